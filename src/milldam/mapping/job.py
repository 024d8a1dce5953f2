"""The job of `milldam.map`: rows of any source through any function, to a table. The same call goes on after a stop.

prepare   what the function depends on, what the source is, its units: nothing is read that need not be
read      sources that can be read only once: their rows, to parts in the run folder
probe     the first batches through the function: columns, and the memory of a worker; then the old table is put away
map       units to shards, in worker processes; a unit with a record is never made again
finish    rejects gathered, the manifest written last

Memory: this process plans and keeps count; a worker holds one batch, in and out of the function. How many workers
there are follows from the budget and the probe; what they make from function, settings and input alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from milldam.errors import ConfigError, InputError
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import cached_out
from milldam.mapping.calling import ALL, CallRules
from milldam.mapping.carrying import Carried, Load
from milldam.mapping.fitting import WorkerNeeds
from milldam.mapping.kept_results import KeptResults
from milldam.mapping.map_run import SCHEMA, SPOOL, UNITS, MapRun, rejects_of
from milldam.mapping.memory_gate import MemoryGate, this_process
from milldam.mapping.preparing import Prepared, prepare, source_options
from milldam.mapping.probing import Probed, ProbeTask
from milldam.mapping.reading import can_be_checked
from milldam.mapping.room import Room
from milldam.mapping.settings import MapSettings
from milldam.mapping.sources import plan_source
from milldam.mapping.unit_list import UnitList, unit_key
from milldam.mapping.working import FAILED, Assigned, MapTask
from milldam.markup import counted
from milldam.memory import Budget, usage
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.run.old_folder import NEW, UNFINISHED
from milldam.run.old_workforce import Staff, Stage, at_work
from milldam.run.planning import SMALL_INPUT, WorkPlan, make_plan
from milldam.run.progress import Observer, Quiet, log
from milldam.run.summary import Summary, describe_machine, package_versions
from milldam.sealed import read_sealed, write_sealed
from milldam.sources.listing import InputFile
from milldam.sources.opening import STDIN
from milldam.stores.table.manifest import MadeUnit, TableManifest, TableSchema


class MapFacts(TypedDict):
    columns: dict[str, str]
    """Name -> type."""


MapSummary: TypeAlias = Summary[MapFacts]
_CHANGES_SHOWN = 6
_GATE_SHARE = 0.9
"""Of the budget, what batches may come to: a batch may take more than those of its size did before."""


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> MapSummary:
    """Make the table, or what is left to make of it. `held_bytes`: memory that the calling program holds already."""
    budget = Budget.of(settings.memory, held_bytes)
    room = Room(budget.limit_bytes, held_bytes, this_process(), settings.format)
    if settings.out is not None:
        out = Path(settings.out)
        with MapRun(out) as run:
            return _run(prepare(settings, room, run.folder / SPOOL), run, observer or Quiet(), budget, room)
    with tempfile.TemporaryDirectory() as spool:
        prepared = prepare(settings, room, Path(spool))
        key = prepared.cache_key
    with cached_out(key) as out, MapRun(out) as run:
        return _run(prepared.moved_to(run.folder / SPOOL), run, observer or Quiet(), budget, room)


def _run(prepared: Prepared, run: MapRun, observer: Observer, budget: Budget, room: Room) -> MapSummary:
    with contextlib.closing(_Job(prepared, run, observer, budget, room)) as job:
        return job.run()


class _Job:
    def __init__(self, prepared: Prepared, run: MapRun, observer: Observer, budget: Budget, room: Room) -> None:
        self._prepared, self._settings, self._source = prepared, prepared.settings, prepared.source
        self._run, self._observer, self._budget, self._room = run, observer, budget, room
        self._changed: list[str] = []
        self._kept: KeptResults | None = None

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def run(self) -> MapSummary:
        run = self._run
        where = self._settings.engine, self._settings.address
        with at_work(run, self._observer, self._budget, *where) as self._workforce:
            self._monitor = self._workforce.monitor
            for doubt in self._prepared.doubts:
                self._observer.warn(doubt)
            table = self._up_to_date()
            if table is not None:
                run.clear_up(table)
                log.info("%s is up to date; %s", run.out, _reused(len(table.units), len(table.units)))
                return _told_by(table, run.out)
            self._begin()
            self._units = self._list_units()
            schema, probed = self._find_schema()
            self._take_over()
            made = self._make(schema, probed)
            self._workforce.close()
            self._workforce.enter("finish")
            return self._finish(schema, probed, made)

    def _up_to_date(self) -> TableManifest | None:
        """The table, if it is what this call would make. What is spooled is known by its source."""
        if self._settings.overwrite or not self._prepared.is_known:
            return None
        table = self._run.table()
        description = self._prepared.description
        if table is None or {name: getattr(table, name) for name in description} != description:
            return None
        if self._prepared.schema is not None and self._prepared.schema.ipc != table.schema.ipc:
            return None
        if not self._source.needs_spooling and list(self._keys(table.schema)) != [unit.key for unit in table.units]:
            return None
        return table if all(self._run.has_shard(unit) for unit in table.units) else None

    def _keys(self, schema: TableSchema) -> Iterator[str]:
        for unit in self._source.units():
            yield unit_key(self._prepared.recipe, schema.hash, unit.numbered_key)

    # ---- begin ----

    def _begin(self) -> None:
        """Say what changed. What is in the folder stays as it is until the function has worked on a batch."""
        run = self._run
        self._description = self._prepared.description
        run.write_inputs((0, file) for file in outside(self._source.files(), run.out, run.folder / SPOOL))
        self._changed = run.changes(self._description)
        self._anew = not self._prepared.is_known or (self._settings.overwrite and not self._goes_on())
        if run.state() != UNFINISHED:
            self._monitor.restart()
        self._made: dict[str, MadeUnit] | None = None
        if run.state() == NEW:
            self._take_over()

    def _take_over(self) -> None:
        """Put the old table aside, and write down what this run is; once."""
        if self._made is not None:
            return
        if self._anew:
            self._run.forget()
        self._made = self._run.made()
        self._run.begin(self._description | {"overwrite": self._settings.overwrite}, self._made.values())

    def _goes_on(self) -> bool:
        """Whether what is unfinished here is this very run, begun with overwrite and interrupted."""
        before = self._run.described() if self._run.state() == UNFINISHED else None
        return before is not None and before.get("overwrite") is True and not self._changed

    def _list_units(self) -> UnitList:
        if self._source.needs_spooling:
            self._workforce.enter("read")
            self._source.spool(None)
        return self._run.list_units(self._source.units())

    # ---- probe ----

    def _find_schema(self) -> tuple[TableSchema, Probed]:
        """The columns, and what is known of a worker's memory: as found before, if that is what would be found now."""
        known = None if self._anew else self._probed_before()
        probed = known or self._probe()
        schema = probed.schema or self._schema_of_none(probed)
        if schema is None:
            raise InputError(self._nothing_left(probed.rows, probed.rejected))
        return schema, probed

    def _schema_of_none(self, probed: Probed) -> TableSchema | None:
        """Of a source without rows: the columns that it has, less those that are to be removed; None: it names none."""
        import pyarrow as pa

        found = self._source.schema
        if probed.rows or probed.rejected or found is None:
            return None
        wanted, removed = self._settings.columns, self._settings.remove_columns
        names = [name for name in wanted or found.names if removed != ALL and name not in removed]
        return TableSchema.of(pa.schema([found.field(name) for name in names], metadata=found.metadata))

    def _probed_before(self) -> Probed | None:
        known = read_sealed(self._run.folder / SCHEMA)
        if known is None or known.pop("made_from") != self._probe_identity(known["units"]):
            return None
        return Probed(**known | {"schema": TableSchema(**known["schema"])})

    def _probe_identity(self, units: int) -> list[Any]:
        """What its figures depend on: those of this process say little of a worker."""
        given = None if self._prepared.schema is None else self._prepared.schema.ipc
        return [self._prepared.recipe, given, self._units.keys[:units], self._settings.engine, self._probes_apart]

    @cached_property
    def _probes_apart(self) -> bool:
        settings = self._settings
        large = self._units.bytes > SMALL_INPUT if settings.workers is None else settings.workers > 1
        return (large or settings.engine != "local") and self._can_travel

    def _probe(self) -> Probed:
        run, found = self._run, list[Probed]()
        self._kept = None if self._probes_apart else KeptResults(run.folder)
        task = ProbeTask(
            run.folder / UNITS,
            self._carried(),
            self._rules(),
            self._room,
            self._prepared.schema,
            this_process(),
            self._kept,
        )
        stage = Stage("probe", task, iter([0]), lambda unit: unit, total=1)
        self._workforce.work(stage, Staff(1, 1, apart=self._probes_apart), found.append)
        probed = found[0]
        if probed.schema is not None and self._prepared.is_known:
            known = asdict(probed) | {"made_from": self._probe_identity(probed.units)}
            write_sealed(run.folder / SCHEMA, known)
        return probed

    def _carried(self) -> Carried:
        settings = self._settings
        return Carried(Load(settings.function, settings.fn_kwargs, self._source.reader), settings.function_spec)

    @cached_property
    def _can_travel(self) -> bool:
        """Whether the function reaches other processes; without that one worker, this process, does it all."""
        try:
            self._carried().pack()
        except ConfigError as error:
            if (self._settings.workers or 1) > 1 or self._settings.engine != "local":
                raise
            self._observer.warn(f"One worker, in this process. {error}")
            return False
        return True

    def _rules(self) -> CallRules:
        settings = self._settings
        return CallRules(
            settings.batched,
            settings.batch_size,
            settings.most_batch_bytes,
            settings.format,
            settings.with_indices,
            settings.input_columns,
            settings.remove_columns,
            settings.on_error,
        )

    # ---- map ----

    def _make(self, schema: TableSchema, probed: Probed) -> list[MadeUnit]:
        """Every unit made, in plan order."""
        run, units, made = self._run, self._units, self._made
        assert made is not None
        keys = [unit_key(self._prepared.recipe, schema.hash, key) for key in units.keys]
        # Equal units, of an input that is named twice, are made once.
        todo = list({key: number for number, key in reversed(list(enumerate(keys))) if key not in made}.values())[::-1]
        self._cached = sum(key in made for key in keys)
        self._fresh = {keys[number]: number for number in todo}
        self._plan = self._plan_work(probed, todo)
        self._observer.planned(self._plan)
        log.info("%s: %s%s", run.out, _reused(self._cached, len(units)), self._because())

        def keep(one: MadeUnit) -> None:
            run.add(one)
            made[one.key] = one

        first = self._needs(probed).first_batch
        limit = int(_GATE_SHARE * self._budget.limit_bytes)
        gate = MemoryGate(run.folder, limit, first, this_process(), probed.worker_bytes)
        facts = (self._carried(), self._rules(), self._room, schema, gate, self._plan.share_bytes)
        task = MapTask(run.out, run.folder, *facts, None if self._elsewhere else self._kept)
        stage = Stage(
            "map",
            task,
            iter(todo),
            lambda number: Assigned(units[number], keys[number]),
            total=len(units),
            done=self._cached,
            input_bytes=sum(units.size(number) for number in todo),
        )
        if todo:
            self._workforce.work(stage, self._staff(probed), keep)
        return [made[key] for key in keys]

    def _plan_work(self, probed: Probed, todo: list[int]) -> WorkPlan:
        units, wanted = self._units, self._settings.workers or self._workforce.crew.cores
        name = self._prepared.function.name
        elsewhere = self._works_elsewhere(todo)
        useful = max(1, min(wanted, len(todo))) if elsewhere else 1
        parent = usage().anonymous
        workers = self._needs(probed).workers(parent, useful)
        self._elsewhere = elsewhere and workers > 0
        return make_plan(
            self._budget,
            kind=WorkPlan,
            workers=max(1, workers),
            useful=useful,
            cores=wanted,
            held_bytes=parent if self._elsewhere or self._workforce.crew.machine else 0,
            units=len(units),
            done=self._cached,
            input_bytes=units.bytes,
            shard_size=units.bytes // max(1, len(units)),
            engine="python",
            engine_note=f"{name}; {_reused(self._cached, len(units))}{self._because()}",
            stages=("probe", "map"),
            left_out=self._source.left_out,
        )

    def _works_elsewhere(self, todo: list[int]) -> bool:
        """Whether the function is called in other processes, whose memory comes back: unless the input is small, one
        worker is asked for, or the function can't be sent to them."""
        settings = self._settings
        small = settings.workers is None and sum(self._units.size(number) for number in todo) <= SMALL_INPUT
        if settings.engine == "local" and (small or settings.workers == 1):
            return False
        return self._can_travel

    def _because(self) -> str:
        if not self._changed:
            return ""
        shown = "; ".join(self._changed[:_CHANGES_SHOWN])
        more = len(self._changed) - _CHANGES_SHOWN
        return f"; changed: {shown}" + (f"; and {more} more" if more > 0 else "")

    def _needs(self, probed: Probed) -> WorkerNeeds:
        return WorkerNeeds(self._prepared, probed, self._room)

    def _staff(self, probed: Probed) -> Staff:
        most = self._needs(probed).most_idle_bytes(self._plan.share_bytes)
        alone = self._elsewhere and self._plan.workers == 1 and not self._workforce.crew.machine
        return Staff(self._plan.workers, self._plan.threads, apart=alone, worker_bytes=most)

    # ---- finish ----

    def _finish(self, schema: TableSchema, probed: Probed, made: list[MadeUnit]) -> MapSummary:
        run, description = self._run, self._prepared.description
        if not self._source.needs_spooling and self._look_again() != description["input"]:
            self._drop_unchecked()
            raise InputError(
                "The input changed while it was mapped. Run the same call again: finished units of files that did not "
                "change are reused; what came from an address or a data set meanwhile is made again."
            )
        table = TableManifest(schema=schema, probe={"units": probed.units}, units=tuple(made), **description)
        damage = gather_rejects(run.out, rejects_of(run.folder, made), lambda: (file["path"] for file in run.inputs()))
        if damage.files:
            self._observer.warn(str(damage))
        read, rejected = table.counts["read"], table.counts["rejected"]
        if rejected and read == rejected.get(FAILED, 0):
            raise InputError(self._nothing_left(read, rejected) + first_reject(run.out))
        summary = self._summary(table)
        summary.write(run.folder)
        table.write(run.out)
        run.clear_up(table)
        run.write_status({"stage": "finished", "units": len(made), "units_done": len(made)})
        return summary

    def _look_again(self) -> dict[str, Any]:
        """The identity of the source as it is now."""
        options = source_options(self._settings, self._room)
        return plan_source(self._settings.source, options, self._run.folder / SPOOL).identity

    def _drop_unchecked(self) -> None:
        """Forget the units of this run that may have read something else than their keys say."""
        dropped = {key for key, number in self._fresh.items() if not can_be_checked(self._units[number])}
        made = self._run.made().values()
        self._run.record_only([unit for unit in made if unit.key not in dropped])

    def _nothing_left(self, read: int, rejected: dict[str, int]) -> str:
        what = f"No rows came out of {self._prepared.function.name}" if read else "No rows in the input"
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        return f"{what}{f' (rejected: {reasons})' if reasons else ''}: there is no table to make."

    def _summary(self, table: TableManifest) -> MapSummary:
        work = self._workforce
        return replace(
            _told_by(table, self._run.out),
            up_to_date=False,
            reused=self._cached,
            changed=tuple(self._changed),
            seconds=work.elapsed,
            stages=work.wall,
            work=dict(work.seconds),
            memory=self._monitor.use(self._budget.limit_bytes),
            workers=self._plan.workers,
            machine=describe_machine(),
            versions=package_versions(),
            started=time.time() - work.elapsed,
            finished=time.time(),
        )


def outside(files: Iterator[InputFile], out: Path, spool: Path) -> Iterator[InputFile]:
    """The files, by names that tell no secrets. Raises ConfigError when one lies where the table is going to be.

    `spool`: what of it is ours; standard input is copied there.
    """
    before, inside = "", False
    for file in files:
        path = file.path.removeprefix("file://")
        if is_address(path):
            yield replace(file, path=without_secrets(path))
            continue
        # By plain strings: pathlib takes longer, and there may be millions of files, most of them in one folder.
        real = os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path)  # noqa: PTH114
        folder = os.path.dirname(real)  # noqa: PTH120
        if folder != before:
            before, place = folder, Path(folder).resolve()
            inside = place.is_relative_to(out.resolve()) and not place.is_relative_to(spool.resolve())
        if inside and path != STDIN:
            raise ConfigError(
                f"{path} is read, and lies in {out}, which is written: its rows would be lost. "
                "Choose another folder for the table."
            )
        yield file


def _told_by(table: TableManifest, out: Path) -> MapSummary:
    """Of a table that is up to date."""
    counts, units = table.counts, len(table.units)
    return Summary(
        "map",
        str(out),
        {"columns": table.schema.columns},
        up_to_date=True,
        units=units,
        reused=units,
        counts={"rows": table.rows, "read": counts["read"]},
        rejected=counts["rejected"],
        output_bytes=table.bytes,
    )


def _reused(reused: int, units: int) -> str:
    return f"{reused} of {counted(units, 'unit')} reused"
