"""A store opened for reading: nothing is loaded, files are mapped when they are first touched.

Opening reads the manifest alone. A document is a numpy view into the mapping. At most `MAPPED_SHARDS` shards are mapped
at a time, since a mapping holds a file open and systems allow as few as 1,024 of those. A store pickles as its path.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.memory import format_size
from milldam.store.format import Index
from milldam.store.manifest import Manifest, Shard

MAPPED_SHARDS = 256

TokenArray = npt.NDArray[np.integer[Any]]


def open_store(path: str | Path, *, split: str | None = None) -> Store:
    """Open a store for reading, in milliseconds and a few megabytes whatever its size.

    >>> store = milldam.open("corpus.milldam")            # doctest: +SKIP
    >>> len(store), store.tokens, store[0][:4]            # doctest: +SKIP
    (18511, 15293621, array([ 1212,   318,   262,  3945], dtype=uint16))
    """
    return Store(path, split=split)


@dataclass(frozen=True, slots=True)
class _MappedShard:
    tokens: TokenArray
    index: Index

    def document(self, number: int) -> TokenArray:
        first, last = self.index.documents[number], self.index.documents[number + 1] - 1
        width = self.tokens.itemsize
        start = int(self.index.offsets[first]) // width
        stop = int(self.index.offsets[last]) // width + int(self.index.lengths[last])
        return self.tokens[start:stop]


class Store:
    """Documents of tokens, by number: `store[i]`, `len(store)`, `for document in store`."""

    def __init__(self, path: str | Path, *, split: str | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self.split_name = split
        self.shards = self._select(split)
        """The shards that are meant, in order."""
        # ends[k]: documents in the shards up to and including k
        self._ends = list(itertools.accumulate(shard.documents for shard in self.shards))
        self._mapped: OrderedDict[int, _MappedShard] = OrderedDict()
        self._tokenizer: Any = None

    def _select(self, split: str | None) -> tuple[Shard, ...]:
        known = self.manifest.splits
        if split is not None and split not in known:
            hint = did_you_mean(split, known)
            raise ConfigError(f'{self.path}: no split "{split}"; it has {", ".join(known) or "none"}.{hint}')
        return tuple(s for s in self.manifest.shards if split in (None, s.split))

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self.manifest.dtype)

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def splits(self) -> tuple[str, ...]:
        return self.manifest.splits

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal tokens in equal order."""
        return self.manifest.fingerprint

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, number: int) -> TokenArray: ...
    @overload
    def __getitem__(self, number: slice) -> list[TokenArray]: ...
    def __getitem__(self, number: int | slice) -> TokenArray | list[TokenArray]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"document {number} of a store of {len(self):,} documents")
        k = bisect.bisect_right(self._ends, wanted)
        return self._map(k).document(wanted - (self._ends[k - 1] if k else 0))

    def __iter__(self) -> Iterator[TokenArray]:
        for k, shard in enumerate(self.shards):
            mapped = self._map(k)
            for number in range(shard.documents):
                yield mapped.document(number)

    def shard_tokens(self) -> Iterator[TokenArray]:
        """The flat tokens of each shard in order, memory-mapped: the whole store as a stream."""
        for k in range(len(self.shards)):
            yield self._map(k).tokens

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens per document, an array a shard."""
        for k in range(len(self.shards)):
            index = self._map(k).index
            if len(index.lengths):
                yield index.document_lengths()

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Text of token ids, special tokens included, by the tokenizer that lies in the store."""
        return str(self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))

    @property
    def tokenizer(self) -> Any:
        """The store's tokenizer, as a `tokenizers.Tokenizer`."""
        if self._tokenizer is None:
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
        return self._tokenizer

    def _map(self, k: int) -> _MappedShard:
        mapped = self._mapped.get(k)
        if mapped is None:
            mapped = self._open_shard(self.shards[k])
            self._mapped[k] = mapped
            if len(self._mapped) > MAPPED_SHARDS:
                self._mapped.popitem(last=False)
        return mapped

    def _open_shard(self, shard: Shard) -> _MappedShard:
        path = self.path / f"{shard.name}.bin"
        index = Index.map(self.path / f"{shard.name}.idx")
        if shard.tokens == 0:
            return _MappedShard(np.empty(0, self.manifest.dtype), index)
        try:
            tokens = np.memmap(path, dtype=self.manifest.dtype, mode="r")
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path}: can't be mapped ({error}). `milldam verify {self.path}` checks the store."
            ) from None
        if len(tokens) != shard.tokens:
            raise StoreError(f"{path}: {len(tokens):,} tokens where the manifest says {shard.tokens:,}. Make it again.")
        # A plain array over the same mapping: np.memmap's slicing costs several times as much.
        return _MappedShard(np.asarray(tokens), index)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (type(self), self.path, self.split_name))

    def _facts(self) -> dict[str, str]:
        manifest = self.manifest
        facts = {"documents": f"{len(self):,}", "tokens": f"{self.tokens:,}", "dtype": manifest.dtype}
        facts |= {"vocabulary": f"{manifest.vocab_size:,}", "tokenizer": str(manifest.tokenizer["name"])}
        size = sum(shard.bin["bytes"] for shard in self.shards)
        return facts | {"splits": ", ".join(self.splits), "size": format_size(size)}

    def __repr__(self) -> str:
        facts = self._facts()
        split = "" if self.split_name is None else f", split {self.split_name}"
        counted = f"{facts['documents']} documents, {facts['tokens']} tokens, {facts['dtype']}"
        return f"Store({str(self.path)!r}{split}: {counted})"

    def _repr_html_(self) -> str:
        import html

        rows = "".join(f"<tr><th>{k}</th><td>{html.escape(v)}</td></tr>" for k, v in self._facts().items())
        return f"<table><caption>{html.escape(str(self.path))}</caption>{rows}</table>"


def _reopen(kind: type[Store], path: Path, split: str | None) -> Store:
    return kind(path, split=split)
