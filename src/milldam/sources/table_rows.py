"""Record batches of Parquet and Arrow files -> texts of one column, or rows.

A text larger than a batch comes in parts, a larger row alone. What is no UTF-8 is mended or rejected by the rules, with
its row. A damaged file may hold offsets that lead anywhere: they are looked at before they are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from milldam.sources.arrays import BATCH_BYTES, MakeReject, bounded, checked_text, decoded_parts, open_batches
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    Batch,
    MalformedError,
    Reading,
    Reject,
    no_such_column,
    require_columns,
)
from milldam.sources.decoding import decode_text
from milldam.sources.rows import cut_by_size
from milldam.sources.tables import AS_BYTES, damage_told, table_batches, text_columns
from milldam.sources.units import Slice
from milldam.text.arrays import text_offsets


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column. Nulls, and what is no UTF-8, are rejected with their rows."""
    wanted = str(reading.rules.text_column)

    def choose(schema: pa.Schema) -> list[str]:
        there = dict(text_columns(schema))
        if wanted not in there:
            raise no_such_column(slice.path, wanted, there)
        return [wanted]

    with damage_told(slice.path, slice.format):
        columns = _columns(table_batches(slice, choose, reading.spool))
        for row, column in _gathered(columns) if slice.format == "parquet" else columns:
            parts = bounded(column)
            del column  # as all that leads to a large text: it must be gone when the next is unpacked
            for part in parts:
                yield from _batches(part, reading, _rejects_at(row, slice))
                row += len(part)
                del part


def _columns(batches: Iterator[tuple[int, pa.RecordBatch]]) -> Iterator[tuple[int, pa.Array]]:
    for row, batch in batches:
        column = batch.column(0)
        _as_bytes(column).validate(full=True)
        ready = [column]
        del batch, column
        yield row, ready.pop()


def _gathered(columns: Iterator[tuple[int, pa.Array]]) -> Iterator[tuple[int, pa.Array]]:
    """Small arrays put together."""
    held: list[pa.Array] = []
    first = size = 0
    for row, column in columns:
        if held and column.nbytes >= BATCH_BYTES:
            # A large one is not copied to go with them.
            yield first, _taken(held)
        if not held:
            first, size = row, 0
        held.append(column)
        size += column.nbytes
        del column
        if size >= BATCH_BYTES // 2:
            yield first, _taken(held)
    if held:
        yield first, _taken(held)


def _taken(held: list[pa.Array]) -> pa.Array:
    """All of them as one; the list keeps none."""
    joined = held.pop() if len(held) == 1 else pa.concat_arrays(held)
    held.clear()
    return joined


def _as_bytes(column: pa.Array) -> pa.Array:
    """Byte strings for strings, so that all but UTF-8 can be checked."""
    return column.view(AS_BYTES[column.type]) if column.type in AS_BYTES else column


def _rejects_at(row: int, slice: Slice) -> MakeReject:
    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        return Reject(slice.path, reason, detail, raw.decode("utf-8", "backslashreplace"), row=row + position)

    return make_reject


def _batches(part: pa.Array, reading: Reading, make_reject: MakeReject) -> Iterator[Batch]:
    # A string column is not checked by its reader: go through bytes, so that invalid UTF-8 is found here.
    raw = part.cast(pa.large_binary())
    if len(part) > 1 or part.nbytes <= BATCH_BYTES:
        yield Batch(checked_text(raw, reading, make_reject), bytes_read=part.nbytes)
        return
    begin, end = map(int, text_offsets(raw))
    data = raw.buffers()[2]  # not by as_buffer, which copies it
    try:
        pieces = (data[at : min(end, at + BATCH_BYTES)].to_pybytes() for at in range(begin, end, BATCH_BYTES))
        yield from open_batches(decoded_parts(pieces, reading.rules))
    except MalformedError as error:
        shown = data[begin : min(end, begin + KEPT_RECORD_CHARS + 1)].to_pybytes()
        reading.reject(make_reject(0, error.reason, error.detail, shown))


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Record batches as they are; nulls stay nulls. A row with a string that is no UTF-8 is mended or rejected."""
    name = reading.name(slice.path)

    def choose(schema: pa.Schema) -> Sequence[str] | None:
        require_columns(reading.columns, schema.names, slice.path)
        return reading.columns

    with damage_told(slice.path, slice.format):
        for row, batch in table_batches(slice, choose, reading.spool, reading.room):
            for number, sound in _sound(batch, row, slice, reading):
                reading.places.begin(name, number)
                yield from (_plain(part) for part in cut_by_size(sound, BATCH_BYTES))


def _plain(rows: Any) -> pa.RecordBatch:
    """Without dictionaries, which differ from batch to batch."""
    if not any(pa.types.is_dictionary(kind) for kind in rows.schema.types):
        return rows
    columns = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in rows.columns]
    return pa.record_batch(columns, names=rows.schema.names)


def _sound(batch: pa.RecordBatch, row: int, slice: Slice, reading: Reading) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batch as it is when nothing is wrong with it; else, one by one, the rows that are sound or can be mended.

    Each with the number of its first row.
    """
    if _is_valid(batch):
        yield row, batch
        return
    for column in batch.columns:
        if not _holds_text(column.type):
            _as_bytes(column).validate(full=True)
    for position in range(row, row + batch.num_rows):
        one = batch.take(pa.array([position - row]))  # not a slice, whose lists would still lead to all their values
        if _is_valid(one):
            yield position, one
            continue
        columns, problem = _mended(one, reading)
        if problem:
            reading.reject(Reject(slice.path, "not_utf8", problem, row=position))
        else:
            yield position, pa.record_batch(columns, schema=one.schema)


def _is_valid(rows: pa.RecordBatch | pa.Array) -> bool:
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _holds_text(kind: pa.DataType) -> bool:
    """Whether it is nested and has strings somewhere in it."""
    inner = [kind.field(k).type for k in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    if pa.types.is_dictionary(kind):
        inner = [kind.value_type]
    return any(one in AS_BYTES or _holds_text(one) for one in inner)


def _mended(one: pa.RecordBatch, reading: Reading) -> tuple[list[pa.Array], str]:
    """The columns of a row whose top-level strings are text by the rules; or what is wrong with them."""
    columns = []
    for column in one.columns:
        if column.type in AS_BYTES:
            raw = column.cast(pa.large_binary())[0].as_py()
            text, problem = decode_text(raw, reading.rules) if raw is not None else (None, "")
            if problem:
                return [], problem
            column = pa.array([text], column.type)
        elif not _is_valid(column):
            return [], "a nested string is not UTF-8"
        columns.append(column)
    return columns, ""
