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
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import ConfigError, InputError, ResourceError, Setting
from milldam.files import hash_bytes
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import ONCE, cached_out
from milldam.mapping.calling import ALL, CallRules
from milldam.mapping.carrying import Carried, Load
from milldam.mapping.file_rows import can_be_checked
from milldam.mapping.identity import identify
from milldam.mapping.kept_results import KeptResults
from milldam.mapping.map_run import SCHEMA, SPOOL, UNITS, MapRun, rejects_of
from milldam.mapping.memory_gate import MemoryGate, this_process
from milldam.mapping.plan import SourceOptions, SourcePlan
from milldam.mapping.probing import Probed, ProbeTask
from milldam.mapping.room import MARGIN, ROOM_BYTES, Room
from milldam.mapping.settings import MapSettings
from milldam.mapping.sources import plan_source
from milldam.mapping.unit_list import UnitList, unit_key
from milldam.mapping.working import FAILED, Assigned, MapTask
from milldam.memory import Budget, format_size, usage
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.run.old_folder import NEW, UNFINISHED
from milldam.run.old_workforce import Staff, Stage, at_work
from milldam.run.planning import SMALL_INPUT, WORK_BYTES, WORKER_BYTES, WorkPlan, make_plan
from milldam.run.progress import Observer, Quiet, log
from milldam.sealed import read_sealed, write_sealed
from milldam.sources.listing import InputFile
from milldam.sources.opening import STDIN
from milldam.stores.table.manifest import MadeUnit, TableManifest, TableSchema
from milldam.stores.table.summary import MapSummary

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
"""Of the way from rows to rows: another one makes other keys."""
SUMMARY = "summary.json"
_CHANGES_SHOWN = 6
_GATE_SHARE = 0.9
"""Of the budget, what batches may come to: a batch may take more than those of its size did before."""


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> MapSummary:
    """Do the job, or what is left of it. `held_bytes`: memory that the calling program holds already."""
    if settings.out is None:
        with cached_out(_cache_key(settings)) as out:
            return run_map(replace(settings, out=str(out)), observer, held_bytes=held_bytes)
    with (
        MapRun(Path(settings.out)) as run,
        contextlib.closing(_Job(settings, run, observer or Quiet(), held_bytes)) as job,
    ):
        return job.run()


def _cache_key(settings: MapSettings) -> str:
    """What a table is called in the cache: its function and settings, then its input. Of what can't be identified
    nothing is found again."""
    function = identify(settings.function, settings.fn_kwargs, key=settings.key)
    with tempfile.TemporaryDirectory() as spool:
        source = plan_source(settings.source, _source_options(settings), Path(spool))
        if function.unhashable or source.unidentified is not None:
            return f"{ONCE}{uuid.uuid4().hex[:16]}"
        schema = _given_schema(settings)
        how = [VERSION, function.hash, settings.parameters, settings.cuts, None if schema is None else schema.ipc]
        return "-".join(hash_bytes(json.dumps(part).encode())[:16] for part in (how, source.identity))


def _source_options(settings: MapSettings, room: Room | None = None) -> SourceOptions:
    return SourceOptions(
        columns=settings.columns,
        **settings.cuts,
        split=settings.split,
        subset=settings.subset,
        input_format=settings.input_format,
        documents=settings.documents,
        separator=settings.separator,
        invalid_utf8=settings.invalid_utf8,
        strict=settings.strict,
        source_key=settings.source_key,
        numbered=settings.with_indices,
        room=room,
    )


def _given_schema(settings: MapSettings) -> TableSchema | None:
    if settings.schema is None:
        return None
    from milldam.mapping.schema import given_schema

    schema: pa.Schema = given_schema(settings.schema)
    return TableSchema.of(schema)


class _Job:
    def __init__(self, settings: MapSettings, run: MapRun, observer: Observer, held_bytes: int) -> None:
        self._settings, self._run, self._observer = settings, run, observer
        self._budget, self._held = Budget.of(settings.memory, held_bytes), held_bytes
        self._room = Room(self._budget.limit_bytes, held_bytes, this_process(), settings.format)
        self._kept: KeptResults | None = None

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def run(self) -> MapSummary:
        run = self._run
        where = self._settings.engine, self._settings.address
        with at_work(run, self._observer, self._budget, *where) as self._workforce:
            self._monitor = self._workforce.monitor
            self._prepare()
            table = self._up_to_date()
            if table is not None:
                run.clear_up(table)
                return _told_by(table, run.out)
            self._begin()
            self._units = self._list_units()
            schema, probed = self._find_schema()
            self._take_over()
            made = self._make(schema, probed)
            self._workforce.close()
            self._workforce.enter("finish")
            return self._finish(schema, probed, made)

    # ---- prepare ----

    def _prepare(self) -> None:
        settings = self._settings
        self._function = identify(settings.function, settings.fn_kwargs, key=settings.key)
        self._source = self._plan_source()
        if settings.with_indices and not self._source.has_indices:
            raise ConfigError(Setting("with_indices"), ": the rows of this source have no numbers. Leave it out.")
        self._given = _given_schema(settings)
        self._reusable = self._is_known()
        self._recipe = hash_bytes(json.dumps([VERSION, self._function.hash, settings.parameters]).encode())
        self._changed: list[str] = []

    def _plan_source(self) -> SourcePlan:
        options = _source_options(self._settings, self._room)
        return plan_source(self._settings.source, options, self._run.folder / SPOOL)

    def _is_known(self) -> bool:
        """Whether equal keys mean equal rows. Says what stands against it, and how to name it."""
        unhashable, unidentified = self._function.unhashable, self._source.unidentified
        if unhashable:
            self._observer.warn(
                f"What {self._function.name} depends on can't be hashed: {'; '.join(unhashable)}. Nothing is reused "
                'from an earlier run. Name it yourself by the setting "key", and change the name whenever it changes.'
            )
        if unidentified is not None:
            self._observer.warn(
                f"The source can't be identified: {unidentified}. Nothing is reused from an earlier run."
            )
        return not unhashable and unidentified is None

    def _describe(self) -> dict[str, Any]:
        """What this run is made from, for the manifest and for naming changes."""
        schema = None if self._given is None else self._given.columns
        settings = {**self._settings.parameters, **self._settings.cuts, "schema": schema}
        return {"function": self._function.as_json(), "settings": settings, "input": self._source.identity}

    def _up_to_date(self) -> TableManifest | None:
        """The table, if it is what this call would make. What is spooled is known by its source."""
        if self._settings.overwrite or not self._reusable:
            return None
        table = self._run.table()
        description = self._describe()
        if table is None or {name: getattr(table, name) for name in description} != description:
            return None
        if self._given is not None and self._given.ipc != table.schema.ipc:
            return None
        if not self._source.needs_spooling and list(self._keys(table.schema)) != [unit.key for unit in table.units]:
            return None
        return table if all(self._run.has_shard(unit) for unit in table.units) else None

    def _keys(self, schema: TableSchema) -> Iterator[str]:
        for unit in self._source.units():
            yield unit_key(self._recipe, schema.hash, unit.numbered_key)

    # ---- begin ----

    def _begin(self) -> None:
        """Say what changed. What is in the folder stays as it is until the function has worked on a batch."""
        run = self._run
        self._description = self._describe()
        run.write_inputs((0, file) for file in outside(self._source.files(), run.out, run.folder / SPOOL))
        self._changed = run.changes(self._description)
        self._anew = not self._reusable or (self._settings.overwrite and not self._goes_on())
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
        given = None if self._given is None else self._given.ipc
        return [self._recipe, given, self._units.keys[:units], self._settings.engine, self._probes_apart]

    @cached_property
    def _probes_apart(self) -> bool:
        settings = self._settings
        large = self._units.bytes > SMALL_INPUT if settings.workers is None else settings.workers > 1
        return (large or settings.engine != "local") and self._can_travel

    def _probe(self) -> Probed:
        run, found = self._run, list[Probed]()
        self._kept = None if self._probes_apart else KeptResults(run.folder)
        task = ProbeTask(
            run.folder / UNITS, self._carried(), self._rules(), self._room, self._given, this_process(), self._kept
        )
        stage = Stage("probe", task, iter([0]), lambda unit: unit, total=1)
        self._workforce.work(stage, Staff(1, 1, apart=self._probes_apart), found.append)
        probed = found[0]
        if probed.schema is not None and self._reusable:
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
        keys = [unit_key(self._recipe, schema.hash, key) for key in units.keys]
        # Equal units, of an input that is named twice, are made once.
        todo = list({key: number for number, key in reversed(list(enumerate(keys))) if key not in made}.values())[::-1]
        self._cached = sum(key in made for key in keys)
        self._fresh = {keys[number]: number for number in todo}
        self._plan = self._plan_work(probed, todo)
        self._observer.planned(self._plan)
        log.info("%s: cached: %d of %d units%s", run.out, self._cached, len(units), self._because())

        def keep(one: MadeUnit) -> None:
            run.add(one)
            made[one.key] = one

        first = (probed.batch_bytes, int(MARGIN * probed.work_bytes))
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
        elsewhere = self._works_elsewhere(todo)
        useful = max(1, min(wanted, len(todo))) if elsewhere else 1
        parent = usage().anonymous
        workers = self._fit_workers(parent, probed, useful)
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
            engine_note=f"{self._function.name}; cached: {self._cached} of {len(units)} units{self._because()}",
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

    def _fit_workers(self, parent: int, probed: Probed, useful: int) -> int:
        """How many workers the budget holds, beside this process; 0: this process has to do it."""
        most, took = self._settings.most_batch_bytes, int(MARGIN * probed.work_bytes) + ROOM_BYTES
        work, limit = max(WORK_BYTES, 4 * most, took), self._budget.limit_bytes
        idle = max(WORKER_BYTES, probed.worker_bytes)
        # What the function loads and keeps is loaded here, too, where this process works.
        alone = parent + idle - WORKER_BYTES + work
        if limit < alone:
            # What the program held before comes on top of what is given.
            smallest = max(0, alone * 103 // 100 - self._held) // 10**6 + 1
            raise ResourceError(
                f"A budget of {format_size(limit - self._held)} is too small: {self._function.name} takes about "
                f"{format_size(work)} on a batch, beside {format_size(max(0, alone - work - self._held))} that stay. "
                "It takes at least ",
                Setting("memory", f"{smallest}MB"),
                ", or a smaller ",
                Setting("batch_bytes"),
                f" (now {format_size(self._settings.most_batch_bytes)}) or ",
                Setting("batch_size"),
                f" (now {self._settings.batch_size}).",
            )
        if limit < parent + idle + work:
            return 0
        usual = max(WORK_BYTES, 4 * most, self._usually(took, probed))
        # While one works on a row as large as the first, each of the others may have read one, too.
        others = (limit - parent - idle - work) // (idle + probed.reading_bytes)
        return min(useful, 1 + others, max(1, (limit - parent) // (idle + usual)))

    def _usually(self, taken: int, probed: Probed) -> int:
        """What a batch takes where the first one took so much. A row larger than a batch may be is an exception: there
        are workers for the others, which wait for it."""
        most = self._settings.most_batch_bytes
        return taken * most // max(most, probed.batch_bytes)

    def _staff(self, probed: Probed) -> Staff:
        """A worker that holds so much after a unit that the next batch would not fit is replaced by a fresh one."""
        most = self._plan.share_bytes - self._usually(probed.work_bytes, probed) if probed.apart else None
        alone = self._elsewhere and self._plan.workers == 1 and not self._workforce.crew.machine
        return Staff(self._plan.workers, self._plan.threads, apart=alone, worker_bytes=most)

    # ---- finish ----

    def _finish(self, schema: TableSchema, probed: Probed, made: list[MadeUnit]) -> MapSummary:
        run, description = self._run, self._describe()
        if not self._source.needs_spooling and self._plan_source().identity != description["input"]:
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
        write_sealed(run.folder / SUMMARY, summary.as_json())
        table.write(run.out)
        run.clear_up(table)
        run.write_status({"stage": "finished", "units": len(made), "units_done": len(made)})
        return summary

    def _drop_unchecked(self) -> None:
        """Forget the units of this run that may have read something else than their keys say."""
        dropped = {key for key, number in self._fresh.items() if not can_be_checked(self._units[number])}
        made = self._run.made().values()
        self._run.record_only([unit for unit in made if unit.key not in dropped])

    def _nothing_left(self, read: int, rejected: dict[str, int]) -> str:
        what = f"No rows came out of {self._function.name}" if read else "No rows in the input"
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        return f"{what}{f' (rejected: {reasons})' if reasons else ''}: there is no table to make."

    def _summary(self, table: TableManifest) -> MapSummary:
        counts = table.counts
        return MapSummary(
            self._run.out,
            False,
            table.rows,
            counts["read"],
            len(table.units),
            self._cached,
            self._changed,
            counts["rejected"],
            table.schema.columns,
            table.bytes,
            seconds=self._workforce.elapsed,
            wall=self._workforce.wall,
            stages=dict(self._workforce.seconds),
            memory=dict(self._monitor.use(self._budget.limit_bytes)),
            workers=self._plan.workers,
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
    counts, units = table.counts, len(table.units)
    log.info("%s is up to date; cached: %d of %d units", out, units, units)
    return MapSummary(
        out, True, table.rows, counts["read"], units, units, [], counts["rejected"], table.schema.columns, table.bytes
    )
