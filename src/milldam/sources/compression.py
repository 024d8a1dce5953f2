"""A file -> its bytes, decompressed as they flow, never more than asked for at a time.

Several members (gz), frames (zst) and streams (bz2, xz) in one file are read through. A damaged file gives every byte
that can be decompressed before the damage, then raises `DamagedError`. The libraries lose what a call had decompressed
when it fails: the damaged member is read again for it, unless it is a pipe.

The raw bytes of an input, wherever it lies: a path, an fsspec address, or standard input.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import explain_address_errors, first_line, is_address, missing_package, without_secrets
from milldam.prefetch import leave_if_closed

MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}
_SKIPPABLE = b"\x2a\x4d\x18"
"""A zst frame that holds no data begins with this, after a byte from 50 to 5f."""
_NAMES = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz"}
_COMPRESSED_BLOCK = 1 << 16


class DamagedError(Exception):
    """The data ends too early or is damaged; the message says how."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.cut: bytes | None = None
        """What there is of the record that was cut off, set by who splits into records; None: there is none."""
        self.line: int | None = None
        """Its line."""

    def __str__(self) -> str:
        return str(self.args[1])


def compression_of(head: bytes) -> str | None:
    """By its first bytes."""
    return next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), None)


def read_blocks(file: IO[bytes], compression: str | None, block_bytes: int) -> Iterator[bytes]:
    """Decompressed blocks of at most `block_bytes`."""
    blocks = iter(lambda: file.read(block_bytes), b"")
    for block in blocks if compression is None else _decompress(file, compression, block_bytes):
        leave_if_closed()
        yield block


def _decompress(file: IO[bytes], compression: str, block_bytes: int) -> Iterator[bytes]:
    pending = file.read(_COMPRESSED_BLOCK)
    position = chunk = 0  # in the file: where `pending`, and what was read last, begin
    while pending:
        decompressor = _DECOMPRESSORS[compression]()
        start, given, head = position, 0, pending
        while not decompressor.eof:
            if decompressor.needs_input and not pending:
                chunk, pending = position, file.read(_COMPRESSED_BLOCK)
                if not pending:
                    raise _damage(compression, head, start, None)
            position += len(pending)
            try:
                block, error = decompressor.decompress(pending, block_bytes), None
            except Exception as failed:  # each library has an error type of its own
                block, error = _up_to_damage(file, compression, start, chunk, given), failed
            pending, given = b"", given + len(block)
            if block:
                yield block
            if error is not None:
                raise _damage(compression, head, start, error)
        # Zero bytes between members are padding, as tape archives leave it.
        unused = bytes(decompressor.unused_data)
        pending = unused.lstrip(b"\0")
        while not pending and (unused := file.read(_COMPRESSED_BLOCK)):
            chunk, position = position, position + len(unused)
            pending = unused.lstrip(b"\0")
        position -= len(pending)


def _up_to_damage(file: IO[bytes], compression: str, position: int, chunk: int, given: int) -> bytes:
    """What can still be had of the member at `position`, behind the bytes that were `given`; of a pipe nothing.

    It fails somewhere in the chunk that was read last: that one is fed byte by byte, and what is new is taken so.
    """
    if not file.seekable():
        return b""
    file.seek(position)
    decompressor, found = _DECOMPRESSORS[compression](), bytearray()
    while data := file.read(min(_COMPRESSED_BLOCK, chunk - position) if position < chunk else 1):
        position += len(data)
        while data or not (decompressor.needs_input or decompressor.eof):
            try:
                block = decompressor.decompress(data, min(given, _COMPRESSED_BLOCK) or 1)
            except Exception:  # as above
                return bytes(found)
            data = b""
            found += b"" if given else block
            given -= len(block) if given else 0
    return bytes(found)


def _damage(compression: str, head: bytes, start: int, error: Exception | None) -> DamagedError:
    """What is wrong with a member that begins with `head` at byte `start`; `error` None: the file ends in it."""
    name, magic, message = _NAMES[compression], MAGIC[compression], str(error)
    skippable = compression == "zst" and head[1:4] == _SKIPPABLE
    if not (head.startswith(magic) or skippable or (error is None and magic.startswith(head))):
        if start == 0:
            return DamagedError("not_compressed", f"not {name} data, whatever its name says: {describe_head(head)}")
        return DamagedError("trailing_data", f"what follows its byte {start:,} is not {name} data, and not read")
    if error is None:
        return DamagedError("truncated", "it ends in the middle of its compressed data")
    if message.endswith(("incorrect data check", "incorrect length check", "match checksum")):
        return DamagedError("bad_checksum", f"the checksum of its {name} data is wrong")
    return DamagedError("damaged", f"damaged {name} data ({message})")


def describe_head(head: bytes) -> str:
    """What a file is by its first bytes."""
    known = compression_of(head)
    return f"it begins with {head[:16]!r}" if known is None else f"it begins as {_NAMES[known]} data does"


class _Gzip:
    """zlib's decompressor behind the interface of the others, which keep unread input themselves."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, size: int) -> bytes:
        block = self._inner.decompress(self._inner.unconsumed_tail + data, size)
        self.needs_input = not self._inner.unconsumed_tail and len(block) < size
        return block


def _make_zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor()


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zst": _make_zstd,
}
STDIN = "-"
_HEAD_BYTES, _LONGEST_HEAD = 1 << 16, 8 << 20


@contextlib.contextmanager
def storage_options(options: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Give options to fsspec's file systems, by protocol, in this process and in those that it starts meanwhile.

    They go the way of fsspec's own variables (FSSPEC_S3): nothing that is pickled, recorded or hashed holds them.
    """
    if not options:
        yield
        return
    from fsspec.config import conf

    stores: list[tuple[Any, str, Any]] = []
    for protocol, chosen in options.items():
        variable = f"FSSPEC_{protocol.upper()}"
        stores += [(conf, protocol, conf.get(protocol)), (os.environ, variable, os.environ.get(variable))]
        conf[protocol] = {**conf.get(protocol, {}), **chosen}
        os.environ[variable] = json.dumps(conf[protocol])
    try:
        yield
    finally:
        for store, key, before in stores:
            del store[key]
            if before is not None:
                store[key] = before


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


class _NamedFile(io.FileIO):
    """A file that errors of reading name, as those of opening do."""

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            error.filename = self.name
            raise


def open_bytes(path: str) -> IO[bytes]:
    """The bytes of a file, wherever it lies: as many as are asked for, fewer only at its end."""
    if path == STDIN:
        return standard_input()  # type: ignore[return-value]
    if is_address(path):
        filesystem, inner = open_filesystem(path)
        with explain_address_errors(path):
            return io.BufferedReader(_RemoteFile(path, filesystem.open(inner, "rb")))
    return io.BufferedReader(_NamedFile(path))


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
