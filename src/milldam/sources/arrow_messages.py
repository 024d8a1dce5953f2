"""What the record batches of an Arrow file take when they are unpacked, from the heads of its buffers.

An Arrow file without compression is mapped and takes nothing. Of a compressed one, all columns of a record batch are
unpacked at once; each buffer begins with its unpacked size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

_MAGIC = b"ARROW1"
_FIRST_MESSAGE = 8
# Kinds of header in Message.fbs; fields of Message, DictionaryBatch and RecordBatch by number.
_DICTIONARY, _RECORDS = 2, 3
_KIND, _HEADER, _DATA, _BUFFERS, _COMPRESSION = 1, 2, 1, 2, 3


def unpacked_sizes(source: Any) -> Iterator[int]:
    """Bytes of each record batch in order, dictionaries before it included; none when the first is not compressed."""
    source.seek(_FIRST_MESSAGE if source.read(len(_MAGIC)) == _MAGIC else 0)
    dictionaries = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            kind, size = _unpacked(message)
            if kind == _DICTIONARY:
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
    kind = data[_field(data, root, _KIND)]
    if kind not in (_DICTIONARY, _RECORDS):
        return kind, 0
    batch = _follow(data, _field(data, root, _HEADER))
    if kind == _DICTIONARY:
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
