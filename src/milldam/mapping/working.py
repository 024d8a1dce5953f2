"""The function on its way to a worker; a unit there: its rows -> batches -> the function -> one shard, and a record.

The user's function, its arguments and the reader of rows travel by `cloudpickle`, so that lambdas, closures and
functions of a script arrive too; a function that was named as `script.py:function` is loaded by its name again. In the
process that they come from nothing is copied. What arrives must be what the keys were made of. Modules are imported
anew in a worker, so one that was edited after this process had loaded it would be another there; and some values leave
a part of themselves behind when they are pickled. So the identity travels too and is found again on arrival, which
costs a hash of all that the function holds.

Holds one batch: what is read, what the function is given and returns, and a record batch of about 4 MB that waits to
be written. Large batches pass the memory gate; what stays after each is looked at by the leak check.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError, Setting
from milldam.mapping.calling import Caller, CallRules, FunctionError, KeptResults, ResultError, batches
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.memory_gate import LeakCheck, MemoryGate, Room
from milldam.mapping.plan import RowReader, RowUnit
from milldam.mapping.schema import ColumnError, fit
from milldam.memory import release
from milldam.pipeline.rejects import RejectFile
from milldam.run.engine import Telling
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Files, Record
from milldam.run.tasks import PART, Report, Work
from milldam.sources.batch import OnReject, Place, Places, Reject, shown
from milldam.sources.rows import Rows, byte_size, column_names, row_count
from milldam.stores.table.manifest import MadeUnit, TableSchema, TableShard
from milldam.stores.table.writer import TableShardWriter

FAILED = "function_failed"
_RELEASE_BYTES = 4 << 20
"""Freed memory is given back after so many bytes of input."""

_HERE = (Setting("workers", 1), " on this machine.")


# ---- the function on its way ----


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker needs that is not ours."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    reader: RowReader


@dataclass(frozen=True)
class Carried:
    """A load that can be pickled, as an `Arrived`."""

    load: Load
    spec: str | None = None
    """`script.py:function`, where the function was named so."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker does not look into the current folder by itself.
        paths = tuple(path or str(Path.cwd()) for path in sys.path)
        return Arrived, (self.spec, self.pack(), self._sent, paths)

    @functools.cached_property
    def _sent(self) -> FunctionIdentity:
        """As it is when it is first sent: what a call in this process has left in a global is no edit of its code."""
        return identify(self.load.function, self.load.kwargs)

    def pack(self) -> bytes:
        """The load as bytes. Raises ConfigError when something in it can't leave this process."""
        try:
            import cloudpickle
        except ImportError:
            missing = "Several workers need cloudpickle: pip install cloudpickle, or use "
            raise ConfigError(missing, Setting("workers", 1), ".") from None
        function = self.load.function if self.spec is None else None
        try:
            packed: bytes = cloudpickle.dumps((function, dict(self.load.kwargs), self.load.reader))
        except Exception as error:
            raise ConfigError(
                f"The function or something that it holds can't be sent to worker processes:\n"
                f"{type(error).__name__}: {error}\nMake it inside the function (once, kept in a global), or use ",
                *_HERE,
            ) from None
        return packed

    def open(self) -> Load:
        return self.load


@dataclass(frozen=True, slots=True)
class Arrived:
    """The same in another process."""

    spec: str | None
    packed: bytes
    identity: FunctionIdentity
    """Of what was packed."""
    paths: tuple[str, ...]
    """Where the process that sent it imports from."""

    def open(self) -> Load:
        key = self.spec, self.packed, self.identity.hash
        if key not in _opened:
            _opened.clear()  # not two at a time
            _opened[key] = self._unpack()
        return _opened[key]

    def _unpack(self) -> Load:
        sys.path += [path for path in self.paths if path not in sys.path]
        import cloudpickle

        try:
            function, kwargs, reader = cloudpickle.loads(self.packed)
        except Exception as error:
            raise ConfigError(
                f"The function could not be loaded in a worker process:\n{type(error).__name__}: {error}\n"
                "What it needs must be importable there; or use ",
                *_HERE,
            ) from None
        if self.spec is not None:
            from milldam.text.user_functions import load_function

            function = load_function(self.spec)
        _require_same(self.identity, identify(function, kwargs))
        return Load(function, kwargs, reader)


_opened: dict[tuple[Any, ...], Load] = {}
"""What arrived in this process last: a process that forks the workers of several stages opens it once."""


def _require_same(sent: FunctionIdentity, arrived: FunctionIdentity) -> None:
    """What can't be hashed is not compared."""
    differences = [
        part for part in sent.differences(arrived) if not any(line.startswith(part) for line in sent.unhashable)
    ]
    if differences:
        listed = "\n".join(f"  {line}" for line in differences)
        raise ConfigError(
            f"{sent.name} is not the same in a worker process as in the one that planned this run:\n{listed}\n"
            "Code: it was edited since it was loaded; run again (in a notebook, restart or reload the module first).\n"
            "A value: the function changes it when it is called, or it does not survive pickling; make it inside the "
            "function, or use ",
            Setting("workers", 1),
            ".",
        )


# ---- the record of a unit ----


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


# ---- rows through the function ----


@dataclass(slots=True)
class UnitCalls:
    """The rows of one unit on their way through the function: where each comes from, and where a call went wrong."""

    unit: RowUnit
    caller: Caller
    reader: RowReader
    room: Room
    rows: int = 0
    """Rows of finished batches."""
    places: Places = field(default_factory=Places)

    def batches(self, on_reject: OnReject) -> Iterator[Rows]:
        rules = self.caller.rules
        read = self.reader.read(self.unit, on_reject, self.places, self.room)
        return batches(read, rules.batch_size, rules.batch_bytes)

    @contextlib.contextmanager
    def batch(self, rows: Rows) -> Iterator[int | None]:
        """Around the work on a batch; gives the number of its first row among all. Errors get the place they are about.

        Raises ResourceError before the block when a row larger than a batch leaves no room for the call.
        """
        count, size = row_count(rows), byte_size(rows)
        self.places.forget(self.rows)
        if size > self.caller.rules.batch_bytes:
            needed = self.room.for_call(rows, self.caller.kept(rows))
            if not self.room.fits(needed):
                where = shown(self.places_of(self.rows, self.rows + count))
                raise self.room.refusal(needed, size, where, by_column=not isinstance(rows, dict))
        try:
            yield None if self.unit.first_row is None else self.unit.first_row + self.rows
        except (FunctionError, ResultError, ColumnError) as error:
            raise self._explained(error, count) from error
        self.rows += count

    def _explained(self, error: FunctionError | ResultError | ColumnError, count: int) -> InputError:
        """An error of the function or its result, with where it was: the one row, where that is known."""
        row = getattr(error, "row", None)
        first, last = (0, count) if row is None else (row, row + 1)
        where = f"{shown(self.places_of(self.rows + first, self.rows + last))} (unit {self.unit.index})"
        if not isinstance(error, FunctionError):
            return InputError(f"{self.caller.name}, {where}: ", *error.args)
        return InputError(
            f"{self.caller.name} failed on {where}:\n",
            *error.args,
            "\nEvery finished unit is safe. Mend it and run again; or set such rows aside with ",
            Setting("on_error", "reject"),
            ".",
        )

    def places_of(self, first: int, last: int) -> list[Place]:
        """Of rows of the unit: in files; or, where it comes from none, in the dataset or the source."""
        found = self.places.of(first, last)
        if found or "range" not in self.unit.place:
            return found or [Place(f"unit {self.unit.index} of the source", first, last - 1)]
        start = self.unit.place["range"][0]
        return [Place("the dataset", start + first, start + last - 1)]


# ---- a unit ----


@dataclass(frozen=True, slots=True)
class Assigned:
    """A unit of work."""

    unit: RowUnit
    key: str


@dataclass(frozen=True, slots=True)
class MapTask:
    out: Path
    carried: Carried
    rules: CallRules
    room: Room
    schema: TableSchema
    gate: MemoryGate
    most_bytes: int
    """What a worker may hold between two batches: its share of the budget."""
    kept: KeptResults | None = None
    """What the probe's calls returned, if the probe ran in this very process."""

    def start(self) -> Work:
        load, schema = self.carried.open(), self.schema.to_arrow()
        caller = Caller(load.function, self.rules, load.kwargs)
        check = functools.cache(lambda: self._join(caller.name))

        def work(assigned: Assigned, report: Report) -> None:
            calls = UnitCalls(assigned.unit, caller, load.reader, self.room)
            made, files = _Unit(self, calls, schema, Telling(report, assigned.unit.size), check()).make(assigned.key)
            report(PART, recorded(made, files))

        return work

    def _join(self, name: str) -> LeakCheck:
        """Count this process among the workers from now on."""
        self.gate.join()
        return LeakCheck(self.most_bytes, self.rules.batch_bytes, name, self.room.is_parent)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit, being made."""

    task: MapTask
    calls: UnitCalls
    schema: pa.Schema
    telling: Telling
    check: LeakCheck

    def make(self, key: str) -> tuple[MadeUnit, Files]:
        """Its shard is durable then. With the file of its rejects, if there are any."""
        out, calls, unreleased = self.task.out, self.calls, 0
        with TableShardWriter(out, self.schema) as writer, RejectFile(out / rejects_name(key)) as rejects:
            for rows in calls.batches(rejects.add):
                self.telling.lap("read")
                size, before = byte_size(rows), calls.rows
                if size >= _RELEASE_BYTES:
                    release()  # what reading it took, before others are told what this process holds
                with self.task.gate.passed(size, is_first=self.check.calls == 0):
                    self.check.begin(is_first=before == 0)
                    self._call(rows, writer, rejects)
                    del rows
                    unreleased += size
                    if unreleased >= _RELEASE_BYTES:
                        release()
                        unreleased = 0
                    self.check.end(size)
                self.telling.add(documents=calls.rows - before, input_bytes=size)
                self.telling.lap()
            require_unchanged(calls.unit)
            files = {f"{RUN_FOLDER}/{name}": file for name, file in rejects.commit().items()}
            shard = writer.commit()
        release()
        self.telling.end()
        return MadeUnit(key, calls.rows, shard, dict(sorted(rejects.counts.items()))), files

    def _call(self, rows: Rows, writer: TableShardWriter, rejects: RejectFile) -> None:
        calls, kept, before = self.calls, self.task.kept, self.calls.rows
        self.telling.lap()
        with calls.batch(rows) as first_row:
            known = kept.take(calls.unit.index, rows) if kept is not None else None
            results = known or calls.caller.results(rows, first_row)
            self.telling.lap("call")
            for columns in results.columns:
                writer.append(fit(columns, self.schema, optional=column_names(rows)))
        for number, row, said in results.failed:
            place = calls.places_of(before + number, before + number + 1)[0]
            record = row if isinstance(row, dict) else row.to_pydict()
            text = json.dumps({name: values[0] for name, values in record.items()}, ensure_ascii=False, default=repr)
            rejects.add(Reject(place.file, FAILED, said, text, row=place.first, origin=place.origin))
        self.telling.lap("write")
