"""The raw bytes of an input, wherever it lies: a path, an fsspec address, or standard input."""

from __future__ import annotations

import functools
import io
import sys
from typing import IO, Any

from milldam.errors import ConfigError

STDIN = "-"
_HEAD_BYTES = 1 << 16


def is_address(given: str) -> bool:
    """Whether fsspec should open it: s3://, gs://, hf://, memory://, ..."""
    return "://" in given


def open_filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system behind an address, and the path in it."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{address}: {error}") from None
    return filesystem, str(path)


def open_bytes(path: str) -> IO[bytes]:
    """The raw bytes of a file, wherever it lies."""
    if path == STDIN:
        return standard_input()  # type: ignore[return-value]
    if is_address(path):
        filesystem, inner = open_filesystem(path)
        file: IO[bytes] = filesystem.open(inner, "rb")
        return file
    return open(path, "rb", buffering=0)


def open_head(path: str) -> IO[bytes]:
    """The same bytes for a look at their beginning: standard input is not used up by it."""
    return io.BytesIO(peek_standard_input()) if path == STDIN else open_bytes(path)


class _StandardInput(io.RawIOBase):
    """Standard input with its head kept for a look; it stays open, since it can't be opened again."""

    def __init__(self) -> None:
        self.head = sys.stdin.buffer.read(_HEAD_BYTES)
        self._rest = io.BytesIO(self.head)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._rest.read(size) or sys.stdin.buffer.read(size)

    def close(self) -> None:
        pass


@functools.cache
def standard_input() -> _StandardInput:
    return _StandardInput()


def peek_standard_input() -> bytes:
    """The head of standard input, which stays there to be read."""
    return standard_input().head
