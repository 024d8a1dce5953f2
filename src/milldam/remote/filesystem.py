"""A folder at an fsspec address: small files whole, large ones in blocks, with another try when the network fails.

Holds at most `_GROUP_BYTES` of a file at a time, fetched by `_BLOCK_BYTES` in parallel where the file system can. What
fails is tried again from where it stopped, `_ATTEMPTS` times with a growing wait; what is not there or not allowed is
said at once. Errors never show the options, which may hold secrets.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from milldam.errors import ConfigError, StoreError
from milldam.input_files import address_error, first_line, is_refusal, missing_bucket, missing_package, without_secrets

_BLOCK_BYTES = 8 << 20
_GROUP_BYTES = 4 * _BLOCK_BYTES
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5

log = logging.getLogger("milldam")

Result = TypeVar("Result")


class RemoteFolder:
    """Files by name below an address. Pickles as address and options; connects anew in another process."""

    def __init__(self, address: str, options: Mapping[str, Any] | None = None) -> None:
        self._address = address.rstrip("/")
        self._options = dict(options or {})
        self._connection: tuple[int, Any, str] | None = None
        self.name = without_secrets(self._address)

    def read(self, file: str) -> bytes | None:
        """A small file whole; None: there is none."""
        return self._tried(file, lambda filesystem, path: bytes(filesystem.cat_file(path)))

    def size(self, file: str) -> int | None:
        """Bytes of a file; None: there is none."""
        return self._tried(file, lambda filesystem, path: int(filesystem.info(path)["size"]))

    def missing_bucket(self) -> str:
        """That the bucket is not there, for a message; empty when it is, or when nobody can tell."""
        if self._connection is None:
            return ""
        return missing_bucket(self._connection[1], self._address, self._connection[2])

    def blocks(self, file: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a file in blocks; fewer when it is shorter."""
        for first in range(0, size, _GROUP_BYTES):
            starts = list(range(first, min(size, first + _GROUP_BYTES), _BLOCK_BYTES))
            blocks = self._tried(file, partial(_ranges, starts, [min(size, start + _BLOCK_BYTES) for start in starts]))
            if blocks is None:
                raise StoreError(f"{self.name}/{file}: missing. `milldam verify {self.name}` checks it.")
            yield from blocks
            if len(blocks[-1]) < min(size - starts[-1], _BLOCK_BYTES):
                return

    def _tried(self, file: str, call: Callable[[Any, str], Result]) -> Result | None:
        """The result of a call with the file system and the file's path in it; None: there is no such file."""
        for attempt in range(1, _ATTEMPTS + 1):
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
                where = f"{self._address}/{file}"
                if is_refusal(error) or attempt == _ATTEMPTS:
                    raise address_error(where, error, f" (tried {_ATTEMPTS} times)") from None
                wait = _FIRST_WAIT_S * 2 ** (attempt - 1)
                log.info("%s: %s; again in %.1f s", without_secrets(where), first_line(error), wait)
            time.sleep(wait)
        raise AssertionError

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        try:
            filesystem, folder = fsspec.core.url_to_fs(self._address, **self._options)
        except ImportError as error:
            raise ConfigError(missing_package(self._address, error)) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.name}: {first_line(error)}") from None
        filesystem.invalidate_cache()  # fsspec keeps listings as long as the process lives
        return filesystem, str(folder).rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self._address, self._options)

    def __repr__(self) -> str:
        return f"RemoteFolder({self.name!r})"


def _ranges(starts: list[int], stops: list[int], filesystem: Any, path: str) -> list[bytes]:
    parts = filesystem.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
    return [bytes(part) for part in parts]
