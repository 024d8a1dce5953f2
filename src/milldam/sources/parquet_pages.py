"""The pages of a Parquet column, from their headers: how large what is unpacked at a time is, before it is unpacked.

A page is decompressed as a whole, and no value lies on two pages: so none is larger than the largest page. Reads a few
hundred bytes a page (Thrift's compact protocol).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_HEADER_BYTES = 1 << 16
_DICTIONARY = 2
_TYPE, _UNPACKED, _PACKED = 1, 2, 3
_DATA_HEADERS = (5, 8)
_VALUES = 1


@dataclass(frozen=True, slots=True)
class Page:
    unpacked_bytes: int
    packed_bytes: int
    first: int
    """Of its values, with nulls, in the column chunk."""
    values: int
    """Of a dictionary 0."""


def pages_of(source: Any, chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk (`pq.ColumnChunkMetaData`), in order. `source`: what Arrow can seek in.

    Raises ArrowInvalid for headers that are none.
    """
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    at = min(offset for offset in offsets if offset is not None and offset > 0)
    stop = at + chunk.total_compressed_size
    first = 0
    while at < stop:
        source.seek(at)
        header = _Header(source.read(min(_HEADER_BYTES, stop - at)))
        try:
            told = header.struct()
            data: dict[int, Any] = next((told[number] for number in _DATA_HEADERS if number in told), {})
            values = 0 if told[_TYPE] == _DICTIONARY else data.get(_VALUES, 0)
            page = Page(told[_UNPACKED], told[_PACKED], first, values)
        except (IndexError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise pa.ArrowInvalid(f"a page header at byte {at:,} can't be read") from error
        yield page
        first += values
        at += header.at + max(0, page.packed_bytes)


class _Header:
    """A struct of Thrift's compact protocol: numbers and structs by the number of their field, the rest passed over."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            found[field] = self._value(head & 15)
        return found

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true, false
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            self.at += 8
        elif kind == 8:
            length = self._varint()  # which moves `at` first
            self.at += length
        elif kind in (9, 10):
            head = self._byte()
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._value(head & 15)
        elif kind == 12:
            return self.struct()
        else:
            raise ValueError(f"a page header with a field of type {kind}")
        return None
