"""Batches of rows to one file: an Arrow IPC stream, of record batches of about 4 MB, as `datasets` maps it too.

Holds at most one such batch besides what it is given. The bytes follow from the batches alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.files import NewFile
from milldam.stores.kinds import commit_shard
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
        self._waiting_bytes = self.rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self.rows += batch.num_rows
        if batch.nbytes >= BATCH_BYTES:  # by itself: it is not copied
            self._flush()
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what waits as one batch; in halves while it is too large: a reader of one row need not map more than
        about 4 MB."""
        table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        left = table.to_batches()[::-1]
        while left:
            batch = left.pop()
            if batch.num_rows > 1 and batch.nbytes > 2 * BATCH_BYTES:
                middle = batch.num_rows // 2
                left += [batch.slice(middle), batch.slice(0, middle)]
                continue
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
        name, records = commit_shard(ROWS, {"arrow": self._file})
        return TableShard(f"{name}{ENDING}", self.rows, **records["arrow"])

    def __enter__(self) -> TableShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()
