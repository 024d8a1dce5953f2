"""The finished units of a table in its run folder: what is recorded of them, what is reused, what goes in the end.

records.jsonl   a line per finished unit, by key (run/records.py)
rejects-*.jsonl the records of a unit that were set aside
rows/           what could be read only once, hashes of large files, row numbers of a dataset

Batches of rows to one file: an Arrow IPC stream, of record batches of about 4 MB, as `datasets` maps it too.

Holds at most one such batch besides what it is given. The bytes follow from the batches alone.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from milldam.files import FileSink, NewFile, record_of, seal_line
from milldam.mapping.file_rows import can_be_checked
from milldam.mapping.memory_gate import remove_gates
from milldam.mapping.plan import HASHES, RowUnit, indices_name
from milldam.run.folder import RUN_FOLDER, RunFolder
from milldam.run.records import Files, Record, Records, sweep
from milldam.stores.kinds import TABLE, live_files, shard_name
from milldam.stores.table.manifest import NAME, MadeUnit, TableManifest, TableShard

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
            self._writer = pa.ipc.new_stream(pa.PythonFile(FileSink(self._file), mode="w"), self._schema)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)


RECORDS, SPOOL = "records.jsonl", "rows"


def recorded(unit: MadeUnit, files: Files) -> Record:
    """What the frame keeps of a finished unit. `files`: its rejects."""
    shard = unit.shard
    outputs = {} if shard is None else {shard.name: {"bytes": shard.bytes, "xxh3": shard.xxh3}}
    facts = {"read": unit.read, "rejected": unit.rejected}
    return Record(unit.key, outputs=outputs, files=files, counts={"rows": unit.rows}, facts=facts)


def made_of(record: Record) -> MadeUnit:
    """The unit again, for the manifest."""
    shards = [TableShard(name, record.counts["rows"], **file) for name, file in record.outputs.items()]
    return MadeUnit(record.key, record.facts["read"], next(iter(shards), None), record.facts["rejected"])


def rejects_name(key: str) -> str:
    """Where the rejects of a unit are, below the output folder."""
    return f"{RUN_FOLDER}/rejects-{key}.jsonl"


def records_of(folder: RunFolder, recipe: str, *, anew: bool) -> Records:
    """What is done, by keys of what a unit reads and of the recipe, all else that rows depend on. `anew`: nothing."""
    if anew:
        folder.journal.close()
        for path in folder.journal.paths(RECORDS):
            path.unlink()
    keys = folder.units.keys()
    mixed = keys.mixed(np.full(len(keys), xxh3_64_intdigest(recipe.encode()), np.uint64))
    records = Records(folder.journal, RECORDS, folder.out, mixed)
    if not anew and (folder.out / NAME).exists():
        # Units of the finished table whose records a run with another function has dropped meanwhile.
        for unit in TableManifest.read(folder.out).units:
            rejects = records.out / rejects_name(unit.key)
            if records.keys.number_of(unit.key) is not None and (not unit.rejected or rejects.exists()):
                record = recorded(unit, {rejects_name(unit.key): record_of(rejects)} if unit.rejected else {})
                if records.holds(record):
                    records.add(record)
    return records


def forget_unchecked(folder: RunFolder, records: Records, made: Iterable[int]) -> None:
    """Drop the records of units that this session made and that may have read something else than their keys say."""
    units = ((number, folder.units.at(number, RowUnit.from_json)) for number in made)
    dropped = {records.keys[number] for number, unit in units if not can_be_checked(unit)}
    stands = [record for record in records.all() if record.key not in dropped]
    folder.journal.close()
    with NewFile(folder.journal.path(RECORDS)) as new:
        for record in stands:
            new.write(seal_line(record.as_json()))
        new.commit()


def clear_up(folder: RunFolder, table: TableManifest) -> None:
    """Remove what a finished table, or one that somebody has open, no longer needs. What a run with another function
    needs again stays: hashes of large files, and row numbers of the dataset."""
    folder.tidy()
    sweep(folder.out, [f"{ROWS}-*{ENDING}"], live_files(folder.out, TABLE))
    rejects = (Path(rejects_name(unit.key)).name for unit in table.units if unit.rejected)
    sweep(folder.folder, ["rejects-*.jsonl"], rejects)
    remove_gates(folder.folder)
    folder.units.remove()  # it may hold addresses with secrets
    spool, kept = folder.folder / SPOOL, {HASHES, indices_name(table.input["fingerprint"])}
    for path in spool.glob("*"):
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        spool.rmdir()
