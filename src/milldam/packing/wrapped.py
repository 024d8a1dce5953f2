"""Rows of documents end to end, in store order, cut wherever a row is full. No padding but in the last row, on request.

Holds the pieces of one chunk and of the row that is open: at most `seq_len` of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from milldam.packing.pieces import Pieces, Rows, join


def wrapped_rows(pieces: Iterator[Pieces], seq_len: int, *, pad_last: bool) -> Iterator[Rows]:
    """Rows of pieces that were cut where rows end; the last, partial row only when it is to be padded."""
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
