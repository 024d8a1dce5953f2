"""Where the rows of a unit come from: the file of each, and its number there.

A reader says where a file begins and which records it leaves out; who works on the rows asks for the place of some.
What lies before the rows that are worked on is forgotten: it holds a mark for each file and each gap of about a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A run of rows of one file."""

    file: str
    first: int
    """Its number in the file, from 0; records that could not be read are counted too."""
    last: int
    origin: int = 0
    """Rows are counted from this byte of the file: a piece of a large file, before which nothing was read."""

    def __str__(self) -> str:
        """
        >>> print(Place("a.jsonl", 3, 3), Place("a.jsonl", 0, 9, 64), sep="; ")
        row 3 of a.jsonl; rows 0 to 9 of a.jsonl, counted from byte 64
        """
        rows = f"row {self.first:,}" if self.first == self.last else f"rows {self.first:,} to {self.last:,}"
        return f"{rows} of {self.file}" + (f", counted from byte {self.origin:,}" if self.origin else "")


@dataclass(frozen=True, slots=True)
class _Mark:
    at: int
    """From this row of the unit on."""
    file: str
    row: int
    origin: int


@dataclass(slots=True)
class Places:
    """Of one unit, while it is read."""

    before: int = 0
    """Rows that are read and passed over before the unit begins."""
    _marks: list[_Mark] = field(default_factory=list)
    _read: int = 0

    def begin(self, file: str, row: int = 0, origin: int = 0) -> None:
        """The next row to come is this one of this file. `origin`: the byte from which its rows are counted."""
        mark = _Mark(self._read, file, row, origin)
        if not self._marks or self._next(self._marks[-1]) != mark:
            self._marks.append(mark)

    def skip(self, ahead: int) -> None:
        """A record is left out, behind `ahead` more rows."""
        if self._marks:
            last = self._marks[-1]
            at = self._read + ahead
            self._marks.append(_Mark(at, last.file, last.row + at - last.at + 1, last.origin))

    def count(self, rows: int) -> None:
        """So many rows came."""
        self._read += rows

    @property
    def next(self) -> Place:
        """Of the row that is read now."""
        return self.of(self._read - self.before, self._read - self.before + 1)[0]

    def forget(self, begin: int) -> None:
        """No row before this one of the unit will be asked for."""
        first = bisect_right(self._marks, begin + self.before, key=lambda mark: mark.at) - 1
        del self._marks[: max(0, first)]

    def _next(self, mark: _Mark) -> _Mark:
        return _Mark(self._read, mark.file, mark.row + self._read - mark.at, mark.origin)

    def of(self, begin: int, end: int) -> list[Place]:
        """The places of rows `begin` to `end` of the unit; none where its reader does not say."""
        begin, end = begin + self.before, end + self.before
        found: list[Place] = []
        for number, mark in enumerate(self._marks):
            stop = self._marks[number + 1].at if number + 1 < len(self._marks) else end
            first, last = max(begin, mark.at), min(end, stop)
            if first < last:
                shift = mark.row - mark.at
                found.append(Place(mark.file, first + shift, last - 1 + shift, mark.origin))
        return found


def shown(places: list[Place]) -> str:
    """For a message: rows of one file together, and the first few files.

    >>> shown([Place("a", 5, 6), Place("a", 8, 9), Place("b", 0, 3)])
    'rows 5 to 9 of a; rows 0 to 3 of b'
    """
    joined: list[Place] = []
    for place in places:
        if joined and (joined[-1].file, joined[-1].origin) == (place.file, place.origin):
            joined[-1] = Place(place.file, joined[-1].first, place.last, place.origin)
        else:
            joined.append(place)
    more = f"; and of further files: {len(joined) - _SHOWN}" if len(joined) > _SHOWN else ""
    return "; ".join(map(str, joined[:_SHOWN])) + more
