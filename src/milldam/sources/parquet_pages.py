"""The sizes of a Parquet column's pages, read from their headers: nothing is unpacked.

A page is the least that can be unpacked, and a value lies in one page: what a page holds bounds what a value may take.
The file's own metadata tells of whole column chunks alone, which may be large for many small values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

_HEADER_BYTES = 1 << 16
# Fields of PageHeader in parquet.thrift, and of the three kinds of header in it.
_KIND, _UNPACKED, _PACKED, _VALUES = 1, 2, 3, 1
_DICTIONARY = 2
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
        yield Page(size, fields.get(_KIND) == _DICTIONARY, values, count)
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
