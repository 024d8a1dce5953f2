"""Input files -> units: slices of about `shard_size` bytes, made from the input alone.

A unit is the unit of work, of resume and of output. Large files are cut by bytes (txt, jsonl, csv), row groups
(parquet) or record batches (arrow), and their slices stand alone; small files are gathered. What can't be cut (a
compressed stream, a text file that is one document) is a unit of its own.

A corpus that grows keeps its units. A group of small files ends where the hash of a file's name says so, with a
probability of twice its share of `shard_size`: so a file that is added, edited or removed moves the ends of the groups
near it, and no others. Streams: holds one group.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from milldam.files import hash_bytes
from milldam.sources.listing import InputFile

SHARD_SIZE = 64 * 10**6
"""Bytes of input per unit, unless told otherwise. It does not follow the input: a corpus that grows keeps its units."""
CHAT_SHARD_SIZE = 16 * 10**6
"""The same of conversations. They take five times as long as plain texts, and there are fewer of them: units are small
enough that all workers have work to the end."""
SAMPLED_SHARD = 16 * 10**6
"""The same where units are samples of the input."""
FILES_PER_UNIT = 20_000
_ALONE = 0.25
"""What has this share of `shard_size` shares a unit with nothing else."""
_ENDS_PER_SHARD = 2
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

    def of_state(self, state: str) -> Slice:
        # Not by replace, which takes three times as long.
        known = (self.path, self.format, self.compression, self.start, self.stop, self.size, self.unpacking)
        return Slice(*known, state)

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
    """Number of its dataset in the configuration."""
    copy: int = 0
    """Which repetition of the dataset it belongs to, for a weight above 1."""
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
        return sum(map(unpacked_bytes, self.slices))

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


Item = TypeVar("Item")


def plan_units(
    files: Iterable[InputFile],
    shard_size: int,
    slice_file: SliceFile,
    *,
    first_index: int = 0,
    dataset: int = 0,
    copy: int = 0,
) -> Iterator[Unit]:
    """Cut the files of a dataset into slices and gather slices into units of about `shard_size`."""
    slices = (slice.of_state(file.state) for file in files for slice in slice_file(file, shard_size))
    for index, group in enumerate(gather(slices, shard_size, lambda one: one), start=first_index):
        yield Unit(index, tuple(group), dataset, copy)


def gather(items: Iterable[Item], shard_size: int, slice_of: Callable[[Item], Slice]) -> Iterator[list[Item]]:
    """Slices, or what has one, in groups of one format: of at most `shard_size` but for the last of a group."""
    group: list[Item] = []
    held, before = 0.0, Slice("", "", None)
    for item in items:
        slice = slice_of(item)
        weight = unpacked_bytes(slice) / shard_size
        alone = weight >= _ALONE or slice.start > 0
        if group and (alone or slice.format != before.format):
            yield group
            group, held = [], 0.0
        group.append(item)
        # Opening a file costs something however small it is.
        weight += 1 / FILES_PER_UNIT
        held += weight
        if alone or held >= 1 or _luck(slice.path, before.path) < _ENDS_PER_SHARD * weight:
            yield group
            group, held = [], 0.0
        before = slice
    if group:
        yield group


def _luck(path: str, before: str) -> float:
    """From 0 to 1 by a file's name, from where it differs from the one before: a corpus may lie anywhere."""
    parts, others = path.split("/"), before.split("/")
    at = next((k for k, (one, other) in enumerate(zip(parts, others, strict=False)) if one != other), 0)
    name = "/".join(parts[at:]) if before else parts[-1]
    return float(xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))) / 2.0**64


def unpacked_bytes(slice: Slice) -> float:
    """About its size without compression, as is typical."""
    return slice.size * TYPICAL_RATIO.get(slice.compression or "", 1.0)


def whole(file: InputFile) -> Slice:
    return Slice(file.path, file.format, file.compression, size=file.size)


def by_bytes(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Byte ranges that begin at multiples of `shard_size`, the last a quarter of it at least; the reader aligns them to
    records. What is appended to a file changes the last one alone."""
    starts = range(0, max(1, file.size - shard_size // 4), shard_size)
    for start, stop in itertools.pairwise([*starts, None]):
        size = (file.size if stop is None else stop) - start
        yield Slice(file.path, file.format, file.compression, start, stop, size)


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
