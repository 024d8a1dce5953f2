"""Which documents of a unit are dropped for what they hold of evaluation sets, in the second pass. Mapped."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from milldam.decontamination.array_file import map_arrays
from milldam.decontamination.letters import Int64s
from milldam.text.arrays import Verdicts

CONTAMINATED = "contaminated"
"""The reason that this room gives."""


class Removals:
    """Of one unit."""

    def __init__(self, path: Path, unit: int) -> None:
        arrays, _ = map_arrays(path)
        low, high = np.searchsorted(arrays["unit"], [unit, unit + 1]).tolist()
        self._rows: Int64s = arrays["row"][low:high]

    def drop(self, first_row: int, verdicts: Verdicts) -> None:
        """Mark those of the documents first_row, first_row + 1, ... that go."""
        low, high = np.searchsorted(self._rows, [first_row, first_row + len(verdicts.codes)]).tolist()
        if low < high:
            gone = np.zeros(len(verdicts.codes), dtype=bool)
            gone[self._rows[low:high] - first_row] = True
            verdicts.drop(gone, CONTAMINATED)


def all_removals(path: Path) -> Int64s:
    """The units and the rows of all documents that go: (2, documents)."""
    arrays, _ = map_arrays(path)
    return np.stack((arrays["unit"], arrays["row"]))


def removal_digests(path: Path, units: int) -> npt.NDArray[np.uint64]:
    """A number for each unit that tells which of its documents go; 0: none."""
    unit, row = all_removals(path)
    digests = np.zeros(units, np.uint64)
    begins = np.flatnonzero(np.diff(unit, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(unit)]):
        digests[int(unit[begin])] = xxhash.xxh3_64_intdigest(row[begin:end].tobytes())
    return digests
