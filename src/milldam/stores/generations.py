"""Generations of a store: a process keeps reading the one that it opened while the folder gets the next one.

A reader holds a shared `flock` on the manifest that it opened, for as long as the store lives, in forked processes too.
A manifest that is held gets a second name in `run/kept` before it is replaced (`replacing`); afterwards the kept ones
that nobody holds any more are removed, and files that none of the others names may go (`live_files`). So whenever it is
killed, the old store is whole or the new one is, and the next run clears up. Where the file system has no locks or no
hard links, nothing is kept: a reader may miss a shard then, and says so; it never reads other bytes, as shards are
named after their contents. docs/decisions/0023 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from milldam.files import sync_folder

if TYPE_CHECKING:
    from milldam.stores.kinds import Kind

KEPT = Path("run", "kept")
_FINGERPRINT = re.compile(rb'\n "fingerprint": "([0-9a-f]{32})"')
_HEAD_BYTES = 4096
_ATTEMPTS, _WAIT_S = 200, 0.005


class Held:
    """An open file, and a shared lock on it where that can be: both last as long as this, in forked processes too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def lock(self) -> bool:
        """Whether nobody can miss it any more: it is locked and still has its name, or there are no locks here."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def map(self) -> mmap.mmap | bytes:
        """What is in it."""
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it is empty, or can't be mapped
            return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def touch(self) -> None:
        """Note that it is used now."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            # Not unlocked: processes that were forked may still read. When Python ends, `os` may be gone before.
            close(self._descriptor)


def hold(path: Path) -> Held:
    """The file that has this name now, held. FileNotFoundError: there is none."""
    for _ in range(_ATTEMPTS):
        held = Held(path)
        if held.lock():
            return held
        # It was just replaced, or somebody looks whether it is held.
        time.sleep(_WAIT_S)
    return held


def kept_manifest(folder: Path, fingerprint: str) -> Path | None:
    """The manifest of an earlier generation that is still being read."""
    return next((folder / KEPT).glob(f"{fingerprint}-*.json"), None)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Around the rename that replaces a manifest: those who read the old one keep it, and what it names."""
    try:
        file = path.open("r+b")  # NFS gives the exclusive lock to writers alone
    except OSError:  # there is none
        yield
        return
    with file:
        # When nobody holds it, nobody can begin to before it has lost its name: the lock lasts until then.
        if _is_held(file):
            _keep(path, file)
        yield


def _keep(path: Path, file: IO[bytes]) -> None:
    found, inode = _FINGERPRINT.search(file.read(_HEAD_BYTES)), os.fstat(file.fileno()).st_ino
    kept = path.parent / KEPT
    if found is not None:
        with contextlib.suppress(OSError):  # it is kept already, or there are no hard links here
            kept.mkdir(parents=True, exist_ok=True)
            os.link(path, kept / f"{found[1].decode()}-{inode}.json")
            sync_folder(kept)


def live_files(folder: Path, kind: Kind) -> Iterator[str]:
    """Names of the files that the manifest of a folder, or a generation that is still being read, is made of.

    Kept manifests that nobody holds are removed first. Call it while holding the lock of the run.
    """
    for path in (folder / KEPT).glob("*.json"):
        with path.open("r+b") as file:
            if not _is_held(file):
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / KEPT).rmdir()
    for manifest in (folder / kind.manifest, *sorted((folder / KEPT).glob("*.json"))):
        yield from (name for name, _ in kind.files_in(manifest))


def _is_held(file: IO[bytes]) -> bool:
    """Whether others have a file locked; if not, it is locked for this process alone, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    return False
