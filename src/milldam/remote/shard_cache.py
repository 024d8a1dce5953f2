"""Files of stores at addresses, kept on this machine: found by content, bounded in bytes, shared between processes.

A file is named after its hash (xxh3, from the manifest), so equal shards of any stores are kept once, and what has
changed at the address is another file. It is streamed under another name, checked by size and hash and renamed: what
has its name is whole, and what a killed process left is removed by whoever makes room next.

    0f3a...c1                       a whole file; its time of modification is when it was last opened
    0f3a...c1-268435456.part        being fetched: counts with its full size from its first byte on
    7c1e...9b.lease                 names of files that are mapped in numbers, too many for a descriptor each
    lock, fetch-0f                  held while room is made or a file gets its name; while one of 0f.. is fetched

Whoever uses a file holds a shared `flock` on it (or a lease), which ends with the descriptor and the mapping, however
the process ends. To make room, the file that was not used for longest goes, of those that can be locked alone. So the
bytes here exceed the bound only when more than that is open at a time, and by no more than that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from milldam.errors import ResourceError, StoreError
from milldam.files import explain_os_errors, has_size, write_whole
from milldam.memory import format_size

log = logging.getLogger("milldam")
Blocks = Callable[[], Iterable[bytes]]


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

    def open(self, record: dict[str, Any], download: Blocks, *, may_exceed: bool = True) -> int | None:
        """A descriptor of the whole file, fetched once however many want it; it stays while that is open.

        None: not without exceeding the bound, and it may not.
        """
        path, size = self.path(record), record["bytes"]
        self.require_room(size)
        if (descriptor := _open_whole(path, size)) is not None:
            return descriptor
        with self._locked(f"fetch-{path.name[:2]}"), explain_os_errors(path):
            if (descriptor := _open_whole(path, size)) is not None:
                return descriptor
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
                if written != size:
                    raise DamagedError(f"{written:,} bytes where the manifest says {size:,}")
                if digest.hexdigest() != record["xxh3"]:
                    raise DamagedError("its bytes are not those that the manifest says (hash differs)")
            except BaseException:
                part.unlink(missing_ok=True)
                _unlock(descriptor)
                raise
            # Under the lock: who counts meanwhile sees it by one name or the other, and nobody removes it before it is
            # open.
            with self._locked("lock"):
                part.rename(path)
                _unlock(descriptor)
                return _open_whole(path, size)

    def require_room(self, size: int) -> None:
        """Refuse a file that is larger than all that may lie here."""
        if size > self.limit:
            raise ResourceError(
                f"A shard of {format_size(size)} and a cache of {format_size(self.limit)}: a shard is fetched "
                f'whole. Use a larger cache, such as cache="{format_size(4 * size).replace(" ", "")}".'
            )

    def hold(self, records: Collection[dict[str, Any]]) -> Lease:
        """Keep files from being removed while the lease lives, those that are not there yet, too."""
        with self._locked("lock"):
            return Lease(self.folder / f"{uuid.uuid4().hex}.lease", {self.path(record).name for record in records})

    def _make_room(self, size: int, *, may_exceed: bool) -> bool:
        """Remove what was not used for longest until so much fits. The cache's lock is held."""
        used, leased, total = [], set[str](), size
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a lease that just ended
                status = path.stat()
                if path.suffix in (".part", ".lease") and _removed(path):
                    continue  # what a killed process left has no lock
                if path.suffix == ".lease":
                    leased |= set(path.read_text().split())
                elif path.suffix == ".part":
                    total += int(path.stem.partition("-")[2])
                elif not path.name.startswith(("lock", "fetch-")):
                    used.append((status.st_mtime_ns, status.st_size, path))
                    total += status.st_size
        for _, freed, path in sorted(used):
            if total > self.limit and path.name not in leased and _removed(path):
                total -= freed
        if total > self.limit and may_exceed:
            over = format_size(total - self.limit)
            log.warning(f"{self.folder}: exceeds its {format_size(self.limit)} by {over}, all of which is in use")
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


class Lease:
    """Keeps files while it lives; in a forked process too, where it must not end for both."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path, self._process = path, os.getpid()
        self._descriptor = _open_locked(path)
        write_whole(self._descriptor, "\n".join(names).encode())

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            if self._process == os.getpid():
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)


def _open_whole(path: Path, size: int) -> int | None:
    """A file of the cache, held and marked as used now; None: it is not there."""
    try:
        descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"{path}: can't be read ({error.strerror}). Choose another cache_dir.") from None
    status = os.fstat(descriptor)
    if status.st_nlink and status.st_size == size:
        with contextlib.suppress(OSError):
            # The kernel's own clock goes in steps of milliseconds, in which several may be opened.
            os.utime(descriptor, ns=(time.time_ns(),) * 2)
        return descriptor
    os.close(descriptor)
    if status.st_nlink:
        # Somebody cut it: what has the name must be whole.
        path.unlink(missing_ok=True)
    return None


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
    except OSError as error:
        os.close(descriptor)
        raise ResourceError(
            f"The cache's folder has no file locks ({error.strerror}). Set cache_dir or MILLDAM_CACHE to a local disk."
        ) from None
    return descriptor


def _unlock(descriptor: int) -> None:
    """Give a lock back and close. Closing alone is not enough: a process that was forked meanwhile has a copy of the
    descriptor, and would keep the lock from everybody, itself included."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
