"""Jobs as units -> read -> steps -> sink -> record: what a job has to say, and the only loop.

    lock       the run folder
    prepare    everything that can be wrong is found; the identity: what the result depends on
    units      slices of the input, each with a key, listed on disk; as many workers as the budget holds
    stages     one after the other, as the job yields them: the keys of a stage may need what an earlier one decided
    finish     the manifest, written last: there is a result if and only if it is there

A stage brings a `Load`, which pickles; a worker builds `make` of it once. `make` takes a unit, reads it batch by batch,
sends each batch through its steps into a sink, and yields a record for every part whose files are durable. A unit whose
last record is there is never made again; one that is begun goes on behind its last part, with what that record says. So
the same call resumes after a kill, redoes what changed of an input that changed, and does nothing when nothing did.

What one job can, all can: run on this machine, on a Ray cluster, as tasks of a job array; be interrupted and resumed;
be watched by `milldam status`; keep to a budget.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from milldam.errors import ConfigError, MilldamError, NotReadyError, Setting, StoreError, os_error
from milldam.memory import Budget, usage
from milldam.run.folder import FINISHED, NEW, PREPARE_FIRST, UNFINISHED, RunFolder
from milldam.run.pools import SMALL_INPUT, Workers, WorkPlan, fit_workers, pool_for
from milldam.run.records import RECORDS, Records
from milldam.run.session import Session, session
from milldam.run.summary import Observer, Quiet
from milldam.run.tasks import FINISH, PREPARE, ArrayTask, Assigned, Load, Make, Telling
from milldam.run.units import Identity, PlannedUnit, UnitList
from milldam.stores.kinds import Kind

if TYPE_CHECKING:
    from milldam.run.fork import ForkedWorkers

__all__ = [
    "ArrayWork",
    "Assigned",
    "Job",
    "Load",
    "Make",
    "Options",
    "Stage",
    "Telling",
    "array_of",
    "plan_work",
    "run",
]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Stage:
    """What is made of the units that have no complete record."""

    name: str
    load: Load
    records: Records
    parse: Callable[[dict[str, Any]], Any] | None = None
    """The unit of a line of the plan; None: the units are steps, each its number."""
    workers: Workers | None = None
    """None: as many as are planned."""
    facts: Callable[[int], dict[str, Any]] = lambda number: {}
    """Of a unit, by its number: `Assigned.facts`, looked up when it is handed out."""
    todo: Iterable[int] | None = None
    """The units to make, in this order; None: all without a complete record. Of an iterator, some may come later
    (`NothingYetError`), and not all be wanted."""
    listed: UnitList | None = None
    """Where the units are listed; None: in the plan."""


class Job(ABC, Generic[S]):
    """What only one kind of job knows."""

    kind: Kind
    stage_names: tuple[str, ...]
    """In order; tasks of a job array can share each of them."""
    outputs: tuple[str, ...] | None
    """What it leaves in its folder besides the manifest, by pattern: removed when a run begins anew. None: the old
    result stays until the new manifest takes its place; what is recorded goes."""
    workers: int | None
    """As many as the user asks for; None: as many as are useful."""
    read_once: bool = False
    """Its input can't be read again: what an earlier run listed of it says nothing."""
    batch_bytes: int = 0
    """What a batch may take in each worker, where that is more than usual; known when it is prepared."""

    @abstractmethod
    def prepare(self, run: Session) -> Identity:
        """Look at settings and input (`run.folder.inputs.write`)."""

    @abstractmethod
    def units(self, run: Session) -> Iterable[PlannedUnit]:
        """Refuse what can be refused before the last one: nothing in the folder has changed yet."""

    def files(self, run: Session) -> dict[str, bytes]:
        """Small files of the result that are there from the start."""
        return {}

    def plan_facts(self, run: Session) -> dict[str, Any]:
        """What this job says of its plan, by the names of `WorkPlan`; the units are listed."""
        return {}

    @abstractmethod
    def stages(self, run: Session) -> Iterator[Stage]:
        """Each is done when the next one is asked for."""

    @abstractmethod
    def finish(self, run: Session, plan: WorkPlan) -> S:
        """Gather what units left, write the manifest last; the summary."""

    @abstractmethod
    def up_to_date(self, run: Session) -> S | None:
        """The summary of a result that was made from the same; None: it is not whole, so that something is to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is run: nothing here changes its result."""

    out: Path
    memory: str | int | None = None
    executor: str = "local"
    address: str | None = None
    overwrite: bool = False
    name: Path | None = None
    """What messages call the result, when it is not the folder."""
    held_bytes: int = 0
    """Memory that the calling program holds already; the limit comes on top of it."""
    adapts: bool = False
    """What was made with other settings is not refused: its units have other keys, and are made again."""
    server: ForkedWorkers | None = None
    """Begun ahead, to start workers."""

    @classmethod
    def of(cls, settings: Any, out: Path | None = None, **more: Any) -> Options:
        """As a job's settings say, which have all of these. `out`: when it is made elsewhere."""
        chosen = settings.memory, settings.executor, settings.address, settings.overwrite
        return cls(out or Path(settings.out or ""), *chosen, **more)


def run(job: Job[S], options: Options, observer: Observer | None = None) -> S:
    """Do a job, or what is left of it."""
    with _at_work(job, options, observer) as work:
        identity = job.prepare(work)
        begin = _where_to_begin(job, work.folder, identity, options)
        if begin == FINISHED:
            work.folder.tidy()
            if (summary := job.up_to_date(work)) is not None:
                return summary
            begin = UNFINISHED
        plan = _plan(job, work, identity, begin)
        for stage in job.stages(work):
            work.work(stage)
        return _finish(job, work, plan)


@contextlib.contextmanager
def _at_work(
    job: Job[S], options: Options, observer: Observer | None, task: ArrayTask | None = None
) -> Iterator[Session]:
    """A session in the job's run folder, which is locked meanwhile."""
    budget = Budget.of(options.memory, options.held_bytes)
    try:
        with RunFolder(options.out, job.kind, name=options.name, task=task) as folder:
            pool = pool_for(options.executor, options.address, budget.limit_bytes, options.server)
            with session(folder, observer or Quiet(), budget, pool) as work:
                yield work
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        raise os_error(error, None if error.filename else options.name or options.out) from error


def _where_to_begin(job: Job[S], folder: RunFolder, identity: Identity, options: Options) -> str:
    names = (RECORDS, *(f"{stage}.jsonl" for stage in job.stage_names))
    has_results = any(next(folder.journal.read(name), None) is not None for name in names)
    return folder.where_to_begin(identity, overwrite=options.overwrite, has_results=has_results, adapts=options.adapts)


def _plan(job: Job[S], work: Session, identity: Identity, begin: str) -> WorkPlan:
    """Have the units listed in the folder, and settle who works on them."""
    folder = work.folder
    if folder.refusal is not None:
        raise folder.refusal
    if begin == NEW:
        work.monitor.restart()
    else:
        folder.tidy()
    changes = () if begin == NEW else tuple(folder.inputs.changes())
    if job.read_once or folder.needs_plan(identity, begin):
        folder.stage(job.units(work))
        if begin == NEW and job.outputs is None:
            folder.journal.forget(RECORDS)
        folder.start(identity, job.files(work), outputs=job.outputs if begin == NEW else None)
    else:
        folder.provide(job.files(work))
    plan = replace(plan_work(work, job), changes=changes)
    work.observer.planned(plan)
    return plan


def plan_work(work: Session, job: Job[Any]) -> WorkPlan:
    """As many workers for the listed units as are wanted, useful and fit into the budget."""
    sizes, held = work.folder.units.sizes(), usage().anonymous
    units, input_bytes = len(sizes), int(sizes.sum())
    cores = work.pool.cores if job.workers is None else job.workers
    useful = 1 if input_bytes < SMALL_INPUT else max(1, min(units, cores))
    facts = {
        "useful": useful,
        "cores": cores,
        "held_bytes": held,
        "units": units,
        "input_bytes": input_bytes,
        "shard_size": input_bytes // max(1, units),
        "stages": job.stage_names,
        **job.plan_facts(work),
    }
    if not facts.get("workers"):
        facts["workers"] = fit_workers(work.budget, held, 0, useful, own_bytes=job.batch_bytes)
    plan = WorkPlan.of(work.budget, **facts)
    work.workers = plan.workers
    return plan


def _finish(job: Job[S], work: Session, plan: WorkPlan) -> S:
    work.pool.close()
    work.enter("finish")
    summary = job.finish(work, plan)
    work.folder.presence.tell({"stage": "finished", "units": plan.units, "units_done": plan.units})
    return summary


# ---- the same job as tasks of a job array, on machines that see its output folder ----


@dataclass(frozen=True, slots=True)
class ArrayWork(Generic[S]):
    """A job for the tasks of a job array."""

    job: Job[S]
    options: Options

    def run(self, task: ArrayTask, observer: Observer | None = None) -> S | None:
        """Do what is left of a task. PREPARE plans for the others; FINISH makes the result and gives its summary.

        Raises NotReadyError when the job is not prepared or a stage before is not done, TaskHeldError when somebody is
        at work on this task.
        """
        if task.stage == FINISH:
            return self._finish(observer)
        if task.stage == PREPARE:
            self._prepare(observer)
        else:
            self._share(task, observer)
        return None

    def _prepare(self, observer: Observer | None) -> None:
        """Check and plan the job; what is there of it already stays."""
        with _at_work(self.job, self.options, observer) as work:
            identity = self.job.prepare(work)
            begin = _where_to_begin(self.job, work.folder, identity, self.options)
            if begin != FINISHED:
                _plan(self.job, work, identity, begin)
                # What stands before the first stage is settled once, for all tasks.
                next(self.job.stages(work), None)
                work.folder.presence.forget_tasks()

    def _share(self, task: ArrayTask, observer: Observer | None) -> None:
        """Do what is left of a task of a stage, beside others that do theirs."""
        with _at_work(self.job, self.options, observer, task) as work:
            presence = work.folder.presence
            try:
                identity = self.job.prepare(work)
                if work.folder.require_same(identity) != FINISHED:
                    if not work.folder.lists_units():
                        named = f"{work.folder.folder / 'units.jsonl'} or units.offsets"
                        raise StoreError(f"{named}: damaged. Make it again: {PREPARE_FIRST}")
                    work.observer.planned(plan_work(work, self.job))
                    self._one_stage(work, task)
            except MilldamError as error:
                presence.tell(presence.told() | {"stage": task.stage, "state": "failed", "message": str(error)})
                raise
            presence.tell(presence.told() | {"stage": task.stage, "state": "done"})

    def _one_stage(self, work: Session, task: ArrayTask) -> None:
        names = self.job.stage_names
        if task.stage not in names:
            raise ConfigError(
                Setting("stage"),
                f": {task.stage}: this job has the stages {', '.join(names)}; {PREPARE} before and {FINISH} after.",
            )
        for stage in self.job.stages(work):
            if stage.name == task.stage:
                work.work(stage, task)
                return
            if stage.name in names and names.index(stage.name) > names.index(task.stage):
                return  # nothing of the stage was left to do
            _require_done(stage, task.stage)

    def _finish(self, observer: Observer | None) -> S:
        """Make the store of what array tasks have done. Raises NotReadyError when something of theirs is left."""
        with _at_work(self.job, self.options, observer) as work:
            folder = work.folder
            if folder.is_new():
                raise NotReadyError(f"{folder.name}: not prepared. First: {PREPARE_FIRST}")
            identity = self.job.prepare(work)
            was_finished = folder.require_same(identity) == FINISHED
            if was_finished and (summary := self.job.up_to_date(work)) is not None:
                return summary
            plan = _plan(self.job, work, identity, UNFINISHED)
            for stage in self.job.stages(work):
                # What a finished store has lost is made again here: tasks leave it alone.
                if stage.name in self.job.stage_names and not was_finished:
                    _require_done(stage, FINISH)
                else:
                    work.work(stage)
            return _finish(self.job, work, plan)


def array_of(job: Job[S], options: Options) -> ArrayWork[S]:
    """The same for tasks of a job array."""
    if options.executor != "local":
        raise ConfigError(Setting("executor"), f": {options.executor}: array tasks work each on its own machine.")
    return ArrayWork(job, options)


def _require_done(stage: Stage, wanted: str) -> None:
    units = stage.records.pending() if stage.todo is None else stage.todo
    if next(iter(units), None) is not None:
        raise NotReadyError(
            Setting("stage"),
            f": {wanted}: the stage {stage.name} before it is not done. Run its tasks first; "
            "the job's own command does all that is left on one machine.",
        )
