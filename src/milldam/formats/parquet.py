"""Parquet: rows of `input_ids` in `part-00000.parquet` ..., zstd, row groups of about a million tokens.

Of conversations also columns for what is trained on.

Always a folder, also for a small store; of several splits a folder for each, which `datasets.load_dataset` takes for
splits. pyarrow, DuckDB, Polars, Spark and `load_dataset("parquet", data_dir=...)` read it. `shard_size` counts the
tokens before compression. Read: the column of any Parquet file, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from milldam.files import FileSink, NewFile
from milldam.formats import rows
from milldam.formats.columns import OFFSET_BYTES, batches, read_column, schema
from milldam.formats.finding import ReadRules, SourceFile
from milldam.formats.rows import FileRows, RowFormat
from milldam.stores.tokens.writer import Tokens

SUFFIXES = (".parquet", ".pq")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, (*rows.OPTIONS, "side"), rows.DTYPES


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    return read_column(source, rules, "parquet")


def _write_row_groups(new: NewFile, rows: FileRows) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(FileSink(new), schema(rows), compression="zstd") as writer:
        for batch in batches(rows):
            # A row group for each: nothing is held from one to the next.
            writer.write_batch(batch, row_group_size=max(1, batch.num_rows))


_ROWS = RowFormat(lambda number, files: f"part-{number:05d}.parquet", OFFSET_BYTES, _write_row_groups, masked=True)
files, write_file = _ROWS.files, _ROWS.write_file
