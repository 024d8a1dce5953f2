"""The job of `milldam.map`, in the frame of run/job.py: rows of any source through any function, to a table.

prepare   the function's identity, the source: nothing is read that need not be
plan      units (rows of sources that can be read only once go to the run folder first); the probe; workers
map       units to shards
finish    rejects gathered, the manifest written last; then what only the old table needs is removed

A unit's key is everything that its rows depend on: function, settings, columns, what it reads. So other settings are no
reason to refuse a folder: what has a record under its key is what this run would make.

Memory: this process plans and keeps count; a worker holds one batch, in and out of the function. How many workers
there are follows from the budget and the probe; what they make from function, settings and input alone.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypedDict

import numpy as np
from xxhash import xxh3_64_intdigest

from milldam.errors import ConfigError, InputError, Setting, StoreError
from milldam.files import NewFile, record_of, seal_line
from milldam.mapping.cache import cached_out
from milldam.mapping.file_rows import can_be_checked
from milldam.mapping.identity import identify
from milldam.mapping.memory_gate import MemoryGate, Room, remove_gates, this_process
from milldam.mapping.plan import HASHES, RowUnit, indices_name
from milldam.mapping.preparing import Prepared, outside, prepare
from milldam.mapping.probing import Probe, WorkerNeeds, nothing_left
from milldam.mapping.settings import MapSettings
from milldam.mapping.sources import plan_source
from milldam.mapping.working import FAILED, Assigned, MapTask, made_of, recorded, rejects_name
from milldam.markup import counted
from milldam.memory import Budget, usage
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.run import job as frame
from milldam.run.folder import FINISHED, NEW, PLAN, RunFolder
from milldam.run.pools import Workers, WorkPlan, make_plan
from milldam.run.records import Records, sweep
from milldam.run.session import Session, Stage
from milldam.run.summary import Observer, Summary, log
from milldam.sources.compression import STDIN
from milldam.stores.kinds import TABLE, live_files
from milldam.stores.table.manifest import NAME, TableManifest
from milldam.stores.table.writer import ENDING, ROWS
from milldam.stores.verify import has_every_file

RECORDS, SPOOL = "records.jsonl", "rows"
"""In the run folder: what is done; what could be read only once, hashes of large files, row numbers of a dataset."""
_CHANGES_SHOWN = 6
_GATE_SHARE = 0.9
"""Of the budget, what batches may come to: a batch may take more than those of its size did before."""


class MapFacts(TypedDict):
    columns: dict[str, str]
    """Name -> type."""


MapSummary: TypeAlias = Summary[MapFacts]


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> MapSummary:
    """Make the table, or what is left to make of it. `held_bytes`: memory that the calling program holds already."""
    job = MapJob(settings, held_bytes)
    if settings.out is not None:
        return frame.run(job, job.options(Path(settings.out)), observer)
    with tempfile.TemporaryDirectory() as spool:
        prepared = job.look(Budget.of(settings.memory, held_bytes), Path(spool))
        key = prepared.cache_key
    with cached_out(key) as out:
        return frame.run(MapJob(settings, held_bytes, prepared), job.options(out), observer)


def array_of(settings: MapSettings) -> frame.ArrayWork[MapSummary]:
    """The same for tasks of a job array."""
    if settings.out is None:
        raise ConfigError(Setting("out"), ": name a folder for the table: other machines don't see this one's cache.")
    job = MapJob(settings)
    return frame.ArrayWork(job, job.options(Path(settings.out)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPlan(WorkPlan):
    needs: WorkerNeeds
    """What workers take, by what the probe saw."""
    probe: Probe
    records: Records
    pending: tuple[int, ...]
    """Units that this session makes."""
    changed: tuple[str, ...]
    """What differs from what was begun here before: function, settings, input."""
    elsewhere: bool
    """The function is called in other processes, whose memory comes back."""


class MapJob:
    """Rows to a table. `prepared`: where function and source were identified before there was a folder."""

    kind = TABLE

    def __init__(self, settings: MapSettings, held_bytes: int = 0, prepared: Prepared | None = None) -> None:
        self.settings, self.held_bytes = settings, held_bytes
        self._prepared = prepared

    def options(self, out: Path) -> frame.Options:
        return frame.Options.of(self.settings, out, held_bytes=self.held_bytes, adapts=True)

    def look(self, budget: Budget, spool: Path) -> Prepared:
        """Identify function and source. `spool`: a folder for what can be read only once, and what is worth keeping."""
        room = Room(budget.limit_bytes, self.held_bytes, this_process(), self.settings.format)
        return prepare(self.settings, room, spool)

    def require_shareable(self) -> None:
        settings = self.settings
        if settings.source == STDIN or (isinstance(settings.source, list | tuple) and STDIN in settings.source):
            raise ConfigError(f"{STDIN}: other machines can't read it. Save it to a file.")
        function = identify(settings.function, settings.fn_kwargs, key=settings.key)
        if function.unhashable:
            unhashable = "; ".join(function.unhashable)
            raise ConfigError(
                f"What {function.name} depends on can't be hashed: {unhashable}. So array tasks could not tell whether "
                "they do the same. Name it by ",
                Setting("key"),
                ".",
            )

    def pieces(self) -> dict[str, int | None]:
        return {"map": None}

    # ---- prepare ----

    def prepare(self, session: Session) -> Prepared:
        folder, before, spool = session.folder, self._prepared, session.folder.folder / SPOOL
        prepared = self.look(session.budget, spool) if before is None else before.moved_to(spool)
        for doubt in prepared.doubts:
            session.observer.warn(doubt)
        folder.inputs.write((0, file) for file in outside(prepared.source.files(), folder.out, spool))
        return prepared

    def has_results(self, folder: RunFolder) -> bool:
        return True

    def up_to_date(self, session: Session, prepared: Prepared) -> MapSummary | None:
        folder = session.folder
        table = TableManifest.read(folder.out)
        if not prepared.is_known or not has_every_file(folder.out, self.kind):
            return None
        if folder.state() != FINISHED:
            (folder.folder / PLAN).unlink()  # of another table, of which nothing came
        clear_up(folder, table)
        log.info("%s is up to date; %s", folder.out, _reused(len(table.units), len(table.units)))
        return _told_by(table, folder.out)

    # ---- plan ----

    def plan(self, session: Session, prepared: Prepared, begin: str) -> MapPlan:
        """What is in the folder stays as it is until the function has worked on a batch."""
        folder, changed = session.folder, _changes(session.folder, prepared)
        if prepared.source.needs_spooling:
            session.enter("read")
            prepared.source.spool()
        if folder.task is None:
            folder.stage(prepared.source.units())
        is_new = folder.is_new()
        if is_new:
            folder.start(prepared.identity)
        is_planned = is_new or folder.task is not None
        listed = (folder.folder, "units") if is_planned else (folder.own, "units.new")
        probe = Probe(session, prepared, listed)
        anew = begin == NEW or not prepared.is_known
        needs = WorkerNeeds(prepared, probe.result(anew=anew))
        needs.workers(usage().anonymous, 1)  # refuse a budget that is too small now
        if not is_planned:
            folder.start(prepared.identity)
        return self._plan_work(session, needs, probe, records_of(folder, needs.recipe, anew=anew), changed)

    def _plan_work(
        self, session: Session, needs: WorkerNeeds, probe: Probe, records: Records, changed: tuple[str, ...]
    ) -> MapPlan:
        folder, prepared, sizes = session.folder, needs.prepared, session.folder.units.sizes()
        pending, told = tuple(records.pending()), _reused(records.complete, len(sizes), changed)
        wanted = self.settings.workers or session.pool.cores
        elsewhere = probe.apart and self.settings.wants_processes(records.pending_bytes(sizes))
        useful = max(1, min(wanted, len(pending))) if elsewhere else 1
        parent = usage().anonymous
        workers = needs.workers(parent, useful)
        elsewhere = elsewhere and workers > 0
        log.info("%s: %s", folder.out, told)
        return make_plan(
            session.budget,
            kind=MapPlan,
            workers=max(1, workers),
            useful=useful,
            cores=wanted,
            held_bytes=parent if elsewhere or session.pool.machine else 0,
            units=len(sizes),
            done=records.complete,
            input_bytes=int(sizes.sum()),
            shard_size=int(sizes.sum()) // max(1, len(sizes)),
            encoder="python",
            encoder_note=f"{prepared.function.name}; {told}",
            stages=("probe", "map"),
            pieces={"map": len(sizes)},
            left_out=prepared.source.left_out,
            needs=needs,
            probe=probe,
            records=records,
            pending=pending,
            changed=changed,
            elsewhere=elsewhere,
        )

    # ---- map ----

    def stages(self, session: Session, prepared: Prepared, plan: MapPlan) -> Generator[Stage, None, None]:
        folder, records, needs = session.folder, plan.records, plan.needs
        limit = int(_GATE_SHARE * session.budget.limit_bytes)
        gate = MemoryGate(folder.own, limit, needs.first_batch, prepared.room.parent, needs.probed.worker_bytes)
        remove_gates(folder.own)
        task = MapTask(
            folder.out,
            plan.probe.carried,
            prepared.call_rules,
            prepared.room,
            plan.needs.schema,
            gate,
            plan.share_bytes,
            None if plan.elsewhere else plan.probe.kept,
        )
        alone = plan.elsewhere and plan.workers == 1 and not session.pool.machine
        if plan.pending:
            yield Stage(
                "map",
                task,
                iter(plan.pending),
                lambda number: Assigned(folder.units.at(number, RowUnit.from_json), records.keys[number]),
                Workers(plan.workers, plan.threads, apart=alone, worker_bytes=needs.most_idle_bytes(plan.share_bytes)),
                records.add,
                total=plan.units,
                done=plan.done,
                input_bytes=records.pending_bytes(folder.units.sizes()),
            )

    # ---- finish ----

    def finish(self, session: Session, prepared: Prepared, plan: MapPlan, done: None) -> MapSummary:
        folder, identity = session.folder, prepared.identity
        again = self.settings, folder.folder / SPOOL, prepared.room
        if not prepared.source.needs_spooling and plan_source(*again).identity != identity.input:
            # Where nothing was left to do, array tasks or an earlier session made them.
            forget_unchecked(folder, plan.records, plan.pending or range(plan.units))
            raise InputError(
                "The input changed while it was mapped. Run the same call again: finished units of files that did not "
                "change are reused; units from an address or a dataset are redone."
            )
        records = [record for _, record in plan.records.in_plan_order()]
        table = TableManifest(
            schema=plan.needs.schema,
            settings=identity.settings,
            input=identity.input,
            probe={"units": plan.needs.probed.units},
            units=tuple(map(made_of, records)),
        )
        rejects = [folder.out / name for record in records for name in record.files]
        damage = gather_rejects(folder.out, rejects, lambda: (file["path"] for file in folder.inputs.planned()))
        if damage.files:
            session.observer.warn(str(damage))
        read, rejected = table.counts["read"], table.counts["rejected"]
        if rejected and read == rejected.get(FAILED, 0):
            raise InputError(nothing_left(prepared, read, rejected) + first_reject(folder.out))
        summary = replace(
            session.measured(_told_by(table, folder.out)),
            up_to_date=False,
            reused=plan.done,
            changed=plan.changed,
            workers=plan.workers,
        )
        summary.write(folder.folder)
        table.write(folder.out)
        clear_up(folder, table)
        return summary


# ---- what is done, what is left over ----


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


# ---- what to say ----


def _changes(folder: RunFolder, prepared: Prepared) -> tuple[str, ...]:
    """What is different from what was last begun here."""
    try:
        before = folder.identity()
    except StoreError:  # nothing was begun, or nobody can tell what
        return ()
    found = [*prepared.differences(before), *(f"input {line}" for line in folder.inputs.changes())]
    return tuple(found or (["input"] if before.input != prepared.identity.input else []))


def _reused(reused: int, units: int, changed: tuple[str, ...] = ()) -> str:
    """What was reused, and why no more was."""
    more = len(changed) - _CHANGES_SHOWN
    why = [*changed[:_CHANGES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return f"{reused} of {counted(units, 'unit')} reused" + (f"; changed: {'; '.join(why)}" if changed else "")


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
