"""The records of a run, read while another process writes them.

Holds 8 bytes a part and what a dict takes; a record is read again when it is asked for. Files are read by position, so
that forked processes do not share one. When the maker is replaced, the file may be: then it is read from its begin.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from milldam.run.records import Record, UnitSet, parse_record, record_head
from milldam.run.units import Keys

_BLOCK = 1 << 20


class MadeParts:
    """Where the record of each part lies."""

    def __init__(self, path: Path, keys: Keys) -> None:
        self._path, self._keys = path, keys
        self._file: tuple[int, int] | None = None
        self._at, self._rest = 0, b""
        self._places: dict[tuple[int, int], int] = {}
        self._complete = UnitSet()
        self._counts_from: float = math.inf
        self.tokens = 0
        """Made since `begin`."""

    def find(self, unit: int, part: int) -> Record | None:
        """The record of a part; None: it is not made yet."""
        self.look()
        place = self._places.get((unit, part))
        record = None if place is None else self._read(place)
        # The file may have been replaced just now.
        return record if record is not None and (record.key, record.part) == (self._keys[unit], part) else None

    def begin(self) -> None:
        """Count tokens from here on."""
        self.look()
        self._counts_from = self._at

    def is_complete(self, unit: int) -> bool:
        return unit in self._complete

    @property
    def units(self) -> int:
        """Units that are complete."""
        return len(self._complete)

    def __len__(self) -> int:
        """Parts that are made."""
        return len(self._places)

    def look(self) -> None:
        """Take note of what was written meanwhile."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._at:
                if self._file is not None:  # what was counted is in it again
                    self._counts_from = found.st_size
                self._file, self._at, self._rest = (found.st_dev, found.st_ino), 0, b""
                self._places.clear()
                self._complete = UnitSet()
            while block := os.pread(descriptor, _BLOCK, self._at):
                self._take(block)
        finally:
            os.close(descriptor)

    def _take(self, block: bytes) -> None:
        begin = self._at - len(self._rest)
        lines = (self._rest + block).split(b"\n")
        # The last one is empty, or still being written.
        self._at, self._rest = self._at + len(block), lines.pop()
        for line in lines:
            head = record_head(line)
            unit = None if head is None else self._keys.number_of(head[0])
            if head is not None and unit is not None and (unit, head[1]) not in self._places:
                self._places[unit, head[1]] = begin
                if head[2]:
                    self._complete.add(unit)
                if begin >= self._counts_from and (record := parse_record(line)) is not None:
                    self.tokens += record.counts["tokens"]
            begin += len(line) + 1

    def _read(self, place: int) -> Record | None:
        with self._path.open("rb") as lines:
            lines.seek(place)
            return parse_record(lines.readline())
