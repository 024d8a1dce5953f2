"""Parquet and Arrow files -> record batches of the wanted columns, of about two megabytes each.

Parquet is decoded a few rows at a time, by what its metadata says of their size; Arrow files are mapped. A larger row
comes alone. A row with a string that is no UTF-8 is mended or rejected by the rules. Nulls stay nulls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from milldam.errors import InputError, did_you_mean
from milldam.mapping.places import Place
from milldam.mapping.room import Room
from milldam.mapping.rows import Rows, cut_by_size
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, Reject, TextRules, stop_or_reject
from milldam.sources.decoding import decode_text
from milldam.sources.parquet_pages import pages_of
from milldam.sources.tables import open_arrow, open_parquet, open_seekable
from milldam.sources.units import Slice

_ROWS, _REPEATED = 8192, 32
_DECODING = 2
"""A page is held as it was unpacked, and as Arrow has it."""
_NUMBER = 8


def require_columns(columns: tuple[str, ...] | None, there: list[str], path: str) -> None:
    """Raise InputError for a column that is not there."""
    missing = next((name for name in columns or () if name not in there), None)
    if missing is not None:
        found = ", ".join(f'"{name}"' for name in there) or "none"
        raise InputError(f'{path}: no column "{missing}"; found {found}.{did_you_mean(missing, there)} Set columns.')


def read_table(
    slice: Slice,
    rules: TextRules,
    on_reject: OnReject,
    columns: tuple[str, ...] | None,
    spool: str | None,
    at: Callable[[int], None],
    room: Room | None = None,
) -> Iterator[Rows]:
    """The rows of a slice of a parquet or Arrow file. `at` is told the number of the next row, wherever some are left
    out before it."""
    read = (
        _read_parquet(slice, columns, spool, room) if slice.format == "parquet" else _read_arrow(slice, columns, spool)
    )
    try:
        for row, batch in read:
            for number, sound in _sound(batch, row, slice, rules, on_reject):
                at(number)
                yield from (_plain(part) for part in cut_by_size(sound, BATCH_BYTES))
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(f"{slice.path}: not a whole {slice.format} file ({reason}). Get or make it again.") from None


def count_table_rows(slice: Slice, spool: str | None) -> int:
    """Rows of a slice, without reading them."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            metadata = parquet.metadata
            stop = metadata.num_row_groups if slice.stop is None else slice.stop
            return sum(metadata.row_group(k).num_rows for k in range(slice.start, stop))
    with open_arrow(slice.path, slice.compression, spool) as reader:
        return sum(batch.num_rows for _, batch in _arrow_batches(reader, slice))


def _read_parquet(
    slice: Slice, columns: tuple[str, ...] | None, spool: str | None, room: Room | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    with open_parquet(slice.path, slice.compression, spool) as parquet:
        require_columns(columns, parquet.schema_arrow.names, slice.path)
        wanted = list(columns) if columns is not None else parquet.schema_arrow.names
        metadata = parquet.metadata
        row = sum(metadata.row_group(k).num_rows for k in range(slice.start))
        stop = metadata.num_row_groups if slice.stop is None else slice.stop
        for group in range(slice.start, stop):
            rows = rows_at_a_time(metadata.row_group(group), wanted)
            if room is not None:
                _require_room(metadata.row_group(group), wanted, slice, row, room)
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False):
                yield row, batch.select(wanted)
                row += batch.num_rows


def _require_room(group: pq.RowGroupMetaData, columns: list[str], slice: Slice, row: int, room: Room) -> None:
    """Raise ResourceError when a page is so large that there is no room for it and for what is decoded of it.

    `row`: the number of the group's first row in the file.
    """
    chunks = [group.column(number) for number in range(group.num_columns)]
    chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    if room.fits((_DECODING + 1) * sum(chunk.total_uncompressed_size for chunk in chunks)):
        return
    try:
        with open_seekable(slice.path, slice.compression, None) as source:
            pages = [max(pages_of(source, chunk), key=lambda page: page.size) for chunk in chunks]
    except ValueError:
        return  # whether the file is damaged shows when it is read
    # While a row is worked on, its page is still held.
    needed = sum((_DECODING + (room.format != "arrow")) * page.size for page in pages)
    if room.fits(needed):
        return
    page, chunk = max(zip(pages, chunks, strict=True), key=lambda both: both[0].size)
    is_flat = page.values and chunk.num_values == group.num_rows
    first, count = (row + page.first, page.values) if is_flat else (row, group.num_rows)
    where = f'{Place(slice.path, first, first + count - 1)}, of "{chunk.path_in_schema}"'
    raise room.refusal(needed, page.size, where, by_column=True)


def rows_at_a_time(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """So many rows that they decode to about two megabytes.

    Counted are the bytes on disk before compression, and the values, since a run of equal ones takes next to no bytes.
    Of texts that are stored once and repeated neither tells the size: few at a time, then.
    """
    count = max(1, group.num_rows)
    per_row, fewest = 1.0, float(_ROWS)
    for k in range(group.num_columns):
        chunk = group.column(k)
        if chunk.path_in_schema.split(".")[0] not in columns:
            continue
        per_row += max(chunk.total_uncompressed_size, _NUMBER * chunk.num_values) / count
        if chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY":
            fewest = min(fewest, _REPEATED * count / max(count, chunk.num_values))
    return int(max(1, min(fewest, BATCH_BYTES / per_row)))


def _read_arrow(
    slice: Slice, columns: tuple[str, ...] | None, spool: str | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    with open_arrow(slice.path, slice.compression, spool) as reader:
        require_columns(columns, reader.schema.names, slice.path)
        for row, batch in _arrow_batches(reader, slice):
            yield row, batch if columns is None else batch.select(list(columns))


def _arrow_batches(reader: Any, slice: Slice) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(number of its first row, batch) of a slice; the batches before it are passed over, which reads none of them."""
    row = 0
    is_file = hasattr(reader, "num_record_batches")
    batches = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else iter(reader)
    for number, batch in enumerate(batches):
        if slice.stop is not None and number >= slice.stop:
            return
        if number >= slice.start:
            yield row, batch
        row += batch.num_rows


def _plain(rows: Rows) -> Rows:
    """Without dictionaries, which differ from batch to batch."""
    assert isinstance(rows, pa.RecordBatch)
    if not any(pa.types.is_dictionary(kind) for kind in rows.schema.types):
        return rows
    columns = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in rows.columns]
    return pa.record_batch(columns, names=rows.schema.names)


# ---- strings that are no UTF-8 ----


def _sound(
    batch: pa.RecordBatch, row: int, slice: Slice, rules: TextRules, on_reject: OnReject
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batch as it is when nothing is wrong with it; else, one by one, the rows that are sound or can be mended.

    Each with the number of its first row.

    A damaged file may hold offsets that lead anywhere: they are looked at before they are followed.
    """
    try:
        batch.validate(full=True)
        yield row, batch
        return
    except pa.ArrowInvalid:
        _as_bytes(batch).validate(full=True)
    for position in range(batch.num_rows):
        one = batch.take(pa.array([position]))  # not a slice, whose lists would still lead to all their values
        try:
            one.validate(full=True)
        except pa.ArrowInvalid:
            mended = _mended(one, row + position, slice, rules, on_reject)
            if mended is not None:
                yield row + position, mended
        else:
            yield row + position, one


def _as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same with byte strings for strings, so that all but UTF-8 can be checked."""
    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    columns = [one.view(bytes_of[one.type]) if one.type in bytes_of else one for one in batch.columns]
    kept = [one for one in columns if not _holds_text(one.type)]
    return pa.record_batch(kept, names=[str(k) for k in range(len(kept))])


def _holds_text(kind: pa.DataType) -> bool:
    """Whether it is nested and has strings somewhere in it."""
    inner = [kind.field(k).type for k in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    if pa.types.is_dictionary(kind):
        inner = [kind.value_type]
    return any(pa.types.is_string(one) or pa.types.is_large_string(one) or _holds_text(one) for one in inner)


def _mended(
    one: pa.RecordBatch, row: int, slice: Slice, rules: TextRules, on_reject: OnReject
) -> pa.RecordBatch | None:
    """A row whose top-level strings are text by the rules; None when it was rejected."""
    columns, problem = [], "a nested string is not UTF-8"
    for column in one.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            raw = column.cast(pa.large_binary())[0].as_py()
            text, problem = decode_text(raw, rules) if raw is not None else (None, "")
            if raw is not None and text is None:
                break
            column = pa.array([text], column.type)
        elif not _is_valid(column):
            break
        columns.append(column)
    else:
        return pa.record_batch(columns, schema=one.schema)
    stop_or_reject(Reject(slice.path, "not_utf8", problem, row=row), rules, on_reject)
    return None


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
