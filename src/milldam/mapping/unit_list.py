"""The units of a map's plan, as the run keeps them on disk; in memory the key and the size of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from milldam.files import hash_bytes
from milldam.mapping.units import RowUnit
from milldam.run.old_units import UnitList as Written


class UnitList:
    def __init__(self, written: Written, units: Iterable[RowUnit]) -> None:
        self._written = written
        self.keys: list[str] = []
        """What each unit reads, in order."""
        written.write(self._noted(units))
        self._sizes = written.sizes()

    def _noted(self, units: Iterable[RowUnit]) -> Iterator[RowUnit]:
        for unit in units:
            self.keys.append(unit.numbered_key)
            yield unit

    def __len__(self) -> int:
        return len(self.keys)

    def size(self, number: int) -> int:
        return int(self._sizes[number])

    @property
    def bytes(self) -> int:
        return int(self._sizes.sum())

    def __getitem__(self, number: int) -> RowUnit:
        unit: RowUnit = self._written.at(number, RowUnit.from_json)
        return unit


def read_units(path: Path) -> Iterator[RowUnit]:
    """The units of a file, in order."""
    with path.open("rb") as lines:
        for line in lines:
            yield RowUnit.from_json(json.loads(line))


def unit_key(recipe: str, schema_hash: str, source_key: str) -> str:
    """Everything that the rows of a unit depend on."""
    return hash_bytes(f"{recipe} {schema_hash} {source_key}".encode())
