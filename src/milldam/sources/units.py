"""Input files -> units: slices of about `shard_size` bytes, made from the input alone.

A unit is the unit of work, of resume and of output. Large files are cut by bytes (txt, jsonl, csv), row groups
(parquet) or record batches (arrow); small files are gathered. What can't be cut (a compressed stream, a text file
that is one document) is a unit of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from milldam.files import hash_bytes
from milldam.sources.listing import InputFile

SMALLEST_SHARD, LARGEST_SHARD = 16 * 10**6, 256 * 10**6
UNITS_WANTED = 16
FILES_PER_UNIT = 20_000
TYPICAL_RATIO = {"gz": 3.0, "zst": 3.5, "bz2": 4.0, "xz": 4.5}
"""How much larger than a file what it unpacks to is, by compression."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of an input file: bytes, row groups or record batches from `start` to `stop`; None: to its end."""

    path: str
    format: str
    compression: str | None
    start: int = 0
    stop: int | None = None
    size: int = 0
    """Bytes of input, for progress."""
    unpacking: int = 0
    """Bytes of memory that reading takes besides batches, where the format can't be read in small parts."""
    state: str = ""
    """Changes when the file changes."""

    def as_json(self) -> dict[str, Any]:
        # Not by asdict, which takes five times as long: there may be ten million of them.
        fields = {name: getattr(self, name) for name in _SLICE_FIELDS}
        return fields | {"unpacking": self.unpacking} if self.unpacking else fields


_SLICE_FIELDS = ("path", "format", "compression", "start", "stop", "size", "state")


@dataclass(frozen=True, slots=True)
class Unit:
    index: int
    slices: tuple[Slice, ...]
    dataset: int = 0
    """Number of its data set in the configuration."""
    copy: int = 0
    """Which repetition of the data set it belongs to, for a weight above 1."""
    original: int | None = None
    """The unit that it repeats; None: it is none of the repetitions."""

    @property
    def origin(self) -> int:
        """The unit that first reads these slices."""
        return self.index if self.original is None else self.original

    @property
    def size(self) -> int:
        return sum(slice.size for slice in self.slices)

    @property
    def key(self) -> str:
        """What it is made from: the same wherever it stands in a plan, and wherever its files lie."""
        made_from = [[s.state, s.format, s.compression, s.start, s.stop] for s in self.slices]
        return hash_bytes(json.dumps([self.dataset, self.copy, made_from]).encode())[:16]

    @property
    def unpacked_bytes(self) -> float:
        """About the size of its input without compression, as is typical."""
        return sum(slice.size * TYPICAL_RATIO.get(slice.compression or "", 1.0) for slice in self.slices)

    def input_bytes(self, bytes_read: int) -> int:
        """About how much of its input so many bytes, unpacked, were; no more than there is."""
        return min(self.size, int(bytes_read * self.size / max(1.0, self.unpacked_bytes)))

    def as_json(self) -> dict[str, Any]:
        origin = {"dataset": self.dataset, "copy": self.copy, "original": self.original}
        given = {name: number for name, number in origin.items() if number}
        return {"index": self.index, "slices": [slice.as_json() for slice in self.slices]} | given

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Unit:
        slices = tuple(Slice(**slice) for slice in value["slices"])
        # A repetition of unit 0 says nothing of it either: 0 is left out.
        copy = value.get("copy", 0)
        return cls(value["index"], slices, value.get("dataset", 0), copy, value.get("original", 0) if copy else None)


SliceFile = Callable[[InputFile, int], Iterable[Slice]]


def default_shard_size(total_bytes: int) -> int:
    """A sixteenth of the input, but 16 MB to 256 MB: small inputs still keep several workers busy."""
    return min(LARGEST_SHARD, max(SMALLEST_SHARD, total_bytes // UNITS_WANTED))


def plan_units(
    files: Iterable[InputFile],
    shard_size: int,
    slice_file: SliceFile,
    *,
    first_index: int = 0,
    dataset: int = 0,
    copy: int = 0,
) -> Iterator[Unit]:
    """Cut the files of a data set into slices and gather slices into units of about `shard_size`."""
    gathered: list[Slice] = []
    index, size = first_index, 0
    for file in files:
        for slice in slice_file(file, shard_size):
            full = size + slice.size > shard_size * 1.25 or len(gathered) >= FILES_PER_UNIT
            if gathered and (full or slice.format != gathered[0].format):
                yield Unit(index, tuple(gathered), dataset, copy)
                gathered, size, index = [], 0, index + 1
            gathered.append(replace(slice, state=file.state))
            size += slice.size
    if gathered:
        yield Unit(index, tuple(gathered), dataset, copy)


def whole(file: InputFile) -> Slice:
    return Slice(file.path, file.format, file.compression, size=file.size)


def by_bytes(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Even byte ranges; the reader aligns them to records."""
    count = max(1, round(file.size / shard_size))
    if count == 1:
        yield whole(file)
        return
    edges = [file.size * k // count for k in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        end = None if stop == file.size else stop
        yield Slice(file.path, file.format, file.compression, start, end, stop - start)


def by_parts(file: InputFile, part_sizes: Iterable[int], shard_size: int) -> Iterator[Slice]:
    """Runs of numbered parts (row groups, record batches, or record starts) of about `shard_size` bytes."""
    start = size = number = 0
    for number, part in enumerate(part_sizes, start=1):
        size += part
        if size >= shard_size:
            yield Slice(file.path, file.format, file.compression, start, number, size)
            start, size = number, 0
    if size or number == 0:
        yield Slice(file.path, file.format, file.compression, start, number, size)
