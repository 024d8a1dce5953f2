"""The raw bytes of an input, wherever it lies: a path, an fsspec address, or standard input."""

from __future__ import annotations

import functools
import io
import os
import sys
from typing import IO, Any

from milldam.errors import ConfigError
from milldam.input_files import is_address

STDIN = "-"
_HEAD_BYTES, _LONGEST_HEAD = 1 << 16, 8 << 20


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
        self._descriptor = sys.stdin.fileno()
        self.head = self._read(_HEAD_BYTES)
        # A first line that is longer belongs to the head too.
        while b"\n" not in self.head and len(self.head) < _LONGEST_HEAD and (more := self._read(_HEAD_BYTES)):
            self.head += more
        self._rest = io.BytesIO(self.head)

    def _read(self, size: int) -> bytes:
        """So many bytes, fewer at the end. Not by sys.stdin, whose lock a waiting thread would keep at exit."""
        parts: list[bytes] = []
        while size > 0 and (part := os.read(self._descriptor, size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return self._rest.read() + b"".join(iter(lambda: self._read(_HEAD_BYTES), b""))
        return self._rest.read(size) or self._read(size)

    def close(self) -> None:
        pass


@functools.cache
def standard_input() -> _StandardInput:
    return _StandardInput()


def peek_standard_input() -> bytes:
    """The head of standard input, which stays there to be read."""
    return standard_input().head
