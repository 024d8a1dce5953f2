"""What is no local file: files at fsspec addresses, and standard input, whose head is kept for a look."""

from __future__ import annotations

import functools
import io
import os
import sys
from typing import IO, Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import explain_address_errors, first_line, missing_package, without_secrets

_HEAD_BYTES, _LONGEST_HEAD = 1 << 16, 8 << 20


def open_filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system behind an address, and the path in it."""
    import fsspec

    try:
        with explain_address_errors(address):
            filesystem, path = fsspec.core.url_to_fs(address)
    except InputError as error:
        if isinstance(error.__cause__, ImportError):
            raise ConfigError(missing_package(address, error.__cause__)) from None
        if isinstance(error.__cause__, ValueError | TypeError):
            raise ConfigError(f"{without_secrets(address)}: {first_line(error.__cause__)}") from None
        raise
    return filesystem, str(path)


class _RemoteFile(io.RawIOBase):
    """A file of fsspec, whose errors of reading say what to do."""

    def __init__(self, address: str, file: IO[bytes]) -> None:
        self._address, self._file = address, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def readinto(self, buffer: Any, /) -> int:
        with explain_address_errors(self._address):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


def open_address(address: str) -> IO[bytes]:
    """The bytes of a file at an address."""
    filesystem, inner = open_filesystem(address)
    with explain_address_errors(address):
        return io.BufferedReader(_RemoteFile(address, filesystem.open(inner, "rb")))


class _StandardInput(io.RawIOBase):
    """Standard input with its head kept for a look; it stays open, since it can't be opened again."""

    def __init__(self) -> None:
        # Not by sys.stdin, whose lock a waiting thread would keep at exit.
        self._descriptor, self._rest = sys.stdin.fileno(), b""
        self.head = self.read(_HEAD_BYTES)
        # A first line that is longer belongs to the head too.
        while b"\n" not in self.head and len(self.head) < _LONGEST_HEAD and (more := self.read(_HEAD_BYTES)):
            self.head += more
        self._rest = self.head

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """So many bytes, fewer at the end."""
        wanted = sys.maxsize if size < 0 else size
        data, self._rest = self._rest[:wanted], self._rest[wanted:]
        while len(data) < wanted and (more := os.read(self._descriptor, min(wanted - len(data), _HEAD_BYTES))):
            data += more
        return data

    def close(self) -> None:
        pass


@functools.cache
def standard_input() -> Any:
    return _StandardInput()
