"""Parquet and Arrow files -> record batches of the wanted columns, about two megabytes at a time.

Parquet is read page by page, row group after row group; a page is unpacked whole, and about what that takes is
estimated beforehand (`Slice.unpacking`). Arrow files are mapped.

Texts are those of one column; a larger one than a batch comes alone, as a larger row. What is no UTF-8 is mended or
rejected by the rules, with its row. A damaged file may hold offsets that lead anywhere: they are looked at before they
are followed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milldam.errors import InputError
from milldam.input_files import is_address
from milldam.sources.arrays import BATCH_BYTES, Int64s, checked_text, decode_text
from milldam.sources.batch import (
    TOO_LARGE,
    Batch,
    Reading,
    Reject,
    TextRules,
    no_such_column,
    require_columns,
    too_large,
)
from milldam.sources.compression import DamagedError, open_bytes
from milldam.sources.rows import cut_by_size, row_sizes
from milldam.sources.units import InputFile, Slice, by_parts, whole
from milldam.text.arrays import text_offsets

FORMATS = {"parquet": "parquet", "arrow": "Arrow"}
Choose = Callable[[pa.Schema], Sequence[str] | None]
"""Of the columns that are there, those to read; None: all. Dots reach into structs. Raises InputError."""
Numbered = tuple[int, pa.RecordBatch]
_BUFFER = 1 << 20
_ROWS, _REPEATED = 8192, 32
_NUMBER = 8
_FIRST_VALUES = 100
_SMALL_PAGE, _PAGE_VALUES, _PAGE_COPIES = 4 << 20, 1024, 3
"""Pages up to this size are unpacked in the memory that every batch may take. Of others Arrow holds so many copies; it
writes pages of so many values, whatever their size."""
AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
"""The types of strings, and what their bytes are as."""
_REPLACED = TextRules(invalid_utf8="replace")


# ---- opening ----


@contextmanager
def _damage_explained(format: str) -> Iterator[None]:
    """What Arrow finds wrong, as damage of the input."""
    try:
        yield
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, not Arrow's
        reason = str(error).splitlines()[0][:160]
        raise DamagedError("damaged_table", f"not a whole {FORMATS[format]} file ({reason})") from None


@contextmanager
def _open_table(file: Slice | InputFile) -> Iterator[Any]:
    """A `ParquetFile`; of Arrow a reader of the file format, or of the stream format that HF datasets writes."""
    if file.compression is not None:
        raise InputError(f"{file.path}: a {FORMATS[file.format]} file compressed as a whole can't be read. Unpack it.")
    remote = is_address(file.path)
    with open_bytes(file.path) if remote else pa.memory_map(file.path) as opened:
        source = pa.PythonFile(opened, mode="r") if remote else opened
        with _damage_explained(file.format):
            if file.format == "parquet":
                reader = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER)
            else:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        yield reader


# ---- slices, and what unpacking them takes ----


def slice_table(file: InputFile, shard_size: int, column: str | None = None) -> Iterator[Slice]:
    """Runs of row groups, or of the record batches of a large local file; of a damaged file, all of it. `column`: the
    one that will be read."""
    slices = [whole(file)]
    with contextlib.suppress(DamagedError), _open_table(file) as reader, _damage_explained(file.format):
        if file.format == "parquet":
            groups = map(reader.metadata.row_group, range(reader.num_row_groups))
            cut = by_parts(file, (group.total_byte_size for group in groups), shard_size)
            slices = [replace(slice, unpacking=_unpacking_bytes(slice, reader.metadata, column)) for slice in cut]
        elif file.size > shard_size and not is_address(file.path):
            # Mapped: only what describes the batches is read.
            slices = list(by_parts(file, (batch.nbytes for batch in _record_batches(reader)), shard_size))
    yield from slices


def _record_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Of the file format, or of the stream format, whose batches are known only by reading through it."""
    count = getattr(reader, "num_record_batches", None)
    return iter(reader) if count is None else map(reader.get_batch, range(count))


def _unpacking_bytes(slice: Slice, metadata: pq.FileMetaData, column: str | None) -> int:
    """About what a column's largest page takes while it is unpacked; 0 for what goes as a batch does."""
    if column is None:
        return 0
    groups = map(metadata.row_group, _numbers(slice, metadata.num_row_groups))
    chunks = (chunk for group in groups for chunk in _chunks(group, (column,)))
    pages = (chunk.total_uncompressed_size * min(1, _PAGE_VALUES / max(1, chunk.num_values)) for chunk in chunks)
    largest = int(max(pages, default=0))
    return _PAGE_COPIES * largest if largest > _SMALL_PAGE else 0


def _numbers(slice: Slice, count: int) -> range:
    return range(slice.start, count if slice.stop is None else slice.stop)


# ---- record batches ----


def table_batches(slice: Slice, choose: Choose, keep: tuple[str, ...] = ()) -> Iterator[Numbered]:
    """(number of its first row in the file, record batch) of the chosen columns, through a slice. `keep`: columns to
    read as well, where they are there; how much comes at a time does not depend on them.

    Raises DamagedError where the file is damaged.
    """
    with _damage_explained(slice.format), _open_table(slice) as reader:
        schema = reader.schema_arrow if slice.format == "parquet" else reader.schema
        columns, wanted = choose(schema), None
        if columns is not None:
            there = {*schema.names, *leaf_types(schema)}
            wanted = [*columns, *(name for name in keep if name in there and name not in columns)]
        if slice.format == "parquet":
            metadata = reader.metadata
            row = sum(metadata.row_group(k).num_rows for k in range(slice.start))
            for number in _numbers(slice, metadata.num_row_groups):
                rows = _rows_at_a_time(metadata.row_group(number), columns)
                # Large texts that are stored once and repeated: each repetition takes its whole size.
                size = 1 if slice.unpacking and rows <= _REPEATED else rows
                for batch in reader.iter_batches(size, row_groups=[number], columns=wanted, use_threads=False):
                    yield row, _selected(batch, wanted)
                    row += batch.num_rows
            return
        row = 0
        for number, batch in enumerate(itertools.islice(_record_batches(reader), slice.stop)):
            if number >= slice.start:  # those before are passed over; mapped, they are not read
                some = _selected(batch, wanted)
                some.validate()
                yield row, some
            row += batch.num_rows


def _rows_at_a_time(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
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


def _chunks(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> list[pq.ColumnChunkMetaData]:
    """The column chunks that hold these columns; with None all."""
    chunks = (group.column(k) for k in range(group.num_columns))
    within = [] if columns is None else [f"{name}." for name in columns]
    return [one for one in chunks if columns is None or f"{one.path_in_schema}.".startswith(tuple(within))]


def _selected(batch: pa.RecordBatch, names: list[str] | None) -> pa.RecordBatch:
    """Columns by their names, or by dots into structs."""
    if names is None or set(names) <= set(batch.schema.names):
        return batch if names is None else batch.select(names)
    columns = []
    for name in names:
        first, *path = [name] if name in batch.schema.names else name.split(".")
        columns.append(pc.struct_field(batch.column(first), path) if path else batch.column(first))
    return pa.record_batch(columns, names=names)


def count_rows(slice: Slice) -> int:
    """Rows of a slice, without reading them; where it is damaged, those before."""
    count = 0
    with contextlib.suppress(DamagedError), _open_table(slice) as reader, _damage_explained(slice.format):
        if slice.format == "parquet":
            return sum(reader.metadata.row_group(k).num_rows for k in _numbers(slice, reader.num_row_groups))
        for batch in itertools.islice(_record_batches(reader), slice.start, slice.stop):
            count += batch.num_rows
    return count


# ---- schemas ----


def open_schema(slice: Slice) -> pa.Schema:
    """The schema of a parquet or Arrow file."""
    with _open_table(slice) as reader:
        schema: pa.Schema = reader.schema_arrow if slice.format == "parquet" else reader.schema
        return schema


def columns_of(slice: Slice) -> list[str]:
    return list(open_schema(slice).names)


def leaf_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Dotted names and types of all columns, structs opened; of what is encoded by a dictionary, the type of its
    values."""
    types: dict[str, pa.DataType] = {}
    fields = list(schema)
    while fields:
        field = fields.pop(0)
        if pa.types.is_struct(field.type):
            fields[:0] = [inner.with_name(f"{field.name}.{inner.name}") for inner in field.type]
        else:
            types[field.name] = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return types


def text_columns(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Those that hold text, or bytes, which may be text."""
    types = leaf_types(schema).items()
    return {
        name: kind for name, kind in types if kind in AS_BYTES or pa.types.is_string_view(kind) or holds_bytes(kind)
    }


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column is of bytes, which may be text or anything else."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def head_values(slice: Slice, names: list[str]) -> pa.RecordBatch:
    """The first values of some columns, without dictionaries, in which what is no UTF-8 is U+FFFD."""
    for _, batch in table_batches(slice, lambda _: names) if names else ():
        columns = _plain(batch.slice(0, _FIRST_VALUES)).columns
        return pa.record_batch([_mended(column, _REPLACED)[0] for column in columns], names=names)
    return pa.record_batch({})


def _plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Without dictionaries, which differ from batch to batch."""
    if not any(map(pa.types.is_dictionary, rows.schema.types)):
        return rows
    columns = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in rows.columns]
    return pa.record_batch(columns, names=rows.schema.names)


# ---- texts ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column, and the columns that are kept. Nulls, and what is no UTF-8, are rejected with their
    rows."""
    wanted, keep = str(reading.rules.text_column), reading.keep

    def choose(schema: pa.Schema) -> list[str]:
        if wanted not in (there := text_columns(schema)):
            raise no_such_column(slice.path, wanted, there)
        return [wanted]

    with _rejecting_damage(slice, reading):
        for row, batch in _gathered(table_batches(slice, choose, keep)):
            # A string column is not checked by its reader: as bytes, what is no UTF-8 is found here.
            if pa.types.is_dictionary(batch.column(0).type):
                sizes = row_sizes(batch.select([0]))
            else:
                raw = batch.column(0).cast(pa.large_binary())
                batch, sizes = batch.set_column(0, wanted, raw), np.diff(text_offsets(raw))
            for part in cut_by_size(batch, BATCH_BYTES, sizes):
                assert isinstance(part, pa.RecordBatch)
                make_reject = partial(_make_reject, slice, row)
                texts, places = checked_text(part.column(0).cast(pa.large_binary()), reading, make_reject)
                columns = None
                if keep:
                    beside = dict(zip(part.schema.names, _plain(part).columns, strict=True))
                    nulls = pa.nulls(part.num_rows)
                    kept = [_mended(beside.get(name, nulls), _REPLACED)[0] for name in keep]
                    columns = pa.record_batch(kept, names=list(keep)).take(pa.array(places))
                yield Batch(texts, bytes_read=part.column(0).nbytes, columns=columns, origins=row + places)
                row += part.num_rows


def _make_reject(slice: Slice, row: int, position: int, reason: str, detail: str, raw: bytes) -> Reject:
    return Reject(slice.path, reason, detail, raw.decode("utf-8", "backslashreplace"), row=row + position)


@contextmanager
def _rejecting_damage(slice: Slice, reading: Reading) -> Iterator[None]:
    """What comes behind the damage is set aside as one reject."""
    try:
        with _damage_explained(slice.format):
            yield
    except DamagedError as error:
        if reading.rules.only_file:
            raise InputError(f"{reading.name(slice.path)}: {error}. Get or make it again.") from None
        reading.reject(Reject(slice.path, error.reason, str(error), damaged=True))


def _gathered(batches: Iterator[Numbered]) -> Iterator[Numbered]:
    """Small batches put together, by the size of their texts. Where the file is damaged, what is before comes first."""
    held, first, size, damage = list[pa.RecordBatch](), 0, 0, None
    try:
        for row, batch in batches:
            _as_bytes(batch.column(0)).validate(full=True)
            first = first if held else row
            held.append(batch)
            size += batch.column(0).nbytes
            if size >= BATCH_BYTES // 2:
                yield first, pa.concat_batches(held) if len(held) > 1 else batch
                held, size = [], 0
    except (DamagedError, pa.ArrowInvalid) as error:
        damage = error
    if held:
        yield first, pa.concat_batches(held)
    if damage is not None:
        raise damage


def _as_bytes(column: pa.Array) -> pa.Array:
    """Byte strings for strings, so that all but UTF-8 can be checked."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _as_bytes(column.dictionary), safe=False)
    return column.view(AS_BYTES[column.type]) if column.type in AS_BYTES else column


def _mended(column: pa.Array, rules: TextRules) -> tuple[pa.Array, dict[int, str]]:
    """A column that is valid UTF-8 by the rules, null in the rows that can't be; and what is wrong with those."""
    if _is_valid(column):
        return column, {}
    if pa.types.is_nested(column.type):
        column.validate()
        sound = [_is_valid(column.take(pa.array([number]))) for number in range(len(column))]
        wrong = {number: "a nested string is not UTF-8" for number, is_sound in enumerate(sound) if not is_sound}
        return column.take(pa.array([number if is_sound else None for number, is_sound in enumerate(sound)])), wrong
    raw = _as_bytes(column)
    raw.validate(full=True)
    decoded = [(None, "") if one is None else decode_text(one, rules) for one in raw.to_pylist()]
    texts = pa.array([text for text, _ in decoded], column.type)
    return texts, {number: problem for number, (_, problem) in enumerate(decoded) if problem}


def _is_valid(rows: pa.RecordBatch | pa.Array) -> bool:
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Record batches as they are; nulls stay nulls. Rows that are too large are rejected; those with a string that is
    no UTF-8 are mended or rejected."""
    most = reading.rules.max_document_bytes

    def choose(schema: pa.Schema) -> Sequence[str] | None:
        require_columns(reading.columns, schema.names, slice.path)
        return reading.columns

    with _rejecting_damage(slice, reading):
        for row, batch in table_batches(slice, choose):
            for dictionary in (one for one in batch.columns if pa.types.is_dictionary(one.type)):
                _as_bytes(dictionary).validate(full=True)
            rows, wrong = _plain(batch), dict[int, tuple[str, str]]()
            if not _is_valid(rows):
                mended = [_mended(column, reading.rules) for column in rows.columns]
                rows = pa.record_batch([column for column, _ in mended], names=rows.schema.names)
                wrong = {at: ("not_utf8", problem) for _, problems in mended for at, problem in problems.items()}
            if rows.nbytes > most:
                sizes = row_sizes(rows)
                large = np.flatnonzero(sizes > most).tolist()
                wrong |= {at: (TOO_LARGE, too_large(int(sizes[at]), most)) for at in large}
            for at in sorted(wrong):
                reading.reject(Reject(slice.path, *wrong[at], row=row + at))
            numbers = np.setdiff1d(np.arange(rows.num_rows), list(wrong))
            rows = rows.take(pa.array(numbers)) if wrong else rows
            first = 0
            for part in cut_by_size(rows, BATCH_BYTES):
                assert isinstance(part, pa.RecordBatch)
                yield part, row + numbers[first : first + part.num_rows]
                first += part.num_rows
