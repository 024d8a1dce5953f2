"""A column of token ids in Arrow and Parquet files -> blocks of tokens, a document a row. Other columns are not read.

Arrow files are mapped, batch after batch; of Parquet a row group's column at a time is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError
from milldam.importers.pieces import Piece, ReadRules
from milldam.stores.tokens.blocks import cut_blocks
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

USUAL_COLUMNS = ("input_ids", "tokens", "token_ids", "ids")
_ROWS = 1000


def read(piece: Piece, rules: ReadRules) -> Iterator[Tokens]:
    import pyarrow as pa

    batches = _parquet if piece.kind == "parquet" else _arrow
    try:
        for column in batches(piece.path, rules.column):
            yield from _tokens(column, piece.path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{piece.path}: can't be read ({error}).") from None


def _parquet(path: Path, asked: str | None) -> Iterator[pa.Array]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        name = choose_column(file.schema_arrow.names, asked, path)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[name], use_threads=False):
            yield batch.column(0)


def _arrow(path: Path, asked: str | None) -> Iterator[pa.Array]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        is_file = bytes(source.read(6)) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            batches: Any = (reader.get_batch(k) for k in range(reader.num_record_batches))
        else:
            reader = batches = pa.ipc.open_stream(source)
        name = choose_column(reader.schema.names, asked, path)
        for batch in batches:
            yield batch.column(batch.schema.get_field_index(name))


def choose_column(names: list[str], asked: str | None, path: Path) -> str:
    """The column that was asked for, one by its usual name, or the only one."""
    usual = [name for name in USUAL_COLUMNS if name in names]
    found = asked if asked is not None else usual[0] if usual else names[0] if len(names) == 1 else None
    if found is None or found not in names:
        what = f'no column "{asked}"' if asked is not None else "no column of a usual name"
        raise InputError(f"{path}: {what}; it has {', '.join(names)}. Say which one holds the ids with --column.")
    return found


def _tokens(column: pa.Array, path: Path) -> Iterator[Tokens]:
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise InputError(f"{path}: the column is {kind}; a list of integers is wanted. Say which with --column.")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{path}: the column has nulls, which are no tokens. Drop these rows first.")
    flat = values.to_numpy(zero_copy_only=False)
    lengths: Int64s = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
    begins = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    for first, stop in cut_blocks(lengths):
        yield Tokens(flat[begins[first] : begins[stop]], lengths[first:stop])
