"""Parquet and Arrow files -> record batches of the wanted columns, about two megabytes at a time.

Parquet is read page by page, row group after row group; a page is unpacked whole, and what that takes is told
beforehand (`Slice.unpacking`, or `Room` is asked). Arrow files are mapped. A compressed file (.parquet.zst) is unpacked
to disk first, since these formats are read from their end.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milldam.errors import InputError
from milldam.input_files import is_address
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.large_rows import Room
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes
from milldam.sources.places import Place
from milldam.sources.units import Slice, by_parts, whole
from milldam.sources.unpacking import batch_sizes, dearest_page

FORMATS = {"parquet": "parquet", "arrow": "Arrow"}
Choose = Callable[[pa.Schema], Sequence[str] | None]
"""Of the columns that are there, those to read; None: all. Dots reach into structs. Raises InputError."""
_BUFFER = 1 << 20
_ROWS, _REPEATED = 8192, 32
_NUMBER = 8
_PAGE_COPIES = 3
"""Copies that Arrow holds of a Parquet page: the page before, the page, its value."""
_ROW_COPIES = 2
"""The same while rows are read: as it was unpacked, and as Arrow has it."""
_BATCH_COPIES = 2
"""Texts of a record batch are still on their way while the next one is unpacked."""
AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
"""The types of strings, and what their bytes are as."""


# ---- opening ----


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


@contextmanager
def damage_told(path: str, format: str) -> Iterator[None]:
    """What Arrow finds wrong, as an error of the input."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(f"{path}: not a whole {FORMATS[format]} file ({reason}). Get or make it again.") from None


def _open_parquet(source: Any, path: str) -> pq.ParquetFile:
    with damage_told(path, "parquet"):
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER)


@contextmanager
def open_parquet(path: str, compression: str | None, spool: str | None) -> Iterator[pq.ParquetFile]:
    with open_seekable(path, compression, spool) as source:
        yield _open_parquet(source, path)


@contextmanager
def open_arrow(path: str, compression: str | None, spool: str | None) -> Iterator[Any]:
    """A reader of the file format, or of the stream format that HF datasets writes."""
    with open_seekable(path, compression, spool) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        with damage_told(path, "arrow"):
            yield pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


# ---- slices, and what unpacking them takes ----


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


def slice_arrow(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Runs of record batches. Those of the stream format are known only by reading through it, as is done of a large
    local file."""
    if file.compression is not None:
        yield whole(file)
        return
    with open_arrow(file.path, None, None) as reader:
        count = getattr(reader, "num_record_batches", None)
        sizes = [file.size // count] * count if count else []
        if count is None and file.size > shard_size and not is_address(file.path):
            sizes = _stream_sizes(reader)
    for slice in by_parts(file, sizes, shard_size) if sizes else [whole(file)]:
        yield replace(slice, unpacking=_dearest_batch(slice)[0])


def _stream_sizes(reader: Any) -> list[int]:
    try:
        return [batch.nbytes for batch in reader]  # mapped: only what describes the batches is read
    except (pa.ArrowInvalid, OSError):
        return []  # whether the file is damaged shows when it is read


def unpacking_place(slice: Slice, column: str | None) -> str:
    """Which part of a slice takes most memory to unpack, in words."""
    if slice.format == "arrow":
        return _dearest_batch(slice)[1]
    with open_parquet(slice.path, None, None) as parquet:
        return _dearest_page(slice, parquet.metadata, column)[1]


def _dearest_page(slice: Slice, metadata: pq.FileMetaData, column: str | None) -> tuple[int, str]:
    """What a column's dearest page takes while it is unpacked, and where it is; 0 for what goes as a batch does."""
    dearest = (0, "")
    # At an address every header would be fetched on its own.
    if column is None or is_address(slice.path):
        return dearest
    with pa.memory_map(slice.path) as source:
        for number in _numbers(slice, metadata.num_row_groups):
            for chunk in _chunks(metadata.row_group(number), (column,)):
                size, page = dearest_page(source, chunk, _PAGE_COPIES)
                where = f'row group {number}, column "{column}", from value {page.first:,} of the group'
                dearest = max(dearest, (size, where)) if size else dearest
    return dearest


def _dearest_batch(slice: Slice) -> tuple[int, str]:
    """What the largest record batch of a slice takes when it is unpacked, and which it is; 0 without compression."""
    if is_address(slice.path):
        return 0, ""
    with pa.memory_map(slice.path) as source:
        sizes = enumerate(itertools.islice(batch_sizes(source), slice.start, slice.stop), slice.start)
        return max(((_BATCH_COPIES * size, f"record batch {k}") for k, size in sizes), default=(0, ""))


def _numbers(slice: Slice, count: int) -> range:
    return range(slice.start, count if slice.stop is None else slice.stop)


def _chunks(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> list[pq.ColumnChunkMetaData]:
    """The column chunks that hold these columns; with None all."""
    chunks = (group.column(k) for k in range(group.num_columns))
    return [one for one in chunks if columns is None or _is_in(one.path_in_schema, columns)]


def _is_in(path: str, columns: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in columns)


# ---- record batches ----


def table_batches(
    slice: Slice, choose: Choose, spool: str | None = None, room: Room | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(number of its first row in the file, record batch) of the chosen columns, through a slice.

    Raises InputError where the file is damaged, and ResourceError where `room` has none for a page.
    """
    read = _parquet_batches(slice, choose, spool, room) if slice.format == "parquet" else None
    with damage_told(slice.path, slice.format):
        yield from read if read is not None else _arrow_batches(slice, choose, spool)


def _parquet_batches(
    slice: Slice, choose: Choose, spool: str | None, room: Room | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    with open_seekable(slice.path, slice.compression, spool) as source:
        parquet = _open_parquet(source, slice.path)
        columns, metadata = choose(parquet.schema_arrow), parquet.metadata
        row = sum(metadata.row_group(k).num_rows for k in range(slice.start))
        for number in _numbers(slice, metadata.num_row_groups):
            group = metadata.row_group(number)
            if room is not None:
                _require_room(source, group, columns, Place(slice.path, row, row + group.num_rows - 1), room)
            rows = rows_at_a_time(group, columns)
            # Large texts that are stored once and repeated: each repetition takes its whole size.
            size = 1 if slice.unpacking and rows <= _REPEATED else rows
            batches = parquet.iter_batches(size, row_groups=[number], columns=columns, use_threads=False)
            for batch in batches:
                ready = [(row, _selected(batch, columns))]
                row += batch.num_rows
                del batch  # as all that leads to a large one: it must be gone when the next is unpacked
                yield ready.pop()


def _require_room(
    source: Any, group: pq.RowGroupMetaData, columns: Sequence[str] | None, place: Place, room: Room
) -> None:
    """Raise ResourceError when a page is so large that there is no room for it and for what is decoded of it.

    `place`: the rows of the group.
    """
    chunks = _chunks(group, columns)
    if room.fits((_ROW_COPIES + 1) * sum(chunk.total_uncompressed_size for chunk in chunks)):
        return
    # While a row is worked on, its page is still held.
    copies = _ROW_COPIES + (room.format != "arrow")
    weighed = [(*dearest_page(source, chunk, copies), chunk) for chunk in chunks]
    needed = sum(size for size, _, _ in weighed)
    if room.fits(needed):
        return
    _, page, chunk = max(weighed, key=lambda one: one[0])
    if page.values and chunk.num_values == group.num_rows:
        first = place.first + page.first
        place = replace(place, first=first, last=first + page.values - 1)
    raise room.refusal(needed, page.size, f'{place}, of "{chunk.path_in_schema}"', by_column=True)


def rows_at_a_time(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
    """So many rows that they decode to about two megabytes.

    Counted are the bytes on disk before compression, and the values, since a run of equal ones takes next to no bytes.
    Of texts that are stored once and repeated neither tells the size: few at a time, then.
    """
    count = max(1, group.num_rows)
    per_row, fewest = 1.0, float(_ROWS)
    for chunk in _chunks(group, columns):
        per_row += max(chunk.total_uncompressed_size, _NUMBER * chunk.num_values) / count
        if chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY":
            fewest = min(fewest, _REPEATED * count / max(count, chunk.num_values))
    return int(max(1, min(fewest, BATCH_BYTES / per_row)))


def _arrow_batches(slice: Slice, choose: Choose, spool: str | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches before the slice are passed over; mapped, they are not read."""
    with open_arrow(slice.path, slice.compression, spool) as reader:
        columns, row = choose(reader.schema), 0
        count = getattr(reader, "num_record_batches", None)
        batches = iter(reader) if count is None else map(reader.get_batch, range(count))
        for number, batch in enumerate(itertools.islice(batches, slice.stop)):
            ready = [_selected(batch, columns)] if number >= slice.start else []
            first, row = row, row + batch.num_rows
            del batch
            if ready:
                ready[0].validate()
                yield first, ready.pop()


def _selected(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    if columns is None or set(columns) <= set(batch.schema.names):
        return batch if columns is None else batch.select(list(columns))
    return pa.record_batch([_leaf(batch, name.split(".")) for name in columns], names=list(columns))


def _leaf(batch: pa.RecordBatch, path: list[str]) -> pa.Array:
    column = batch.column(path[0])
    return pc.struct_field(column, path[1:]) if path[1:] else column


def count_rows(slice: Slice, spool: str | None) -> int:
    """Rows of a slice, without reading them."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            groups = _numbers(slice, parquet.metadata.num_row_groups)
            return sum(parquet.metadata.row_group(k).num_rows for k in groups)
    return sum(batch.num_rows for _, batch in table_batches(slice, lambda schema: None, spool))


def row_count(slice: Slice) -> int | None:
    """Rows of a slice, where its file tells them without being read through."""
    return count_rows(slice, None) if slice.format == "parquet" and slice.compression is None else None


# ---- schemas ----


def open_schema(slice: Slice, spool: str | None) -> pa.Schema:
    """The schema of a parquet or Arrow file."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            return parquet.schema_arrow
    with open_arrow(slice.path, slice.compression, spool) as reader:
        return reader.schema


def text_columns(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Dotted names and types of all fields that hold text."""
    for field in schema:
        yield from _text_fields(field.name, field.type)


def _text_fields(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if value in AS_BYTES or pa.types.is_string_view(value) or holds_bytes(kind):
        yield name, kind
    elif pa.types.is_struct(kind):
        for inner in kind:
            yield from _text_fields(f"{name}.{inner.name}", inner.type)


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column is of bytes, which may be text or anything else."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(value) or pa.types.is_large_binary(value))


def column_sizes(slice: Slice, spool: str | None) -> dict[str, int]:
    """About how many bytes each column has at the beginning of a parquet or Arrow file."""
    if slice.format == "parquet":
        with open_parquet(slice.path, slice.compression, spool) as parquet:
            groups = [parquet.metadata.row_group(0)] if parquet.num_row_groups else []
            return {
                chunk.path_in_schema: chunk.total_uncompressed_size for one in groups for chunk in _chunks(one, None)
            }
    head = [batch for _, batch in table_batches(replace(slice, stop=1), lambda _: None, spool)]
    first = pa.Table.from_batches(head or [pa.record_batch({})])
    while any(pa.types.is_struct(field.type) for field in first.schema):
        first = first.flatten()
    return {name: first.column(k).nbytes for k, name in enumerate(first.column_names)}
