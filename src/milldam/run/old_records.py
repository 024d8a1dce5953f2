"""Finished parts of units: what each is, which units are complete, and all of them in plan order.

Memory: a bit a unit for what is complete, an entry for each unit that is not; to put records in order, 32 bytes each
and as much again for a moment. A pass over a million records takes some seconds: most of it is reading JSON.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.sealed import is_sealed, unseal_line
from milldam.stores.tokens.drafting import in_manifest_order
from milldam.stores.tokens.manifest import Shard


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A finished part of a unit; its shards are durable before this is written."""

    unit: int
    part: int
    shards: list[dict[str, Any]]
    """At most one per split."""
    dropped: dict[str, dict[str, int]]
    """Stage -> reason -> documents."""
    batches: int
    """Batches of the unit that are done with this part: where a resumed unit goes on."""
    last: bool
    """The unit is complete."""
    read: int = 0
    """Documents that were read for it."""
    dataset: int = 0
    """Number of its data set in the configuration."""
    inexact_cuts: int = 0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was made besides shards, by its path below the output folder: size and hash."""

    def as_json(self) -> dict[str, Any]:
        # Not by asdict, which copies all that is in it.
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = ("unit", "part", "shards", "dropped", "batches", "last", "read", "dataset", "inexact_cuts", "files")
_KEY = re.compile(rb'\{"unit": (\d+), "part": (\d+), ')
_BLOCK = 4096


def parse_record(line: bytes) -> PartRecord | None:
    """A record, unless its line is not as it was written."""
    value = unseal_line(line)
    return None if value is None else PartRecord(**value)


class UnitSet:
    """Numbers of units, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, unit: int) -> None:
        place, bit = divmod(unit, 8)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits))))
        if not self._bits[place] >> bit & 1:
            self._bits[place] |= 1 << bit
            self._count += 1

    def __contains__(self, unit: int) -> bool:
        place, bit = divmod(unit, 8)
        return place < len(self._bits) and bool(self._bits[place] >> bit & 1)

    def __len__(self) -> int:
        return self._count

    def missing(self, units: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each of so many units whether it is not in the set."""
        bits = np.frombuffer(bytes(self._bits[: -(-units // 8)]), np.uint8)
        inside = np.zeros(units, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:units]
        inside[: len(known)] = known
        return ~inside


@dataclass(slots=True)
class Progress:
    """What is recorded as done: per unit, how many parts and batches, and whether it is complete."""

    complete: UnitSet = field(default_factory=UnitSet)
    partial: dict[int, tuple[int, int]] = field(default_factory=dict)
    """unit -> (parts, batches) of the units that are not complete."""
    documents: int = 0
    text_bytes: int = 0

    def holds(self, record: PartRecord) -> bool:
        """Whether the part is booked already."""
        return record.unit in self.complete or record.part < self.partial.get(record.unit, (0, 0))[0]

    def book(self, record: PartRecord) -> None:
        for shard in record.shards:
            self.documents += shard["documents"]
            self.text_bytes += shard["text_bytes"]
        if record.last:
            self.complete.add(record.unit)
            self.partial.pop(record.unit, None)
        else:
            self.partial[record.unit] = (record.part + 1, record.batches)


class Sequence:
    """Goes through records in the order they were written: each part once, none before the one it follows."""

    def __init__(self) -> None:
        self._complete = UnitSet()
        self._next: dict[int, int] = {}

    def takes(self, record: PartRecord) -> bool:
        """Whether the record comes next in its unit; then it is booked."""
        if record.unit in self._complete or record.part != self._next.get(record.unit, 0):
            return False
        if record.last:
            self._complete.add(record.unit)
            self._next.pop(record.unit, None)
        else:
            self._next[record.unit] = record.part + 1
        return True


def in_plan_order(files: Iterable[Path]) -> Iterator[PartRecord]:
    """The records of some files by unit and part, whatever the order of work."""
    paths = list(files)
    table = _places(paths)
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open("rb", buffering=1 << 18)) for path in paths]
        done = (-1, -1)
        for number, at, unit, part in _rows(table):
            if (unit, part) == done:
                continue  # made twice, by shares that were cut in different ways: the same bytes
            opened[number].seek(at)
            record = parse_record(opened[number].readline())
            if record is not None:
                done = unit, part
                yield record


def _places(paths: list[Path]) -> npt.NDArray[np.int64]:
    """(file, byte, unit, part) of every record, in plan order."""
    places = array("q")
    for number, path in enumerate(paths):
        with path.open("rb") as lines:
            at = 0
            for line in lines:
                key = _key(line)
                if key is not None:
                    places.extend((number, at, *key))
                at += len(line)
    table = np.frombuffer(places, np.int64).reshape(-1, 4)
    return table[np.lexsort((table[:, 3], table[:, 2]))]


def _key(line: bytes) -> tuple[int, int] | None:
    """Unit and part of a record, for a fifth of what it takes to read it whole; None when it is not whole."""
    match = _KEY.match(line) if is_sealed(line) else None
    return None if match is None else (int(match[1]), int(match[2]))


def _rows(table: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    """As plain numbers, without a list of all of them."""
    for first in range(0, len(table), _BLOCK):
        yield from table[first : first + _BLOCK].tolist()


def shards_in_order(records: Iterable[PartRecord]) -> tuple[Shard, ...]:
    """Every shard of records that come in plan order: split after split. Holds them; `ShardSpool` does not."""
    shards = [Shard(**shard) for record in records for shard in record.shards]
    return tuple(sorted(shards, key=lambda shard: in_manifest_order(shard.split)))
