"""A file -> its bytes in blocks, decompressed as they flow: of a path, an fsspec address, or standard input.

Several members or frames in one file are read through. A file that is cut off or damaged gives what can be decompressed
before the damage, then raises `DamagedError`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from milldam.input_files import is_address
from milldam.prefetch import leave_if_closed

STDIN = "-"
BLOCK_BYTES = 1 << 20
MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}
_LONGEST_HEAD = 64 << 20


class DamagedError(Exception):
    """A record, or the rest of a file, that can't be read: why, as the reason of a reject and in words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return self.detail


def compression_of(head: bytes) -> str | None:
    """By its first bytes."""
    return next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), None)


def read_blocks(file: IO[bytes], compression: str | None, size: int | None = None) -> Iterator[bytes]:
    """Blocks of about `BLOCK_BYTES`, decompressed. `size`: of a file that is not compressed, no more than that."""
    left = sys.maxsize if size is None else size
    try:
        blocks = iter(lambda: file.read(min(BLOCK_BYTES, left)), b"")
        for block in blocks if compression is None else _decompressed(file, compression):
            leave_if_closed()
            left -= len(block)
            yield block
    except OSError as error:  # of a read, which names no file
        error.filename = error.filename or (file.name if isinstance(file, io.BufferedReader) else None)
        raise


def _decompressed(file: IO[bytes], compression: str) -> Iterator[bytes]:
    import bz2
    import gzip
    import lzma
    import zlib

    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    openers: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open, "zst": zstd.open}
    stream, parts, size, damage = openers[compression](file), list[bytes](), 0, None
    while True:
        try:
            part = stream.read1(BLOCK_BYTES - size)
        except EOFError:
            part, damage = b"", DamagedError("truncated", "it ends in the middle of its compressed data")
        except (OSError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's error, not one of the data
            part, damage = b"", DamagedError("damaged", f"damaged {compression} data ({error})")
        parts.append(part)
        size += len(part)
        if size == BLOCK_BYTES or (size and not part):
            yield b"".join(parts)
            parts, size = [], 0
        if not part:
            break
    if damage is not None:
        raise damage


# ---- where bytes are ----


def open_bytes(path: str) -> IO[bytes]:
    """The bytes of a file, wherever it is: as many as are asked for, fewer only at its end."""
    if path == STDIN or is_address(path):
        from milldam.sources.streams import open_address, standard_input

        return standard_input() if path == STDIN else open_address(path)
    return open(path, "rb")


def read_head(
    path: str, compression: str | None, as_lines: Callable[[Iterator[bytes], int], Iterator[bytes]] | None = None
) -> bytes:
    """The first block of a file, more where its first line is longer. Standard input is not used up by it. Raises
    DamagedError where nothing can be read. `as_lines`: makes lines of the blocks of another format."""
    head = b""
    if path == STDIN:
        from milldam.sources.streams import standard_input

        file: IO[bytes] = io.BytesIO(standard_input().head)
    else:
        file = open_bytes(path)
    with file:
        try:
            blocks = read_blocks(file, compression)
            for block in blocks if as_lines is None else as_lines(blocks, _LONGEST_HEAD):
                head += block
                if b"\n" in head or len(head) > _LONGEST_HEAD:
                    break
        except DamagedError:
            if not head:
                raise
    return head


@contextlib.contextmanager
def storage_options(options: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Give options to fsspec's file systems, by protocol, in this process and in those that it starts meanwhile.

    They go the way of fsspec's own variables (FSSPEC_S3): nothing that is pickled, recorded or hashed holds them.
    """
    if not options:
        yield
        return
    from fsspec.config import conf

    variables = {protocol: f"FSSPEC_{protocol.upper()}" for protocol in options}
    before = {protocol: (conf.get(protocol), os.environ.get(variables[protocol])) for protocol in options}
    for protocol, chosen in options.items():
        conf[protocol] = {**conf.get(protocol, {}), **chosen}
        os.environ[variables[protocol]] = json.dumps(conf[protocol])
    try:
        yield
    finally:
        for protocol, (settings, variable) in before.items():
            del conf[protocol], os.environ[variables[protocol]]
            conf.update({} if settings is None else {protocol: settings})
            os.environ.update({} if variable is None else {variables[protocol]: variable})
