"""Where documents begin in written rows: position ids and cu_seqlens, from the index alone, without a loop over rows.

Padding is a piece of its own, the last of its row: nothing but the manifest's `pad_id`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.reader import Store


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The pieces of some rows."""

    lengths: Int64s
    """Tokens of each piece, row after row; padding counts as a piece."""
    counts: Int64s
    """Pieces of each row."""

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Where pieces begin when the rows lie end to end, and the end: what attention over packed rows takes.

        >>> Boundaries(np.array([3, 1, 4]), np.array([2, 1])).cu_seqlens
        array([0, 3, 4, 8], dtype=int32)
        """
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32)

    @property
    def position_ids(self) -> Int64s:
        """Rows of positions that begin at 0 with every piece.

        >>> Boundaries(np.array([3, 1, 4]), np.array([2, 1])).position_ids
        array([[0, 1, 2, 0],
               [0, 1, 2, 3]])
        """
        begins = np.cumsum(self.lengths) - self.lengths
        flat = np.arange(int(self.lengths.sum())) - np.repeat(begins, self.lengths)
        return flat.reshape(len(self.counts), -1)


def boundaries_of(index: Index, first: int, last: int) -> Boundaries:
    """The pieces of rows [first, last) of one shard; rows of different lengths are none."""
    rows = index.document_lengths(first, last)
    sequences = index.documents[first : last + 1].astype(np.int64)
    lengths = index.lengths[int(sequences[0]) : int(sequences[-1])].astype(np.int64)
    if (rows != rows[0]).any() or not len(lengths) or int(lengths.min()) < 0:
        raise index.damaged("its rows are not of one length")
    return Boundaries(lengths, np.diff(sequences))


def read_boundaries(store: Store, first: int, last: int) -> Boundaries:
    """The pieces of rows [first, last) of a store of rows, across its shards."""
    parts: list[Boundaries] = []
    start = 0
    for shard in store.shards:
        here = max(first - start, 0), min(last - start, shard.documents)
        if here[0] < here[1]:
            parts.append(boundaries_of(store.open_index(shard), *here))
        start += shard.documents
    if not parts:
        raise IndexError(f"rows {first:,} to {last:,} of a store of {len(store):,} rows")
    return Boundaries(np.concatenate([p.lengths for p in parts]), np.concatenate([p.counts for p in parts]))
