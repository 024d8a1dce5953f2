"""The raw bytes of an input, wherever it lies: a path, an fsspec address, or standard input."""

from __future__ import annotations

import io
import sys
from typing import IO, Any

from milldam.errors import ConfigError

STDIN = "-"


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
        return standard_input()
    if is_address(path):
        filesystem, inner = open_filesystem(path)
        file: IO[bytes] = filesystem.open(inner, "rb")
        return file
    return open(path, "rb", buffering=0)


def open_head(path: str) -> IO[bytes]:
    """The same bytes for a look at their beginning: standard input is not used up by it."""
    return io.BytesIO(peek_standard_input()) if path == STDIN else open_bytes(path)


class _StandardInput(io.BufferedReader):
    """Stays open: it can't be opened again."""

    def close(self) -> None:
        pass


_stdin: _StandardInput | None = None


def standard_input() -> io.BufferedReader:
    """Standard input with enough buffer to look at its head before it is read."""
    global _stdin
    if _stdin is None:
        _stdin = _StandardInput(io.FileIO(sys.stdin.fileno(), closefd=False), buffer_size=1 << 20)
    return _stdin


def peek_standard_input() -> bytes:
    """The head of standard input, which stays there to be read."""
    return bytes(standard_input().peek())
