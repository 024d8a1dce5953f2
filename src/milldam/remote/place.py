"""A store at an address: its manifest is read when it is opened, a shard comes here whole when it is first touched.

What is needed soon is fetched by a thread, one file at a time: at most half of the cache is kept for what was announced
and not opened yet. A fetched file is held open until somebody takes it, so that it can't be removed in between.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from milldam.errors import MilldamError, StoreError
from milldam.memory import format_size
from milldam.remote.filesystem import RemoteFolder
from milldam.remote.shard_cache import DamagedError, ShardCache
from milldam.stores.kinds import KINDS, TOKENS, FileRecord
from milldam.stores.place import BLOCK_BYTES

_MOST_AHEAD, _FEW_FILES = 64, 8
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
        self.origin = RemoteFiles(self._remote, ShardCache(cache_dir / "shards", cache_bytes))

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

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePlace, self._made_from

    def __repr__(self) -> str:
        return f"RemotePlace({self.name!r}, cache {format_size(self.cache_bytes)} in {self.cache_dir})"


class _Fetch(threading.Thread):
    """A file that comes in the background, one after another; `descriptor` when it has: None, if it could not."""

    def __init__(self, fetch: Callable[[], int | None], turn: threading.Lock, opened_before: int) -> None:
        super().__init__(name="milldam-fetch", daemon=True)
        self._call, self._turn, self.opened_before = fetch, turn, opened_before
        self.descriptor: int | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._turn:
                self.descriptor = self._call()
        except (MilldamError, OSError) as error:
            # Whoever needs it tries again and is told.
            log.debug("not fetched ahead: %s", error)
        del self._call  # which knows the place, and that knows this

    def close(self) -> None:
        self.join()
        if self.descriptor is not None:
            os.close(self.descriptor)


class RemoteFiles:
    """Files of a folder at an address, on this machine while they are needed: the `Origin` of its store."""

    def __init__(self, remote: RemoteFolder, cache: ShardCache) -> None:
        self._remote, self._cache = remote, cache
        self.cache_bytes, self.require_room = cache.limit, cache.require_room
        self._known: dict[Path, tuple[str, FileRecord]] = {}
        self._begin_ahead()

    def path(self, file: str, record: FileRecord) -> Path:
        """Where a file lies once it is fetched."""
        path = self._cache.path(record)
        self._known[path] = file, record
        return path

    def open(self, path: Path) -> int:
        descriptor = self.open_if_room(path)
        if descriptor is None:
            # What was fetched for later gives way to what is needed now.
            with self._lock:
                self._waiting.clear()
                while self._ahead:
                    self._ahead.popitem()[1].close()
            descriptor = self._fetch(path, may_exceed=True)
            assert descriptor is not None
        return descriptor

    def open_if_room(self, path: Path) -> int | None:
        """None: not without going beyond the cache's bound."""
        self._after_fork()
        with self._lock:
            self._waiting.pop(path, None)
            ahead = self._ahead.pop(path, None)
        if ahead is not None:
            ahead.join()
        found = None if ahead is None else ahead.descriptor
        descriptor = self._fetch(path, may_exceed=False) if found is None else found
        if descriptor is not None:
            with self._lock:
                self._opened_bytes += self._size(path)
                # Nobody comes for it any more: the loop that announced it was left.
                for old, one in list(self._ahead.items()):
                    if one.opened_before < self._opened_bytes - 2 * self.cache_bytes:
                        self._ahead.pop(old).close()
                self._fetch_ahead()
        return descriptor

    def hold(self, paths: Sequence[Path]) -> object:
        """Have files here while the result lives."""
        wanted = [path for path in paths if self._size(path)]
        lease = self._cache.hold([self._known[path][1] for path in wanted])
        for path in wanted:
            os.close(self.open(path))
        return lease

    def has(self, paths: Sequence[Path]) -> bool:
        return all(not self._size(path) or self._cache.has(self._known[path][1]) for path in paths)

    def _size(self, path: Path) -> int:
        return int(self._known[path][1]["bytes"])

    def _fetch(self, path: Path, *, may_exceed: bool) -> int | None:
        """A descriptor of a file that is here, or comes now; once more where its bytes are wrong."""
        file, record = self._known[path]

        def download() -> Iterator[bytes]:
            log.info("%s: fetching %s (%s)", self._remote.name, file, format_size(record["bytes"]))
            return self._remote.blocks(file, record["bytes"])

        try:
            return self._cache.open(record, download, may_exceed=may_exceed)
        except DamagedError:
            pass
        try:
            return self._cache.open(record, download, may_exceed=may_exceed)
        except DamagedError as error:
            raise StoreError(
                f"{self._remote.name}/{file}: {error}. It was changed or not uploaded whole: "
                f"`milldam verify {self._remote.name}` checks all of it."
            ) from None

    # ---- ahead ----

    def announce(self, paths: Sequence[Path]) -> None:
        """These are needed soon; none: there is room again."""
        self._after_fork()
        with self._lock:
            self._waiting |= dict.fromkeys(path for path in paths if path not in self._ahead)
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Begin with what waits: up to half of the cache, or one file where that holds few."""
        while self._waiting:
            path = next(iter(self._waiting))
            size, ahead = self._size(path), sum(map(self._size, self._ahead))
            holds_few = self.cache_bytes < _FEW_FILES * size
            if self._ahead and (holds_few or ahead + size > self.cache_bytes // 2 or len(self._ahead) >= _MOST_AHEAD):
                return
            del self._waiting[path]
            fetch = partial(self._fetch, path, may_exceed=False)
            self._ahead[path] = _Fetch(fetch, self._turn, self._opened_bytes)

    def _begin_ahead(self) -> None:
        self._process = os.getpid()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._waiting: dict[Path, None] = {}
        self._ahead: dict[Path, _Fetch] = {}
        self._opened_bytes = 0
        """Of all files that were opened."""

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            # A fork has neither the threads nor a lock that anybody would give back. What was fetched stays open.
            self._begin_ahead()

    def __del__(self) -> None:
        if self._process == os.getpid():
            while self._ahead:
                self._ahead.popitem()[1].close()
