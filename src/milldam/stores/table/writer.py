"""Batches of rows to one file: an Arrow IPC stream, of record batches of about 4 MB, as `datasets` maps it too.

Holds at most one such batch besides what it is given. The bytes follow from the batches alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.files import NewFile
from milldam.stores.kinds import shard_name
from milldam.stores.table.manifest import TableShard

BATCH_BYTES = 4 << 20
ROWS, ENDING = "rows", ".arrow"


class TableShardWriter:
    """Use it as a context manager; left without a commit, nothing stays. No file is made before the first row."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder, self._schema = folder, schema
        self._file: NewFile | None = None
        self._writer: Any = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self.rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self.rows += batch.num_rows
        if batch.nbytes >= BATCH_BYTES:
            self._flush()
            self._write(batch)
            return
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
            self._waiting, self._waiting_bytes = [], 0
            for batch in table.to_batches():
                self._write(batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        """In halves while it is too large: a reader of one row need not map more than about 4 MB."""
        if batch.num_rows > 1 and batch.nbytes > 2 * BATCH_BYTES:
            middle = batch.num_rows // 2
            self._write(batch.slice(0, middle))
            self._write(batch.slice(middle))
            return
        if self._writer is None:
            self._file = NewFile(self._folder / f"{ROWS}{ENDING}")
            self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)
        self._writer.write_batch(batch)

    def commit(self) -> TableShard | None:
        """Make it durable under its name; None when there are no rows."""
        self._flush()
        if self._file is None:
            return None
        self._writer.close()
        name = shard_name(ROWS, self._file.record) + ENDING
        record = self._file.commit(name)
        return TableShard(name, self.rows, record["bytes"], record["xxh3"])

    def __enter__(self) -> TableShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()
