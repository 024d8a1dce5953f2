"""Which documents of a unit an index holds, found while they are read: no pass before, and no other document counts.

A file of sorted hashes for each run of the index, (2, hashes): the high halves, then the low ones. It is mapped, so
that it takes no memory of the budget: a document costs some 30 looks, at pages that the file system keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.dedup.drops import SEEN_BEFORE, Original
from milldam.dedup.fingerprints import Hashes, fingerprint
from milldam.dedup.keys import SCATTERED, mapped
from milldam.text.arrays import Mask, Verdicts

_NOWHERE = -1

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PinnedIndex:
    """What the documents of a job are compared with; it pickles."""

    runs: tuple[str, ...]
    """Ids of the runs of the index."""
    paths: tuple[Path, ...]
    normalize: bool

    def open(self) -> SeenBefore:
        return SeenBefore(self)


class SeenBefore:
    """Drops the documents of a unit that the index holds."""

    def __init__(self, index: PinnedIndex) -> None:
        self._hashes = [mapped(path, np.uint64, wanted=SCATTERED).reshape(2, -1) for path in index.paths]
        self._normalize = index.normalize
        self._runs: dict[int, int] = {}

    def apply(self, texts: pa.LargeStringArray, rows: Numbers, verdicts: Verdicts) -> None:
        """Mark those of the documents of these rows that the index holds."""
        hashes, runs = fingerprint(texts, normalize=self._normalize), np.full(len(rows), _NOWHERE, np.int64)
        order = np.argsort(hashes[:, 0])  # so that neighbours are looked for one after the other
        hi, lo = hashes[order].T
        for number, run in enumerate(self._hashes):  # of several runs, the first that has it counts
            left = np.flatnonzero(runs[order] == _NOWHERE)
            runs[order[left[_held_by(run, np.ascontiguousarray(hi[left]), lo[left])]]] = number
        seen = runs != _NOWHERE
        verdicts.drop(seen, SEEN_BEFORE)
        self._runs = dict(zip(rows[seen].tolist(), runs[seen].tolist(), strict=True))

    def of(self, row: int) -> Original | None:
        """What the document of a row duplicates, of those asked for last."""
        run = self._runs.get(row)
        return None if run is None else Original(SEEN_BEFORE, indexed_run=run)


def _held_by(run: Hashes, hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> Mask:
    """Which of some hashes a sorted run has, (2, hashes)."""
    held, place, left = np.zeros(len(hi), np.bool_), np.searchsorted(run[0], hi), np.arange(len(hi))
    # Several may share their high half.
    while len(left):
        left = left[place[left] < run.shape[1]]
        left = left[run[0, place[left]] == hi[left]]
        equal = run[1, place[left]] == lo[left]
        held[left[equal]] = True
        left = left[~equal]
        place[left] += 1
    return held
