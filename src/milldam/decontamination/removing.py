"""What is removed of the documents of a unit, in the second pass: all of a document, or stretches of it.

Mapped; holds nothing but what it returns.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.decontamination.array_file import map_arrays
from milldam.decontamination.letters import Int64s
from milldam.text.arrays import Mask, Verdicts

CONTAMINATED = "contaminated"
"""The reason that this room gives."""


class Removals:
    """Of one unit."""

    def __init__(self, path: Path, unit: int) -> None:
        arrays, _ = map_arrays(path)
        low, high = np.searchsorted(arrays["unit"], [unit, unit + 1]).tolist()
        self._rows: Int64s = arrays["row"][low:high]
        self._first: Int64s = arrays["first"][low : high + 1]
        self._start: Int64s = arrays["start"]
        self._end: Int64s = arrays["end"]

    def _between(self, first_row: int, count: int) -> range:
        low, high = np.searchsorted(self._rows, [first_row, first_row + count]).tolist()
        return range(low, high)

    def drop(self, first_row: int, verdicts: Verdicts) -> None:
        """Mark the documents first_row, first_row + 1, ... that go as a whole."""
        which = np.zeros(len(verdicts.codes), dtype=bool)
        for k in self._between(first_row, len(which)):
            which[int(self._rows[k]) - first_row] = self._first[k] == self._first[k + 1]
        if which.any():
            verdicts.drop(which, CONTAMINATED)

    def cut(self, texts: pa.LargeStringArray, first_row: int, verdicts: Verdicts) -> pa.LargeStringArray:
        """The documents without the stretches that are cut out; one of which nothing is left is dropped."""
        cut: dict[int, str] = {}
        empty: Mask = np.zeros(len(texts), dtype=bool)
        for k in self._between(first_row, len(texts)):
            position = int(self._rows[k]) - first_row
            if self._first[k] < self._first[k + 1] and verdicts.keep[position]:
                left = self.part(int(self._rows[k]), bytes(texts[position].as_buffer()), 0).decode()
                cut[position], empty[position] = left, not left.strip()
        if not cut:
            return texts
        if empty.any():
            verdicts.drop(empty, CONTAMINATED)
        parts: list[pa.LargeStringArray] = []
        done = 0
        for position, left in cut.items():
            parts += [texts[done:position], pa.array([left], pa.large_string())]
            done = position + 1
        return pa.concat_arrays([*parts, texts[done:]])

    def part(self, row: int, data: bytes, before: int) -> bytes:
        """A part of a document, which begins `before` bytes into it, without what is cut out."""
        kept, done = [], 0
        for k in self._between(row, 1):
            for stretch in range(int(self._first[k]), int(self._first[k + 1])):
                start, end = int(self._start[stretch]) - before, int(self._end[stretch]) - before
                kept.append(data[done : max(done, start)])
                done = max(done, min(len(data), end))
        return b"".join([*kept, data[done:]])


def whole_removals(path: Path) -> Int64s:
    """The documents that go as a whole: (2, documents), their units and their rows."""
    arrays, _ = map_arrays(path)
    whole = arrays["first"][1:] == arrays["first"][:-1]
    return np.stack((arrays["unit"][whole], arrays["row"][whole]))


def removal_digests(path: Path, units: int) -> npt.NDArray[np.uint64]:
    """A number for each unit that says what is removed of its documents; 0: nothing."""
    arrays, _ = map_arrays(path)
    unit, row, first = arrays["unit"], arrays["row"], arrays["first"]
    digests = np.zeros(units, np.uint64)
    begins = np.flatnonzero(np.diff(unit, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(unit)]):
        low, high = int(first[begin]), int(first[end])
        said = (row[begin:end], first[begin : end + 1] - low, arrays["start"][low:high], arrays["end"][low:high])
        digests[int(unit[begin])] = xxhash.xxh3_64_intdigest(b"".join(one.tobytes() for one in said))
    return digests
