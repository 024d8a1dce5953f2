"""The first batches through the function, before the work begins: which columns it makes, and how much memory it takes.

Reads units in order until every column has a type, and four at most once there are rows. What is found depends on the
input and the settings alone. In a process of its own (for inputs that are worth it) its peak is that of a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.mapping.batching import batches
from milldam.mapping.calling import Caller, FunctionError, ResultError, Results
from milldam.mapping.carrying import Carried, Load
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.kept_results import KeptResults
from milldam.mapping.schema import ColumnError, fit, infer, is_settled, joined, to_array
from milldam.mapping.turns import PeakMeter, this_process
from milldam.mapping.unit_list import read_units
from milldam.mapping.units import RowUnit
from milldam.mapping.working import FAILED, BatchRules, call_batch, explained, place_of, require_room
from milldam.memory import release, usage
from milldam.run.tasks import PART, Report, Work
from milldam.sources.batch import Reject
from milldam.sources.places import Places
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


@dataclass(frozen=True, slots=True)
class ProbeTask:
    units: Path
    """The list of units."""
    carried: Carried
    rules: BatchRules
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
            apart = this_process() != self.parent
            reading = max(0, probe.peak_of_reading - before)
            read = (probe.rows, dict(probe.rejected), units)
            memory = (usage().anonymous, meter.peak, reading, probe.largest_batch)
            report(PART, Probed(schema, *read, *memory, apart))

        return work


class _Probe:
    """The first batches, through the function."""

    def __init__(self, task: ProbeTask, load: Load, meter: PeakMeter) -> None:
        self._task, self._load, self._meter = task, load, meter
        self.rows, self.rejected = 0, Counter[str]()
        self.largest_batch = self.peak_of_reading = 0
        """In bytes; the most memory that there was before the function was called."""

    def run(self) -> tuple[TableSchema | None, int]:
        """The columns, and how many units it took."""
        task, load = self._task, self._load
        caller = Caller(load.function, task.rules.call, load.kwargs)
        given = None if task.schema is None else task.schema.to_arrow()
        found: pa.Schema | None = given
        of_none: pa.Schema | None = None
        rows_seen = False
        looked_at = 0
        for unit in read_units(task.units):
            looked_at += 1
            for schema, count in self._schemas(unit, caller, given):
                if not count:
                    of_none = of_none or schema
                    continue
                rows_seen = True
                found = given if given is not None else _agreed(found, schema, caller, unit)
                if is_settled(found):
                    return TableSchema.of(found), looked_at
            if rows_seen and looked_at >= MOST_UNITS:
                break
        found = found or of_none
        return (None if found is None else TableSchema.of(found)), looked_at

    def _count_reject(self, reject: Reject) -> None:
        """It is set aside, and told, when its unit is worked on."""
        self.rejected[reject.reason] += 1

    def _schemas(self, unit: RowUnit, caller: Caller, given: pa.Schema | None) -> Iterator[tuple[pa.Schema, int]]:
        """The schema and the number of rows of what each call returned."""
        row = 0
        rules = self._task.rules
        places = Places()
        read = self._load.reader.read(unit, self._count_reject, places, rules.room)
        for rows in batches(read, rules.batch_size, rules.batch_bytes):
            places.forget(row)
            first = None if unit.first_row is None else unit.first_row + row
            span = (row, row + row_count(rows))
            row = span[1]
            self.rows += row_count(rows)
            require_room(caller, rows, rules, partial(place_of, unit, span, places))
            try:
                self.peak_of_reading = self.peak_of_reading or self._meter.peak
                self.largest_batch = max(self.largest_batch, byte_size(rows))
                results = _as_arrays(call_batch(caller, rows, first, rules.on_error))
                self.rejected.update({FAILED: len(results.failed)} if results.failed else {})
                if self._task.kept is not None:
                    self._task.kept.add(unit.index, results)
                yield from _schemas_of(results.columns, rows, given)
            except (FunctionError, ResultError, ColumnError) as error:
                raise explained(error, caller, unit, span, places) from error
            release()


def _as_arrays(results: Results) -> Results:
    columns = [{name: to_array(name, values) for name, values in one.items()} for one in results.columns]
    return replace(results, columns=columns)


def _schemas_of(results: list[dict[str, Any]], rows: Rows, given: pa.Schema | None) -> Iterator[tuple[pa.Schema, int]]:
    for columns in results:
        if given is not None:
            yield given, fit(columns, given, optional=column_names(rows), given=True).num_rows
        else:
            count = len(next(iter(columns.values()), ()))
            yield infer(columns) if count else _schema_of_none(columns, rows), count


def _schema_of_none(columns: dict[str, Any], rows: Rows) -> pa.Schema:
    """Of columns without a row: an empty list has no type, but a column of the input under its name has."""
    known = set(column_names(rows))
    untyped = [name for name, values in columns.items() if name in known and pa.types.is_null(values.type)]
    return infer(columns | {name: column(rows, name) for name in untyped})


def _agreed(before: pa.Schema | None, now: pa.Schema, caller: Caller, unit: RowUnit) -> pa.Schema:
    try:
        return joined(before, now)
    except ColumnError as error:
        raise explained(error, caller, unit, (0, 1)) from error
