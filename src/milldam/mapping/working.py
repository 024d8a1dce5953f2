"""A unit in a worker: its rows -> batches -> the function -> one shard.

Holds one batch: what is read, what the function is given and returns, and a record batch of about 4 MB that waits to
be written. Workers take turns with large batches (turns.py).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from milldam.errors import InputError
from milldam.mapping.batching import batches
from milldam.mapping.calling import Caller, CallRules, FunctionError, ResultError, Results, row_by_row
from milldam.mapping.carrying import Carried
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.holding import Holding
from milldam.mapping.kept_results import KeptResults
from milldam.mapping.plan import RowReader
from milldam.mapping.room import Room
from milldam.mapping.schema import ColumnError, fit
from milldam.mapping.shards import TableShardWriter
from milldam.mapping.turns import Turns, this_process
from milldam.mapping.units import RowUnit
from milldam.memory import release, usage
from milldam.pipeline.aside import RejectFile
from milldam.pipeline.assignments import REPORT_SECONDS
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.sources.batch import Reject
from milldam.sources.places import Place, Places, shown
from milldam.sources.rows import Rows, byte_size, column_names, row_count
from milldam.stores.table.manifest import MadeUnit, TableSchema

FAILED = "function_failed"
RELEASE_BYTES = 4 << 20
"""Freed memory is given back after so many bytes of input."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How rows become batches, and what happens when the function fails on one."""

    call: CallRules
    batch_size: int
    batch_bytes: int
    on_error: str
    room: Room


@dataclass(frozen=True, slots=True)
class Assigned:
    """A unit of work."""

    unit: RowUnit
    key: str


@dataclass(frozen=True, slots=True)
class MapTask:
    out: Path
    folder: Path
    """Of the run."""
    carried: Carried
    rules: BatchRules
    schema: TableSchema
    turns: Turns
    most_bytes: int
    """What a worker may hold between two batches: its share of the budget."""
    kept: KeptResults | None = None
    """What the probe found in this very process."""

    def start(self) -> Work:
        load, schema = self.carried.open(), self.schema.to_arrow()
        caller = Caller(load.function, self.rules.call, load.kwargs)
        self.turns.join()
        here = self.turns.parent == this_process()
        holding = Holding(self.most_bytes, self.rules.batch_bytes, name_of(caller), here)

        def work(assigned: Assigned, report: Report) -> None:
            _Unit(self, caller, load.reader, schema, report, holding).make(assigned)

        return work


def rejects_path(folder: Path, key: str) -> Path:
    return folder / f"rejects-{key[:16]}.jsonl"


def call_batch(caller: Caller, rows: Rows, first_row: int | None, on_error: str) -> Results:
    """The function on a batch; where it fails and rows may be set aside, on each row by itself."""
    try:
        return Results([caller(rows, first_row)], [])
    except FunctionError:
        if on_error != "reject":
            raise
    results = Results([], [])
    for number, row, result in row_by_row(caller, rows, first_row):
        if isinstance(result, FunctionError):
            results.failed.append((number, row, result))
        else:
            results.columns.append(result)
    return results


def require_room(caller: Caller, rows: Rows, rules: BatchRules, where: Callable[[], str]) -> None:
    """Before a call: raise ResourceError when a row larger than a batch may be leaves no room for it."""
    size = byte_size(rows)
    if size > rules.batch_bytes:
        needed = rules.room.for_call(rows, caller.kept(rows))
        if not rules.room.fits(needed):
            raise rules.room.refusal(needed, size, where(), by_column=not isinstance(rows, dict))


def name_of(caller: Caller) -> str:
    """Of the function."""
    return str(getattr(caller.function, "__name__", type(caller.function).__name__))


def place_of(unit: RowUnit, rows: tuple[int, int], places: Places | None) -> str:
    found = places.of(*rows) if places is not None else []
    return shown(found or [_unit_place(unit, *rows)])


def explained(
    error: Exception, caller: Caller, unit: RowUnit, rows: tuple[int, int], places: Places | None = None
) -> InputError:
    """An error of the function or its result, with where it was: the one row, where that is known."""
    name = name_of(caller)
    row = getattr(error, "row", None)
    if row is not None:
        rows = (rows[0] + row, rows[0] + row + 1)
    where = f"{place_of(unit, rows, places)} (unit {unit.index})"
    if isinstance(error, FunctionError):
        return InputError(
            f"{name} failed on {where}:\n{error}\n"
            'Every finished unit is safe. Mend it and run again; or set such rows aside with on_error="reject".'
        )
    return InputError(f"{name}, {where}: {error}")


def _unit_place(unit: RowUnit, begin: int, end: int) -> Place:
    """Rows of a unit that comes from no files: of the data set, or what is said of the source."""
    if "range" in unit.place:
        first = unit.place["range"][0]
        return Place("the data set", first + begin, first + end - 1)
    return Place(f"unit {unit.index} of the source", begin, end - 1)


@dataclass(slots=True)
class _Unit:
    """One unit, being made."""

    task: MapTask
    caller: Caller
    reader: RowReader
    schema: pa.Schema
    report: Report
    holding: Holding
    places: Places = field(default_factory=Places)
    rows: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    """For progress."""
    seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "call": 0.0, "write": 0.0})
    told: float = 0.0
    unreleased: int = 0

    def make(self, assigned: Assigned) -> None:
        task, unit, rules = self.task, assigned.unit, self.task.rules
        with (
            TableShardWriter(task.out, assigned.key, self.schema) as writer,
            RejectFile(rejects_path(task.folder, assigned.key)) as rejects,
        ):
            begun = time.perf_counter()
            read = self.reader.read(unit, rejects.add, self.places, rules.room)
            for rows in batches(read, rules.batch_size, rules.batch_bytes):
                self.seconds["read"] += time.perf_counter() - begun
                size = byte_size(rows)
                if size >= RELEASE_BYTES:
                    release()  # what reading it took, before others are told what this process holds
                with task.turns.take(size):
                    self.holding.begin(is_first=self.rows == 0)
                    self._batch(rows, unit, writer, rejects)
                    del rows
                    self._give_back(size)
                self._count(size, unit)
                begun = time.perf_counter()
            require_unchanged(unit)
            rejects.commit()
            shard = writer.commit()
        release()
        self.shown["input_bytes"] = unit.size
        self._tell(force=True)
        self.report(PART, MadeUnit(assigned.key, self.rows, shard, dict(sorted(rejects.counts.items()))))

    def _batch(self, rows: Rows, unit: RowUnit, writer: TableShardWriter, rejects: RejectFile) -> None:
        span = (self.rows, self.rows + row_count(rows))
        self.places.forget(span[0])
        first = None if unit.first_row is None else unit.first_row + self.rows
        require_room(self.caller, rows, self.task.rules, lambda: place_of(unit, span, self.places))
        begun = time.perf_counter()
        try:
            kept = self.task.kept.take(unit.index, rows) if self.task.kept is not None else None
            results = kept or call_batch(self.caller, rows, first, self.task.rules.on_error)
            made = time.perf_counter()
            for columns in results.columns:
                writer.append(fit(columns, self.schema, optional=column_names(rows)))
        except (FunctionError, ResultError, ColumnError) as error:
            raise explained(error, self.caller, unit, span, self.places) from error
        for number, row, failure in results.failed:
            at = self.rows + number
            place = (self.places.of(at, at + 1) or [_unit_place(unit, at, at + 1)])[0]
            rejects.add(_reject(place, row, failure))
        self.rows = span[1]
        self.seconds["call"] += made - begun
        self.seconds["write"] += time.perf_counter() - made

    def _give_back(self, size: int) -> None:
        self.unreleased += size
        if self.unreleased >= RELEASE_BYTES:
            release()
            self.unreleased = 0
        self.holding.end(size)

    def _count(self, size: int, unit: RowUnit) -> None:
        self.shown["documents"] = self.rows
        self.shown["input_bytes"] = min(unit.size, self.shown["input_bytes"] + size)
        self._tell(force=False)

    def _tell(self, *, force: bool) -> None:
        if force or time.monotonic() - self.told > REPORT_SECONDS:
            self.told = time.monotonic()
            told = {"counts": dict(self.shown), "seconds": dict(self.seconds)}
            self.report(PROGRESS, told | {"anonymous_bytes": usage().anonymous})


def _reject(place: Place, row: Rows, failure: FunctionError) -> Reject:
    record = row if isinstance(row, dict) else row.to_pydict()
    text = json.dumps({name: values[0] for name, values in record.items()}, ensure_ascii=False, default=repr)
    return Reject(place.file, FAILED, failure.said, text, row=place.first, origin=place.origin)
