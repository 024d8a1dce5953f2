"""Parquet: rows of `input_ids` in `part-00000.parquet` ..., zstd, row groups of about a million tokens.

Always a folder, also for a small store; of several splits a folder for each, which `datasets.load_dataset` takes for
splits. pyarrow, DuckDB, Polars, Spark and `load_dataset("parquet", data_dir=...)` read it. `shard_size` counts the
tokens before compression. Read: the column of any Parquet file, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from milldam.files import NewFile
from milldam.formats import rows
from milldam.formats.columns import read_column
from milldam.formats.finding import ReadRules, SourceFile
from milldam.formats.hf import OFFSET_BYTES, batches, schema_of
from milldam.formats.rows import RowFormat, Rows
from milldam.formats.writing import OutputFile
from milldam.stores.tokens.writer import Tokens

SUFFIXES = (".parquet", ".pq")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, (*rows.OPTIONS, "side"), rows.DTYPES


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    return read_column(source, rules, "parquet")


def _write_row_groups(new: NewFile, rows: Rows, file: OutputFile) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(new, schema_of(rows), compression="zstd") as writer:
        for batch in batches(rows, file):
            # A row group for each: nothing is held from one to the next.
            writer.write_batch(batch, row_group_size=max(1, batch.num_rows))


_ROWS = RowFormat("part-{:05d}.parquet".format, OFFSET_BYTES, _write_row_groups, masked=True)
files, write_file = _ROWS.files, _ROWS.write_file
