"""Parquet and Arrow files -> documents, a few megabytes of one column at a time.

Parquet is read page by page, row group after row group; a page is unpacked whole, and what that takes is told
beforehand (`Slice.unpacking`). Arrow files are mapped. A document larger than a batch comes in parts. Nulls are
rejected with their row. A compressed file (.parquet.zst) is unpacked to disk first, since these formats are read from
their end.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milldam.errors import InputError
from milldam.input_files import is_address
from milldam.sources.arrays import BATCH_BYTES, MakeReject, bounded, checked_text, text_in_parts
from milldam.sources.arrow_messages import unpacked_sizes
from milldam.sources.batch import Batch, OnReject, Reject, TextRules, no_such_column
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes
from milldam.sources.parquet_pages import pages_of
from milldam.sources.units import Slice, by_parts, whole

_BUFFER = 1 << 20
_ROWS = 8192
_ROWS_OF_DICTIONARY = 32
_SMALL_PAGE = 4 << 20
_PAGE_COPIES, _DICTIONARY_COPIES = 3, 4
"""Copies that Arrow holds of a Parquet page (the page before, the page, its value) and of a dictionary."""
_BATCH_COPIES = 2
"""Texts of a record batch are still on their way while the next one is unpacked."""


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
    except DamagedError as error:
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


def slice_parquet(file: InputFile, shard_size: int, column: str | None = None) -> Iterator[Slice]:
    """Runs of row groups. `column`: the one that will be read, whose pages are looked at."""
    if file.compression is not None:
        yield whole(file)
        return
    with open_parquet(file.path, None, None) as parquet:
        metadata = parquet.metadata
        sizes = (metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
        for slice in by_parts(file, sizes, shard_size):
            yield replace(slice, unpacking=_dearest_page(slice, metadata, column)[0])


def _dearest_page(slice: Slice, metadata: pq.FileMetaData, column: str | None) -> tuple[int, str]:
    """What a column's dearest page takes while it is unpacked, and where it is; 0 for what goes as a batch does."""
    dearest = (0, "")
    # At an address every header would be fetched on its own.
    if column is None or is_address(slice.path):
        return dearest
    stop = metadata.num_row_groups if slice.stop is None else slice.stop
    for number in range(slice.start, stop):
        for size, first in _large_pages(slice.path, _chunk(metadata.row_group(number), column)):
            where = f'row group {number}, column "{column}", from value {first:,} of the group'
            dearest = max(dearest, (size, where))
    return dearest


def _large_pages(path: str, chunk: pq.ColumnChunkMetaData | None) -> Iterator[tuple[int, int]]:
    """(bytes while it is unpacked, number of its first value) of the pages that are no small ones."""
    if chunk is None or chunk.total_uncompressed_size <= _SMALL_PAGE:
        return
    dictionary = 0
    try:
        with pa.memory_map(path) as source:
            for page in pages_of(source, chunk):
                if page.dictionary:
                    dictionary = _DICTIONARY_COPIES * page.size
                if page.size > _SMALL_PAGE:
                    yield dictionary if page.dictionary else dictionary + _PAGE_COPIES * page.size, page.first
    except ValueError:
        # What can't be told counts as one page; whether the file is damaged shows when it is read.
        yield _DICTIONARY_COPIES * chunk.total_uncompressed_size, 0


def _chunk(group: pq.RowGroupMetaData, column: str) -> pq.ColumnChunkMetaData | None:
    chunks = (group.column(k) for k in range(group.num_columns))
    return next((chunk for chunk in chunks if chunk.path_in_schema == column), None)


def read_parquet(slice: Slice, rules: TextRules, on_reject: OnReject, spool: str | None) -> Iterator[Batch]:
    assert rules.text_column is not None
    with open_parquet(slice.path, slice.compression, spool) as parquet:
        _require_column(parquet.schema_arrow, rules.text_column, slice.path)
        metadata = parquet.metadata
        stop = metadata.num_row_groups if slice.stop is None else slice.stop
        row = sum(metadata.row_group(k).num_rows for k in range(slice.start))
        for group in range(slice.start, stop):
            rows = rows_at_a_time(metadata.row_group(group), rules.text_column)
            batches = parquet.iter_batches(
                # Large texts that are stored once and repeated: each repetition takes its whole size.
                batch_size=1 if slice.unpacking and rows <= _ROWS_OF_DICTIONARY else rows,
                row_groups=[group],
                columns=[rules.text_column],
                use_threads=False,
            )
            yield from _read_batches(_gathered(batches), row, slice, rules, on_reject, "parquet")
            row += metadata.row_group(group).num_rows


def row_count(slice: Slice) -> int | None:
    """Rows of a slice, where its file tells them without being read through."""
    if slice.format != "parquet" or slice.compression is not None:
        return None
    with open_parquet(slice.path, None, None) as parquet:
        metadata = parquet.metadata
        stop = metadata.num_row_groups if slice.stop is None else slice.stop
        return int(sum(metadata.row_group(k).num_rows for k in range(slice.start, stop)))


def rows_at_a_time(group: pq.RowGroupMetaData, column: str) -> int:
    """About a batch; fewer where texts may be stored once and repeated, since then sizes on disk tell little."""
    per_row = group.total_byte_size // max(1, group.num_rows)
    rows = int(max(1, min(_ROWS, BATCH_BYTES // max(1, per_row))))
    chunk = _chunk(group, column)
    return min(rows, _ROWS_OF_DICTIONARY) if chunk is not None and chunk.has_dictionary_page else rows


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches put together."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if held and batch.nbytes >= BATCH_BYTES:
            # A large one is not copied to go with them.
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held = []
        held.append(batch)
        del batch  # as all that leads to a large one: it must be gone when the next is unpacked
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
        slices = by_parts(file, [file.size // batches] * batches, shard_size) if batches else [whole(file)]
    for slice in slices:
        yield replace(slice, unpacking=_dearest_batch(slice)[0])


def _dearest_batch(slice: Slice) -> tuple[int, str]:
    """What the largest record batch of a slice takes when it is unpacked, and which it is; 0 without compression."""
    if is_address(slice.path):
        return 0, ""
    with pa.memory_map(slice.path) as source:
        sizes = enumerate(itertools.islice(unpacked_sizes(source), slice.start, slice.stop), slice.start)
        return max(((_BATCH_COPIES * size, f"record batch {k}") for k, size in sizes), default=(0, ""))


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


def unpacking_place(slice: Slice, column: str | None) -> str:
    """Which part of a slice takes most memory to unpack, in words."""
    if slice.format == "arrow":
        return _dearest_batch(slice)[1]
    with open_parquet(slice.path, None, None) as parquet:
        return _dearest_page(slice, parquet.metadata, column)[1]


def _require_column(schema: pa.Schema, column: str, path: str) -> None:
    there = dict(text_columns(schema))
    if column not in there:
        raise no_such_column(path, column, there)


def text_columns(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Dotted names and types of all fields that hold text."""
    for field in schema:
        yield from _text_fields(field.name, field.type)


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column is of bytes, which may be text or anything else."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(value) or pa.types.is_large_binary(value))


def _text_fields(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
    if text or holds_bytes(kind):
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
                yield from _batches(part, rules, on_reject, _rejects_at(row, slice))
                row += len(part)
                del part
            del batch, column
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(slice.path, kind, error) from None


def _require_sound(column: pa.Array) -> None:
    """A damaged file may hold offsets that lead anywhere: look before they are followed. UTF-8 is checked later."""
    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    (column.view(bytes_of[column.type]) if column.type in bytes_of else column).validate(full=True)


def _rejects_at(row: int, slice: Slice) -> MakeReject:
    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        return Reject(slice.path, reason, detail, raw.decode("utf-8", "backslashreplace"), row=row + position)

    return make_reject


def _batches(part: pa.Array, rules: TextRules, on_reject: OnReject, make_reject: MakeReject) -> Iterator[Batch]:
    # A string column is not checked by its reader: go through bytes, so that invalid UTF-8 is found here.
    raw = part.cast(pa.large_binary())
    if len(part) == 1 and part.nbytes > BATCH_BYTES:
        yield from text_in_parts(raw, rules, on_reject, make_reject)
    else:
        yield Batch(checked_text(raw, rules, on_reject, make_reject), bytes_read=part.nbytes)


def open_schema(slice: Slice, spool: str | None) -> pa.Schema:
    """The schema of a parquet or Arrow file."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            return parquet.schema_arrow
    with open_arrow(slice.path, slice.compression, spool) as reader:
        return reader.schema


def column_sizes(slice: Slice, spool: str | None) -> dict[str, int]:
    """About how many bytes each column has at the beginning of a parquet or Arrow file."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            groups = [parquet.metadata.row_group(0)] if parquet.num_row_groups else []
            chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
            return {chunk.path_in_schema: chunk.total_uncompressed_size for chunk in chunks}
    with open_arrow(slice.path, slice.compression, spool) as reader:
        several = reader.num_record_batches if hasattr(reader, "num_record_batches") else None
        batch = next(iter(reader), None) if several is None else reader.get_batch(0) if several else None
        first = pa.Table.from_batches([] if batch is None else [batch], reader.schema)
        while any(pa.types.is_struct(field.type) for field in first.schema):
            first = first.flatten()
        return {name: first.column(k).nbytes for k, name in enumerate(first.column_names)}
