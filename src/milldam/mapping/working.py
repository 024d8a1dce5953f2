"""The function on its way to a worker; a unit there: its rows -> batches -> the function -> shards, and a record.

The user's function, its arguments and the reader of rows travel by cloudpickle, so that lambdas, closures and functions
of a script arrive too; a function that was named as `script.py:function` is loaded by its name again. Modules are
imported again in a worker, and some values lose a part of themselves when they are pickled: so the identity travels
too, and is checked on arrival.

Holds one batch: what is read, what the function gets and returns, and a record batch of about 4 MB that waits to be
written. The first batch of a worker shows what one takes, and so how many workers there are.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from milldam import memory
from milldam.errors import ConfigError, InputError, ResourceError, Setting
from milldam.mapping.function import Caller, Columns, FunctionError, ResultError, batches
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.rows import DatasetRows, FileRows
from milldam.mapping.schema import fit, joined, to_array, with_features
from milldam.mapping.settings import MapSettings
from milldam.mapping.table_job import unit_record
from milldam.memory import format_size, proportional_bytes, release, usage
from milldam.pipeline.rejects import RejectFile
from milldam.run.engine import Assigned, Make, Progress
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.sources.batch import Reject
from milldam.sources.rows import Places, byte_size, row_count, shown
from milldam.stores.table.manifest import TableSchema, TableShard
from milldam.stores.table.writer import TableShardWriter

FAILED = "function_failed"
_RELEASE_BYTES, _LOOK_SECONDS = 4 << 20, 0.1
"""Freed memory is given back, and the rest looked at, after so many bytes of input or so much time."""


# ---- the function on its way ----


@dataclass(frozen=True)
class MapLoad:
    """The function and all it needs; in another process it arrives as an `_Arrived`."""

    settings: MapSettings
    """Without the source."""
    reader: FileRows | DatasetRows
    out: Path
    schema: pa.Schema | None
    """The columns, if the user gave them."""
    source: pa.Schema | None
    """The columns of the source, if it names them."""
    limit_bytes: int
    """The budget."""
    is_away: bool = False
    """In another process than the program's."""

    def load(self) -> Make:
        worker = _Worker(self)
        return lambda assigned, progress: iter([worker.make(assigned, progress)])

    def __reduce__(self) -> tuple[Any, ...]:
        # As it is when it is sent: what a call in this process has left in a global is no edit of its code. A worker
        # does not look into the current folder by itself.
        paths = tuple(path or str(Path.cwd()) for path in sys.path)
        identity = identify(self.settings.function, self.settings.fn_kwargs)
        return _Arrived, (self.settings.function_spec, self.pack(), identity, paths)

    def pack(self) -> bytes:
        """All of it as bytes. Raises ConfigError if something can't leave this process."""
        values = {**self.__dict__, "is_away": True}
        if self.settings.function_spec is not None:
            values["settings"] = replace(self.settings, function=print)
        try:
            return bytes(cloudpickle.dumps(values))
        except Exception as error:
            raise ConfigError(
                f"The function or something that it holds can't be sent to worker processes:\n"
                f"{type(error).__name__}: {error}\nMake it inside the function (once, kept in a global), or use ",
                Setting("workers", 1),
                " on this machine.",
            ) from None


@dataclass(frozen=True, slots=True)
class _Arrived:
    spec: str | None
    """`script.py:function`, if the function was named so."""
    packed: bytes
    identity: FunctionIdentity
    """Of the function that was packed."""
    paths: tuple[str, ...]
    """Where the sending process imports from."""

    def load(self) -> Make:
        sys.path += [path for path in self.paths if path not in sys.path]
        try:
            load = MapLoad(**cloudpickle.loads(self.packed))
        except Exception as error:
            raise ConfigError(
                f"The function could not be loaded in a worker process:\n{type(error).__name__}: {error}\n"
                "What it needs must be importable there."
            ) from None
        if self.spec is not None:
            from milldam.text.user_functions import load_function

            load = replace(load, settings=replace(load.settings, function=load_function(self.spec)))
        # What can't be hashed is not compared.
        unhashable = [line.partition(":")[0] for line in self.identity.unhashable]
        arrived = identify(load.settings.function, load.settings.fn_kwargs)
        differences = [part for part in self.identity.differences(arrived) if part not in unhashable]
        if differences:
            raise ConfigError(
                f"{arrived.name} is not the same in a worker process as when this run was planned: "
                f"{', '.join(differences)}.\nCode was edited after it was loaded: run again (in a notebook, restart "
                "or reload it first). A value is changed by a call, or does not survive pickling: make it inside the "
                "function, or use ",
                Setting("workers", 1),
                ".",
            )
        return load.load()


# ---- a unit ----


class _Worker:
    """The function in a process, unit after unit."""

    def __init__(self, load: MapLoad) -> None:
        self._load, self._caller = load, Caller(load.settings)
        self._unreleased, self._looked = 0, time.monotonic()
        self._is_measured = not load.is_away
        """What a batch takes is known, or of no use: what this process holds is the program's."""

    def make(self, assigned: Assigned, progress: Progress) -> Record:
        """The rows of a unit through the function; what comes out is durable then."""
        unit, load, settings, places = assigned.unit, self._load, self._load.settings, Places()
        done = 0
        listed = load.out / RUN_FOLDER / f"rejects-{assigned.key}.jsonl"
        with contextlib.closing(UnitWriter(load)) as writer, RejectFile(listed) as rejects:
            read = load.reader.read(unit, rejects.add, places)
            for rows in batches(read, settings.batch_size, settings.most_batch_bytes):
                progress.lap("read")
                count, size = row_count(rows), byte_size(rows)
                places.forget(done)
                try:
                    first = None if unit.first_row is None else unit.first_row + done
                    results, failed = self._caller.results(rows, first)
                    progress.lap("call")
                    for columns in results:
                        writer.add(columns)
                except ResultError as error:
                    begin, end = (0, count) if error.row is None else (error.row, error.row + 1)
                    where = f"{shown(places.of(done + begin, done + end))} (unit {unit.index})"
                    if not isinstance(error, FunctionError):
                        raise InputError(f"{self._caller.name}, {where}: ", *error.args) from error
                    raise InputError(
                        f"{self._caller.name} failed on {where}:\n",
                        *error.args,
                        "\nEvery finished unit is safe. Repair it and run again; or set such rows aside with ",
                        Setting("on_error", "reject"),
                        ".",
                    ) from error
                for number, one, message in failed:
                    place = places.of(done + number, done + number + 1)[0]
                    record = one if isinstance(one, dict) else one.to_pydict()
                    values = {name: values[0] for name, values in record.items()}
                    text = json.dumps(values, ensure_ascii=False, default=repr)
                    # Behind the start of a file only lines are known: they are counted when the table is done.
                    line, row = (place.first + 1, None) if place.origin else (None, place.first)
                    rejects.add(Reject(place.file, FAILED, message, text, line, place.origin, row))
                progress.lap("write")
                del rows, results, failed  # not held while the next ones are read
                done += count
                progress.add(documents=count, input_bytes=size)
                self._look(size, progress)
                progress.lap()
            load.reader.require_unchanged(unit)
            lists, shards = rejects.commit(), writer.commit()
        release()
        return unit_record(assigned, shards, lists, {"read": done}, rejects.counts, types=writer.types)

    def _look(self, size: int, progress: Progress) -> None:
        """At the memory, between two batches."""
        self._unreleased += size
        now = time.monotonic()
        if self._is_measured and self._unreleased < _RELEASE_BYTES and now - self._looked < _LOOK_SECONDS:
            return
        release()
        self._unreleased, self._looked, held = 0, now, usage().anonymous
        if not self._is_measured:
            self._is_measured = True
            # The one process that shares with this one, so far, is the one that forked it.
            shared = 2 * (held - proportional_bytes()) if memory.forked else 0
            # The most that this process has held since it was forked: what the kernel counts, less what is mapped now.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            peak = max(held, peak - usage().file) - shared
            progress.report(peak_bytes=peak, idle_bytes=held - shared, inherited_bytes=shared)
        limit = self._load.limit_bytes
        if held > limit:
            raise ResourceError(
                f"{self._caller.name} keeps memory: after a batch its process holds {format_size(held)}, more than "
                f"the budget of {format_size(limit)}. Let it keep less from call to call; or let workers be replaced "
                "between units, with two or more of them and a smaller ",
                Setting("shard_size"),
                "; or give more ",
                Setting("memory"),
                ".",
            )


class UnitWriter:
    """The results of a unit to a shard, with the types that they have; to another shard from where they differ on."""

    def __init__(self, load: MapLoad) -> None:
        self._load, self._schema = load, load.schema
        self._writer: TableShardWriter | None = None
        self._shards: list[TableShard] = []
        self.types: list[str] = []
        """Of each shard."""

    def add(self, columns: Columns) -> None:
        arrays = {name: to_array(name, values) for name, values in columns.items()}
        if not len(next(iter(arrays.values()), ())):
            return
        if self._load.schema is None:
            schema = joined(self._schema, arrays)
            if self._schema is None or not schema.equals(self._schema):
                self.commit()
                self._schema = schema
        assert self._schema is not None
        batch = fit(arrays, self._schema)
        if self._writer is None:
            schema = self._schema if self._load.schema is not None else with_features(self._schema, self._load.source)
            self._writer = TableShardWriter(self._load.out, schema)
            self.types.append(TableSchema.of(schema).ipc)
        self._writer.append(batch)

    def commit(self) -> list[TableShard]:
        """Make what was added durable."""
        shard = None if self._writer is None else self._writer.commit()
        self._shards += [] if shard is None else [shard]
        self._writer = None
        return self._shards

    def close(self) -> None:
        """Discard what was not committed."""
        if self._writer is not None:
            self._writer.__exit__()
