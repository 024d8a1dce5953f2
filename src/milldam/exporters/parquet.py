"""Rows of `input_ids` as Parquet: `part-00000.parquet` ..., zstd, row groups of about a million tokens.

Always a folder, also for a small store; of several splits a folder for each, which `datasets.load_dataset` takes for
splits. pyarrow, DuckDB, Polars, Spark and `load_dataset("parquet", data_dir=...)` read it. `shard_size` counts the
tokens before compression.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.exporters.arrow_rows import DTYPES, ROW_BYTES, batches, schema
from milldam.exporters.job import Export, Options
from milldam.exporters.rows import FileRows, Part, check_rows, write_rows
from milldam.files import FileSink, NewFile

if TYPE_CHECKING:
    from milldam.loader.stores import Store

NAME, KIND, ALL_SPLITS = "parquet", "folder", True
OPTIONS = ("seq_len", "dtype", "shard_size")


def check(store: Store, out: Path, options: Options) -> None:
    check_rows(store, options, DTYPES, NAME)


def write(export: Export) -> dict[str, Any]:
    return write_rows(export, _Parquet())


class _Parquet:
    row_bytes, file_bytes = ROW_BYTES, None

    def file_name(self, number: int, files: int) -> str:
        return f"part-{number:05d}.parquet"

    def write_file(self, new: NewFile, rows: FileRows) -> None:
        import pyarrow.parquet as pq

        form = schema(rows.part.dtype)
        with pq.ParquetWriter(FileSink(new), form, compression="zstd") as writer:
            for batch in batches(rows):
                # A row group for each: nothing is held from one to the next.
                writer.write_batch(batch, row_group_size=max(1, batch.num_rows))

    def write_index(self, part: Part, made: list[dict[str, Any]]) -> None:
        """A Parquet file says all about itself."""
