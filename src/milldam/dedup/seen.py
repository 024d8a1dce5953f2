"""Which documents of a unit an index holds, found while they are read: no pass before, and no other document counts.

A file of sorted hashes for each run of the index, (2, hashes): the high halves, then the low ones. It is mapped, so
that it takes no memory of the budget: a document costs some 30 looks, at pages that the file system keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.dedup.drops import SEEN_BEFORE, Original
from milldam.dedup.fingerprints import Hashes, fingerprint
from milldam.dedup.keys import SCATTERED, mapped
from milldam.text.arrays import Verdicts

_NOWHERE = -1

Numbers = npt.NDArray[np.int64]


class SeenHashes:
    """The hashes of several runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._runs = [mapped(path, np.uint64, wanted=SCATTERED).reshape(2, -1) for path in paths]

    def find(self, hashes: Hashes) -> Numbers:
        """The first run that has each of some hashes; -1: none."""
        found = np.full(len(hashes), _NOWHERE, np.int64)
        order = np.argsort(hashes[:, 0])  # so that neighbours are looked for one after the other
        hi, lo = hashes[order].T
        for number, run in enumerate(self._runs):
            left = np.flatnonzero(found[order] == _NOWHERE)
            held = places_in(run, np.ascontiguousarray(hi[left]), lo[left]) != _NOWHERE
            found[order[left[held]]] = number
        return found


def places_in(run: Hashes, hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> Numbers:
    """Where each of some hashes is in a sorted run, (2 or more, hashes); -1: nowhere."""
    found = np.full(len(hi), _NOWHERE, np.int64)
    place = np.searchsorted(run[0], hi)
    open_ = np.arange(len(hi))
    # Several may share their high half.
    while len(open_):
        open_ = open_[place[open_] < run.shape[1]]
        open_ = open_[run[0, place[open_]] == hi[open_]]
        equal = run[1, place[open_]] == lo[open_]
        found[open_[equal]] = place[open_[equal]]
        open_ = open_[~equal]
        place[open_] += 1
    return found


@dataclass(frozen=True, slots=True)
class PinnedIndex:
    """What the documents of a job are compared with; it pickles."""

    runs: tuple[str, ...]
    """Ids of the runs of the index."""
    paths: tuple[Path, ...]
    normalize: bool

    def open(self) -> SeenBefore:
        return SeenBefore(self.paths, normalize=self.normalize)


class SeenBefore:
    """Drops the documents of a unit that the index holds."""

    def __init__(self, paths: Sequence[Path], *, normalize: bool) -> None:
        self._hashes, self._normalize = SeenHashes(paths), normalize
        self._runs: dict[int, int] = {}

    def apply(self, texts: pa.LargeStringArray, rows: Numbers, verdicts: Verdicts) -> None:
        """Mark those of the documents of these rows that the index holds."""
        runs = self._hashes.find(fingerprint(texts, normalize=self._normalize))
        seen = runs != _NOWHERE
        verdicts.drop(seen, SEEN_BEFORE)
        self._runs = dict(zip(rows[seen].tolist(), runs[seen].tolist(), strict=True))

    def of(self, row: int) -> Original | None:
        """What the document of a row duplicates, of those asked for last."""
        run = self._runs.get(row)
        return None if run is None else Original(SEEN_BEFORE, indexed_run=run)
