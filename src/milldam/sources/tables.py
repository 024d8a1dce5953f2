"""Parquet and Arrow files -> documents, a few megabytes of one column at a time.

Parquet is read page by page, row group after row group; Arrow files are mapped. Nulls are rejected with their row.
A compressed file (.parquet.zst) is unpacked to disk first, since these formats are read from their end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milldam.errors import InputError
from milldam.input_files import is_address
from milldam.sources.arrays import BATCH_BYTES, bounded, checked_text
from milldam.sources.batch import Batch, OnReject, Reject, TextRules
from milldam.sources.compression import TruncatedError, read_blocks
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes
from milldam.sources.units import Slice, by_parts, whole

_BUFFER = 1 << 20
_ROWS = 8192
_ROWS_OF_DICTIONARY = 32


@contextmanager
def open_seekable(path: str, compression: str | None, spool: str | None) -> Iterator[Any]:
    """Something Arrow can seek in."""
    if compression is None and not is_address(path):
        with pa.memory_map(path) as mapped:
            yield mapped
        return
    with open_bytes(path) as file:
        if compression is None:
            yield pa.PythonFile(file, mode="r")
            return
        with tempfile.TemporaryFile(dir=spool) as unpacked:
            _unpack(file, compression, unpacked, path)
            yield pa.PythonFile(unpacked, mode="r")


def _unpack(file: IO[bytes], compression: str, unpacked: IO[bytes], path: str) -> None:
    try:
        for block in read_blocks(file, compression, _BUFFER):
            unpacked.write(block)
    except TruncatedError as error:
        raise InputError(f"{path}: {error}. Get the file again.") from None
    unpacked.seek(0)


def _damaged(path: str, kind: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0][:160]
    return InputError(f"{path}: not a whole {kind} file ({reason}). Get or make it again.")


# ---- Parquet ----


@contextmanager
def open_parquet(path: str, compression: str | None, spool: str | None) -> Iterator[pq.ParquetFile]:
    with open_seekable(path, compression, spool) as source:
        try:
            file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER)
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(path, "parquet", error) from None
        yield file


def slice_parquet(file: InputFile, shard_size: int) -> Iterator[Slice]:
    if file.compression is not None:
        yield whole(file)
        return
    with open_parquet(file.path, None, None) as parquet:
        metadata = parquet.metadata
        sizes = (metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
        yield from by_parts(file, sizes, shard_size)


def read_parquet(slice: Slice, rules: TextRules, on_reject: OnReject, spool: str | None) -> Iterator[Batch]:
    assert rules.text_column is not None
    with open_parquet(slice.path, slice.compression, spool) as parquet:
        _require_column(parquet.schema_arrow, rules.text_column, slice.path)
        metadata = parquet.metadata
        stop = metadata.num_row_groups if slice.stop is None else slice.stop
        row = sum(metadata.row_group(k).num_rows for k in range(slice.start))
        for group in range(slice.start, stop):
            batches = parquet.iter_batches(
                batch_size=rows_at_a_time(metadata.row_group(group), rules.text_column),
                row_groups=[group],
                columns=[rules.text_column],
                use_threads=False,
            )
            yield from _read_batches(_gathered(batches), row, slice, rules, on_reject, "parquet")
            row += metadata.row_group(group).num_rows


def rows_at_a_time(group: pq.RowGroupMetaData, column: str) -> int:
    """About a batch; fewer where texts may be stored once and repeated, since then sizes on disk tell little."""
    per_row = group.total_byte_size // max(1, group.num_rows)
    rows = int(max(1, min(_ROWS, BATCH_BYTES // max(1, per_row))))
    chunks = (group.column(k) for k in range(group.num_columns))
    repeated = any(chunk.has_dictionary_page for chunk in chunks if chunk.path_in_schema == column)
    return min(rows, _ROWS_OF_DICTIONARY) if repeated else rows


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches put together."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.nbytes for one in held) >= BATCH_BYTES // 2:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held = []
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


# ---- Arrow IPC: the file format, and the stream format that HF datasets writes ----


@contextmanager
def open_arrow(path: str, compression: str | None, spool: str | None) -> Iterator[Any]:
    with open_seekable(path, compression, spool) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        try:
            yield pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(path, "Arrow", error) from None


def slice_arrow(file: InputFile, shard_size: int) -> Iterator[Slice]:
    if file.compression is not None:
        yield whole(file)
        return
    with open_arrow(file.path, None, None) as reader:
        batches = getattr(reader, "num_record_batches", None)
        if not batches:
            yield whole(file)
            return
        yield from by_parts(file, [file.size // batches] * batches, shard_size)


def read_arrow(slice: Slice, rules: TextRules, on_reject: OnReject, spool: str | None) -> Iterator[Batch]:
    assert rules.text_column is not None
    with open_arrow(slice.path, slice.compression, spool) as reader:
        _require_column(reader.schema, rules.text_column, slice.path)
        row = 0
        if hasattr(reader, "num_record_batches"):
            stop = reader.num_record_batches if slice.stop is None else slice.stop
            row = sum(reader.get_batch(k).num_rows for k in range(slice.start))
            batches = (reader.get_batch(k) for k in range(slice.start, stop))
        else:
            batches = iter(reader)
        yield from _read_batches(batches, row, slice, rules, on_reject, "Arrow")


# ---- what both share ----


def _require_column(schema: pa.Schema, column: str, path: str) -> None:
    if column not in dict(text_columns(schema)):
        names = ", ".join(f'"{name}"' for name, _ in text_columns(schema)) or "none"
        raise InputError(f'{path}: no text column "{column}"; its text columns: {names}. Set text_column.')


def text_columns(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Dotted names and types of all fields that hold text."""
    for field in schema:
        yield from _text_fields(field.name, field.type)


def _text_fields(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
    if text or pa.types.is_binary(value) or pa.types.is_large_binary(value):
        yield name, kind
    elif pa.types.is_struct(kind):
        for inner in kind:
            yield from _text_fields(f"{name}.{inner.name}", inner.type)


def _read_batches(
    batches: Iterator[pa.RecordBatch], row: int, slice: Slice, rules: TextRules, on_reject: OnReject, kind: str
) -> Iterator[Batch]:
    assert rules.text_column is not None
    names = rules.text_column.split(".")
    try:
        for batch in batches:
            column = batch.column(names[0])
            for name in names[1:]:
                column = pc.struct_field(column, name)
            _require_sound(column)
            for part in bounded(column):
                yield Batch(_checked(part, row, slice, rules, on_reject), bytes_read=part.nbytes)
                row += len(part)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(slice.path, kind, error) from None


def _require_sound(column: pa.Array) -> None:
    """A damaged file may hold offsets that lead anywhere: look before they are followed. UTF-8 is checked later."""
    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    (column.view(bytes_of[column.type]) if column.type in bytes_of else column).validate(full=True)


def _checked(part: pa.Array, row: int, slice: Slice, rules: TextRules, on_reject: OnReject) -> pa.LargeStringArray:
    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        return Reject(slice.path, reason, detail, raw.decode("utf-8", "backslashreplace"), row=row + position)

    # A string column is not checked by its reader: go through bytes, so that invalid UTF-8 is found here.
    return checked_text(part.cast(pa.large_binary()), rules, on_reject, make_reject)


def open_schema(slice: Slice, spool: str | None) -> pa.Schema:
    """The schema of a parquet or Arrow file."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            return parquet.schema_arrow
    with open_arrow(slice.path, slice.compression, spool) as reader:
        return reader.schema
