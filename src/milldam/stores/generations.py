"""Generations of a store: a process keeps reading the one that it opened while the folder gets the next one.

Only the manifest of a store is ever replaced; all else is named after its content. A reader holds a shared `flock` on
the manifest that it opened, for as long as the store lives, in forked processes too. Before a manifest is replaced it
gets a second name in `run/kept` (`keep`); afterwards those that nobody holds are removed, and files that none of the
others names may go (`live_files`). So whenever it is killed, the old store is whole or the new one is, and the next
run clears up. Where the file system has no locks or no hard links, nothing is kept: a reader may miss a shard then, and
says so; it never reads other bytes. docs/decisions/0023 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from milldam.files import sync_folder

if TYPE_CHECKING:
    from milldam.stores.kinds import Kind

KEPT = Path("run", "kept")
_ATTEMPTS, _WAIT_S = 200, 0.005


class Held:
    """The file that has this name now, and a shared lock on it where that can be: both last as long as this, in forked
    processes too. FileNotFoundError: there is none."""

    def __init__(self, path: Path) -> None:
        for _ in range(_ATTEMPTS):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._descriptor), path.stat()):
                    return
            except (BlockingIOError, FileNotFoundError):
                pass  # somebody looks whether it is held, or it was just replaced
            except OSError:
                return  # no locks here
            os.close(self._descriptor)
            del self._descriptor
            time.sleep(_WAIT_S)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def map(self) -> mmap.mmap | bytes:
        """Its content."""
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it is empty, or can't be mapped
            with open(self._descriptor, "rb", closefd=False) as file:
                file.seek(0)
                return file.read()

    def touch(self) -> None:
        """Note that it is used now."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            # Not unlocked: processes that were forked may still read. When Python ends, `os` may be gone before.
            close(self._descriptor)


def keep(manifest: Path) -> None:
    """Before a manifest is replaced: those who read it keep it, and what it names."""
    kept = manifest.parent / KEPT
    with contextlib.suppress(OSError):  # there is none, it is kept already, or there are no hard links here
        inode = manifest.stat().st_ino
        kept.mkdir(parents=True, exist_ok=True)
        os.link(manifest, kept / f"{inode}.json")
        sync_folder(kept)


def live_files(folder: Path, kind: Kind) -> Iterator[str]:
    """Names of the files that the manifest of a folder, or a generation that is still being read, is made of.

    Kept manifests that nobody holds are removed first. Call it while holding the lock of the run.
    """
    for path in (folder / KEPT).glob("*.json"):
        with path.open("r+b") as file:  # NFS gives the exclusive lock to writers alone
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # no locks here
                pass
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / KEPT).rmdir()
        (folder / KEPT.parent).rmdir()
    for manifest in (folder / kind.manifest, *sorted((folder / KEPT).glob("*.json"))):
        yield from kind.names_in(manifest)
