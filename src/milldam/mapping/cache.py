"""Tables that `milldam.map` makes without a named folder: one folder each in the user's cache, found again by key.

    map/3f0c6a1e9b3d2748-91ab...   a table, named by function and settings, then by what it is made of
    map/.../in-use                 whoever makes or reads it holds a shared `flock`; its time is the last use

If an input has changed, its table is updated like one in a named folder: units of what did not change are reused, and
whoever has the old one open keeps reading it. Bounded in bytes: after a table is made, those not used for longest are
removed, except those in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from milldam.files import TEMPORARY_SUFFIX, explain_os_errors, user_cache
from milldam.memory import parse_size
from milldam.remote import default_bytes
from milldam.run.folder import RUN_FOLDER
from milldam.stores.place import hold
from milldam.stores.table.manifest import IN_USE


def cache_folder() -> Path:
    return user_cache().expanduser().absolute() / "map"


def cache_limit() -> int:
    """Bytes for all tables: as the environment says; or 50 GB, or half of what the disk has free."""
    size = os.environ.get("MILLDAM_MAP_CACHE_SIZE")
    return default_bytes(cache_folder(), "*/*") if size is None else parse_size(size)


@contextlib.contextmanager
def cached_out(key: str) -> Iterator[Path]:
    """The folder for the table of a key, reserved while the block runs; then room is made for it."""
    out = cache_folder() / key
    held = None
    while held is None:
        with explain_os_errors(out), contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            (out / RUN_FOLDER).mkdir(exist_ok=True, parents=True)
            with (out / IN_USE).open("ab") as file:
                file.write(b"" if file.tell() else b"\n")  # an empty file can't be held
            os.utime(out / IN_USE)
            held = hold(out / IN_USE)
    with FileLock(out / RUN_FOLDER / "lock"):
        pass  # wait for another process that makes the same table, to use that
    yield out
    remove_leftovers()
    tables, limit = cached_tables(), cache_limit()
    total = sum(table.bytes for table in tables)
    for table in reversed(tables):  # the one that was not used for longest first
        if total > limit and remove(table):
            total -= table.bytes
    del held


# ---- the tables ----


@dataclass(frozen=True, slots=True)
class CachedTable:
    key: str
    path: Path
    bytes: int
    used: float
    """When, in seconds since 1970."""
    in_use: bool


def cached_tables() -> list[CachedTable]:
    """The last used first."""
    tables = []
    for path in cache_folder().glob("*"):
        if path.is_dir() and not path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                used = (path / IN_USE).stat().st_mtime
                with _exclusive(path / IN_USE) as is_free:
                    tables.append(CachedTable(path.name, path, size, used, not is_free))
    return sorted(tables, key=lambda table: table.used, reverse=True)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock on a file, and nobody gets one while the block runs."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def remove_leftovers() -> None:
    """Remove what killed processes left half removed, or half written a day ago."""
    for path in cache_folder().glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if (path / IN_USE).exists() or time.time() - path.stat().st_mtime > 24 * 3600:
                shutil.rmtree(path, ignore_errors=True)


def remove(table: CachedTable) -> bool:
    """Whether it is gone; not if it is in use."""
    with contextlib.suppress(FileNotFoundError), _exclusive(table.path / IN_USE) as is_free:
        if not is_free:
            return False
        # Under another name first: a folder with its own name is complete.
        gone = table.path.with_name(f".{table.key}.{time.time_ns()}{TEMPORARY_SUFFIX}")
        table.path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return True
