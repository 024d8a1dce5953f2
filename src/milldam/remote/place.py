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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from milldam.errors import MilldamError, StoreError
from milldam.memory import format_size
from milldam.remote.filesystem import RemoteFolder
from milldam.remote.shard_cache import Content, DamagedError, ShardCache
from milldam.stores.kinds import KINDS, TOKENS, FileRecord
from milldam.stores.place import BLOCK_BYTES

_MOST_AHEAD, _FEW_FILES, _MOST_ANNOUNCED = 64, 8, 1024
_LOOKED_AT, _AGAIN_TOO_SOON = 32, 24
"""Of the last fetches, how many of a shard that was fetched shortly before."""

log = logging.getLogger("milldam")


class RemotePlace:
    """A folder at an address, whose large files come through a cache. Pickles as its address and settings."""

    folder = None

    def __init__(self, address: str, cache_bytes: int, cache_dir: Path, options: Mapping[str, Any]) -> None:
        self._made_from = (address, cache_bytes, cache_dir, dict(options))
        self.address, self.cache_bytes, self.cache_dir = address, cache_bytes, cache_dir
        """The address as it was given; it may hold secrets."""
        self.rows, self.mapped_bytes = cache_dir / "rows", cache_bytes // 2
        self._remote = RemoteFolder(address, options)
        self._small: dict[str, bytes] = {}
        self.name = self._remote.name
        self.origin = RemoteFiles(self._remote, cache_dir / "shards", cache_bytes, self._shards)

    def read(self, file: str) -> bytes | None:
        if file not in self._small:
            data = self._remote.read(file)
            if data is None:
                return None
            self._small[file] = data
        return self._small[file]

    def manifest(self, name: str) -> bytes | None:
        return self.read(name)

    def size(self, file: str) -> int | None:
        return self._remote.size(file)

    def blocks(self, file: str) -> Iterator[bytes]:
        for block in self._remote.blocks(file, self._remote.size(file) or 0):
            for first in range(0, len(block), BLOCK_BYTES):
                yield block[first : first + BLOCK_BYTES]

    @contextmanager
    def spooled(self, file: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as copy:
            copy.writelines(self.blocks(file))
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
        return self._small.get(TOKENS.manifest, b"").count(b'"bin": {')

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePlace, self._made_from

    def __repr__(self) -> str:
        return f"RemotePlace({self.name!r}, cache {format_size(self.cache_bytes)} in {self.cache_dir})"


class _Ahead(NamedTuple):
    """A file that was fetched for later."""

    descriptor: int
    size: int
    opened: int
    """Bytes that had been opened when it came."""


class RemoteFiles:
    """Files of a folder at an address, on this machine while they are needed: the `Origin` of its store."""

    def __init__(self, remote: RemoteFolder, folder: Path, cache_bytes: int, shards: Callable[[], int]) -> None:
        """`shards`: how many the store has, once its manifest is known."""
        self.cache_bytes, self._shards = cache_bytes, shards
        self._remote = remote
        self._cache = ShardCache(folder, cache_bytes)
        self._known: dict[Path, tuple[str, Content]] = {}
        self._fetches: dict[Path, int] = {}
        """The number of the last fetch of each file."""
        self._too_soon: deque[bool] = deque(maxlen=_LOOKED_AT)
        self._count, self._warned = 0, False
        self._begin_ahead()

    def path(self, file: str, record: FileRecord) -> Path:
        """Where a file lies once it is fetched."""
        content = Content(record["xxh3"], record["bytes"])
        path = self._cache.path(content)
        self._known[path] = file, content
        return path

    def require_room(self, size: int) -> None:
        self._cache.require_room(size)

    def open(self, path: Path) -> int:
        descriptor = self.open_if_room(path)
        if descriptor is None:
            # What was fetched for later gives way to what is needed now.
            self._drop_ahead()
            descriptor = self._fetch(path, may_exceed=True)
            assert descriptor is not None
        return descriptor

    def open_if_room(self, path: Path) -> int | None:
        with self._in_this_process():
            while self._fetching == path:
                self._changed.wait()
            if path in self._waiting:
                self._waiting.remove(path)
            ahead = self._ahead.pop(path, None)
        descriptor = self._fetch(path, may_exceed=False) if ahead is None else ahead.descriptor
        if descriptor is not None:
            with self._changed:
                self._opened += self._size(path)
                # Nobody comes for it any more: the loop that announced it was left.
                for old, one in list(self._ahead.items()):
                    if one.opened < self._opened - 2 * self.cache_bytes:
                        os.close(self._ahead.pop(old).descriptor)
                self._go_on()
        return descriptor

    def hold(self, paths: Sequence[Path]) -> object:
        wanted = [path for path in paths if self._size(path)]
        lease = self._cache.hold([self._known[path][1] for path in wanted])
        for path in wanted:
            os.close(self.open(path))
        return lease

    def has(self, paths: Sequence[Path]) -> bool:
        return all(not self._size(path) or self._cache.has(self._known[path][1]) for path in paths)

    def _size(self, path: Path) -> int:
        return self._known[path][1].size

    def _fetch(self, path: Path, *, may_exceed: bool) -> int | None:
        file, content = self._known[path]

        def download() -> Iterator[bytes]:
            self._notice(path)
            log.info("%s: fetching %s (%s)", self._remote.name, file, format_size(content.size))
            return self._remote.blocks(file, content.size)

        try:
            return self._cache.open(content, download, may_exceed=may_exceed)
        except DamagedError:
            pass
        try:
            return self._cache.open(content, download, may_exceed=may_exceed)
        except DamagedError as error:
            raise StoreError(
                f"{self._remote.name}/{file}: {error}. It was changed or not uploaded whole: "
                f"`milldam verify {self._remote.name}` checks all of it."
            ) from None

    def _notice(self, path: Path) -> None:
        """Notice when shards are fetched again and again, since each is thrown out before it is read through."""
        self._too_soon.append(path in self._fetches and self._count - self._fetches[path] < self._shards() // 2)
        self._fetches[path] = self._count
        self._count += 1
        if sum(self._too_soon) >= _AGAIN_TOO_SOON and not self._warned:
            self._warned = True
            log.warning(
                f"{self._remote.name}: the same shards are fetched again and again, since samples come from more of "
                f"them than the cache of {format_size(self.cache_bytes)} holds. "
                'Use shuffle="shard" or shuffle=False, a larger cache, or `milldam pull`.'
            )

    # ---- ahead: a thread that ends when there is nothing to do ----

    def _begin_ahead(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque(maxlen=_MOST_ANNOUNCED)
        self._ahead: dict[Path, _Ahead] = {}
        self._fetching: Path | None = None
        self._running = False
        self._opened = 0
        """Bytes of all files that were opened."""

    def _in_this_process(self) -> threading.Condition:
        if self._process != os.getpid():
            # A fork has neither the thread nor a lock that anybody would give back. What was fetched stays open.
            self._inherited = self._ahead
            self._begin_ahead()
        return self._changed

    def announce(self, paths: Sequence[Path]) -> None:
        with self._in_this_process():
            for path in paths:
                if path not in self._ahead and path not in self._waiting and path != self._fetching:
                    self._waiting.append(path)
            self._go_on()

    def _go_on(self) -> None:
        if not self._running and self._may_fetch():
            self._running = True
            threading.Thread(target=self._fetch_ahead, name="milldam-fetch", daemon=True).start()

    def _may_fetch(self) -> bool:
        """Whether one more may lie here: up to half of the cache; one alone where that is little, or none would."""
        if not self._waiting:
            return False
        size = self._size(self._waiting[0])
        if self.cache_bytes < _FEW_FILES * size:
            return not self._ahead
        kept = sum(one.size for one in self._ahead.values())
        return kept + size <= self.cache_bytes // 2 and len(self._ahead) < _MOST_AHEAD

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                if not self._may_fetch():
                    self._running = False
                    return
                path = self._fetching = self._waiting.popleft()
            descriptor, failed = None, False
            try:
                descriptor = self._fetch(path, may_exceed=False)
            except (MilldamError, OSError) as error:
                # Whoever needs it tries again and is told.
                log.debug("%s: not fetched ahead: %s", self._remote.name, error)
                failed = True
            with self._changed:
                self._fetching = None
                self._changed.notify_all()
                if descriptor is not None:
                    self._ahead[path] = _Ahead(descriptor, self._size(path), self._opened)
                elif not failed:
                    # No room: when something is given back it goes on.
                    self._waiting.appendleft(path)
                    self._running = False
                    return

    def _drop_ahead(self) -> None:
        """Give everything back, also what is just being fetched."""
        with self._in_this_process():
            self._waiting.clear()
            while self._fetching is not None:
                self._changed.wait()
            self._close_ahead()

    def _close_ahead(self) -> None:
        while self._ahead:
            os.close(self._ahead.popitem()[1].descriptor)

    def __del__(self) -> None:
        self._close_ahead()
