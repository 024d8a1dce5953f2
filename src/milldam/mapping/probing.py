"""The probe: the first batches through the function, to find the columns it makes and the memory it takes.

Reads units in order until every column has a type, and four at most once there are rows. What it finds depends on the
input and the settings alone. In a process of its own (for inputs that are worth it) its peak is that of a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.mapping.calling import Caller, CallRules, Results
from milldam.mapping.carrying import Carried, Load
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.kept_results import KeptResults
from milldam.mapping.memory_gate import PeakMeter, this_process
from milldam.mapping.room import Room
from milldam.mapping.schema import fit, infer, is_settled, joined, to_array
from milldam.mapping.unit_list import read_units
from milldam.mapping.working import FAILED, UnitCalls
from milldam.memory import release, usage
from milldam.run.tasks import PART, Report, Work
from milldam.sources.batch import Reject
from milldam.sources.rows import Rows, byte_size, column, column_names, row_count
from milldam.stores.table.manifest import TableSchema

MOST_UNITS = 4
"""Units that are looked at for a type of the last columns."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the first batches showed."""

    schema: TableSchema | None
    """None: the function returned nothing that has columns."""
    rows: int
    """How many were read."""
    rejected: dict[str, int]
    """Reason -> records that could not be read, or on which the function failed."""
    units: int
    """How many units it took."""
    idle_bytes: int
    """Memory of the process afterwards: what a worker holds between two units."""
    peak_bytes: int
    reading_bytes: int
    """What reading the first batch took, at most, before the function was called."""
    batch_bytes: int
    """Of the largest batch."""
    apart: bool
    """It ran in a process of its own, as a worker does."""

    @property
    def worker_bytes(self) -> int:
        """What a worker holds between two units; 0: it is not known."""
        return self.idle_bytes if self.apart else 0

    @property
    def work_bytes(self) -> int:
        """What the first batches took beside what stays."""
        return max(0, self.peak_bytes - self.idle_bytes)


@dataclass(frozen=True, slots=True)
class ProbeTask:
    units: Path
    """The list of units."""
    carried: Carried
    rules: CallRules
    room: Room
    schema: TableSchema | None
    """Given by the user: then one batch is enough."""
    parent: tuple[str, int]
    """Machine and process that plan."""
    kept: KeptResults | None = None
    """Takes what the calls return, where the work goes on in this process."""

    def start(self) -> Work:
        load = self.carried.open()

        def work(assigned: int, report: Report) -> None:
            release()
            before = usage().anonymous
            with PeakMeter() as meter:
                probe = _Probe(self, load, meter)
                schema, units = probe.run()
            for unit in islice(read_units(self.units), units):
                require_unchanged(unit)
            release()
            found = Probed(
                schema=schema,
                rows=probe.rows,
                rejected=dict(probe.rejected),
                units=units,
                idle_bytes=usage().anonymous,
                peak_bytes=meter.peak,
                reading_bytes=max(0, probe.peak_of_reading - before),
                batch_bytes=probe.largest_batch,
                apart=this_process() != self.parent,
            )
            report(PART, found)

        return work


class _Probe:
    """The first batches, through the function."""

    def __init__(self, task: ProbeTask, load: Load, meter: PeakMeter) -> None:
        self._task, self._load, self._meter = task, load, meter
        self._given = None if task.schema is None else task.schema.to_arrow()
        self._schema: pa.Schema | None = None
        """What the rows that were returned have in common."""
        self._empty: pa.Schema | None = None
        """Of the first result without a row."""
        self.rows, self.rejected = 0, Counter[str]()
        self.largest_batch = self.peak_of_reading = 0
        """In bytes; the most memory that there was before the function was called."""

    def run(self) -> tuple[TableSchema | None, int]:
        """The columns, and how many units it took."""
        caller = Caller(self._load.function, self._task.rules, self._load.kwargs)
        looked_at = 0
        for unit in read_units(self._task.units):
            looked_at += 1
            calls = UnitCalls(unit, caller, self._load.reader, self._task.room)
            for rows in calls.batches(self._count_reject):
                self._call(calls, rows)
                if self._schema is not None and is_settled(self._schema):
                    return TableSchema.of(self._schema), looked_at
            if self._schema is not None and looked_at >= MOST_UNITS:
                break
        found = self._schema or self._given or self._empty
        return (None if found is None else TableSchema.of(found)), looked_at

    def _count_reject(self, reject: Reject) -> None:
        """It is set aside, and told, when its unit is worked on."""
        self.rejected[reject.reason] += 1

    def _call(self, calls: UnitCalls, rows: Rows) -> None:
        self.rows += row_count(rows)
        with calls.batch(rows) as first_row:
            self.peak_of_reading = self.peak_of_reading or self._meter.peak
            self.largest_batch = max(self.largest_batch, byte_size(rows))
            results = _as_arrays(calls.caller.results(rows, first_row))
            if results.failed:
                self.rejected[FAILED] += len(results.failed)
            if self._task.kept is not None:
                self._task.kept.add(calls.unit.index, results)
            for columns in results.columns:
                self._learn(columns, rows)
        release()

    def _learn(self, columns: Mapping[str, Any], rows: Rows) -> None:
        """From what a call returned."""
        if self._given is not None:
            if fit(columns, self._given, optional=column_names(rows), given=True).num_rows:
                self._schema = self._given
        elif len(next(iter(columns.values()), ())):
            self._schema = joined(self._schema, infer(columns))
        elif self._empty is None:
            self._empty = infer(_typed(columns, rows))


def _as_arrays(results: Results) -> Results:
    columns = [{name: to_array(name, values) for name, values in one.items()} for one in results.columns]
    return Results(columns, results.failed)


def _typed(columns: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """Columns without a row: an empty list has no type, but a column of the input under its name has."""
    known = set(column_names(rows))
    untyped = [name for name, values in columns.items() if name in known and pa.types.is_null(values.type)]
    return {**columns, **{name: column(rows, name) for name in untyped}}
