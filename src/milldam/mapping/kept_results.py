"""What the probe's calls returned, for a run that goes on in the same process: it is called on no batch twice.

In a file of the run folder that has no name: nothing of it is left, however the process ends. In memory: an offset a
batch, and one batch's results when they are taken.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict, deque
from pathlib import Path

import pyarrow as pa

from milldam.files import explain_os_errors
from milldam.mapping.calling import Results
from milldam.sources.rows import Rows, take


class KeptResults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with explain_os_errors(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._offsets: defaultdict[int, deque[int]] = defaultdict(deque)
        """Unit -> where the results of its batches begin, in order."""

    def close(self) -> None:
        self._file.close()

    def add(self, unit: int, results: Results) -> None:
        """Of the next batch of a unit; its columns are Arrow arrays."""
        self._offsets[unit].append(self._file.tell())
        failed = [(number, said) for number, _, said in results.failed]
        with explain_os_errors(self._folder):
            self._file.write(json.dumps([len(results.columns), failed]).encode() + b"\n")
            for columns in results.columns:
                batch = pa.record_batch(list(columns.values()), names=list(columns))
                with pa.ipc.new_stream(self._file, batch.schema) as stream:
                    stream.write_batch(batch)

    def take(self, unit: int, rows: Rows) -> Results | None:
        """What the function made of these rows, the next batch of a unit; None: it was not called on them."""
        if not self._offsets[unit]:
            return None
        self._file.seek(self._offsets[unit].popleft())
        count, failed = json.loads(self._file.readline())
        columns = []
        for _ in range(count):
            batch = pa.ipc.open_stream(self._file).read_all()
            columns.append({name: batch.column(name) for name in batch.schema.names})
        return Results(columns, [(number, take(rows, number, number + 1), said) for number, said in failed])
