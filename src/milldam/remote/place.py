"""A store at an address: its manifest is read when it is opened, a shard comes here whole when it is first touched.

What is needed soon is fetched by a thread, one file at a time: at most half of the cache is kept for what was announced
and not opened yet, or one file where the cache holds few. A fetched file is held open until somebody takes it, so that
it can't be removed in between.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from milldam.errors import MilldamError, StoreError
from milldam.memory import format_size
from milldam.remote.filesystem import RemoteFolder
from milldam.remote.shard_cache import Content, DamagedError, ShardCache
from milldam.stores.kinds import KINDS, TOKENS, FileRecord
from milldam.stores.place import BLOCK_BYTES

SHARDS, ROWS = "shards", "rows"
_MOST_AHEAD = 64
_FEW_FILES = 8
_MOST_ANNOUNCED = 1024
_DAMAGED_ATTEMPTS = 2
_LOOKED_AT, _AGAIN_TOO_SOON = 32, 24
"""Of the last fetches, how many of a shard that was fetched shortly before."""

log = logging.getLogger("milldam")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    content: Content


class RemotePlace:
    """A folder at an address, whose large files come through a cache. Pickles as its address and settings."""

    folder = None

    def __init__(
        self, address: str, *, cache_bytes: int, cache_dir: Path, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._made_from = (address, cache_bytes, cache_dir, dict(storage_options or {}))
        self.cache_bytes, self.cache_dir = cache_bytes, cache_dir
        self._remote = RemoteFolder(address, storage_options)
        self._small: dict[str, bytes] = {}
        self.origin = RemoteFiles(self._remote, cache_dir / SHARDS, cache_bytes, self._shards)

    @property
    def name(self) -> str:
        return self._remote.name

    @property
    def rows(self) -> Path:
        return self.cache_dir / ROWS

    @property
    def mapped_bytes(self) -> int:
        return self.cache_bytes // 2

    @property
    def address(self) -> str:
        """The address as it was given; it may hold secrets."""
        return self._made_from[0]

    # ---- files by name ----

    def read(self, file: str) -> bytes | None:
        if file not in self._small:
            found = self._remote.read(file)
            if found is None:
                return None
            self._small[file] = found
        return self._small[file]

    def manifest(self, name: str) -> bytes | None:
        return self.read(name)

    def size(self, file: str) -> int | None:
        return self._remote.size(file)

    def blocks(self, file: str) -> Iterator[bytes]:
        for group in self._remote.blocks(file, self._remote.size(file) or 0):
            for first in range(0, len(group), BLOCK_BYTES):
                yield group[first : first + BLOCK_BYTES]

    @contextmanager
    def spooled(self, file: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as copy:
            for block in self.blocks(file):
                copy.write(block)
            copy.flush()
            copy.seek(0)
            yield copy

    def local(self, file: str, record: FileRecord) -> Path:
        return self.origin.path(file, record)

    def map(self, file: str, record: FileRecord) -> mmap.mmap:
        descriptor = self.origin.open(self.local(file, record))
        try:
            # A mapping has a copy of the descriptor, and with it the lock: the file stays while it lives.
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def not_a_store(self) -> str:
        for other in KINDS:
            if other is not TOKENS and self._remote.size(other.manifest) is not None:
                return (
                    f"{self.name}: {other.phrase}, and only token stores are read at an address. "
                    "`milldam pull` or copy it here first."
                )
        missing = self._remote.missing_bucket()
        if missing:
            return f"{self.name}: no store there: {missing}. Is the address right?"
        return f"{self.name}: no store there (no {TOKENS.manifest}). Is the address right, and the upload complete?"

    def _shards(self) -> int:
        return self._small.get(TOKENS.manifest, b"").count(b'\n   "bin": {')

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, self._made_from

    def __repr__(self) -> str:
        return f"RemotePlace({self.name!r}, cache {format_size(self.cache_bytes)} in {self.cache_dir})"


def _made_again(address: str, cache_bytes: int, cache_dir: Path, options: dict[str, Any]) -> RemotePlace:
    return RemotePlace(address, cache_bytes=cache_bytes, cache_dir=cache_dir, storage_options=options)


class RemoteFiles:
    """Files of a folder at an address, on this machine while they are needed: the `Origin` of its store."""

    def __init__(self, remote: RemoteFolder, folder: Path, cache_bytes: int, shards: Callable[[], int]) -> None:
        """`shards`: how many the store has, once its manifest is known."""
        self.cache_bytes, self._shards = cache_bytes, shards
        self._remote = remote
        self._cache = ShardCache(folder, cache_bytes)
        self._known: dict[Path, _File] = {}
        self._ahead = _Ahead(self)
        self._fetched: dict[Path, int] = {}
        self._fetches, self._warned = 0, False
        self._too_soon: deque[bool] = deque(maxlen=_LOOKED_AT)

    @property
    def name(self) -> str:
        return self._remote.name

    def path(self, file: str, record: FileRecord) -> Path:
        """Where a file lies once it is fetched."""
        content = Content(record["xxh3"], record["bytes"])
        path = self._cache.path(content)
        self._known[path] = _File(file, content)
        return path

    def require_room(self, size: int) -> None:
        self._cache.require_room(size)

    def open(self, path: Path) -> int:
        found = self.open_if_room(path)
        if found is None:
            # What was fetched for later gives way to what is needed now.
            self._ahead.drop()
            found = self._fetch(path, may_exceed=True)
            assert found is not None
            self._ahead.opened(self.size_here(path))
        return found

    def open_if_room(self, path: Path) -> int | None:
        found = self._ahead.take(path)
        if found is None:
            found = self._fetch(path, may_exceed=False)
            if found is not None:
                self._ahead.opened(self.size_here(path))
        return found

    def hold(self, paths: Sequence[Path]) -> object:
        wanted = [path for path in paths if self._known[path].content.size]
        lease = self._cache.hold([self._known[path].content for path in wanted])
        for path in wanted:
            os.close(self.open(path))
        return lease

    def has(self, paths: Sequence[Path]) -> bool:
        contents = (self._known[path].content for path in paths)
        return all(not content.size or self._cache.has(content) for content in contents)

    def announce(self, paths: Sequence[Path]) -> None:
        self._ahead.announce(paths)

    def size_here(self, path: Path) -> int:
        """Bytes that a file takes in the cache."""
        return self._known[path].content.size

    def fetch_if_room(self, path: Path) -> int | None:
        """A descriptor, when that needs nothing that is in use."""
        return self._fetch(path, may_exceed=False)

    def _fetch(self, path: Path, *, may_exceed: bool) -> int | None:
        file = self._known[path]
        open_file = self._cache.open if may_exceed else self._cache.open_if_room

        def download() -> Iterator[bytes]:
            self._count(path)
            log.info("%s: fetching %s (%s)", self.name, file.name, format_size(file.content.size))
            return self._remote.blocks(file.name, file.content.size)

        for attempt in range(1, _DAMAGED_ATTEMPTS + 1):
            try:
                return open_file(file.content, download)
            except DamagedError as error:
                if attempt == _DAMAGED_ATTEMPTS:
                    raise StoreError(
                        f"{self.name}/{file.name}: {error}. It was changed or not uploaded whole: "
                        f"`milldam verify {self.name}` checks all of it."
                    ) from None
        raise AssertionError

    def _count(self, path: Path) -> None:
        """Notice when shards are fetched again and again, since each is thrown out before it is read through."""
        number = self._fetches
        self._too_soon.append(path in self._fetched and number - self._fetched[path] < self._shards() // 2)
        self._fetched[path] = number
        self._fetches += 1
        if sum(self._too_soon) >= _AGAIN_TOO_SOON and not self._warned:
            self._warned = True
            log.warning(
                f"{self.name}: the same shards are fetched again and again, since samples come from more of them than "
                f'the cache of {format_size(self.cache_bytes)} holds. Use shuffle="shard" or shuffle=False, a larger '
                "cache, or `milldam pull`."
            )


@dataclass(frozen=True, slots=True)
class _Fetched:
    descriptor: int
    size: int
    at: int
    """Bytes that had been opened when it came."""


class _Ahead:
    """Fetches what was announced, in a thread that ends when there is nothing to do."""

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files
        self._start_anew()

    def _start_anew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque(maxlen=_MOST_ANNOUNCED)
        self._fetched: OrderedDict[Path, _Fetched] = OrderedDict()
        self._running = False
        self._current: Path | None = None
        self._opened_bytes = 0

    def _in_this_process(self) -> threading.Condition:
        if self._process != os.getpid():
            # A fork has neither the thread nor a lock that anybody would give back. What was fetched stays open.
            self._inherited = self._fetched
            self._start_anew()
        return self._changed

    def announce(self, paths: Sequence[Path]) -> None:
        with self._in_this_process():
            for path in paths:
                if path not in self._fetched and path not in self._waiting and path != self._current:
                    self._waiting.append(path)
            self._go_on()

    def take(self, path: Path) -> int | None:
        """What was fetched, or is just being fetched; None: nothing of the kind."""
        with self._in_this_process():
            while self._current == path:
                self._changed.wait()
            if path in self._waiting:
                self._waiting.remove(path)
            found = self._fetched.pop(path, None)
            if found is None:
                return None
            self._count(found.size)
            return found.descriptor

    def opened(self, size: int) -> None:
        """So many bytes were opened that had not been fetched ahead."""
        with self._in_this_process():
            self._count(size)

    def _count(self, size: int) -> None:
        self._opened_bytes += size
        # Nobody comes for it any more: the loop that announced it was left.
        old = self._opened_bytes - 2 * self._files.cache_bytes
        for path in [path for path, fetched in self._fetched.items() if fetched.at < old]:
            os.close(self._fetched.pop(path).descriptor)
        self._go_on()

    def drop(self) -> None:
        """Give everything back, also what is just being fetched."""
        with self._in_this_process():
            self._waiting.clear()
            while self._current is not None:
                self._changed.wait()
            while self._fetched:
                os.close(self._fetched.popitem()[1].descriptor)

    def _go_on(self) -> None:
        if self._waiting and not self._running and self._has_room(self._waiting[0]):
            self._running = True
            threading.Thread(target=self._work, name="milldam-fetch", daemon=True).start()

    def _has_room(self, path: Path) -> bool:
        """Whether one more may wait: up to half of the cache; one alone where that is little, or none would stay."""
        size, limit = self._files.size_here(path), self._files.cache_bytes
        if limit < _FEW_FILES * size:
            return not self._fetched
        return sum(one.size for one in self._fetched.values()) + size <= limit // 2 and len(self._fetched) < _MOST_AHEAD

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or not self._has_room(self._waiting[0]):
                    self._running = False
                    return
                path = self._current = self._waiting.popleft()
            descriptor, failed = self._fetch(path)
            with self._changed:
                self._current = None
                self._changed.notify_all()
                if descriptor is None and failed:
                    continue
                if descriptor is None:
                    # No room: when something is given back it goes on.
                    self._waiting.appendleft(path)
                    self._running = False
                    return
                self._fetched[path] = _Fetched(descriptor, self._files.size_here(path), self._opened_bytes)

    def _fetch(self, path: Path) -> tuple[int | None, bool]:
        """A descriptor, or whether it failed, and not for want of room."""
        try:
            return self._files.fetch_if_room(path), False
        except (MilldamError, OSError) as error:
            # Whoever needs it tries again and is told.
            log.debug("%s: not fetched ahead: %s", self._files.name, error)
            return None, True

    def __del__(self) -> None:
        while self._fetched:
            os.close(self._fetched.popitem()[1].descriptor)
