"""Files of stores at addresses, kept on this machine: found by content, bounded in bytes, shared between processes.

A file is named after its hash (xxh3, from the manifest), so equal shards of any stores are kept once, and what has
changed at the address is another file. It is streamed under another name, checked by size and hash, made durable and
renamed: what has its name is whole, and what a killed process left is removed by whoever fetches next.

    0f3a...c1              a whole file; its time of modification is when it was last opened
    0f3a...c1-268435456.part   being fetched: counts with its full size from its first byte on
    7c1e...9b.lease        names of files that are mapped in numbers, for which a descriptor each would be too many

Whoever uses a file holds a shared `flock` on it (or a lease), which ends with the descriptor and the mapping, however
the process ends. Who needs room takes the exclusive one of the file that was not used for longest, and removes it only
if he gets it. So the bytes here exceed the bound only when more than that is open at a time, and by no more than that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from milldam.errors import ResourceError, StoreError
from milldam.files import write_whole
from milldam.memory import format_size

_PART, _LEASE, _LOCK = ".part", ".lease", "lock"
_HASH = re.compile(r"[0-9a-f]{32}")
_ASK_S = 0.02

log = logging.getLogger("milldam")


@dataclass(frozen=True, slots=True)
class Content:
    """What a file must be."""

    xxh3: str
    size: int

    def __post_init__(self) -> None:
        # A manifest comes from anywhere: what it says must not become a path elsewhere.
        if not isinstance(self.xxh3, str) or not _HASH.fullmatch(self.xxh3) or not isinstance(self.size, int):
            raise StoreError(f"A damaged manifest: a file of {self.size!r} bytes with the hash {self.xxh3!r}.")


Download = Callable[[], Iterator[bytes]]
"""The bytes of a file from its begin, in blocks."""


class DamagedError(StoreError):
    """What was fetched is not what the manifest says."""


class ShardCache:
    """At most `limit` bytes of files in a folder, and what is open beyond them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def path(self, content: Content) -> Path:
        return self.folder / content.xxh3

    def has(self, content: Content) -> bool:
        try:
            return self.path(content).stat().st_size == content.size
        except OSError:
            return False

    def open(self, content: Content, download: Download) -> int:
        """A descriptor of the whole file, fetched once whoever else wants it too; it stays while that is open."""
        found = self._open(content, download, may_exceed=True)
        assert found is not None
        return found

    def open_if_room(self, content: Content, download: Download) -> int | None:
        """The same when there is room without exceeding the bound; else None."""
        return self._open(content, download, may_exceed=False)

    def _open(self, content: Content, download: Download, *, may_exceed: bool) -> int | None:
        while True:
            found = self._open_whole(content)
            if found is not None:
                return found
            part = self._begin(content)
            if part is None:
                continue
            try:
                if not self._make_room(content, may_exceed=may_exceed):
                    return None
                self._write(part.descriptor, content, download)
                # Those who waited for it find it by its name in the next turn. Under the lock: who counts what lies
                # here meanwhile could see neither the one name nor the other, and who makes room would remove it while
                # nobody has it open.
                with self._locked():
                    part.finish(self.path(content))
                    found = self._open_whole(content)
                if found is not None:
                    return found
            finally:
                part.discard()

    def require_room(self, size: int) -> None:
        """Refuse a file that is larger than all that may lie here."""
        if size > self.limit:
            raise ResourceError(
                f"A shard of {format_size(size)} and a cache of {format_size(self.limit)}: a shard is fetched "
                f'whole. Use a larger cache, such as cache="{format_size(4 * size).replace(" ", "")}".'
            )

    # ---- one file ----

    def _open_whole(self, content: Content) -> int | None:
        path = self.path(content)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ResourceError(f"{path}: can't be read ({error.strerror}). Choose another cache_dir.") from None
        _lock(descriptor, fcntl.LOCK_SH)
        found = os.fstat(descriptor)
        if found.st_nlink and found.st_size == content.size:
            with contextlib.suppress(OSError):
                # The kernel's own clock goes in steps of milliseconds, in which several may be opened.
                now = time.time_ns()
                os.utime(descriptor, ns=(now, now))
            return descriptor
        os.close(descriptor)
        if found.st_nlink:
            # Somebody cut it: what has the name must be whole.
            path.unlink(missing_ok=True)
        return None

    def _begin(self, content: Content) -> _Part | None:
        """The file to write to, for this process alone; None: another one had it meanwhile, so look again."""
        self.require_room(content.size)
        path = self.folder / f"{content.xxh3}-{content.size}{_PART}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: can't be written ({error.strerror}). Set cache_dir, or MILLDAM_CACHE, to a "
                "folder that can be."
            ) from None
        part = _Part(descriptor, path)
        if part.lock() and not self.path(content).exists():
            return part
        part.discard()
        return None

    def _write(self, descriptor: int, content: Content, download: Download) -> None:
        digest, size = xxhash.xxh3_128(), 0
        try:
            os.ftruncate(descriptor, 0)
            for block in download():
                digest.update(block)
                size += len(block)
                write_whole(descriptor, block)
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ResourceError(
                f"The disk is full: {self.folder} can't take a shard of {format_size(content.size)}. Use a smaller "
                "cache, or another cache_dir."
            ) from None
        if size != content.size:
            raise DamagedError(f"{size:,} bytes where the manifest says {content.size:,}")
        if digest.hexdigest() != content.xxh3:
            raise DamagedError("its bytes are not those that the manifest says (hash differs)")

    # ---- room ----

    def used_bytes(self) -> int:
        """What lies here, and what is on its way."""
        return sum(entry.size for entry in self._entries())

    def _make_room(self, content: Content, *, may_exceed: bool) -> bool:
        """Remove what was not used for longest, until this one fits, which counts already."""
        with self._locked():
            # What killed processes left: their locks are gone.
            for path in (*self.folder.glob(f"*{_PART}"), *self.folder.glob(f"*{_LEASE}")):
                if path.name != f"{content.xxh3}-{content.size}{_PART}":
                    self._removed(path.name)
            entries = list(self._entries())
            total = sum(entry.size for entry in entries)
            if total <= self.limit:
                return True
            leased = self._leased()
            for entry in sorted(entries, key=lambda entry: entry.used):
                if entry.name not in leased and not entry.is_part and self._removed(entry.name):
                    total -= entry.size
                    if total <= self.limit:
                        return True
        if may_exceed:
            over = format_size(total - self.limit)
            log.warning(f"{self.folder}: exceeds its {format_size(self.limit)} by {over}, all of which is in use")
        return may_exceed

    def _entries(self) -> Iterator[_Entry]:
        try:
            found = list(os.scandir(self.folder))
        except FileNotFoundError:
            return
        for one in found:
            part = one.name.endswith(_PART)
            if not part and not _HASH.fullmatch(one.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = one.stat()
                size = _size_in(one.name) if part else status.st_size
                yield _Entry(one.name, size, status.st_mtime_ns, part)

    def _removed(self, name: str) -> bool:
        """Remove a file, unless somebody uses it."""
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return not path.exists()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            return False
        finally:
            _unlock(descriptor)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time makes room; no file gets its name or loses it meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _lock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _unlock(descriptor)

    # ---- many files at once ----

    def hold(self, contents: Sequence[Content]) -> Lease:
        """Keep files from being removed while the lease lives, those that are not there yet, too."""
        needed = sum(content.size for content in set(contents))
        if needed > self.limit:
            raise ResourceError(
                f"{format_size(needed)} have to be here at once, and the cache holds {format_size(self.limit)}. "
                "Use a larger cache."
            )
        with self._locked():
            # Not by the process: two containers that share a folder have processes of the same number.
            path = self.folder / f"{uuid.uuid4().hex}{_LEASE}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            # Nobody else can have it, as leftovers are removed under the cache's lock: nothing to wait for.
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_whole(descriptor, "\n".join({content.xxh3 for content in contents}).encode())
        return Lease(descriptor, path)

    def _leased(self) -> set[str]:
        """The files of all leases; those of dead processes are gone already."""
        names: set[str] = set()
        for path in self.folder.glob(f"*{_LEASE}"):
            with contextlib.suppress(FileNotFoundError):
                names |= set(path.read_text().split("\n"))
        return names


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    used: int
    """When it was last opened, in ns."""
    is_part: bool


class _Part:
    """A file that is being fetched, locked by this process."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self._path = descriptor, path
        self._open = True

    def lock(self) -> bool:
        """Wait while another one fetches it; False: it has become a whole file, or is gone.

        By asking again and again: once it is whole it is locked by whoever reads it, for as long as that takes.
        """
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self.has_its_name()
            except BlockingIOError:
                if not self.has_its_name():
                    return False
                time.sleep(_ASK_S)
            except OSError as error:
                raise _no_locks(error) from None

    def has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def finish(self, path: Path) -> None:
        self._path.rename(path)
        self._open = False
        _unlock(self.descriptor)

    def discard(self) -> None:
        if self._open:
            self._open = False
            if self.has_its_name():
                self._path.unlink(missing_ok=True)
            _unlock(self.descriptor)


class Lease:
    """Keeps files while it lives; in a forked process too, where it must not end for both."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor: int | None = descriptor
        self._path, self._process = path, os.getpid()

    def close(self) -> None:
        if self._descriptor is not None:
            if self._process == os.getpid():
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


def _size_in(name: str) -> int:
    size = name.removesuffix(_PART).partition("-")[2]
    return int(size) if size.isdigit() else 0


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        os.close(descriptor)
        raise _no_locks(error) from None


def _unlock(descriptor: int) -> None:
    """Give a lock back and close. Closing alone is not enough: a process that was forked meanwhile has a copy of the
    descriptor, and would keep the lock from everybody, itself included."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _no_locks(error: OSError) -> ResourceError:
    return ResourceError(
        f"The cache's folder has no file locks ({error.strerror}). Set cache_dir or MILLDAM_CACHE to a local disk."
    )
