"""What the user names -> input files, in a fixed order.

Paths, folders (searched to the bottom), globs and fsspec addresses. A folder gives the files whose format is known,
hidden ones left out, sorted by name level by level; so the order depends on the names alone. Streams: no list of a
million files is held.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from milldam.errors import InputError, Setting
from milldam.files import hash_bytes
from milldam.input_files import (
    COMPRESSIONS,
    FORMATS,
    RUN_FOLDER,
    LeftOut,
    files_below,
    is_address,
    is_input,
    kind_of,
    nearby,
    version_of,
    without_secrets,
)
from milldam.sources.compression import (
    STDIN,
    DamagedError,
    compression_of,
    open_filesystem,
    peek_standard_input,
    read_blocks,
)
from milldam.stores.kinds import KINDS

_READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
"""Of a mode: by everybody."""
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
    inputs: Sequence[str], input_format: str | None = None, left_out: LeftOut | None = None
) -> Iterator[InputFile]:
    """The files behind each input, in the order given. `left_out` is told what is not read of folders."""
    for given in inputs:
        found, others = False, LeftOut() if left_out is None else left_out
        for file in _list_one(str(given), input_format, others):
            found = True
            yield file
        if not found:
            known = ", ".join(FORMATS)
            said = f"{given}: no input files in it. Known are {known}, each also as .gz, .zst, .bz2 or .xz."
            there = f"\nIn it: {others}. To read text of other endings: "
            raise InputError(said, *((there, Setting("input_format", "txt")) if str(others) else ()))


def _list_one(given: str, input_format: str | None, left_out: LeftOut) -> Iterator[InputFile]:
    if given == STDIN:
        yield _standard_input(input_format)
    elif is_address(given):
        yield from _list_address(given, input_format, left_out)
    elif os.path.isdir(given):
        above = os.path.join(Path(given), "")
        for path in files_below(Path(given), any_format=input_format is not None, left_out=left_out):
            below = path[len(above) :] if path.startswith(above) else os.path.relpath(path, given)
            yield _local_file(path, input_format, below)
    elif os.path.isfile(given):
        yield _local_file(given, input_format)
    elif glob.has_magic(given):
        for path in sorted(glob.iglob(os.path.expanduser(given), recursive=True)):
            if os.path.isfile(path):
                yield _local_file(path, input_format)
    else:
        raise InputError(f"{given}: {_what_else(given)}")


def _what_else(given: str) -> str:
    """Of a path that leads to no file and no folder: what is there, and what to do."""
    path = Path(given)
    if path.exists():
        what = "a named pipe" if path.is_fifo() else "neither a file nor a folder"
        return f"{what}, which can't be read twice. Feed it on standard input: milldam ... - < {given}"
    if path.is_symlink():
        return f"a link to {path.readlink()}, which is not there."
    return f"no such file or folder.{nearby(given)}"


def _standard_input(input_format: str | None) -> InputFile:
    """It has no name that tells: compression shows in its first bytes, an object there means JSON lines."""
    if input_format in ("parquet", "arrow"):
        raise InputError(f"{input_format} can't be read from standard input: it is read from its end. Name the file.")
    head = peek_standard_input()
    compression = compression_of(head)
    with contextlib.suppress(DamagedError):
        head = next(read_blocks(io.BytesIO(head), compression, len(head)), b"")
    sniffed = next((kind for kind, begin in _JSON_BEGINS.items() if begin.match(head)), "txt")
    return InputFile(STDIN, input_format or sniffed, compression, 0, "")


def _local_file(path: str, input_format: str | None, name: str = "") -> InputFile:
    status = os.stat(path)
    if status.st_mode & _READABLE != _READABLE and not os.access(path, os.R_OK):
        raise InputError(f"{path}: not readable. Check its permissions.")
    kind, compression = _required_kind(path, input_format)
    return InputFile(path, kind, compression, status.st_size, version_of(status), name)


def is_as_listed(path: str, state: str) -> bool:
    """Whether a file is the one that had this state when it was listed."""
    try:
        if is_address(path):
            filesystem, inside = open_filesystem(path)
            filesystem.invalidate_cache()
            found = _remote_file(filesystem, filesystem.info(inside), "txt")
        else:
            found = _local_file(path, "txt")
    except FileNotFoundError:
        return False
    # Below the folder that was named, whichever that was.
    parts = PurePosixPath(path).parts
    return any(replace(found, name="/".join(parts[first:])).state == state for first in range(len(parts)))


def _list_address(address: str, input_format: str | None, left_out: LeftOut) -> Iterator[InputFile]:
    filesystem, path = open_filesystem(address)
    is_folder = False
    try:
        if glob.has_magic(path):
            found = sorted(filesystem.glob(path, detail=True).items())
            files = (detail for _, detail in found if detail["type"] == "file")
            details = (detail for detail in files if not PurePosixPath(detail["name"]).name.startswith("."))
        else:
            given = filesystem.info(path)
            is_folder = given["type"] == "directory"
            if is_folder:
                _refuse_ours(filesystem, path, address)
            details = (detail for detail in (_walk(filesystem, path) if is_folder else [given]))
        for detail in details:
            if not is_folder or input_format is not None or is_input(detail["name"]):
                yield _remote_file(filesystem, detail, input_format)
            else:
                left_out.add(detail["name"])
    except FileNotFoundError:
        raise InputError(f"{address}: nothing there.") from None


def _walk(filesystem: Any, folder: str) -> Iterator[dict[str, Any]]:
    """The files of a remote folder in the order of a local one; of what milldam made, none."""
    entries = _entries(filesystem, folder)
    if _is_ours(filesystem, entries):
        return
    for name, entry in sorted(entries.items()):
        if name.startswith("."):
            continue
        if entry["type"] == "directory":
            yield from _walk(filesystem, entry["name"])
        else:
            yield entry


def _entries(filesystem: Any, folder: str) -> dict[str, Any]:
    return {PurePosixPath(entry["name"]).name: entry for entry in filesystem.ls(folder, detail=True)}


def _is_ours(filesystem: Any, entries: dict[str, Any]) -> bool:
    """As `input_files.is_ours`: its manifest tells, or the lock of its run folder."""
    if any(kind.manifest in entries for kind in KINDS):
        return True
    return RUN_FOLDER in entries and bool(filesystem.exists(f"{entries[RUN_FOLDER]['name']}/lock"))


def _refuse_ours(filesystem: Any, folder: str, address: str) -> None:
    """Its files are not its rows in order, and those of its run folder are none at all."""
    if _is_ours(filesystem, _entries(filesystem, folder)):
        raise InputError(
            f"{without_secrets(address)}: a store or a table that milldam made. Tables are read on this machine: "
            "`milldam pull` or copy it here first."
        )


def _remote_file(filesystem: Any, detail: dict[str, Any], input_format: str | None) -> InputFile:
    kind, compression = _required_kind(detail["name"], input_format)
    keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_commit", "created")
    version = next((str(detail[key]) for key in keys if key in detail), "")
    return InputFile(filesystem.unstrip_protocol(detail["name"]), kind, compression, int(detail["size"]), version)


def _required_kind(name: str, input_format: str | None) -> tuple[str, str | None]:
    kind = kind_of(name)
    if input_format is not None:
        return input_format, COMPRESSIONS.get(PurePosixPath(name.lower()).suffix)
    if kind is None:
        known = "|".join(dict.fromkeys(FORMATS.values()))
        raise InputError(f"{name}: its ending says no known format. Say what it is: ", Setting("input_format", known))
    return kind
