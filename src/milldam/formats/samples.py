"""A file of samples, the number of them and where each lies at its begin: what MDS and litdata have in common.

    count u32, offsets u32[count + 1] from the file's begin, something of the format, the samples

All little-endian. A sample is its tokens, or a header and its tokens. Read: files are mapped, and the tokens gathered
from between the bytes that belong to a sample; a compressed file is decompressed to disk first, its size in the scratch
folder for as long as it is read.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.errors import InputError
from milldam.files import NewFile
from milldam.loader.reading import TokenArray, gathered
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import cut_blocks, is_giant
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.formats.rows import FileRows

Bytes = npt.NDArray[np.uint8]
Headers = Callable[[Int64s], tuple[Bytes, Int64s]]
"""Lengths of rows -> (rows, widest) bytes, and how many of them each row uses."""

FILE_BYTES = 1 << 32
"""What an offset can say."""
OFFSET_BYTES = 4
_GATHERED = 1 << 17
"""Tokens at a time: each byte takes 8 while its place is worked out."""
_BLOCK, _HEADERS_AT_A_TIME = 1 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of each sample lie."""

    begins: Int64s
    lengths: Int64s
    """In tokens."""
    dtype: np.dtype[Any]


# ---- read ----


def read_samples(
    path: Path, find: Callable[[Bytes], Places], compression: str | None = None, scratch: Path | None = None
) -> Iterator[Tokens]:
    """A document a sample; `find` looks for them in the bytes of the file."""
    with _mapped(path, compression, scratch) as data:
        try:
            places = find(data)
            ends = places.begins + places.lengths * places.dtype.itemsize
            if len(ends) and int(ends.max()) > len(data):
                raise IndexError
        except IndexError:
            raise InputError(f"{path}: its index points beyond its end. Is the file truncated?") from None
        for first, stop in cut_blocks(places.lengths, _GATHERED):
            begins, lengths = places.begins[first:stop], places.lengths[first:stop]
            yield Tokens(gathered(data, begins, lengths * places.dtype.itemsize).view(places.dtype), lengths)


@contextmanager
def _mapped(path: Path, compression: str | None, scratch: Path | None) -> Iterator[Bytes]:
    from milldam.sources.compression import DamagedError, read_blocks

    try:
        if compression is None:
            yield _map(path)
            return
        with tempfile.NamedTemporaryFile(dir=scratch) as unpacked, path.open("rb") as packed:
            for block in read_blocks(packed, compression, _BLOCK):
                unpacked.write(block)
            unpacked.flush()
            yield _map(Path(unpacked.name))
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}).") from None
    except DamagedError as error:
        raise InputError(f"{path}: {error}.") from None


def _map(path: Path) -> Bytes:
    if path.stat().st_size < 8:
        raise InputError(f"{path}: {path.stat().st_size} bytes; not even the number of samples is there.")
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def offsets_of(data: Bytes, path: Path, samples: int) -> Int64s:
    """Bytes where samples begin, and the end of the last. (samples + 1,)"""
    found = int(data[:4].view("<u4")[0])
    if found != samples:
        raise InputError(f"{path}: {found:,} samples in it where the index says {samples:,}. Do they belong together?")
    return data[4 : 4 * (samples + 2)].view("<u4").astype(np.int64)


def numbers_at(data: Bytes, places: Int64s) -> Int64s:
    """Numbers of four bytes at any places."""
    gathered = np.ascontiguousarray(data[places[:, None] + np.arange(4)])
    return gathered.view("<u4").reshape(-1).astype(np.int64)


# ---- write ----


def write_samples(new: NewFile, rows: FileRows, headers: Headers | None, between: bytes = b"") -> None:
    """All rows of a file; `headers`: what each row has before its tokens; `between`: what stands before the rows."""
    sizes = _header_sizes(rows.lengths, headers) + rows.lengths * rows.dtype.itemsize
    first = 4 * (len(sizes) + 2) + len(between)
    new.write(struct.pack("<I", len(sizes)))
    new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
    new.write(between)
    for start, lengths in rows.blocks():
        count = int(lengths.sum())
        if headers is not None and not is_giant(lengths):
            new.write(_with_headers(rows.tokens(start, count), lengths, *headers(lengths)).data)
            continue
        if headers is not None:
            header, used = headers(lengths)
            new.write(header[0, : used[0]].tobytes())
        for tokens in rows.chunks(start, count):
            new.write(tokens.data)


def _header_sizes(lengths: Int64s, headers: Headers | None) -> Int64s:
    if headers is None or not len(lengths):
        return np.zeros_like(lengths)
    # Some at a time: their bytes take more than what is held of the rows.
    some = (lengths[first : first + _HEADERS_AT_A_TIME] for first in range(0, len(lengths), _HEADERS_AT_A_TIME))
    return np.concatenate([headers(block)[1] for block in some])


def _with_headers(tokens: TokenArray, lengths: Int64s, headers: Bytes, sizes: Int64s) -> Bytes:
    """The bytes of rows, each behind the first `sizes[k]` bytes of `headers[k]`. headers: (rows, widest)."""
    data_sizes = lengths * tokens.itemsize
    ends = (data_sizes + sizes).cumsum()
    begins = ends - data_sizes - sizes
    columns = np.arange(headers.shape[1])
    used = columns < sizes[:, None]
    places = (begins[:, None] + columns)[used]
    made = np.empty(int(ends[-1]), np.uint8)
    is_data = np.ones(len(made), np.bool_)
    is_data[places] = False
    made[places] = headers[used]
    made[is_data] = tokens.view(np.uint8)
    return made
