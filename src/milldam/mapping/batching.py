"""Rows as they come -> batches of at most so many rows and bytes.

Greedy and exact: a batch ends where one row more would be too many, or too large. A row larger than `batch_bytes` is a
batch of its own. The result depends on the rows alone, not on the pieces in which they come. Holds one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from milldam.sources.rows import Rows, joined, row_count, row_sizes, take


def batches(rows: Iterable[Rows], batch_size: int, batch_bytes: int) -> Iterator[Rows]:
    """
    >>> list(batches([{"n": [1, 2]}, {"n": [3]}], batch_size=2, batch_bytes=100))
    [{'n': [1, 2]}, {'n': [3]}]
    """
    held: list[Rows] = []
    count = size = 0
    for piece in rows:
        total = row_count(piece)
        if total == 0:
            continue
        ends = np.cumsum(row_sizes(piece))
        start = 0
        while start < total:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + batch_bytes - size, side="right"))
            stop = min(total, start + batch_size - count, fitting)
            if stop <= start and not held:
                stop = start + 1
            if stop > start:
                held.append(take(piece, start, stop))
                count, size = count + stop - start, size + int(ends[stop - 1]) - before
                start = stop
            if start < total or count >= batch_size or size >= batch_bytes:
                if start == total:
                    piece = {}  # not held here while it is worked on
                count = size = 0
                yield _taken(held)
        del piece  # not held while the next one is read
    if held:
        yield joined(held)


def _taken(held: list[Rows]) -> Rows:
    """All of them as one; the list keeps none."""
    rows = joined(held)
    held.clear()
    return rows
