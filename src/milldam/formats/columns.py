"""A column of token ids in Arrow: what hf and parquet have in common. No Python object for any token.

Written as `input_ids`, a plain list of integers; read by its name, a document a row. Beside it stand the columns that
say what is trained on (`masks`); others are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.formats.documents import ReadRules, SourceFile, choose_column
from milldam.formats.masks import MaskedRows, choose_masks, spans_of, trained_of
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import cut_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.formats.rows import FileRows
    from milldam.formats.writing import Export
    from milldam.loader.stores import Store

COLUMN = "input_ids"
OFFSET_BYTES = 4
"""What a row takes besides its tokens."""


def column_types(export: Export, store: Store) -> dict[str, tuple[np.dtype[Any], bool]]:
    """Each column's dtype, and whether it holds lists."""
    if not store.has_spans:
        return {COLUMN: (export.dtype, True)}
    return MaskedRows(store, export.seq_len, export.dtype).types


def schema(rows: FileRows) -> pa.Schema:
    import pyarrow as pa

    types = column_types(rows.export, rows.store)
    kinds = {name: pa.from_numpy_dtype(dtype) for name, (dtype, _) in types.items()}
    return pa.schema([(name, pa.list_(kinds[name]) if lists else kinds[name]) for name, (_, lists) in types.items()])


def batches(rows: FileRows) -> Iterator[pa.RecordBatch]:
    """About a million tokens each, or one row that has more."""
    import pyarrow as pa

    form = schema(rows)
    if rows.store.has_spans:
        masked = MaskedRows(rows.store, rows.seq_len, rows.dtype)
        for columns in masked.blocks(rows.file.first, rows.file.rows, rows.lengths):
            yield pa.record_batch([_array(*columns[name]) for name in form.names], schema=form)
        return
    for start, lengths in rows.blocks():
        yield pa.record_batch([_array(rows.tokens(start, int(lengths.sum())), lengths)], schema=form)


def _array(values: Array, lengths: Int64s | None) -> pa.Array:
    """Values as lists of so many each; None: as they are."""
    import pyarrow as pa

    if lengths is None:
        return pa.array(values)
    # offsets: (rows + 1,)
    offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def read_column(source: SourceFile, rules: ReadRules, format: str) -> Iterator[Tokens]:
    """The column of token ids of a parquet or Arrow file, a few megabytes at a time."""
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    def choose(schema: pa.Schema) -> list[str]:
        found = choose_column(schema.names, rules.column, source.path)
        masks = choose_masks(schema, rules.masks, source.path)
        return [found] if masks is None else [found, masks]

    for _, batch in table_batches(Slice(str(source.path), format, None), choose):
        yield from _documents_of(batch, choose(batch.schema), source.path)


def _documents_of(batch: pa.RecordBatch, names: list[str], path: Path) -> Iterator[Tokens]:
    """The rows of a batch, in blocks, with what is trained on where a second column says it."""
    flat, lengths = _values(batch.column(names[0]), path)
    mask: Bools | None = None
    if len(names) > 1:
        values, of_each = _values(batch.column(names[1]), path, names[1])
        if not np.array_equal(of_each, lengths):
            raise InputError(f'{path}: "{names[1]}" has not as many values as "{names[0]}" has tokens in every row.')
        mask = trained_of(flat, values, names[1], path)
    begins = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    for first, stop in cut_blocks(lengths):
        here, own = slice(begins[first], begins[stop]), lengths[first:stop]
        yield Tokens(flat[here], own, spans=None if mask is None else spans_of(mask[here], own))


def _values(column: pa.Array, path: Path, name: str = "") -> tuple[Array, Int64s]:
    """The numbers of a column of lists end to end, and how many each row has."""
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        told = f"{path}: the column {name}is {kind}; a list of integers is wanted. Say which with "
        raise InputError(told, Setting("masks" if name else "column"), ".")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{path}: the column has nulls, which are no tokens. Drop these rows first.")
    flat = values.to_numpy(zero_copy_only=False)
    return flat, np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
