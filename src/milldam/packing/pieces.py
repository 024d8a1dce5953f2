"""A split's document lengths -> pieces that fit a row, and rows of them end to end, as arrays of bounded size.

A position is that of a token in the split's stream: its documents end to end, in store order. Holds the documents that
come at a time and `CHUNK` pieces, however long a document is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milldam.stores.tokens.format import Int64s

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

    def __getitem__(self, part: slice) -> Rows:
        first, stop, _ = part.indices(len(self))
        counts, before = self.counts[first:stop], int(self.counts[:first].sum())
        return Rows(self.pieces[before : before + int(counts.sum())], counts)


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


def wrapped_rows(pieces: Iterator[Pieces], seq_len: int, *, pad_last: bool) -> Iterator[Rows]:
    """Documents end to end, in rows of pieces that were cut where rows end.

    The last, partial row comes only when it is to be padded. Holds the pieces of one chunk and of the row that is open.
    """
    open_row = Pieces.none()
    for chunk in pieces:
        waiting = join((open_row, chunk))
        ends = waiting.starts + waiting.lengths
        full = int(np.searchsorted(ends, ends[-1] // seq_len * seq_len, side="right"))
        if full:
            yield _rows(waiting[:full], seq_len)
        open_row = waiting[full:]
    if pad_last and len(open_row):
        yield _rows(open_row, seq_len)


def _rows(pieces: Pieces, seq_len: int) -> Rows:
    row = pieces.starts // seq_len
    return Rows(pieces, np.bincount(row - row[0]).astype(np.int64))
