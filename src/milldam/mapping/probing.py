"""The probe: the first batches through the function, to find the columns it makes and the memory it takes. From what it
saw and the budget follow the number of workers, and when a worker has grown too large.

Reads units in order until every column has a type, and four at most once there are rows. What it finds depends on the
input and the settings alone. In a process of its own (for inputs that are worth it) its peak is that of a worker. What
it found is kept for the next run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, Setting
from milldam.files import read_sealed, write_sealed
from milldam.mapping.calling import ALL, Caller, CallRules, KeptResults, Results
from milldam.mapping.file_rows import require_unchanged
from milldam.mapping.memory_gate import MARGIN, ROOM_BYTES, PeakMeter, Room
from milldam.mapping.plan import RowUnit
from milldam.mapping.preparing import Prepared
from milldam.mapping.schema import fit, infer, is_settled, joined, to_array, with_features
from milldam.mapping.working import FAILED, Carried, Load, UnitCalls
from milldam.memory import format_size, inherited, release, usage
from milldam.run.pools import WORK_BYTES, WORKER_BYTES, Workers, enough_memory
from milldam.run.session import Session, Stage
from milldam.run.tasks import PART, Report, Work
from milldam.run.units import UnitList
from milldam.sources.rows import Rows, byte_size, column, column_names, row_count
from milldam.stores.table.manifest import TableSchema

MOST_UNITS = 4
"""Units that are looked at for a type of the last columns."""
_PROBED = "probe.json"


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
    inherited_bytes: int = 0
    """What that process got from the one that forked it; 0: it was not forked."""
    shared_bytes: int = 0
    """What of that it had not changed afterwards, so that workers will have it in common."""

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
    units: tuple[Path, str]
    """The folder and the name of the list of units."""
    carried: Carried
    rules: CallRules
    room: Room
    schema: TableSchema | None
    """Given by the user: then one batch is enough."""
    kept: KeptResults | None = None
    """Takes what the calls return, where the work goes on in this process."""

    def start(self) -> Work:
        load = self.carried.open()

        def work(assigned: int, report: Report) -> None:
            report(PART, _FirstBatches(self, load).run())

        return work


class _FirstBatches:
    """The first batches, through the function."""

    def __init__(self, task: ProbeTask, load: Load) -> None:
        self._task, self._load, self._meter = task, load, PeakMeter()
        self._given = None if task.schema is None else task.schema.to_arrow()
        self._schema: pa.Schema | None = None
        """What the rows that were returned have in common."""
        self._empty: pa.Schema | None = None
        """Of the first result without a row."""
        self._rows, self._rejected = 0, Counter[str]()
        self._largest_batch = self._peak_of_reading = 0
        """In bytes; the most memory that there was before the function was called."""

    def run(self) -> Probed:
        release()
        before = usage().anonymous
        with self._meter:
            units = self._look()
        for unit in islice(self._units(), units):
            require_unchanged(unit)
        release()
        schema, (got, shared) = self._schema or self._given or self._empty, inherited()
        return Probed(
            schema=None if schema is None else TableSchema.of(schema),
            rows=self._rows,
            rejected=dict(self._rejected),
            units=units,
            idle_bytes=usage().anonymous,
            peak_bytes=self._meter.peak,
            reading_bytes=max(0, self._peak_of_reading - before),
            batch_bytes=self._largest_batch,
            apart=not self._task.room.is_parent,
            inherited_bytes=got,
            shared_bytes=shared,
        )

    def _units(self) -> Iterator[RowUnit]:
        return UnitList(*self._task.units).all(RowUnit.from_json)

    def _look(self) -> int:
        """Call the function until the columns are known; how many units it took."""
        caller = Caller(self._load.function, self._task.rules, self._load.kwargs)
        looked_at = 0
        for unit in self._units():
            looked_at += 1
            calls = UnitCalls(unit, caller, self._load.reader, self._task.room)
            # A reject is set aside, and told, when its unit is worked on.
            for rows in calls.batches(lambda reject: self._rejected.update([reject.reason])):
                self._call(calls, rows)
                if self._schema is not None and is_settled(self._schema):
                    return looked_at
            if self._schema is not None and looked_at >= MOST_UNITS:
                break
        return looked_at

    def _call(self, calls: UnitCalls, rows: Rows) -> None:
        self._rows += row_count(rows)
        with calls.batch(rows) as first_row:
            self._peak_of_reading = self._peak_of_reading or self._meter.peak
            self._largest_batch = max(self._largest_batch, byte_size(rows))
            found = calls.caller.results(rows, first_row)
            arrays = [{name: to_array(name, values) for name, values in one.items()} for one in found.columns]
            results = Results(arrays, found.failed)
            if results.failed:
                self._rejected[FAILED] += len(results.failed)
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
            # Columns without a row: an empty list has no type, but a column of the input under its name has.
            known = set(column_names(rows))
            untyped = [name for name, values in columns.items() if name in known and pa.types.is_null(values.type)]
            self._empty = infer({**columns, **{name: column(rows, name) for name in untyped}})


class Probe:
    """The probe of a run."""

    def __init__(self, session: Session, prepared: Prepared, units: tuple[Path, str]) -> None:
        """`units`: folder and name of the list."""
        settings = prepared.settings
        self._session, self._prepared, self._place, self._units = session, prepared, units, UnitList(*units)
        self._path = session.folder.folder / _PROBED
        load = Load(settings.function, settings.fn_kwargs, prepared.source.reader)
        self.carried = Carried(load, settings.function_spec)
        self.apart = settings.wants_processes(int(self._units.sizes().sum())) and self._can_travel()
        """In a process of its own."""
        self.kept = None if self.apart else session.held.enter_context(closing(KeptResults(session.folder.own)))
        """What its calls return, where the work goes on in this process."""

    def _can_travel(self) -> bool:
        """Whether the function reaches other processes; without that one worker, this process, does it all."""
        settings = self._prepared.settings
        try:
            self.carried.pack()
        except ConfigError as error:
            if (settings.workers or 1) > 1 or settings.executor != "local":
                raise
            self._session.observer.warn(f"One worker, in this process. {error}")
            return False
        return True

    def result(self, *, anew: bool) -> Probed:
        """As found before, if that is what would be found now. Raises InputError when nothing tells the columns."""
        probed = (None if anew else self._known()) or self._run()
        schema = probed.schema or self._schema_of_source(probed)
        if schema is None:
            raise InputError(nothing_left(self._prepared, probed.rows, probed.rejected))
        if self._prepared.schema is None:
            with contextlib.suppress(MilldamError):  # a first file that is damaged is told by who reads it
                schema = TableSchema.of(with_features(schema.to_arrow(), self._prepared.source.schema))
        return replace(probed, schema=schema)

    def _schema_of_source(self, probed: Probed) -> TableSchema | None:
        """Of a source without rows: the columns that it has, less those that are to be removed; None: it names none."""
        found = self._prepared.source.schema
        if probed.rows or probed.rejected or found is None:
            return None
        wanted, removed = self._prepared.settings.columns, self._prepared.settings.remove_columns
        names = [name for name in wanted or found.names if removed != ALL and name not in removed]
        return TableSchema.of(pa.schema([found.field(name) for name in names], metadata=found.metadata))

    def _known(self) -> Probed | None:
        known = read_sealed(self._path)
        if known is None or known.pop("made_from") != self._identity(known["units"]):
            return None
        return Probed(**known | {"schema": TableSchema(**known["schema"])})

    def _identity(self, units: int) -> list[Any]:
        """What its figures depend on: those of this process say little of a worker."""
        given, keys = self._prepared.schema, self._units.keys()
        read = [keys[number] for number in range(min(units, len(keys)))]
        executor = self._prepared.settings.executor
        return [self._prepared.recipe, None if given is None else given.ipc, read, executor, self.apart]

    def _run(self) -> Probed:
        found: list[Probed] = []
        prepared, workers = self._prepared, Workers(1, 1, apart=self.apart)
        task = ProbeTask(self._place, self.carried, prepared.call_rules, prepared.room, prepared.schema, self.kept)
        self._session.work(Stage("probe", task, iter([0]), lambda unit: unit, workers, found.append, total=1))
        probed = found[0]
        if probed.schema is not None and prepared.is_known:
            write_sealed(self._path, asdict(probed) | {"made_from": self._identity(probed.units)})
        return probed


def nothing_left(prepared: Prepared, read: int, rejected: dict[str, int]) -> str:
    """Why there is no table to make."""
    what = f"No rows came out of {prepared.function.name}" if read else "No rows in the input"
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
    return f"{what}{f' (rejected: {reasons})' if reasons else ''}: there is no table to make."


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """What a worker takes: between two batches, and on a batch."""

    prepared: Prepared
    probed: Probed

    @property
    def schema(self) -> TableSchema:
        """The columns that the probe found."""
        assert self.probed.schema is not None
        return self.probed.schema

    @property
    def recipe(self) -> str:
        """All that a unit's rows depend on besides what it reads."""
        return f"{self.prepared.recipe} {self.schema.hash}"

    @property
    def _batch_bytes(self) -> int:
        return self.prepared.settings.most_batch_bytes

    @property
    def first_batch(self) -> tuple[int, int]:
        """Bytes of the largest batch that the probe saw, and what it took."""
        return self.probed.batch_bytes, int(MARGIN * self.probed.work_bytes)

    def workers(self, parent_bytes: int, useful: int) -> int:
        """How many workers the budget holds beside this process; 0: this process has to do it alone.

        Raises ResourceError with the smallest budget that would do when it can't do it either.
        """
        probed, limit = self.probed, self.prepared.room.limit_bytes
        took = self.first_batch[1] + ROOM_BYTES
        work = max(WORK_BYTES, 4 * self._batch_bytes, took)
        idle = max(WORKER_BYTES, probed.worker_bytes)
        # What the function loads and keeps is loaded here, too, where this process works.
        alone = parent_bytes + idle - WORKER_BYTES + work
        if limit < alone:
            raise self._too_small(work, alone)
        # What workers have in common is held once, by the process that forks them.
        left, own = limit - parent_bytes - probed.inherited_bytes, idle - probed.shared_bytes
        if left < own + work:
            return 0
        usual = max(WORK_BYTES, 4 * self._batch_bytes, self._usually(took))
        # While one works on a row as large as the first, each of the others may have read one, too.
        others = (left - own - work) // (own + probed.reading_bytes)
        return min(useful, 1 + others, max(1, left // (own + usual)))

    def most_idle_bytes(self, share_bytes: int) -> int | None:
        """A worker that holds more after a unit is replaced: its next batch would not fit. None: not known."""
        return share_bytes - self._usually(self.probed.work_bytes) if self.probed.apart else None

    def _usually(self, taken: int) -> int:
        """What a batch takes where the first one took so much. A row larger than a batch may be is an exception: there
        are workers for the others, which wait for it."""
        return taken * self._batch_bytes // max(self._batch_bytes, self.probed.batch_bytes)

    def _too_small(self, work: int, alone: int) -> ResourceError:
        room, settings, held = self.prepared.room, self.prepared.settings, self.prepared.room.held_bytes
        # A batch of one row can't be made smaller.
        smaller = (
            ", or a smaller ",
            Setting("batch_bytes"),
            f" (now {format_size(self._batch_bytes)}) or ",
            Setting("batch_size"),
            f" (now {settings.batch_size})",
        )
        return ResourceError(
            f"A budget of {format_size(room.limit_bytes - held)} is too small: {self.prepared.function.name} takes "
            f"about {format_size(work)} on a batch, beside {format_size(max(0, alone - work - held))} that stay. It "
            "takes at least ",
            enough_memory(alone, held),
            *(smaller if settings.batch_size > 1 else ()),
            ".",
        )
