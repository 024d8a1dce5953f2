"""A store opened for reading: nothing is loaded, files are mapped when they are first touched.

Opening reads the manifest alone. A document is a numpy view into the mapping. At most `MAPPED_SHARDS` shards are mapped
at a time, since a mapping holds a file open and systems allow as few as 1,024 of those. A store pickles as its path.

A store may lie at an address (`milldam.remote`): then a shard is fetched when it is first touched, and no more are kept
mapped than fit in half of the cache.

Rows and stretches of tokens in blocks of bounded size: what is held at a time of a store that is read or made.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.files import in_home
from milldam.markup import counted, in_notebook
from milldam.memory import format_size
from milldam.stores.kinds import TOKENS
from milldam.stores.place import Folder, Place, same_generation
from milldam.stores.tokens.format import Index, Int64s, SpanTable
from milldam.stores.tokens.manifest import Shard, read

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAPPED_SHARDS = 256
TOKENIZER = "tokenizer.json"
TokenArray = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]


def open_store(path: str | Path | Place, *, split: str | None = None) -> Store:
    """Open a store for reading, in milliseconds and a few megabytes whatever its size."""
    return Store(path, split=split)


@dataclass(frozen=True, slots=True)
class _MappedShard:
    tokens: TokenArray
    index: Index
    spans: SpanTable | None = None
    """The stretches that are trained on; None: all of it."""
    labels: npt.NDArray[np.uint8] | None = None

    def document(self, number: int) -> TokenArray:
        begin, end = self.index.extent(number)
        return self.tokens[begin:end]


class _MappedShards:
    """The shards of a store, mapped when they are touched; the oldest give way."""

    def __init__(self, place: Place, shards: Sequence[Shard], dtype: np.dtype[np.generic]) -> None:
        self._place, self._shards, self._dtype = place, shards, dtype
        # ends[k]: documents in the shards up to and including k
        self._ends = list(itertools.accumulate(shard.documents for shard in shards))
        self._mapped: OrderedDict[int, _MappedShard] = OrderedDict()

    def __len__(self) -> int:
        """How many documents there are."""
        return self._ends[-1] if self._ends else 0

    def at(self, number: int) -> tuple[_MappedShard, int]:
        """The shard of a document, and its number there."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"document {number} of a store of {len(self):,} documents")
        k = bisect.bisect_right(self._ends, wanted)
        return self.map(k), wanted - (self._ends[k - 1] if k else 0)

    def map(self, k: int, *, in_turn: bool = False) -> _MappedShard:
        """All files of shard k, mapped; `in_turn`: the next one is fetched meanwhile, where it has to be."""
        mapped, limit, shard = self._mapped.get(k), self._place.mapped_bytes, self._shards[k]
        if mapped is None:
            if limit is not None:  # what is mapped can't be removed from a cache
                held = sum(_size(self._shards[one]) for one in self._mapped) + _size(shard)
                while self._mapped and held > limit:
                    held -= _size(self._shards[self._mapped.popitem(last=False)[0]])
            mapped = self._mapped[k] = self._open_shard(shard)
            if len(self._mapped) > MAPPED_SHARDS:
                self._mapped.popitem(last=False)
        if in_turn and self._place.origin is not None and k + 1 < len(self._shards) and self._shards[k + 1].tokens:
            following = self._shards[k + 1]
            self._place.origin.announce([self._place.local(f"{following.name}.bin", following.bin)])
        return mapped

    def _open_shard(self, shard: Shard) -> _MappedShard:
        path, index, spans, labels = f"{self._place.name}/{shard.name}", self.open_index(shard), None, None

        def array(ending: str, dtype: Any) -> Any:
            name = f"{shard.name}.{ending}"
            try:
                return np.frombuffer(self._place.map(name, shard.files[ending]), dtype)
            except (OSError, ValueError) as error:
                advice = f"`milldam verify {self._place.name}` checks the store."
                raise StoreError(f"{self._place.name}/{name}: can't be mapped ({error}). {advice}") from None

        if shard.spans is not None:
            spans = SpanTable.parse(memoryview(array("spans", np.uint8)), shard.documents, f"{path}.spans")
        if shard.labels is not None:
            labels = array("labels", np.uint8)
            if len(labels) != shard.documents:
                raise StoreError(f"{path}.labels: {len(labels):,} labels of {shard.documents:,} documents.")
        tokens = array("bin", self._dtype) if shard.tokens else np.empty(0, self._dtype)
        if len(tokens) != shard.tokens:
            problem = f"{len(tokens):,} tokens where the manifest says {shard.tokens:,}"
            raise StoreError(f"{path}.bin: {problem}. Make it again.")
        return _MappedShard(tokens, index, spans, labels)

    def open_index(self, shard: Shard) -> Index:
        """The index of a shard, mapped; its ends are those of the shard."""
        path = f"{self._place.name}/{shard.name}.idx"
        try:
            buffer = self._place.map(f"{shard.name}.idx", shard.idx)
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: can't be read as an index ({error}).") from None
        index = Index.parse(buffer, path)
        index.check_ends(shard.tokens * self._dtype.itemsize)
        if index.dtype != self._dtype or len(index.documents) != shard.documents + 1:
            holds = f"{len(index.documents) - 1:,} documents of {index.dtype}"
            raise index.damaged(f"{holds} where the manifest says {shard.documents:,} of {self._dtype}")
        return index


class Store:
    """Documents of tokens, by number: `store[i]`, `len(store)`, `for document in store`."""

    def __init__(self, path: str | Path | Place, *, split: str | None = None) -> None:
        self.place: Place = Folder(Path(in_home(path))) if isinstance(path, str | Path) else path
        """Where it lies."""
        self.name = self.place.name
        """Its path, or its address."""
        self.manifest = read(self.place)
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
        self._mapped = _MappedShards(self.place, self.shards, self.dtype)
        self._tokenizer: Tokenizer | None = None

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
        """The files of what was set aside when it was made, as far as they are on this machine."""
        if self.place.folder is None:
            return {}
        paths = {what: self.place.folder / file["name"] for what, file in TOKENS.audit(self.place).items()}
        return {what: path for what, path in paths.items() if path.exists()}

    @property
    def rejects(self) -> Path | None:
        """Records that could not be read (JSON lines); None: there are none here."""
        return self.audit.get("rejects")

    @property
    def dropped(self) -> Path | None:
        """Documents that were dropped, with `write_dropped` (JSON lines in zstd); None: there are none here."""
        return self.audit.get("dropped")

    @property
    def contamination(self) -> Path | None:
        """Findings of evaluation sets (JSON lines); None: there are none here."""
        return self.audit.get("contamination")

    def __len__(self) -> int:
        return len(self._mapped)

    @overload
    def __getitem__(self, number: int) -> TokenArray: ...
    @overload
    def __getitem__(self, number: slice) -> list[TokenArray]: ...
    def __getitem__(self, number: int | slice) -> TokenArray | list[TokenArray]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        shard, within = self._mapped.at(number)
        return shard.document(within)

    def spans(self, number: int) -> Int64s:
        """The trained spans of a document: (n, 2), half-open token positions within it."""
        shard, within = self._mapped.at(number)
        if shard.spans is None:
            raise StoreError(
                f"{self.name}: does not say which tokens are trained on: all of them are. Stores of conversations do: "
                "`milldam tokenize --chat`."
            )
        begin, end = shard.index.extent(within)
        return shard.spans.document(within, end - begin)

    def label(self, number: int) -> int:
        """The label of a document, such as 1 for a desirable answer and 0 for an undesirable one."""
        shard, within = self._mapped.at(number)
        if shard.labels is None:
            raise StoreError(f"{self.name}: its documents have no labels. Records with a field `label` give some.")
        return int(shard.labels[within])

    def __iter__(self) -> Iterator[TokenArray]:
        for k, shard in enumerate(self.shards):
            mapped = self._mapped.map(k, in_turn=True)
            for number in range(shard.documents):
                yield mapped.document(number)

    def shard_tokens(self) -> Iterator[TokenArray]:
        """The flat tokens of each shard in order, memory-mapped: the whole store as a stream."""
        for k in range(len(self.shards)):
            yield self._mapped.map(k, in_turn=True).tokens

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens per document, one array per shard."""
        for shard in self.shards:
            index = self.open_index(shard)
            if len(index.lengths):
                yield np.concatenate(list(index.length_blocks()))

    def open_index(self, shard: Shard) -> Index:
        """The index of a shard, mapped; its ends are those of the shard."""
        return self._mapped.open_index(shard)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Text of token ids, special tokens included, by the store's tokenizer."""
        try:
            return str(self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))
        except (OverflowError, TypeError):
            raise StoreError(f"{self.name}: no tokens have such ids. `milldam verify` checks it.") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, as a `tokenizers.Tokenizer`."""
        if self._tokenizer is None:
            data = self.place.read(TOKENIZER)
            if data is None:
                raise StoreError(
                    f"{self.name}: has no {TOKENIZER}, so its tokens can't be turned into text. Decode them with the "
                    "tokenizer that made them."
                )
            self._tokenizer = parse_tokenizer(data, f"{self.name}/{TOKENIZER}")
        return self._tokenizer

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_same, (type(self), self.place, self.split_name, self.fingerprint)

    def __repr__(self) -> str:
        split = "" if self.split_name is None else f", split {self.split_name}"
        figures = f"{counted(len(self), 'document')}, {counted(self.tokens, 'token')}, {self.manifest.dtype}"
        return f"Store({self.name!r}{split}: {figures})"

    _repr_html_ = in_notebook(lambda store: (store.name, _facts(store).items()))


def _facts(store: Store) -> dict[str, str]:
    """For a notebook."""
    facts = {"documents": f"{len(store):,}", "tokens": f"{store.tokens:,}", "dtype": store.manifest.dtype}
    facts |= {"vocabulary": f"{store.vocab_size:,}", "tokenizer": str(store.manifest.tokenizer.get("name"))}
    size = sum(shard.bin["bytes"] for shard in store.shards)
    return facts | {"splits": ", ".join(store.splits), "size": format_size(size)}


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
    same = same_generation(place, fingerprint, lambda one: read(one).fingerprint)
    return kind(same, split=split)


BLOCK_TOKENS = 1 << 20


def in_blocks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the blocks of a stretch."""
    for at in range(start, start + count, BLOCK_TOKENS):
        yield at, min(at + BLOCK_TOKENS, start + count)


def cut_blocks(lengths: Int64s, most_tokens: int | None = None) -> Iterator[tuple[int, int]]:
    """(first, stop) of rows of about a block's tokens, or of so many, or one row that has more."""
    most_tokens = most_tokens or BLOCK_TOKENS
    ends = lengths.cumsum()
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(ends.searchsorted(before + most_tokens, side="right")))
        yield first, stop
        first = stop


def is_giant(lengths: Int64s) -> bool:
    """Whether rows are one that is better read and written in pieces."""
    return len(lengths) == 1 and int(lengths[0]) > BLOCK_TOKENS


def require_split(name: str, split: str, known: Collection[str]) -> None:
    if split not in known:
        hint = did_you_mean(split, known)
        raise ConfigError(f'{name}: no split "{split}"; it has {", ".join(known) or "none"}.{hint}')
