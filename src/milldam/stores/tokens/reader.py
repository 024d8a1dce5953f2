"""A store opened for reading: nothing is loaded, files are mapped when they are first touched.

Opening reads the manifest alone. A document is a numpy view into the mapping. At most `MAPPED_SHARDS` shards are mapped
at a time, since a mapping holds a file open and systems allow as few as 1,024 of those. A store pickles as its path.

A store may lie at an address (`milldam.remote`): then a shard is fetched when it is first touched, and no more are kept
mapped than fit in half of the cache.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.files import in_home
from milldam.markup import counted
from milldam.stores.kinds import TOKENS
from milldam.stores.place import Folder, Place, same_generation
from milldam.stores.tokens.format import Index, Int64s, SpanTable
from milldam.stores.tokens.manifest import Manifest, Shard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAPPED_SHARDS = 256
TOKENIZER = "tokenizer.json"
TokenArray = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]


@dataclass(frozen=True, slots=True)
class _MappedShard:
    tokens: TokenArray
    index: Index
    spans: SpanTable | None = None
    """The stretches that are trained on; None: all of it."""
    labels: npt.NDArray[np.uint8] | None = None


class Store:
    """Documents of tokens, by number: `store[i]`, `len(store)`, `for document in store`."""

    def __init__(self, path: str | Path | Place, *, split: str | None = None) -> None:
        self.place: Place = Folder(Path(in_home(path))) if isinstance(path, str | Path) else path
        """Where it lies."""
        self.name = self.place.name
        """Its path, or its address."""
        self.manifest: Manifest = TOKENS.read(self.place)
        self.split_name = split
        if split is not None:
            require_split(self.name, split, self.manifest.splits)
        self.shards = tuple(shard for shard in self.manifest.shards if split in (None, shard.split))
        """The shards that are meant, in order."""
        self.tokens = sum(shard.tokens for shard in self.shards)
        """How many tokens there are."""
        self.dtype: np.dtype[np.generic] = np.dtype(self.manifest.dtype)
        self.vocab_size = self.manifest.vocab_size
        self.splits = self.manifest.splits
        self.fingerprint = self.manifest.fingerprint
        """Names the content: equal fingerprints mean equal tokens in equal order."""
        self.has_spans = self.manifest.chat is not None
        """Whether it says which tokens are trained on: a store of conversations."""
        self._ends = list(itertools.accumulate(shard.documents for shard in self.shards))
        """Documents in the shards up to and including each."""
        self._mapped: OrderedDict[int, _MappedShard] = OrderedDict()

    @property
    def path(self) -> Path:
        """Its folder on this machine; an error if it is at an address."""
        if self.place.folder is None:
            raise ConfigError(
                f"{self.name}: is at an address, and this needs its files here. `milldam pull` brings them."
            )
        return self.place.folder

    @property
    def audit(self) -> dict[str, Path]:
        """The files of what was set aside when it was made, as far as they are on this machine: `rejects` (records that
        could not be read, JSON lines), `dropped` (documents, with `write_dropped`; JSON lines in zstd), `contamination`
        (findings of evaluation sets, JSON lines)."""
        folder, listed = self.place.folder, self.manifest.audit or {}
        paths = {} if folder is None else {what: folder / file["name"] for what, file in listed.items()}
        return {what: path for what, path in paths.items() if path.exists()}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, number: int) -> TokenArray: ...
    @overload
    def __getitem__(self, number: slice) -> list[TokenArray]: ...
    def __getitem__(self, number: int | slice) -> TokenArray | list[TokenArray]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        shard, within = self._at(number)
        begin, end = shard.index.extent(within)
        return shard.tokens[begin:end]

    def spans(self, number: int) -> Int64s:
        """The trained spans of a document: (n, 2), half-open token positions within it."""
        shard, within = self._at(number)
        if shard.spans is None:
            raise StoreError(f"{self.name}: no store of conversations: all of its tokens are trained on.")
        begin, end = shard.index.extent(within)
        return shard.spans.some(within, np.array([end - begin])).pairs

    def label(self, number: int) -> int:
        """The label of a document, such as 1 for a desirable answer and 0 for an undesirable one."""
        shard, within = self._at(number)
        if shard.labels is None:
            raise StoreError(f"{self.name}: its documents have no labels. Records with a field `label` give some.")
        return int(shard.labels[within])

    def __iter__(self) -> Iterator[TokenArray]:
        for k, shard in enumerate(self.shards):
            mapped = self._map(k, in_turn=True)
            for begin, end in map(mapped.index.extent, range(shard.documents)):
                yield mapped.tokens[begin:end]

    def shard_tokens(self) -> Iterator[TokenArray]:
        """The flat tokens of each shard in order, memory-mapped: the whole store as a stream."""
        for k in range(len(self.shards)):
            yield self._map(k, in_turn=True).tokens

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of the documents in order, many at a time; one shard's index is mapped at a time."""
        for shard in self.shards:
            yield from self.open_index(shard).length_blocks()

    # ---- shards, mapped when they are touched; the oldest give way ----

    def _at(self, number: int) -> tuple[_MappedShard, int]:
        """The shard of a document, and its number there."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"document {number} of a store of {len(self):,} documents")
        k = bisect.bisect_right(self._ends, wanted)
        return self._map(k), wanted - (self._ends[k - 1] if k else 0)

    def _map(self, k: int, *, in_turn: bool = False) -> _MappedShard:
        """All files of shard k, mapped; `in_turn`: the next one is fetched meanwhile, where it has to be."""
        place, shards = self.place, self.shards
        if k not in self._mapped:
            if place.mapped_bytes is not None:  # what is mapped can't be removed from a cache
                held = sum(_size(shards[one]) for one in (*self._mapped, k))
                while self._mapped and held > place.mapped_bytes:
                    held -= _size(shards[self._mapped.popitem(last=False)[0]])
            self._mapped[k] = self._open_shard(shards[k])
            if len(self._mapped) > MAPPED_SHARDS:
                self._mapped.popitem(last=False)
        if in_turn and place.origin is not None and k + 1 < len(shards) and shards[k + 1].tokens:
            place.origin.announce([place.local(f"{shards[k + 1].name}.bin", shards[k + 1].bin)])
        return self._mapped[k]

    def _open_shard(self, shard: Shard) -> _MappedShard:
        path, index, spans, labels = f"{self.name}/{shard.name}", self.open_index(shard), self.open_spans(shard), None
        tokens = self._array(shard, "bin", self.dtype) if shard.tokens else np.empty(0, self.dtype)
        if len(tokens) != shard.tokens:
            problem = f"{len(tokens):,} tokens where the manifest says {shard.tokens:,}"
            raise StoreError(f"{path}.bin: {problem}. Make it again.")
        if shard.labels is not None:
            labels = self._array(shard, "labels", np.uint8)
            if len(labels) != shard.documents:
                raise StoreError(f"{path}.labels: {len(labels):,} labels of {shard.documents:,} documents.")
        return _MappedShard(tokens, index, spans, labels)

    def _array(self, shard: Shard, ending: str, dtype: Any) -> Any:
        name = f"{shard.name}.{ending}"
        try:
            return np.frombuffer(self.place.map(name, shard.files[ending]), dtype)
        except (OSError, ValueError) as error:
            advice = f"`milldam verify {self.name}` checks the store."
            raise StoreError(f"{self.name}/{name}: can't be mapped ({error}). {advice}") from None

    def open_index(self, shard: Shard) -> Index:
        """The index of a shard, mapped; its ends are those of the shard."""
        index = Index.parse(memoryview(self._array(shard, "idx", np.uint8)), f"{self.name}/{shard.name}.idx")
        index.check_ends(shard.tokens * self.dtype.itemsize)
        if index.dtype != self.dtype or len(index.documents) != shard.documents + 1:
            holds = f"{len(index.documents) - 1:,} documents of {index.dtype}"
            raise index.damaged(f"{holds} where the manifest says {shard.documents:,} of {self.dtype}")
        return index

    def open_spans(self, shard: Shard) -> SpanTable | None:
        """The stretches of a shard that are trained on, mapped; None: all of it."""
        if shard.spans is None:
            return None
        buffer = memoryview(self._array(shard, "spans", np.uint8))
        return SpanTable.parse(buffer, shard.documents, f"{self.name}/{shard.name}.spans")

    # ---- text ----

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Text of token ids, special tokens included, by the store's tokenizer."""
        try:
            return str(self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))
        except (OverflowError, TypeError):
            raise StoreError(f"{self.name}: no tokens have such ids. `milldam verify` checks it.") from None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, as a `tokenizers.Tokenizer`."""
        data = self.place.read(TOKENIZER)
        if data is None:
            raise StoreError(
                f"{self.name}: has no {TOKENIZER}, so its tokens can't be turned into text. Decode them with the "
                "tokenizer that made them."
            )
        return parse_tokenizer(data, f"{self.name}/{TOKENIZER}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_same, (type(self), self.place, self.split_name, self.fingerprint)

    def __repr__(self) -> str:
        split = "" if self.split_name is None else f", split {self.split_name}"
        figures = f"{counted(len(self), 'document')}, {counted(self.tokens, 'token')}, {self.manifest.dtype}"
        return f"Store({self.name!r}{split}: {figures})"


def parse_tokenizer(data: bytes, path: str) -> Tokenizer:
    """A `tokenizers.Tokenizer` from the bytes of its file."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # whatever is in it, tokenizers raises plain ones
        raise StoreError(f"{path}: can't be read as a tokenizer ({error}). Make the store again.") from None


def _size(shard: Shard) -> int:
    return sum(int(file["bytes"]) for file in shard.files.values())


def _reopen_same(kind: type[Store], place: Place, split: str | None, fingerprint: str) -> Store:
    """In another process: the store may have been replaced meanwhile."""
    return kind(same_generation(place, TOKENS, fingerprint), split=split)


def require_split(name: str, split: str, known: Collection[str]) -> None:
    if split not in known:
        hint = did_you_mean(split, known)
        raise ConfigError(f'{name}: no split "{split}"; it has {", ".join(known) or "none"}.{hint}')
