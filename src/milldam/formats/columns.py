"""A column of token ids in Arrow: what hf and parquet have in common. No Python object for any token.

Written as `input_ids`, a plain list of integers; read by its name, a document a row. Other columns are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.formats.documents import ReadRules, SourceFile, choose_column
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import cut_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.formats.rows import FileRows

COLUMN = "input_ids"
OFFSET_BYTES = 4
"""What a row takes besides its tokens."""


def schema(dtype: np.dtype[Any]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])


def batches(rows: FileRows) -> Iterator[pa.RecordBatch]:
    """About a million tokens each, or one row that has more."""
    import pyarrow as pa

    form = schema(rows.dtype)
    for start, lengths in rows.blocks():
        # offsets: (rows + 1,)
        offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
        tokens = pa.array(rows.tokens(start, int(offsets[-1])))
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), tokens)
        yield pa.record_batch([lists], schema=form)


def read_column(source: SourceFile, rules: ReadRules, format: str) -> Iterator[Tokens]:
    """The column of token ids of a parquet or Arrow file, a few megabytes at a time."""
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    def choose(schema: pa.Schema) -> list[str]:
        return [choose_column(schema.names, rules.column, source.path)]

    for _, batch in table_batches(Slice(str(source.path), format, None), choose):
        yield from _tokens_of(batch.column(0), source.path)


def _tokens_of(column: pa.Array, path: Path) -> Iterator[Tokens]:
    """The rows of a column of lists, in blocks."""
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        told = f"{path}: the column is {kind}; a list of integers is wanted. Say which with "
        raise InputError(told, Setting("column"), ".")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{path}: the column has nulls, which are no tokens. Drop these rows first.")
    flat = values.to_numpy(zero_copy_only=False)
    lengths: Int64s = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
    begins = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    for first, stop in cut_blocks(lengths):
        yield Tokens(flat[begins[first] : begins[stop]], lengths[first:stop])
