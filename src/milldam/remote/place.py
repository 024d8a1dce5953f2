"""A store at an address: its manifest is read when it is opened, a shard comes here whole when it is first touched.

Large files are fetched in blocks, a few in parallel where the file system can; what fails is tried again from where it
stopped, with a growing wait. What is needed soon is fetched by a thread: at most half of the cache is kept for what was
announced and not opened yet. A fetched file is held open until somebody takes it, so that it can't be removed in
between. Errors never show the options, which may hold secrets.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from milldam.errors import ConfigError, MilldamError, ResourceError, StoreError
from milldam.input_files import address_error, first_line, is_refusal, missing_bucket, missing_package, without_secrets
from milldam.remote.shard_cache import DamagedError, ShardCache
from milldam.stores.kinds import TOKENS, FileRecord

_BLOCK_BYTES, _PARALLEL_BLOCKS = 8 << 20, 4
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_MOST_AHEAD, _FEW_FILES = 64, 8
log = logging.getLogger("milldam")

Result = TypeVar("Result")


class RemoteFolder:
    """Files by name below an address. Connects anew in another process."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self.address, self.name, self._options = address.rstrip("/"), without_secrets(address.rstrip("/")), options
        """The address as it was given may hold secrets; the name does not."""
        self._connection: tuple[int, Any, str] | None = None

    def read(self, file: str) -> bytes | None:
        """A small file whole; None: there is none."""
        return self._tried(file, lambda filesystem, path: bytes(filesystem.cat_file(path)))

    def size(self, file: str) -> int | None:
        """Bytes of a file; None: there is none."""
        return self._tried(file, lambda filesystem, path: int(filesystem.info(path)["size"]))

    def blocks(self, file: str, size: int | None = None) -> Iterator[bytes]:
        """A file, or its first `size` bytes, in blocks; fewer when it is shorter."""
        size = self.size(file) or 0 if size is None else size
        for first in range(0, size, _PARALLEL_BLOCKS * _BLOCK_BYTES):
            starts = range(first, min(size, first + _PARALLEL_BLOCKS * _BLOCK_BYTES), _BLOCK_BYTES)

            def fetch(filesystem: Any, path: str, starts: range = starts) -> list[bytes]:
                stops = [min(size, start + _BLOCK_BYTES) for start in starts]
                parts = filesystem.cat_ranges([path] * len(starts), list(starts), stops, on_error="raise")
                return list(map(bytes, parts))

            blocks = self._tried(file, fetch)
            if blocks is None:
                raise StoreError(f"{self.name}/{file}: missing. `milldam verify {self.name}` checks it.")
            yield from blocks
            if len(blocks[-1]) < min(size - starts[-1], _BLOCK_BYTES):
                return

    def _tried(self, file: str, call: Callable[[Any, str], Result]) -> Result | None:
        """The result of a call with the file system and the file's path in it; None: there is no such file."""
        for attempt in range(_ATTEMPTS):
            try:
                # A connection of another process does not work here.
                if self._connection is None or self._connection[0] != os.getpid():
                    self._connection = (os.getpid(), *self._connect())
                filesystem, folder = self._connection[1:]
                return call(filesystem, f"{folder}/{file}")
            except FileNotFoundError:
                return None
            except ConfigError:
                raise
            except Exception as error:
                if is_refusal(error) or attempt == _ATTEMPTS - 1:
                    raise address_error(f"{self.address}/{file}", error, f" (tried {_ATTEMPTS} times)") from None
                log.info("%s/%s: %s; again", self.name, file, first_line(error))
            time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise AssertionError

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        try:
            filesystem, folder = fsspec.core.url_to_fs(self.address, **self._options)
        except ImportError as error:
            raise ConfigError(missing_package(self.address, error)) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.name}: {first_line(error)}") from None
        filesystem.invalidate_cache()  # fsspec keeps listings as long as the process lives
        return filesystem, str(folder).rstrip("/")


class RemotePlace(RemoteFolder):
    """A folder at an address, whose large files come through a cache. Pickles as its address and settings."""

    folder = None

    def __init__(self, address: str, cache_bytes: int, cache_dir: Path, options: Mapping[str, Any]) -> None:
        super().__init__(address, options)
        self._made_from = (address, cache_bytes, cache_dir, dict(options))
        self.cache_bytes, self.cache_dir = cache_bytes, cache_dir
        self.rows, self.mapped_bytes = cache_dir / "rows", cache_bytes // 2
        self._small: dict[str, bytes] = {}
        self.origin = RemoteFiles(RemoteFolder(address, options), ShardCache(cache_dir / "shards", cache_bytes))

    def read(self, file: str) -> bytes | None:
        if file not in self._small:
            data = super().read(file)
            if data is None:
                return None
            self._small[file] = data
        return self._small[file]

    manifest = read

    def local(self, file: str, record: FileRecord) -> Path:
        return self.origin.path(file, record)

    def map(self, file: str, record: FileRecord) -> mmap.mmap:
        return self.origin.map(self.local(file, record))

    def not_a_store(self) -> str:
        missing = missing_bucket(self._connection[1], self.address, self._connection[2]) if self._connection else ""
        if missing:
            return f"{self.name}: no store there: {missing}. Is the address right?"
        return f"{self.name}: no store there (no {TOKENS.manifest}). Is the address right, and the upload complete?"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePlace, self._made_from


class RemoteFiles:
    """Files of a folder at an address, on this machine while they are needed: the `Origin` of its store."""

    _fetching: Path | None

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
            with self._changed:
                self._waiting.clear()
                self._changed.wait_for(lambda: self._fetching is None)
                self._give_back()
            descriptor = self._fetch(path, may_exceed=True)
            assert descriptor is not None
        return descriptor

    def open_if_room(self, path: Path) -> int | None:
        """None: not without going beyond the cache's bound."""
        self._after_fork()
        with self._changed:
            self._waiting.pop(path, None)
            self._changed.wait_for(lambda: self._fetching != path)
            descriptor = self._ready.pop(path, None)
        descriptor = self._fetch(path, may_exceed=False) if descriptor is None else descriptor
        self.announce(())
        return descriptor

    def map(self, path: Path) -> mmap.mmap:
        descriptor = self.open(path)
        try:
            # A mapping has a copy of the descriptor, and with it the lock: the file stays while it lives.
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def hold(self, paths: Sequence[Path]) -> object:
        """Have files here while the result lives. StoreError: not so many at once."""
        try:
            return [self.map(path) for path in paths if self._size(path)]
        except (OSError, ResourceError) as error:
            raise StoreError(f"{self._remote.name}: not all of it can be held open ({error}).") from None

    def has(self, paths: Sequence[Path]) -> bool:
        return all(not self._size(path) or self._cache.has(self._known[path][1]) for path in paths)

    def announce(self, paths: Sequence[Path]) -> None:
        """These are needed soon; none: there is room again."""
        self._after_fork()
        with self._changed:
            self._waiting |= dict.fromkeys(path for path in paths if path not in self._ready)
            if self._fetching is None and (path := self._next()) is not None:
                self._fetching = path
                threading.Thread(target=self._fetch_ahead, args=(path,), name="milldam-fetch", daemon=True).start()

    def _size(self, path: Path) -> int:
        return int(self._known[path][1]["bytes"])

    def _fetch(self, path: Path, *, may_exceed: bool) -> int | None:
        """A descriptor of a file that is here, or comes now."""
        file, record = self._known[path]

        def download() -> Iterator[bytes]:
            return self._remote.blocks(file, record["bytes"])

        try:
            return self._cache.open(record, download, may_exceed=may_exceed)
        except DamagedError as error:
            raise StoreError(
                f"{self._remote.name}/{file}: {error}. It was changed or not uploaded whole: "
                f"`milldam verify {self._remote.name}` checks all of it."
            ) from None

    # ---- ahead ----

    def _next(self) -> Path | None:
        """What to fetch next: up to half of the cache, or one file where that holds few."""
        path = next(iter(self._waiting), None)
        if path is not None:
            size, ahead = self._size(path), sum(map(self._size, self._ready))
            holds_few = self.cache_bytes < _FEW_FILES * size
            if self._ready and (holds_few or ahead + size > self.cache_bytes // 2 or len(self._ready) >= _MOST_AHEAD):
                return None
            del self._waiting[path]
        return path

    def _fetch_ahead(self, path: Path | None) -> None:
        while path is not None:
            descriptor = None
            with contextlib.suppress(MilldamError, OSError):  # whoever needs it tries again and is told
                descriptor = self._fetch(path, may_exceed=False)
            with self._changed:
                if descriptor is not None:
                    self._ready[path] = descriptor
                path = self._fetching = self._next()
                self._changed.notify_all()

    def _begin_ahead(self) -> None:
        self._process, self._changed = os.getpid(), threading.Condition()
        self._waiting, self._fetching = dict[Path, None](), None
        self._ready = dict[Path, int]()
        """Descriptors of files that nobody has taken yet."""

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            # A fork has neither the thread nor a lock that anybody would give back. What was fetched stays open.
            self._begin_ahead()

    def _give_back(self) -> None:
        while self._ready:
            os.close(self._ready.popitem()[1])

    def __del__(self) -> None:
        if self._process == os.getpid():
            self._give_back()
