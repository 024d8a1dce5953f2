"""Parquet: rows of `input_ids` in `part-00000.parquet` ..., zstd, row groups of about a million tokens.

Always a folder, also for a small store; of several splits a folder for each, which `datasets.load_dataset` takes for
splits. pyarrow, DuckDB, Polars, Spark and `load_dataset("parquet", data_dir=...)` read it. `shard_size` counts the
tokens before compression. Read: the column of any Parquet file, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from milldam.files import FileSink, NewFile
from milldam.formats import rows
from milldam.formats.columns import OFFSET_BYTES, batches, explain_arrow_errors, schema, tokens_of
from milldam.formats.reading import ReadRules, SourceFile, choose_column
from milldam.formats.rows import FileRows, RowFormat, write_rows
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.formats.exporting import Export

SUFFIXES = (".parquet", ".pq")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, rows.OPTIONS, rows.DTYPES
_ROWS_READ = 1000


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    import pyarrow.parquet as pq

    with explain_arrow_errors(source.path), pq.ParquetFile(source.path, memory_map=True, pre_buffer=False) as file:
        name = choose_column(file.schema_arrow.names, rules.column, source.path)
        for batch in file.iter_batches(batch_size=_ROWS_READ, columns=[name], use_threads=False):
            yield from tokens_of(batch.column(0), source.path)


def write(export: Export) -> dict[str, Any]:
    # A Parquet file says all about itself: there is no index.
    form = RowFormat(
        lambda number, files: f"part-{number:05d}.parquet", _write_file, lambda part, made: None, row_bytes=OFFSET_BYTES
    )
    return write_rows(export, form)


def _write_file(new: NewFile, rows: FileRows) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(FileSink(new), schema(rows.part.dtype), compression="zstd") as writer:
        for batch in batches(rows):
            # A row group for each: nothing is held from one to the next.
            writer.write_batch(batch, row_group_size=max(1, batch.num_rows))
