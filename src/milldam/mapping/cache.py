"""Tables that `milldam.map` makes where no folder is named: one folder each in the user's cache, found again by key.

    map/3f0c6a1e9b3d2748-91ab...   a table, named by function and settings, then by what it is made of
    map/.../in-use                 whoever makes or reads it holds a shared `flock`; its time tells the last use

When an input has changed, its table is brought up to date as one in a named folder is: units of what did not change are
reused, and who has the old one open keeps reading it. Bounded in bytes: when a table was made, those go that were not
used for longest, but none that is in use.
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

from milldam.errors import ConfigError
from milldam.files import TEMPORARY_SUFFIX, explain_os_errors, user_cache
from milldam.memory import parse_size
from milldam.remote import default_bytes
from milldam.run.folder import RUN_FOLDER
from milldam.stores.generations import Held
from milldam.stores.table.manifest import IN_USE, NAME

SIZE_VARIABLE = "MILLDAM_MAP_CACHE_SIZE"
ONCE = "once-"
"""How the key of a table begins that is not found again."""


def cache_folder() -> Path:
    return user_cache().expanduser().absolute() / "map"


def cache_limit() -> int:
    """Bytes that all tables may have: as the environment says; or 50 GB, or half of what the disk has free."""
    given = os.environ.get(SIZE_VARIABLE)
    return default_bytes(cache_folder(), "*/*") if given is None else parse_size(given)


@contextlib.contextmanager
def cached_out(key: str) -> Iterator[Path]:
    """The folder for the table of a key, nobody else's while the block runs; then there is room made for it."""
    out = cache_folder() / key
    held: Held | None = None
    while held is None:
        with explain_os_errors(out), contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            (out / RUN_FOLDER).mkdir(exist_ok=True, parents=True)
            (out / IN_USE).touch()
            held = Held(out / IN_USE)
    try:
        with FileLock(out / RUN_FOLDER / "lock"):
            pass  # another process that makes the same table is waited for, then its table is found
        yield out
        make_room(cache_limit())
    finally:
        if key.startswith(ONCE) and not (out / NAME).exists():
            shutil.rmtree(out, ignore_errors=True)  # nobody would go on with it
        del held


# ---- what there is ----


@dataclass(frozen=True, slots=True)
class CachedTable:
    path: Path
    bytes: int
    used: float
    """When, in seconds since 1970."""
    in_use: bool

    @property
    def key(self) -> str:
        return self.path.name


def cached_tables() -> list[CachedTable]:
    """Those last used first."""
    found = []
    for path in cache_folder().glob("*"):
        if path.is_dir() and not path.name.startswith("."):
            with _exclusive(path / IN_USE) as is_free:
                found.append(CachedTable(path, _bytes_of(path), _last_used(path), not is_free))
    return sorted(found, key=lambda table: table.used, reverse=True)


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _last_used(folder: Path) -> float:
    try:
        return (folder / IN_USE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock on a file or folder, and nobody gets one while the block runs."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


# ---- making room ----


def make_room(limit: int) -> None:
    """Remove tables that were not used for longest, until the others have at most so many bytes or are in use."""
    remove_leftovers()
    for table in reversed(cached_tables()):
        if sum(one.bytes for one in cached_tables()) <= limit:
            return
        remove(table)


def remove(table: CachedTable) -> bool:
    """Whether it is gone; not when it is in use."""
    with _exclusive(table.path / IN_USE) as is_free:
        if is_free:
            # Under another name first: what has its own is whole.
            gone = table.path.with_name(f".{table.path.name}.{time.time_ns()}{TEMPORARY_SUFFIX}")
            with contextlib.suppress(FileNotFoundError):
                table.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        return is_free


def remove_leftovers() -> None:
    """Remove what processes that were killed left half removed."""
    for path in cache_folder().glob(f".*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def table_of(key: str) -> CachedTable:
    """The table of a key, or of its beginning. Raises ConfigError when there is none, or more than one."""
    found = [table for table in cached_tables() if table.key.startswith(key)]
    if len(found) != 1:
        what = "no table of that key" if not found else f"{len(found)} tables begin so"
        raise ConfigError(f"{key}: {what} in {cache_folder()}. `milldam cache` lists them.")
    return found[0]
