"""A file -> its bytes, decompressed as they flow, never more than asked for at a time.

Several members (gz), frames (zst) and streams (bz2, xz) in one file are read through. A file that ends in the middle of
one gives everything up to there, then raises `TruncatedError`.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

_COMPRESSED_BLOCK = 1 << 16


class TruncatedError(Exception):
    """The compressed data ends too early or is damaged; the message says how."""


def read_blocks(file: IO[bytes], compression: str | None, block_bytes: int) -> Iterator[bytes]:
    """Decompressed blocks of at most `block_bytes`."""
    if compression is None:
        while block := file.read(block_bytes):
            yield block
        return
    yield from _decompress(file, _DECOMPRESSORS[compression], block_bytes)


def _decompress(file: IO[bytes], make: Callable[[], Any], block_bytes: int) -> Iterator[bytes]:
    pending = file.read(_COMPRESSED_BLOCK)
    while pending:
        decompressor = make()
        while not decompressor.eof:
            if decompressor.needs_input and not pending:
                pending = file.read(_COMPRESSED_BLOCK)
                if not pending:
                    raise TruncatedError("it ends in the middle of its compressed data")
            try:
                block = decompressor.decompress(pending, block_bytes)
            except Exception as error:  # each library has an error type of its own
                raise TruncatedError(f"damaged compressed data ({error})") from None
            pending = b""
            if block:
                yield block
        # Zero bytes between members are padding, as tape archives leave it.
        pending = bytes(decompressor.unused_data).lstrip(b"\0")
        while not pending and (block := file.read(_COMPRESSED_BLOCK)):
            pending = block.lstrip(b"\0")


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
