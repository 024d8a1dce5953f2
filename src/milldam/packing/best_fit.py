"""Rows by best fit decreasing: a document is cut only when it is longer than a row; what stays free is padded.

`buffer` pieces are looked at together, the longest first; each goes to the fullest row that has room for it. Rows that
are not full stay open for the next pieces: the emptiest ones, of `_OPEN_TOKENS` tokens in all. So the result follows
from the order of document lengths, `seq_len` and `buffer` alone, and memory is bounded: about 200 bytes for each
piece of the buffer, and 24 for each piece in an open row.

Rows come when they are closed, after each `buffer` of pieces; those that are closed together in the order of their
first documents. Documents in a row are in store order.

Free lengths are a sorted list: the fullest row that has room is found by bisection. Pieces of equal length are placed
together. About 1 us a piece on one core.

Pieces are an array of two rows: where each begins in the split's stream of tokens, its documents end to end in store
order, and its tokens. Rows are their pieces, in the order of rows, and how many each row has; what these leave free is
padding. Both come as arrays of bounded size, however long a document is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from milldam.stores.tokens.format import Int64s

CHUNK = 1 << 16
_OPEN_TOKENS = 1 << 21
_MOST_OPEN = 1 << 10

Rows = tuple[Int64s, Int64s]
"""Pieces (2, pieces) and how many each row has (rows,)."""


class Cutter:
    """Document lengths in, pieces of at most `seq_len` tokens out.

    `wrapped`: cuts lie where rows end when documents lie end to end. Otherwise each document is cut from its own start,
    into pieces of a whole row and a remainder.
    """

    def __init__(self, seq_len: int, *, wrapped: bool) -> None:
        self.cut_documents = 0
        """Documents that became more than one piece, so far."""
        self._row, self._wrapped = seq_len, wrapped

    def __call__(self, documents: Iterable[Int64s]) -> Iterator[Int64s]:
        position = 0
        for lengths in documents:
            ends = position + np.cumsum(lengths)
            if len(ends):
                position = int(ends[-1])
                yield from self.cut(ends - lengths, ends)

    def cut(self, starts: Int64s, ends: Int64s) -> Iterator[Int64s]:
        """The pieces of documents that begin and end there."""
        grid = starts // self._row * self._row if self._wrapped else starts
        counts = -((grid - ends) // self._row)
        self.cut_documents += int(np.count_nonzero(counts > 1))
        last = np.cumsum(counts)
        for first in range(0, int(counts.sum()), CHUNK):
            numbers = np.arange(first, min(first + CHUNK, int(last[-1])))
            document = np.searchsorted(last, numbers, side="right")
            begins = grid[document] + (numbers - (last - counts)[document]) * self._row
            stops = np.minimum(begins + self._row, ends[document])
            begins = np.maximum(begins, starts[document])
            yield np.stack([begins, stops - begins])


def wrapped_rows(pieces: Iterable[Int64s], seq_len: int, *, pad_last: bool) -> Iterator[Rows]:
    """Documents end to end, in rows of pieces that were cut where rows end.

    The last, partial row comes only when it is to be padded. Holds the pieces of one chunk and of the row that is open.
    """

    def rows(whole: Int64s) -> Rows:
        row = whole[0] // seq_len
        return whole, np.bincount(row - row[0]).astype(np.int64)

    waiting = np.empty((2, 0), np.int64)
    for chunk in pieces:
        waiting = np.concatenate((waiting, chunk), axis=1)
        ends = waiting.sum(axis=0)
        full = int(np.searchsorted(ends, ends[-1] // seq_len * seq_len, side="right"))
        if full:
            yield rows(waiting[:, :full])
        waiting = waiting[:, full:]
    if pad_last and waiting.size:
        yield rows(waiting)


def best_fit_rows(pieces: Iterable[Int64s], seq_len: int, *, buffer: int) -> Iterator[Rows]:
    """Rows as they are finished: full, or closed to make place for emptier ones."""
    most_open = max(1, min(_MOST_OPEN, buffer // 8, _OPEN_TOKENS // seq_len))
    space = _FreeSpace(seq_len)
    held, held_rows = np.empty((2, 0), np.int64), np.empty(0, np.int64)
    for window in _windows(pieces, buffer):
        order = np.argsort(-window[1], kind="stable")
        placed = space.place(window[1, order])
        held, held_rows = np.concatenate((held, window[:, order]), axis=1), np.concatenate((held_rows, placed))
        still_open = np.isin(held_rows, space.keep(most_open))
        if not still_open.all():
            yield _in_order(held[:, ~still_open], held_rows[~still_open])
        held, held_rows = held[:, still_open], held_rows[still_open]
    if held.size:
        yield _in_order(held, held_rows)


def _windows(pieces: Iterable[Int64s], size: int) -> Iterator[Int64s]:
    """The same pieces, exactly `size` at a time, but for the last time."""
    waiting, count = [np.empty((2, 0), np.int64)], 0
    for chunk in pieces:
        waiting.append(chunk)
        count += chunk.shape[1]
        if count < size:
            continue
        joined, whole = np.concatenate(waiting, axis=1), count // size * size
        for start in range(0, whole, size):
            yield joined[:, start : start + size]
        waiting, count = [joined[:, whole:]], count - whole
    if count:
        yield np.concatenate(waiting, axis=1)


def _in_order(pieces: Int64s, rows: Int64s) -> Rows:
    _, row = np.unique(rows, return_inverse=True)  # row: (pieces,), from 0
    first = np.full(int(row.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, row, pieces[0])
    order = np.lexsort((pieces[0], first[row]))
    return pieces[:, order], np.bincount(row)[np.argsort(first)].astype(np.int64)


class _FreeSpace:
    """The open rows by the room that they have left."""

    def __init__(self, seq_len: int) -> None:
        self._row = seq_len
        self._opened = 0
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._lengths: list[int] = []
        """Every length that is the room of some row, ascending."""

    def place(self, lengths: Int64s) -> Int64s:
        """The row of each piece; longest pieces first."""
        placed: list[int] = []
        falling, counts = np.unique(-lengths, return_counts=True)
        for length, count in zip((-falling).tolist(), counts.tolist(), strict=True):
            while count:
                rows = self._fill(length, count)
                placed += rows
                count -= len(rows)
        return np.array(placed, dtype=np.int64)

    def _fill(self, length: int, count: int) -> list[int]:
        """Put up to `count` pieces of one length into the fullest rows that have room for them."""
        at = bisect_left(self._lengths, length)
        if at == len(self._lengths):
            self._open(-(-count // (self._row // length)))
        free = self._lengths[at]
        # The next best row for a piece of this length is the same row again, while it has room.
        each = min(free // length, count)
        rows = self._take(free, -(-count // each))
        if each == 1:
            self._put(free - length, rows)
            return rows
        placed = [row for row in rows for _ in range(each)][:count]
        in_last = len(placed) - each * (len(rows) - 1)
        self._put(free - each * length, rows[:-1])
        self._put(free - in_last * length, rows[-1:])
        return placed

    def _open(self, count: int) -> None:
        self._put(self._row, list(range(self._opened, self._opened + count)))
        self._opened += count

    def _take(self, free: int, most: int) -> list[int]:
        rows = self._rows[free]
        if most < len(rows):
            taken = rows[-most:]
            del rows[-most:]
            return taken
        del self._lengths[bisect_left(self._lengths, free)], self._rows[free]
        return rows

    def _put(self, free: int, rows: list[int]) -> None:
        if free and rows:
            if free not in self._rows:
                insort(self._lengths, free)
            self._rows[free] += rows

    def keep(self, most: int) -> Int64s:
        """Close all but the emptiest rows; those that stay open."""
        kept: list[int] = []
        for free in reversed(self._lengths):
            room = most - len(kept)
            if room:
                # Of equally empty rows, the youngest: the others have waited longest to be written.
                self._rows[free] = sorted(self._rows[free])[-room:]
                kept += self._rows[free]
            else:
                del self._rows[free]
        self._lengths = sorted(self._rows)
        return np.array(kept, dtype=np.int64)
