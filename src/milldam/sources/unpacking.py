"""What can only be unpacked whole, and what that takes: Parquet's pages, and the record batches of Arrow files.

Sizes are read from the heads of pages and buffers: nothing is unpacked. A value of a Parquet column lies in one page,
so that what a page holds bounds what a value may take; the file's own metadata tells of whole column chunks alone,
which may be large for many small values. Of a compressed Arrow file all columns of a record batch are unpacked at once;
one without compression is mapped and takes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SMALL_PAGE = 4 << 20
"""Pages up to this size are unpacked in the memory that every batch may take."""
_DICTIONARY_COPIES = 4
"""Of a dictionary, Arrow holds so many."""
_HEADER_BYTES = 1 << 16
# Fields of PageHeader in parquet.thrift, and of the three kinds of header in it.
_KIND, _UNPACKED, _PACKED, _VALUES = 1, 2, 3, 1
_DICTIONARY_PAGE = 2
_KINDS_OF_PAGE = (5, 8)
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, 12


@dataclass(frozen=True, slots=True)
class Page:
    size: int
    """Bytes when it is unpacked."""
    dictionary: bool
    first: int
    """Number of its first value in the column chunk."""
    values: int
    """With nulls; of a dictionary 0."""


def dearest_page(source: Any, chunk: pq.ColumnChunkMetaData, copies: int) -> tuple[int, Page]:
    """Bytes that a column chunk's dearest page takes while it is unpacked, beside its dictionary; and that page.

    0 where all pages are small. `copies`: so many are held of a page. What can't be told counts as one page.
    """
    dearest, dictionary = (0, Page(chunk.total_uncompressed_size, False, 0, 0)), 0
    if chunk.total_uncompressed_size <= SMALL_PAGE:
        return dearest
    try:
        for page in pages_of(source, chunk):
            if page.dictionary:
                dictionary = _DICTIONARY_COPIES * page.size
            if page.size > SMALL_PAGE:
                size = dictionary if page.dictionary else dictionary + copies * page.size
                dearest = max(dearest, (size, page), key=lambda both: both[0])
    except ValueError:  # whether the file is damaged shows when it is read
        return _DICTIONARY_COPIES * chunk.total_uncompressed_size, dearest[1]
    return dearest


def pages_of(source: Any, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """The pages of a column chunk in order; raises ValueError when the headers make no sense."""
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        position = min(position, chunk.dictionary_page_offset)
    end, values = position + chunk.total_compressed_size, 0
    while position < end:
        source.seek(position)
        header = _Header(source.read(_HEADER_BYTES))
        fields = header.struct()
        size, packed = fields.get(_UNPACKED, -1), fields.get(_PACKED, -1)
        if size < 0 or packed < 0:
            raise ValueError(f"a page header without sizes at byte {position:,}")
        count = sum(fields[kind].get(_VALUES, 0) for kind in _KINDS_OF_PAGE if kind in fields)
        yield Page(size, fields.get(_KIND) == _DICTIONARY_PAGE, values, count)
        values += count
        position += header.at + packed


class _Header:
    """As much of Thrift's compact protocol as page headers use."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            fields[number] = self._value(kind & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            return self.struct()
        if kind not in (_BYTE, _DOUBLE, _BINARY):
            raise ValueError(f"a page header with a field of type {kind}")
        size = {_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint()
        self.at += size
        return None

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _byte(self) -> int:
        self.at += 1
        if self.at > len(self._data):
            raise ValueError("a page header that does not end")
        return self._data[self.at - 1]


# ---- Arrow ----

_MAGIC = b"ARROW1"
_FIRST_MESSAGE = 8
# Kinds of header in Message.fbs; fields of Message, DictionaryBatch and RecordBatch by number.
_DICTIONARIES, _RECORDS = 2, 3
_HEADER_KIND, _HEADER_AT, _DATA, _BUFFERS, _COMPRESSION = 1, 2, 1, 2, 3


def batch_sizes(source: Any) -> Iterator[int]:
    """Bytes of each record batch in order, dictionaries before it included; none when the first is not compressed."""
    source.seek(_FIRST_MESSAGE if source.read(len(_MAGIC)) == _MAGIC else 0)
    dictionaries = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            kind, size = _unpacked(message)
            if kind == _DICTIONARIES:
                dictionaries += size
            elif kind == _RECORDS:
                if not size:
                    return
                yield dictionaries + size
    except (ValueError, OSError, struct.error, IndexError, TypeError):
        return  # whether the file is damaged shows when it is read


def _unpacked(message: pa.Message) -> tuple[int, int]:
    """The kind of a message, and its size when it is compressed."""
    data = message.metadata.to_pybytes()
    root = _follow(data, 0)
    kind = data[_field(data, root, _HEADER_KIND)]
    if kind not in (_DICTIONARIES, _RECORDS):
        return kind, 0
    batch = _follow(data, _field(data, root, _HEADER_AT))
    if kind == _DICTIONARIES:
        batch = _follow(data, _field(data, batch, _DATA))
    if not _field(data, batch, _COMPRESSION):
        return kind, 0
    buffers = _follow(data, _field(data, batch, _BUFFERS))
    (count,) = struct.unpack_from("<I", data, buffers)
    size = 0
    for offset, length in struct.iter_unpack("<qq", data[buffers + 4 : buffers + 4 + 16 * count]):
        # Minus one: this buffer was left as it is.
        size += max(0, struct.unpack_from("<q", message.body, offset)[0]) if length else 0
    return kind, size


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a FlatBuffers table is; 0 when it has none."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    offset = (
        struct.unpack_from("<H", data, vtable + entry)[0] if entry < struct.unpack_from("<H", data, vtable)[0] else 0
    )
    return table + offset if offset else 0


def _follow(data: bytes, at: int) -> int:
    (offset,) = struct.unpack_from("<I", data, at)
    return at + int(offset)
