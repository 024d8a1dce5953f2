"""A unit in a worker: its rows -> batches -> the function -> one shard.

Holds one batch: what is read, what the function is given and returns, and a record batch of about 4 MB that waits to
be written. Large batches pass the memory gate; what stays after each is looked at by the leak check.

The leak check: a function that keeps more memory with every call stops the run before the budget is broken.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from milldam.errors import InputError, ResourceError, Setting
from milldam.mapping.calling import Caller, CallRules, FunctionError, KeptResults, ResultError, batches
from milldam.mapping.carrying import Carried
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.made_units import TableShardWriter, recorded, rejects_name
from milldam.mapping.memory_gate import MemoryGate, Room, this_process
from milldam.mapping.plan import RowReader, RowUnit
from milldam.mapping.schema import ColumnError, fit
from milldam.memory import allowance, format_size, release, usage
from milldam.pipeline.documents import REPORT_SECONDS
from milldam.pipeline.rejects import RejectFile
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.sources.batch import OnReject, Place, Places, Reject, shown
from milldam.sources.rows import Rows, byte_size, column_names, row_count
from milldam.stores.table.manifest import MadeUnit, TableSchema

_LARGE_TIMES = 2
"""For a row larger than a batch: some readers hold it, and what it left behind, until the next one."""
_SMALLEST_GROWTH = 10**5
_FEW = 4
"""Calls that say little about growth."""


@dataclass(slots=True)
class LeakCheck:
    """Compares this process's memory after each batch with what the budget leaves it. Reads one small file a batch."""

    most_bytes: int
    """What the budget leaves this worker."""
    batch_bytes: int
    name: str
    """Of the function."""
    is_parent: bool
    """This process planned the run and can't be replaced by a fresh one."""
    calls: int = 0
    first: int = 0
    """Memory after the first call, which may load something that stays."""
    last: int = field(default_factory=lambda: usage().anonymous)
    """Memory after the last call."""
    read: int = 0
    """What was read since the last call: the batch, and perhaps a large row that follows it."""
    leak: tuple[object, ...] = ()
    """Why another batch would be too much, as parts of a message; empty while all is well."""

    def begin(self, *, is_first: bool) -> None:
        """Before a batch. Raises ResourceError when too much was held after the last one; not before the first of a
        unit, since a worker that was too large has just been replaced."""
        if self.leak and (self.is_parent or not is_first):
            raise ResourceError(*self.leak)
        self.read = max(0, usage().anonymous - self.last)

    def end(self, size: int) -> None:
        """After a batch of this size: is more held than the budget leaves, now or probably after the next one?"""
        is_large = size > self.batch_bytes
        most = allowance(self.most_bytes) + (_LARGE_TIMES * size if is_large else 0)
        held = self._held()
        self.calls += 1
        if self.calls == 1:
            self.first = held
        if self._after_next(held, is_large=is_large) > most:
            gc.collect()
            release()
            held = self._held()
        self.leak = self._told(held) if self._after_next(held, is_large=is_large) > most else ()

    def _held(self) -> int:
        self.last = usage().anonymous
        return self.last - self.read

    def _growth(self, held: int) -> int:
        """Bytes a call, on average since the first."""
        return max(0, held - self.first) // max(1, self.calls - 1)

    def _after_next(self, held: int, *, is_large: bool) -> int:
        return held + (self._growth(held) if self.calls > _FEW and not is_large else 0)

    def _told(self, held: int) -> tuple[object, ...]:
        growth = self._growth(held)
        keeps = f"the function keeps about {format_size(growth)} more after each call (a default argument, a global, "
        what = keeps + "a cache?)" if growth >= _SMALLEST_GROWTH else "the function loads that much and keeps it"
        here = (" (with ", Setting("workers", 2), " or more: this one is the program)") if self.is_parent else ()
        most = allowance(self.most_bytes)
        return (
            f"{self.name}: between two calls a worker holds {format_size(held)}, too much for the "
            f"{format_size(most)} that the budget leaves it: {what}. Every finished unit is safe.\n"
            "Let it keep less; or use a smaller ",
            Setting("shard_size"),
            ", so that workers are replaced between units",
            *here,
            "; or give more ",
            Setting("memory"),
            ".",
        )


FAILED = "function_failed"
RELEASE_BYTES = 4 << 20
"""Freed memory is given back after so many bytes of input."""


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
            _Unit(self, calls, schema, report, check()).make(assigned.key)

        return work

    def _join(self, name: str) -> LeakCheck:
        """Count this process among the workers from now on."""
        self.gate.join()
        return LeakCheck(self.most_bytes, self.rules.batch_bytes, name, self.gate.parent == this_process())


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
        count = row_count(rows)
        self.places.forget(self.rows)
        size = byte_size(rows)
        if size > self.caller.rules.batch_bytes:
            needed = self.room.for_call(rows, self.caller.kept(rows))
            if not self.room.fits(needed):
                where = self._where(self.rows, self.rows + count)
                raise self.room.refusal(needed, size, where, by_column=not isinstance(rows, dict))
        try:
            yield None if self.unit.first_row is None else self.unit.first_row + self.rows
        except (FunctionError, ResultError, ColumnError) as error:
            raise self.explained(error, count) from error
        self.rows += count

    def explained(self, error: FunctionError | ResultError | ColumnError, count: int) -> InputError:
        """An error of the function or its result, with where it was: the one row, where that is known."""
        first, last = self.rows, self.rows + count
        row = getattr(error, "row", None)
        if row is not None:
            first, last = first + row, first + row + 1
        where = f"{self._where(first, last)} (unit {self.unit.index})"
        if not isinstance(error, FunctionError):
            return InputError(f"{self.caller.name}, {where}: ", *error.args)
        return InputError(
            f"{self.caller.name} failed on {where}:\n",
            *error.args,
            "\nEvery finished unit is safe. Mend it and run again; or set such rows aside with ",
            Setting("on_error", "reject"),
            ".",
        )

    def _where(self, first: int, last: int) -> str:
        return shown(self.places.of(first, last) or [self._unit_place(first, last)])

    def place_of(self, row: int) -> Place:
        return (self.places.of(row, row + 1) or [self._unit_place(row, row + 1)])[0]

    def _unit_place(self, first: int, last: int) -> Place:
        """Rows of a unit that comes from no files: of the dataset, or of the source."""
        if "range" in self.unit.place:
            start = self.unit.place["range"][0]
            return Place("the dataset", start + first, start + last - 1)
        return Place(f"unit {self.unit.index} of the source", first, last - 1)


@dataclass(slots=True)
class _Unit:
    """One unit, being made."""

    task: MapTask
    calls: UnitCalls
    schema: pa.Schema
    report: Report
    check: LeakCheck
    shown: Counter[str] = field(default_factory=Counter)
    """For progress."""
    seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "call": 0.0, "write": 0.0})
    told: float = 0.0
    unreleased: int = 0

    def make(self, key: str) -> None:
        task, unit = self.task, self.calls.unit
        with (
            TableShardWriter(task.out, self.schema) as writer,
            RejectFile(task.out / rejects_name(key)) as rejects,
        ):
            begun = time.perf_counter()
            for rows in self.calls.batches(rejects.add):
                self.seconds["read"] += time.perf_counter() - begun
                size = byte_size(rows)
                if size >= RELEASE_BYTES:
                    release()  # what reading it took, before others are told what this process holds
                with task.gate.passed(size, is_first=self.check.calls == 0):
                    self.check.begin(is_first=self.calls.rows == 0)
                    self._call(rows, writer, rejects)
                    del rows
                    self.unreleased += size
                    if self.unreleased >= RELEASE_BYTES:
                        release()
                        self.unreleased = 0
                    self.check.end(size)
                self.shown["documents"] = self.calls.rows
                self.shown["input_bytes"] = min(self.calls.unit.size, self.shown["input_bytes"] + size)
                self._tell(force=False)
                begun = time.perf_counter()
            require_unchanged(unit)
            files = {rejects_name(key): file for file in rejects.commit().values()}
            shard = writer.commit()
        release()
        self.shown["input_bytes"] = unit.size
        self._tell(force=True)
        made = MadeUnit(key, self.calls.rows, shard, dict(sorted(rejects.counts.items())))
        self.report(PART, recorded(made, files))

    def _call(self, rows: Rows, writer: TableShardWriter, rejects: RejectFile) -> None:
        kept, before = self.task.kept, self.calls.rows
        begun = time.perf_counter()
        with self.calls.batch(rows) as first_row:
            known = kept.take(self.calls.unit.index, rows) if kept is not None else None
            results = known or self.calls.caller.results(rows, first_row)
            made = time.perf_counter()
            for columns in results.columns:
                writer.append(fit(columns, self.schema, optional=column_names(rows)))
        for number, row, said in results.failed:
            place = self.calls.place_of(before + number)
            record = row if isinstance(row, dict) else row.to_pydict()
            text = json.dumps({name: values[0] for name, values in record.items()}, ensure_ascii=False, default=repr)
            rejects.add(Reject(place.file, FAILED, said, text, row=place.first, origin=place.origin))
        self.seconds["call"] += made - begun
        self.seconds["write"] += time.perf_counter() - made

    def _tell(self, *, force: bool) -> None:
        if force or time.monotonic() - self.told > REPORT_SECONDS:
            self.told = time.monotonic()
            told = {"counts": dict(self.shown), "seconds": dict(self.seconds)}
            self.report(PROGRESS, told | {"anonymous_bytes": usage().anonymous})
