"""The index files of a store -> how long its documents are, per split.

Counted, not collected: half a megabyte a split however many documents there are, read in blocks. Exact up
to 65,535 tokens a document, by powers of two beyond. A billion documents are some 4 GB of index to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.manifest import Manifest

MAX_SPLITS = 50
_EXACT = 1 << 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of `low` to `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(slots=True)
class Lengths:
    """Documents by their number of tokens."""

    counts: Int64s = field(default_factory=lambda: np.zeros(_EXACT, dtype=np.int64))
    """Documents of exactly so many tokens."""
    longer: Int64s = field(default_factory=lambda: np.zeros(64, dtype=np.int64))
    """Documents of 2**k and more, but not 2**(k + 1), tokens, where those are not counted above."""
    documents: int = 0
    tokens: int = 0
    longest: int = 0

    def add(self, lengths: Int64s) -> None:
        if not len(lengths):
            return
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max()))
        short = lengths < _EXACT
        self.counts += np.bincount(lengths[short], minlength=_EXACT)
        # frexp: the exponent of 2**k is k + 1, exactly.
        self.longer += np.bincount(np.frexp(lengths[~short].astype(np.float64))[1] - 1, minlength=64)

    def quantile(self, part: float) -> int | None:
        """The length that this part of the documents does not exceed; None when it is beyond what is counted exactly.

        >>> lengths = Lengths()
        >>> lengths.add(np.array([5, 1, 9]))
        >>> lengths.quantile(0.5)
        5
        """
        wanted = max(1, int(np.ceil(part * self.documents)))
        position = int(np.searchsorted(np.cumsum(self.counts), wanted))
        return position if position < _EXACT else None

    def buckets(self) -> list[Bucket]:
        """By powers of two, from the shortest to the longest there is; one for empty documents when there are any."""
        powers = [int(self.counts[2**k : 2 ** (k + 1)].sum()) + int(self.longer[k]) for k in range(64)]
        used = [k for k in range(64) if powers[k]]
        found = [Bucket(0, 0, int(self.counts[0]))] if self.counts[0] else []
        span = range(used[0], used[-1] + 1) if used else range(0)
        return found + [Bucket(2**k, 2 ** (k + 1) - 1, powers[k]) for k in span]


def count_lengths(folder: Path, manifest: Manifest) -> dict[str, Lengths]:
    """Tokens per document, by split in the manifest's order; each takes memory, so only the first are counted."""
    found = {split: Lengths() for split in manifest.splits[:MAX_SPLITS]}
    for shard in (shard for shard in manifest.shards if shard.split in found):
        for block in Index.map(folder / f"{shard.name}.idx").length_blocks():
            found[shard.split].add(block)
    return found
