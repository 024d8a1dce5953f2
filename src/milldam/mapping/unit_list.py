"""The units of a plan in a file, a line each: read one at a time, however many there are.

Held in memory: where each line begins, its size in bytes of input, and its key.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from milldam.files import explain_os_errors, hash_bytes
from milldam.mapping.units import RowUnit


class UnitList:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        self._sizes = array("q")
        self.keys: list[str] = []
        """What each unit reads, in order."""

    @classmethod
    def written(cls, path: Path, units: Iterable[RowUnit]) -> UnitList:
        found = cls(path)
        with explain_os_errors(path), path.open("wb") as file:
            for unit in units:
                found._offsets.append(file.tell())
                found._sizes.append(unit.size)
                # Where rows are numbered, their numbers are part of what the function is given.
                found.keys.append(unit.key if unit.first_row is None else f"{unit.key} {unit.first_row}")
                file.write(json.dumps(unit.as_json()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return found

    def __len__(self) -> int:
        return len(self.keys)

    def size(self, number: int) -> int:
        return self._sizes[number]

    @property
    def bytes(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, number: int) -> RowUnit:
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            return RowUnit.from_json(json.loads(file.readline()))


def read_units(path: Path) -> Iterator[RowUnit]:
    """The units of a file, in order."""
    with path.open("rb") as lines:
        for line in lines:
            yield RowUnit.from_json(json.loads(line))


def unit_key(recipe: str, schema_hash: str, source_key: str) -> str:
    """Everything that the rows of a unit depend on."""
    return hash_bytes(f"{recipe} {schema_hash} {source_key}".encode())
