"""Drop files: which documents to drop, and what each of them duplicates. Written by every way to drop documents in a
first pass, read unit by unit.

`drops-<way>-<partition>.bin`, the way being exact, contaminated or near: 18 bytes a dropped document, in plan
order: its place, that of the one that is kept, and how alike they are in thousandths. A place is unit << 40 | row; what
is kept may also be below 0: -1 - k is what the run k of the index has seen, `UNKNOWN` what the way can't tell.

Files are mapped, and looked up by halving: reading holds what it is asked for, however many documents a unit has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.dedup.keys import Int64s, mapped
from milldam.files import NewFile
from milldam.text.arrays import Verdicts

UNKNOWN = -(1 << 62)
"""Kept is something of which the place is not known."""
ROW_BITS = 40
EQUAL = 1000
"""The similarity of equal texts, in thousandths."""

EXACT, NEAR, EVALUATION = "exact", "near", "contaminated"
DEDUP = (EXACT, NEAR)
DUPLICATE, SEEN_BEFORE, NEAR_DUPLICATE, CONTAMINATED = "duplicate", "seen_before", "near_duplicate", "contaminated"
DUPLICATES = (DUPLICATE, SEEN_BEFORE, NEAR_DUPLICATE)
"""The reasons that dedup gives."""
_REASONS = {EXACT: DUPLICATE, NEAR: NEAR_DUPLICATE, EVALUATION: CONTAMINATED}
_DROP = np.dtype([("place", "<i8"), ("of", "<i8"), ("similarity", "<u2")])
_AT_ONCE = 1 << 16

Drops = npt.NDArray[np.void]


def place_of(unit: Any, row: Any) -> Any:
    """The place of a document, or of several; of what a run of the index has, below 0, the row is not told."""
    return np.where(unit < 0, unit, unit << ROW_BITS | row)


def unit_and_row(places: Int64s) -> tuple[Int64s, Int64s]:
    """Of places that are no less than 0."""
    return places >> ROW_BITS, places & ((1 << ROW_BITS) - 1)


def drop_file_name(way: str, partition: int) -> str:
    """The file of the drops of one partition, by one way of dedup.

    >>> drop_file_name(EXACT, 3)
    'drops-exact-00003.bin'
    """
    return f"drops-{way}-{partition:05d}.bin"


def drop_files(folder: Path, *ways: str) -> list[Path]:
    return [path for way in sorted(ways) for path in sorted(folder.glob(f"drops-{way}-*.bin"))]


def drops_in(path: Path) -> Iterator[Drops]:
    """All drops of a file, some at a time."""
    table = mapped(path, _DROP)
    for start in range(0, len(table), _AT_ONCE):
        yield table[start : start + _AT_ONCE]


class DropWriter:
    """Writes one drop file; use it as a context manager.

    with DropWriter(folder / drop_file_name(NEAR, 0)) as writer:
        writer.add(places, of)      # arrays, in order over all calls
        writer.commit()
    """

    def __init__(self, path: Path) -> None:
        self.dropped = 0
        self._last = -1
        self._new = NewFile(path)

    def add(self, places: Int64s, of: Int64s, similarity: Any = EQUAL) -> None:
        """Add drops; without a similarity, of equal documents."""
        if not len(places):
            return
        if places[0] <= self._last or (places[1:] <= places[:-1]).any():
            raise ValueError("drops must come in the order of (unit, row), each once")
        self._last = int(places[-1])
        self.dropped += len(places)
        drops = np.empty(len(places), _DROP)
        drops["place"], drops["of"], drops["similarity"] = places, of, similarity
        self._new.write(drops.tobytes())

    def commit(self) -> dict[str, Any]:
        """Put the file in place; its size and hash, by which it is believed after a power failure."""
        return self._new.put_in_place()

    def __enter__(self) -> DropWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._new.discard()


@dataclass(frozen=True, slots=True)
class Original:
    """The document that a dropped one duplicates."""

    unit: int | None = None
    row: int | None = None
    """The document that is kept; None when another run has it, or when the way can't tell."""
    indexed_run: int | None = None
    """The position, among the runs of the index, of the run that has seen it."""
    similarity: int = EQUAL
    """How alike the two are, in thousandths."""


class DropSet:
    """The dropped documents of one unit by some ways; an exact duplicate is named before a near one."""

    def __init__(self, folder: Path, unit: int, ways: tuple[str, ...] = DEDUP) -> None:
        self._unit = unit
        found = ((_REASONS[path.name.split("-")[1]], mapped(path, _DROP)) for path in drop_files(folder, *ways))
        self._files = [(reason, table) for reason, table in found if len(self._between(table, 0, 1 << ROW_BITS))]

    def apply(self, rows: Int64s, verdicts: Verdicts) -> None:
        """Mark the dropped among the documents of these rows, in order, that the verdicts are about."""
        for reason, table in self._files if len(rows) else ():
            drops = self._between(table, int(rows[0]), int(rows[-1]) + 1)
            _, dropped = unit_and_row(drops["place"])
            seen = (drops["of"] < 0) & (drops["of"] != UNKNOWN)
            for name, which in ((reason, ~seen), (SEEN_BEFORE, seen)):
                if which.any():
                    places = np.searchsorted(rows, dropped[which])
                    gone = np.zeros(len(rows), bool)
                    gone[places[rows[places] == dropped[which]]] = True
                    verdicts.drop(gone, name)

    def of(self, row: int) -> Original | None:
        """The document that a dropped one duplicates; None for one that is kept."""
        for _, table in self._files:
            for drop in self._between(table, row, row + 1):
                of, similarity = int(drop["of"]), int(drop["similarity"])
                if of < 0:
                    return Original(indexed_run=None if of == UNKNOWN else -1 - of, similarity=similarity)
                unit, kept = (int(number) for number in unit_and_row(drop["of"]))
                return Original(unit, kept, similarity=similarity)
        return None

    def _between(self, table: Drops, first_row: int, stop_row: int) -> Drops:
        """The drops in a range of rows of the unit."""
        places, unit = table["place"], self._unit << ROW_BITS
        return table[bisect_left(places, unit + first_row) : bisect_left(places, unit + stop_row)]
