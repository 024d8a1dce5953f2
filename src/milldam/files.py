"""Writing that survives a crash: temporary name, fsync, rename, fsync of the folder.

A reader sees a file whole or not at all, whenever the power fails. Every file is hashed while it is written (xxh3, 128
bits), so that the record of it can be checked later. The system is asked to start writing every few megabytes: fsync,
which waits, then finds little left to do.

What milldam writes for itself, and trusts when it resumes, is sealed JSON: an object with one more field at its end,
`check`, the hash of the text before it. A torn line, a zeroed page or a flipped digit is noticed, and other tools can
read the files as JSON. About a microsecond an object.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import functools
import hashlib
import io
import itertools
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from milldam.errors import ConfigError, ResourceError, os_error

TEMPORARY_SUFFIX = ".tmp"
_CHUNK = 1 << 20
_BEGIN_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_NUMBERS = itertools.count()
# Two letters at least: a drive is none. A path has lost one of the slashes.
_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.:-]+):/+")


class NewFile(io.RawIOBase):
    """A file that appears under its name only when it is committed; left without a commit, it is removed.

    with NewFile(path) as new:
        new.write(b"...")
        record = new.commit()     # {"bytes": 3, "xxh3": "..."}

    pyarrow and others write to it too; their closing it commits nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._begun = 0
        # By machine and process: a leftover of a killed run is not its successor's.
        own = f"{os.uname().nodename}.{os.getpid()}.{next(_NUMBERS)}"
        self._temporary = path.with_name(f".{path.name}.{own}{TEMPORARY_SUFFIX}")
        self._hash = xxhash.xxh3_128()
        with explain_os_errors(path):
            self._file = self._temporary.open("wb", buffering=0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.size += len(view)
        with explain_os_errors(self.path):
            write_whole(self._file.fileno(), view)
        if self.size - self._begun >= _BEGIN_BYTES:
            if (start_writing := _load_sync_file_range()) is not None:
                start_writing(self._file.fileno(), self._begun, self.size - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = self.size
        return view.nbytes

    @property
    def record(self) -> dict[str, Any]:
        """Size and hash of what was written so far."""
        return {"bytes": self.size, "xxh3": self._hash.hexdigest()}

    def commit(self, name: str | None = None) -> dict[str, Any]:
        """Make it durable under its name, or under another one in its folder; its size and hash."""
        return commit_together({name or self.path.name: self})[name or self.path.name]

    def put_in_place(self, name: str | None = None, *, sync: bool = False) -> dict[str, Any]:
        """As `commit`, without waiting for the disk: a power failure may leave a torn file. For work files, which are
        trusted only when they have the hash that was recorded. `sync`: only the name may be lost."""
        if sync:
            with explain_os_errors(self.path):
                os.fsync(self._file.fileno())
        with explain_os_errors(self.path):
            self._file.close()
            self._temporary.rename(self.path if name is None else self.path.with_name(name))
        return self.record

    def discard(self) -> None:
        """Leave nothing of it, unless it was committed."""
        if not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


def commit_together(files: dict[str, NewFile]) -> dict[str, dict[str, Any]]:
    """Make files of one folder durable under these names, in this order, with one wait for the folder; the records."""
    records = {name: new.put_in_place(name, sync=True) for name, new in files.items()}
    for path in {new.path.parent: new.path for new in files.values()}.values():
        with explain_os_errors(path):
            sync_folder(path.parent)
    return records


def stays_in_folder(name: object, *, hidden: bool = True) -> bool:
    """Whether this is the name of something in a folder, and of nothing elsewhere; `hidden`: it may begin with a dot.

    A manifest or an index may come from anywhere: whatever it names goes through here before it becomes a path.

    >>> stays_in_folder("train-00000"), stays_in_folder("../train"), stays_in_folder(".git", hidden=False)
    (True, False, False)
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        return False
    return hidden or not name.startswith(".")


@functools.cache
def _load_sync_file_range() -> Callable[..., int] | None:
    """None where the system has no such call: fsync then does all of it."""
    try:
        call = ctypes.CDLL("libc.so.6").sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def write_whole(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes: the system may take fewer than it is offered, and that is no error."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file at once, durably."""
    with NewFile(path) as new:
        new.write(data)
        return new.commit()


def write_json(path: Path, value: Any) -> None:
    write_file(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """JSON for people and machines, the same bytes for the same value."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a MiB at a time."""
    with path.open("rb", buffering=0) as file:
        while block := file.read(_CHUNK):
            yield block


def hash_file(path: Path) -> str:
    """The xxh3 of a file's bytes, read in blocks."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_bytes(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def remove_temporaries(folder: Path) -> None:
    """Clear what killed runs left behind; call it only while holding the folder's lock."""
    remove_matching(folder, f".*{TEMPORARY_SUFFIX}")


def names_matching(folder: Path, *patterns: str) -> Iterator[str]:
    """Names of a folder that match one of some shell patterns, as they come: none of a million others is held."""
    matches = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries if matches(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return


def remove_matching(folder: Path, *patterns: str) -> None:
    """Remove the files of a folder that match one of some shell patterns, however many there are."""
    while names := list(itertools.islice(names_matching(folder, *patterns), 10_000)):
        for name in names:
            (folder / name).unlink(missing_ok=True)


def in_home(path: str | Path) -> str:
    """A path as the user named it, `~/...` in his home: the one place where that is looked up."""
    return os.path.expanduser(path)


def user_cache() -> Path:
    """Where milldam keeps what it can make or fetch again: MILLDAM_CACHE, or in the user's cache folder."""
    own, home = os.environ.get("MILLDAM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(home) if home else Path.home() / ".cache") / "milldam"


def address_of(path: str | Path) -> str | None:
    """The address that a path was made from, without secrets, to be shown; None for an ordinary path.

    >>> address_of(Path("s3://bucket/corpus")), address_of("https://me:secret@host/a?token=1"), address_of("corpus")
    ('s3://bucket/corpus', 'https://host/a', None)
    """
    match = _ADDRESS.match(str(path))
    if match is None:
        return None
    host, slash, rest = str(path)[match.end() :].partition("?")[0].partition("/")
    return f"{match[1]}://{host.rpartition('@')[2]}{slash}{rest}"


def refuse_address(out: str | Path) -> None:
    """Refuse an address where files are written: as a path it is a folder here, called `s3:`."""
    address = address_of(out)
    if address is not None:
        raise ConfigError(
            f"{address}: the output is a folder on this machine, or on a file system that it mounts. Put it there, and "
            "copy it afterwards, or `milldam push` it to the Hub."
        )


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals on writing into errors that say what to do. Errors about other files pass through."""
    refuse_address(path)
    try:
        yield
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else path
        if error.errno is None or not (path.is_relative_to(named) or named.parent in (path, path.parent)):
            raise
        if error.errno == errno.ENOENT:
            if named != path and path.parent.exists():
                raise
            # As in /proc, or when the folder was removed meanwhile.
            raise ResourceError(f"{path}: its folder takes no files, or was removed. Choose another place.") from None
        raise os_error(error, path) from None


# ---- sealed JSON ----

_encode, _decode = json.JSONEncoder().encode, json.JSONDecoder().decode
_BEFORE, _BEHIND = b', "check": "', b'"}\n'
_TAIL = len(_BEFORE) + 16 + len(_BEHIND)
_FILE_BEFORE, _FILE_BEHIND, _CLOSED = b',\n "check": "', b'"\n}\n', b"\n}\n"
_FILE_TAIL = len(_FILE_BEFORE) + 16 + len(_FILE_BEHIND)


def seal_line(value: dict[str, Any]) -> bytes:
    """
    >>> seal_line({"unit": 3})
    b'{"unit": 3, "check": "846547cfc5d7423c"}\\n'
    """
    body = _encode(value).encode()[:-1]
    return body + _BEFORE + xxhash.xxh3_64_hexdigest(body).encode() + _BEHIND


def unseal_line(line: bytes) -> dict[str, Any] | None:
    """The sealed value; None when the line is not as it was written. Its line end alone may be missing."""
    line = line if line.endswith(b"\n") else line + b"\n"
    body = line[:-_TAIL]
    if line[-_TAIL:] != _BEFORE + xxhash.xxh3_64_hexdigest(body).encode() + _BEHIND:
        return None
    value: dict[str, Any] = _decode(body.decode() + "}")
    return value


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """A file of one object, laid out for people."""
    write_file(path, seal_file(value))


def replace_unsynced(path: Path, data: bytes) -> None:
    """Replace a file without waiting for the disk: a power failure may leave a torn one, so it must be sealed."""
    new = path.with_name(f"{path.name}.new")
    with naming(new):
        new.write_bytes(data)
        new.replace(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in errors of the system that name none, as those of reading and writing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def seal_file(value: dict[str, Any]) -> bytes:
    return seal_text(json_bytes(value))


def seal_text(text: bytes) -> bytes:
    """The text of an object as `json_bytes` makes it, with one more field: the hash of what is before it."""
    body = text[: -len(_CLOSED)]
    return body + _FILE_BEFORE + xxhash.xxh3_64_hexdigest(body).encode() + _FILE_BEHIND


def is_whole_text(data: bytes | mmap.mmap) -> bool:
    """Whether the text of a file is as `seal_text` gave it. A gigabyte takes a tenth of a second."""
    end = max(0, len(data) - _FILE_TAIL)
    check = xxhash.xxh3_64_hexdigest(memoryview(data)[:end]).encode()
    return data[end:] == _FILE_BEFORE + check + _FILE_BEHIND


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The value in a file; None when there is none, or it is not as it was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error(error, path) from None
    if not is_whole_text(data):
        return None
    value: dict[str, Any] = json.loads(data)
    del value["check"]
    return value


def record_of(path: Path) -> dict[str, Any]:
    """What `is_whole` compares a file with later."""
    return {"bytes": path.stat().st_size, "xxh3": hash_file(path)}


def has_size(path: str | Path, size: int) -> bool:
    """Whether a file is there, and of this size."""
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def is_whole(path: str | Path, record: dict[str, Any]) -> bool:
    """Whether a file is as it was written: its size first, then its hash."""
    try:
        return has_size(path, record["bytes"]) and hash_file(Path(path)) == record["xxh3"]
    except OSError:
        return False
