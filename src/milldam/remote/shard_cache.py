"""Files of stores at addresses, kept on this machine: found by content, bounded in bytes, shared between processes.

    0f3a...c1                       a whole file, named after its hash (xxh3, from the manifest), so equal shards of any
                                    stores are kept once; its time of modification is when it was last opened
    0f3a...c1-268435456.part        being fetched: counts with its full size; checked, then renamed
    lock, fetch-0f                  held while room is made or a file gets its name; while one of 0f.. is fetched

Whoever uses a file holds a shared `flock` on it, which ends with the descriptor and the mapping, however
the process ends. To make room, the file that was not used for longest goes, of those that can be locked alone, and what
a killed process left. So the bytes here exceed the bound only when more than that is open, and by no more than that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from milldam.errors import ResourceError, StoreError
from milldam.files import explain_os_errors, has_size, write_whole
from milldam.memory import format_size


class DamagedError(StoreError):
    """The fetched bytes are not those of the manifest."""


class ShardCache:
    """At most `limit` bytes of files in a folder, and what is open beyond them. A file is asked for by its record in
    the manifest: `bytes` and `xxh3`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def path(self, record: dict[str, Any]) -> Path:
        # A manifest comes from anywhere: what it says must not become a path elsewhere.
        if not re.fullmatch(r"[0-9a-f]{32}", record["xxh3"]):
            raise StoreError(f"A damaged manifest: a file with the hash {record['xxh3']!r}.")
        return self.folder / str(record["xxh3"])

    def has(self, record: dict[str, Any]) -> bool:
        return has_size(self.path(record), record["bytes"])

    def open(
        self, record: dict[str, Any], download: Callable[[], Iterable[bytes]], *, may_exceed: bool = True
    ) -> int | None:
        """A descriptor of the whole file, fetched once however many want it; it stays while that is open.

        None: not without exceeding the bound, and it may not.
        """
        path, size = self.path(record), record["bytes"]
        self.require_room(size)
        if (found := _open_whole(path)) is not None:
            return found
        with self._locked(f"fetch-{path.name[:2]}"), explain_os_errors(path):
            if (found := _open_whole(path)) is not None:
                return found
            part = self.folder / f"{path.name}-{size}.part"
            with self._locked("lock"):
                if not self._make_room(size, may_exceed=may_exceed):
                    return None
                descriptor = _open_locked(part)
            try:
                digest, written = xxhash.xxh3_128(), 0
                for block in download():
                    digest.update(block)
                    written += len(block)
                    write_whole(descriptor, block)
                os.fsync(descriptor)
                if (written, digest.hexdigest()) != (size, record["xxh3"]):
                    raise DamagedError(f"its bytes are not those of the manifest: {written:,} of {size:,}, or others")
            except BaseException:
                part.unlink(missing_ok=True)
                _unlock(descriptor)
                raise
            # Under the lock: who counts sees it by one name or the other, and nobody removes it before it is open.
            with self._locked("lock"):
                part.rename(path)
                _unlock(descriptor)
                return _open_whole(path)

    def require_room(self, size: int) -> None:
        """Refuse a file that is larger than all that may lie here."""
        if size > self.limit:
            raise ResourceError(
                f"A shard of {format_size(size)} and a cache of {format_size(self.limit)}: a shard is fetched "
                f'whole. Use a larger cache, such as cache="{format_size(4 * size).replace(" ", "")}".'
            )

    def _make_room(self, size: int, *, may_exceed: bool) -> bool:
        """Remove what was not used for longest until so much fits. The cache's lock is held."""
        used, total = [], size
        for path in self.folder.iterdir():
            if path.suffix == ".part":
                # What a killed process left has no lock.
                total += 0 if _removed(path) else int(path.stem.partition("-")[2])
            elif not path.name.startswith(("lock", "fetch-")):
                status = path.stat()
                used.append((status.st_mtime_ns, status.st_size, path))
                total += status.st_size
        for _, freed, path in sorted(used):
            if total > self.limit and _removed(path):
                total -= freed
        return total <= self.limit or may_exceed

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with explain_os_errors(self.folder / name):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open_locked(self.folder / name)
        try:
            yield
        finally:
            _unlock(descriptor)


def _open_whole(path: Path) -> int | None:
    """A file of the cache, held and marked as used now; None: it is not there."""
    try:
        descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"{path}: can't be read ({error.strerror}). Choose another cache_dir.") from None
    if not os.fstat(descriptor).st_nlink:  # it was just removed
        os.close(descriptor)
        return None
    with contextlib.suppress(OSError):
        # The kernel's own clock goes in steps of milliseconds, in which several may be opened.
        os.utime(descriptor, ns=(time.time_ns(),) * 2)
    return descriptor


def _removed(path: Path) -> bool:
    """Remove a file, unless somebody uses it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        _unlock(descriptor)
    return True


def _open_locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT, lock: int = fcntl.LOCK_EX) -> int:
    """A locked file; by default to write to, for whoever has the descriptor alone."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, lock)
    except OSError:  # where the folder has no file locks
        os.close(descriptor)
        raise
    return descriptor


def _unlock(descriptor: int) -> None:
    """Give a lock back and close. Closing alone is not enough: a process that was forked meanwhile has a copy of the
    descriptor, and would keep the lock from everybody, itself included."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
