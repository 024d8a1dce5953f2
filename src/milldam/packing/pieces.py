"""A split's document lengths -> pieces that fit a row, as arrays of bounded size.

A position is that of a token in the split's stream: its documents end to end, in store order. Reads the indexes of a
store and none of its tokens; holds at most `CHUNK` documents and `CHUNK` pieces at a time, however long a document is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milldam.stores.tokens import Store
from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.manifest import Manifest, Shard

CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of documents: where each begins in the stream, and its tokens."""

    starts: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, part: slice | Int64s | npt.NDArray[np.bool_]) -> Pieces:
        return Pieces(self.starts[part], self.lengths[part])

    @classmethod
    def none(cls) -> Pieces:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))


def join(parts: Iterable[Pieces]) -> Pieces:
    several = list(parts)
    return Pieces(np.concatenate([p.starts for p in several]), np.concatenate([p.lengths for p in several]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Pieces in the order of their rows; what they leave free at the end of a row is padding."""

    pieces: Pieces
    counts: Int64s
    """Pieces of each row."""

    def __len__(self) -> int:
        return len(self.counts)

    def parts(self, most: int) -> Iterator[Rows]:
        """The same rows, at most so many at a time."""
        ends = np.concatenate(([0], np.cumsum(self.counts)))
        for first in range(0, len(self), most):
            counts = self.counts[first : first + most]
            yield Rows(self.pieces[int(ends[first]) : int(ends[first + len(counts)])], counts)


def split_shards(manifest: Manifest, split: str) -> list[Shard]:
    return [shard for shard in manifest.shards if shard.split == split]


def document_lengths(store: Store, split: str) -> Iterator[Int64s]:
    """Tokens of each document of a split in order, a bounded number at a time."""
    for shard in split_shards(store.manifest, split):
        yield from Index.map(store.path / f"{shard.name}.idx").length_blocks()


class Cutter:
    """Document lengths in, pieces of at most `seq_len` tokens out.

    `wrapped`: cuts lie where rows end when documents lie end to end. Otherwise each document is cut from its own start,
    into pieces of a whole row and a remainder.
    """

    def __init__(self, seq_len: int, *, wrapped: bool) -> None:
        self.cut_documents = 0
        """Documents that became more than one piece, so far."""
        self._row = seq_len
        self._wrapped = wrapped

    def __call__(self, documents: Iterable[Int64s]) -> Iterator[Pieces]:
        position = 0
        for lengths in documents:
            ends = position + np.cumsum(lengths)
            if len(ends):
                position = int(ends[-1])
                yield from self._cut(ends - lengths, ends)

    def _cut(self, starts: Int64s, ends: Int64s) -> Iterator[Pieces]:
        grid = starts // self._row * self._row if self._wrapped else starts
        counts = -((grid - ends) // self._row)
        self.cut_documents += int(np.count_nonzero(counts > 1))
        last = np.cumsum(counts)
        for first in range(0, int(last[-1]), CHUNK):
            numbers = np.arange(first, min(first + CHUNK, int(last[-1])))
            document = np.searchsorted(last, numbers, side="right")
            begins = grid[document] + (numbers - (last - counts)[document]) * self._row
            stops = np.minimum(begins + self._row, ends[document])
            begins = np.maximum(begins, starts[document])
            yield Pieces(begins, stops - begins)
