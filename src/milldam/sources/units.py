"""What the user names -> input files, in a fixed order -> units: slices of about `shard_size` bytes.

Paths, folders (searched to the bottom), globs and fsspec addresses. A folder gives the files whose format is known,
hidden ones left out, sorted by name level by level; so the order depends on the names alone.

A unit is the unit of work, of resume and of output, made from the input alone. Large files are cut by bytes (txt,
jsonl), row groups (parquet) or record batches (arrow), and their slices stand alone; small files are gathered. What
can't be cut (CSV, a compressed stream, a text file that is one document) is a unit of its own.

A corpus that grows keeps its units. A group of small files ends where the hash of a file's name says so, with a
probability of twice its share of `shard_size`: so a file that is added, edited or removed moves the ends of the groups
near it, and no others. Streams: holds one group, and no list of a million files.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

import xxhash

from milldam.errors import InputError, Setting
from milldam.files import hash_bytes, in_home
from milldam.input_files import (
    FORMATS,
    RUN_FOLDER,
    count_left_out,
    describe_left_out,
    explain_address_errors,
    files_below,
    is_address,
    is_input,
    kind_of,
    missing_bucket,
    nearby,
    without_secrets,
)
from milldam.sources.compression import STDIN, DamagedError, compression_of, read_head
from milldam.stores.kinds import KINDS

_JSON_BEGINS = {"jsonl": re.compile(rb"\s*\{"), "json": re.compile(rb"\s*\[\s*\{")}


@dataclass(frozen=True, slots=True)
class InputFile:
    path: str
    format: str
    compression: str | None
    size: int
    version: str
    """Changes when the file changes: modification time, or what a remote store offers."""
    name: str = ""
    """Its path below the folder that was named; empty: its own name will do."""

    @property
    def state(self) -> str:
        """Another one whenever the file is another one, wherever it lies. Standard input is never the same twice."""
        if self.path == STDIN:
            return os.urandom(8).hex()
        name = self.name or PurePosixPath(self.path).name
        return hash_bytes(f"{name} {self.size} {self.version}".encode("utf-8", "surrogateescape"))[:16]


def list_inputs(
    inputs: Sequence[str], input_format: str | None = None, left_out: Counter[str] | None = None
) -> Iterator[InputFile]:
    """The files behind each input, in the order given. `left_out` counts what is not read of folders, by ending."""
    for path in map(in_home, inputs):
        is_empty, others = True, Counter[str]() if left_out is None else left_out
        if path == STDIN:
            files: Iterable[InputFile] = (_standard_input(input_format),)
        elif is_address(path):
            files = _list_address(path, input_format, others)
        elif os.path.isdir(path):
            above, any_format = os.path.join(Path(path), ""), input_format is not None
            below = files_below(Path(path), any_format=any_format, left_out=others)
            files = (_local_file(file, input_format, file.removeprefix(above)) for file in below)
        elif os.path.isfile(path):
            files = (_local_file(path, input_format),)
        elif glob.has_magic(path):
            matching = filter(os.path.isfile, sorted(glob.iglob(path, recursive=True)))
            files = (_local_file(file, input_format) for file in matching)
        elif Path(path).exists():
            advice = f"Feed it on standard input: milldam ... - < {path}"
            raise InputError(f"{path}: neither a file nor a folder, and can't be read twice. {advice}")
        else:
            raise InputError(f"{path}: no such file or folder.{nearby(path)}")
        for file in files:
            is_empty = False
            yield file
        if is_empty:
            known = ", ".join(FORMATS)
            message = f"{path}: no input files in it. Known are {known}, each also as .gz, .zst, .bz2 or .xz."
            there = f"\nIn it: {describe_left_out(others)}. To read text of other endings: "
            raise InputError(message, *((there, Setting("input_format", "txt")) if others else ()))


def _standard_input(input_format: str | None) -> InputFile:
    """It has no name that tells: compression shows in its first bytes, an object there means JSON lines."""
    if input_format in ("parquet", "arrow"):
        raise InputError(f"{input_format} can't be read from standard input: it is read from its end. Name the file.")
    head = read_head(STDIN, None)
    compression = compression_of(head)
    with contextlib.suppress(DamagedError):
        head = read_head(STDIN, compression)
    sniffed = next((kind for kind, begin in _JSON_BEGINS.items() if begin.match(head)), "txt")
    return InputFile(STDIN, input_format or sniffed, compression, 0, "")


def _local_file(path: str, input_format: str | None, name: str = "") -> InputFile:
    status = os.stat(path)
    kind = kind_of(path, input_format) or _refuse_unknown(path)
    return InputFile(path, *kind, status.st_size, str(status.st_mtime_ns), name)


def _refuse_unknown(name: str) -> NoReturn:
    known = "|".join(dict.fromkeys(FORMATS.values()))
    raise InputError(f"{name}: its ending says no known format. Say what it is: ", Setting("input_format", known))


def is_as_listed(path: str, state: str) -> bool:
    """Whether a file is the one that had this state when it was listed."""
    try:
        found = next(list_inputs([path], "txt"))
    except InputError:
        return False
    # Below the folder that was named, whichever that was.
    parts = PurePosixPath(path).parts
    return any(replace(found, name="/".join(parts[first:])).state == state for first in range(len(parts)))


def _list_address(address: str, input_format: str | None, left_out: Counter[str]) -> Iterator[InputFile]:
    from milldam.sources.streams import open_filesystem

    filesystem, path = open_filesystem(address)
    filesystem.invalidate_cache()  # fsspec keeps listings as long as the process lives: what is new would not be seen
    files, is_folder = list[dict[str, Any]](), False
    with contextlib.suppress(FileNotFoundError), explain_address_errors(address):
        if glob.has_magic(path):
            matching = (detail for _, detail in sorted(filesystem.glob(path, detail=True).items()))
            is_hidden = re.compile(r".*/\.[^/]*|\.[^/]*")
            files = [one for one in matching if one["type"] == "file" and not is_hidden.fullmatch(one["name"])]
        else:
            info = filesystem.info(path)
            is_folder = info["type"] == "directory"
            files = _files_in(filesystem, info["name"], address) if is_folder else [info]
    read = False
    for detail in files:
        if not is_folder or input_format is not None or is_input(detail["name"]):
            read = True
            yield _remote_file(filesystem, detail, input_format)
        else:
            count_left_out(left_out, detail["name"])
    if not read and not left_out:
        why = missing_bucket(filesystem, address, path)
        if why or not is_folder:
            raise InputError(f"{without_secrets(address)}: {why or 'nothing there'}. Is the address right?")


def _files_in(filesystem: Any, folder: str, address: str) -> list[dict[str, Any]]:
    """The files of a remote folder in the order of a local one, hidden ones left out; of what milldam made, none: its
    manifest tells, or the lock of its run folder."""
    by_path = {PurePosixPath(name): detail for name, detail in filesystem.find(folder, detail=True).items()}
    manifests, top = {kind.manifest for kind in KINDS}, PurePosixPath(folder)
    ours = {path.parent for path in by_path if path.name in manifests}
    ours |= {path.parent.parent for path in by_path if path.parts[-2:] == (RUN_FOLDER, "lock")}
    if top in ours:  # its files are not its rows in order
        raise InputError(f"{without_secrets(address)}: a store or a table of milldam's. Copy it here: `milldam pull`.")
    return [
        by_path[path]
        for path in sorted(by_path, key=lambda path: path.parts)
        if ours.isdisjoint(path.parents) and not any(part.startswith(".") for part in path.parts[len(top.parts) :])
    ]


def _remote_file(filesystem: Any, detail: dict[str, Any], input_format: str | None) -> InputFile:
    kind = kind_of(detail["name"], input_format) or _refuse_unknown(detail["name"])
    keys = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_commit", "created")
    version = next((str(detail[key]) for key in keys if detail.get(key) is not None), "")
    return InputFile(filesystem.unstrip_protocol(detail["name"]), *kind, int(detail["size"]), version)


# ---- units ----

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
TYPICAL_RATIO: dict[str | None, float] = {None: 1.0, "gz": 3.0, "zst": 3.5, "bz2": 4.0, "xz": 4.5}
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
        return {name: getattr(self, name) for name in _SLICE_FIELDS}


_SLICE_FIELDS = ("path", "format", "compression", "start", "stop", "size", "unpacking", "state")


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
        return sum(one.size * TYPICAL_RATIO[one.compression] for one in self.slices)

    def input_bytes(self, bytes_read: int) -> int:
        """About how much of its input so many bytes, unpacked, were; no more than there is."""
        return min(self.size, int(bytes_read / TYPICAL_RATIO[self.slices[0].compression]))

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
    slices = (slice for file in files for slice in slice_file(file, shard_size))
    for index, group in enumerate(gather(slices, shard_size, lambda one: one), start=first_index):
        yield Unit(index, tuple(group), dataset, copy)


def gather(items: Iterable[Item], shard_size: int, slice_of: Callable[[Item], Slice]) -> Iterator[list[Item]]:
    """Slices, or what has one, in groups of one format: of at most `shard_size` but for the last of a group."""
    group: list[Item] = []
    held, before = 0.0, Slice("", "", None)
    for item in items:
        slice = slice_of(item)
        weight = slice.size * TYPICAL_RATIO[slice.compression] / shard_size
        alone = weight >= _ALONE or slice.start > 0
        if group and (alone or slice.format != before.format):
            yield group
            group, held = [], 0.0
        group.append(item)
        # Opening a file costs something however small it is.
        weight += 1 / FILES_PER_UNIT
        held += weight
        # From 0 to 1 by the file's name, from where it differs from the one before: a corpus may lie anywhere.
        parts, others = slice.path.split("/"), before.path.split("/")
        at = next((k for k, (one, other) in enumerate(zip(parts, others, strict=False)) if one != other), 0)
        name = "/".join(parts[at:]) if before.path else parts[-1]
        luck = float(xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))) / 2.0**64
        if alone or held >= 1 or luck < _ENDS_PER_SHARD * weight:
            yield group
            group, held = [], 0.0
        before = slice
    if group:
        yield group


def whole(file: InputFile) -> Slice:
    return Slice(file.path, file.format, file.compression, size=file.size, state=file.state)


def by_parts(file: InputFile, part_sizes: Iterable[int], shard_size: int) -> Iterator[Slice]:
    """Runs of numbered parts (row groups or record batches) of about `shard_size` bytes."""
    start = size = number = 0
    for number, part in enumerate(part_sizes, start=1):
        size += part
        if size >= shard_size:
            yield replace(whole(file), start=start, stop=number, size=size)
            start, size = number, 0
    if size or number == 0:
        yield replace(whole(file), start=start, stop=number, size=size)
