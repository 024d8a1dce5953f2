"""Jobs as units -> read -> steps -> sink -> record: what a job implements, and the only loop.

    lock       the run folder
    prepare    everything that can be wrong is found; the identity: what the result depends on
    units      slices of the input, each with a key, listed on disk; as many workers as the budget holds
    stages     one after the other, as the job yields them: the keys of a stage may need what an earlier one decided
    finish     the manifest, written last: there is a result if and only if it is there

A stage brings a `Load`, which pickles; each worker builds `make` of it once. `make` takes a unit, reads it batch by
batch, sends each batch through its steps into a sink, and yields a record for every part whose files are durable. A
unit whose last record is there is never made again; one that is begun resumes after its last part. So the same call
resumes after a kill, redoes what changed of an input that changed, and does nothing when nothing did.

Every job can run on this machine, on a Ray cluster or as tasks of a job array, can be interrupted and resumed, reports
to `milldam status`, and keeps to a budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from milldam import memory
from milldam.errors import NotReadyError, Setting, os_error
from milldam.memory import Budget, release, usage
from milldam.run.budget import SMALL_INPUT, Monitor, WorkPlan, fit_workers
from milldam.run.folder import FINISHED, NEW, UNFINISHED, RunFolder
from milldam.run.pools import Pool, pool_for
from milldam.run.records import Records
from milldam.run.summary import Observer, Quiet, Snapshot, Summary, describe_machine, package_versions
from milldam.run.tasks import (
    CRASH,
    DONE,
    ENDED,
    FINISH,
    PART,
    PROGRESS,
    Assigned,
    Event,
    Load,
    Make,
    Progress,
    Todo,
    Workers,
    cores,
)
from milldam.run.units import Identity, UnitList
from milldam.stores.kinds import Kind

if TYPE_CHECKING:
    from milldam.run.array import ArrayTask
    from milldam.run.fork import ForkServer

__all__ = ["Assigned", "Job", "Load", "Make", "Options", "Progress", "Session", "Stage", "Workers", "run"]
S = TypeVar("S")
F = TypeVar("F", bound=Mapping[str, object])
_REPORT_SECONDS, _STATUS_SECONDS = 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a job: makes records of the units that have no complete one."""

    name: str
    load: Load
    records: Records
    parse: Callable[[dict[str, Any]], Any] | None = None
    """Builds the unit of a line of the plan; None: the units are steps, each its number."""
    workers: Workers | None = None
    """None: as many as are planned."""
    facts: Callable[[int], dict[str, Any]] = lambda number: {}
    """`Assigned.facts` of a unit, by its number; looked up when it is handed out."""
    todo: Iterable[int | None] | None = None
    """The units to make, in this order; None: all without a complete record. An iterator may yield None while it has
    none to hand out, and may end before all are made."""
    listed: UnitList | None = None
    """Where the units are listed; None: in the plan."""

    def require_done(self, wanted: str) -> None:
        """Raise NotReadyError where something is left to do. `wanted`: the stage that comes next."""
        units = self.records.pending() if self.todo is None else self.todo
        if next(iter(units), None) is not None:
            raise NotReadyError(
                Setting("stage"),
                f": {wanted}: the stage {self.name} before it is not done. Run its tasks first; "
                "the job's own command does all that is left on one machine.",
            )


class Job(ABC, Generic[S]):
    """A kind of job: what differs from other jobs."""

    kind: Kind
    stage_names: tuple[str, ...]
    """In order; tasks of a job array can share each of them."""
    outputs: tuple[str, ...] | None
    """Patterns of its files besides the manifest, which are removed when a run begins anew. None: the old result stays
    until the new manifest takes its place; its records go."""
    workers: int | None
    """As many as the user asks for; None: as many as are useful."""
    read_once: bool = False
    """Its input can't be read again, so an earlier list of it is worthless."""
    batch_bytes: int = 0
    """Memory of a batch in each worker, where that is more than usual; known when it is prepared."""

    @abstractmethod
    def prepare(self, run: Session) -> Identity:
        """Check settings and input, and list the input (`run.folder.inputs.write`)."""

    @abstractmethod
    def units(self, run: Session) -> Iterable[Any]:
        """Refuse what can be refused before the last one: nothing in the folder has changed yet."""

    def files(self, run: Session) -> dict[str, bytes]:
        """Small files of the result that are there from the start."""
        return {}

    def plan_facts(self, run: Session) -> dict[str, Any]:
        """Fields of `WorkPlan` that only this job knows; the units are listed."""
        return {}

    @abstractmethod
    def stages(self, run: Session) -> Iterator[Stage]:
        """Each is done before the next one is requested."""

    @abstractmethod
    def finish(self, run: Session, plan: WorkPlan) -> S:
        """Gather what units left, write the manifest last, and return the summary."""

    @abstractmethod
    def up_to_date(self, run: Session) -> S | None:
        """The summary of a result that was made from the same; None: files of it are missing."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is run: nothing here changes its result."""

    out: Path
    memory: str | int | None = None
    executor: str = "local"
    address: str | None = None
    overwrite: bool = False
    name: Path | None = None
    """The name of the result in messages, when it is not the folder."""
    held_bytes: int = 0
    """Memory that the calling program holds already; the limit comes on top of it."""
    adapts: bool = False
    """A folder made with other settings is not refused: its units have other keys, and are made again."""
    server: ForkServer | None = None
    """Starts workers; begun ahead."""

    @classmethod
    def of(cls, settings: Any, out: Path | None = None, **more: Any) -> Options:
        """From a job's settings, which have all of these. `out`: when it is made elsewhere."""
        chosen = settings.memory, settings.executor, settings.address, settings.overwrite
        return cls(out or Path(settings.out or ""), *chosen, **more)


def run(job: Job[S], options: Options, observer: Observer | None = None) -> S:
    """Do a job, or what is left of it."""
    with at_work(job, options, observer) as work:
        identity = job.prepare(work)
        begin = work.folder.where_to_begin(identity, overwrite=options.overwrite, adapts=options.adapts)
        if begin == FINISHED:
            work.folder.tidy()
            summary = job.up_to_date(work)
            if summary is not None:
                return summary
            begin = UNFINISHED
        return complete(job, work, identity, begin)


@contextlib.contextmanager
def at_work(
    job: Job[S], options: Options, observer: Observer | None, task: ArrayTask | None = None
) -> Iterator[Session]:
    """A session in the job's run folder, which is locked meanwhile."""
    budget = Budget.of(options.memory, options.held_bytes)
    try:
        with RunFolder(options.out, job.kind, name=options.name, task=task) as folder:
            pool = pool_for(options.executor, options.address, budget.limit_bytes, options.server)
            with Session(folder, observer or Quiet(), budget, pool) as work:
                yield work
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        raise os_error(error, None if error.filename else options.name or options.out) from error


def make_plan(job: Job[S], work: Session, identity: Identity, begin: str) -> WorkPlan:
    """List the units in the folder, and settle the number of workers."""
    folder, changes = work.folder, list[str]()
    if begin == NEW:
        work.monitor.restart()
    else:
        folder.tidy()
        changes = folder.inputs.changes()
    if begin != NEW and not job.read_once and folder.has_plan(identity):
        folder.provide(job.files(work))
    else:
        folder.start(identity, job.units(work), job.files(work), anew=begin == NEW, outputs=job.outputs)
    plan = replace(plan_work(work, job), changes=tuple(changes))
    work.observer.planned(plan)
    return plan


def plan_work(work: Session, job: Job[Any]) -> WorkPlan:
    """As many workers for the listed units as are wanted, useful and fit into the budget."""
    sizes, held = work.folder.units.sizes(), usage().anonymous
    units, input_bytes = len(sizes), int(sizes.sum())
    cores = work.pool.cores if job.workers is None else job.workers
    useful = 1 if input_bytes < SMALL_INPUT else max(1, min(units, cores))
    facts: dict[str, Any] = {"units": units, "input_bytes": input_bytes, "shard_size": input_bytes // max(1, units)}
    facts |= {"stages": job.stage_names, **job.plan_facts(work)}
    useful, cores, held = facts.pop("useful", useful), facts.pop("cores", cores), facts.pop("held_bytes", held)
    workers = facts.pop("workers", 0) or fit_workers(work.budget, held, 0, useful, own_bytes=job.batch_bytes)
    note = f"the budget holds {workers} of {useful} workers" if workers < useful else ""
    work.workers, share = workers, (work.budget.limit_bytes - held) // workers
    return WorkPlan(
        work.budget, workers=workers, threads=max(1, cores // workers), share_bytes=share, note=note, **facts
    )


def complete(job: Job[S], work: Session, identity: Identity, begin: str, *, shared: tuple[str, ...] = ()) -> S:
    """Plan, do what is left of every stage, finish. `shared`: stages that the tasks of an array must have done."""
    plan = make_plan(job, work, identity, begin)
    for stage in job.stages(work):
        if stage.name in shared:
            stage.require_done(FINISH)
        else:
            work.work(stage)
    work.pool.close()
    work.enter("finish")
    summary = job.finish(work, plan)
    work.folder.write_status({"stage": "finished", "units": plan.units, "units_done": plan.units})
    return summary


# ---- a session ----


class Session:
    """A job at work: its run folder, budget and workers. Makes the units of a stage, measures time and memory, and
    reports progress. Use it as a context manager."""

    def __init__(self, folder: RunFolder, observer: Observer, budget: Budget, pool: Pool) -> None:
        self.folder, self.observer, self.budget, self.pool = folder, observer, budget, pool
        self.workers = 1
        """As planned, for stages that name no number."""
        self._snapshot = Snapshot(budget_bytes=budget.limit_bytes)
        self._running: dict[int, dict[str, Any]] = {}
        """The last progress report of each unit at work."""
        self._started = self._stage_started = time.monotonic()
        self._reported = self._written = 0.0
        self._work_seconds: Counter[str] = Counter()
        """By kind, summed over workers."""
        self._stage_seconds: defaultdict[str, float] = defaultdict(float)
        """Of the stages that are over."""
        self.held = contextlib.ExitStack()
        """Takes what a job wants closed at the end."""
        self.held.callback(pool.leave)
        pool.folder = folder.folder.absolute()

    def __enter__(self) -> Session:
        try:
            monitor = Monitor(self.folder.own / "memory.csv", stage="prepare", here=self.pool.machine)
            self.monitor = self.held.enter_context(monitor)
            if memory.own_process:
                memory.keep_arrow_lean()
        except BaseException:
            self.held.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.held.__exit__(*error)

    def measured(self, summary: Summary[F]) -> Summary[F]:
        """A summary with what is known of every job: where and when, time and memory as they are now."""
        now, stage, past = time.monotonic(), self.monitor.stage, self._stage_seconds
        return dataclasses.replace(
            summary,
            seconds=now - self._started,
            stages={**past, stage: past[stage] + now - self._stage_started},
            work=dict(self._work_seconds),
            memory=self.monitor.use(self.budget.limit_bytes),
            machine=describe_machine(),
            versions=package_versions(),
            started=self.folder.plan().get("started", 0.0),
            finished=time.time(),
        )

    def enter(self, stage: str, units: int = 0, done: int = 0, input_bytes: int = 0) -> None:
        """Book what follows under another stage, and report it."""
        now = time.monotonic()
        self._stage_seconds[self.monitor.stage] += now - self._stage_started
        self._stage_started = now
        self.monitor.enter_stage(stage)
        budget = self.budget.limit_bytes
        self._snapshot = Snapshot(stage, units, units_done=done, input_total=input_bytes, budget_bytes=budget)
        self._report(force=True)

    def work(self, stage: Stage, task: ArrayTask | None = None) -> None:
        """Make every unit of a stage, or those of an array task."""
        records, parse, listed = stage.records, stage.parse, stage.listed or self.folder.units
        sizes = np.zeros(len(records.keys), np.int64) if parse is None else listed.sizes()
        total, done, input_bytes = len(records.keys), records.complete, records.pending_bytes(sizes)
        if isinstance(stage.todo, Sized):
            total, done, input_bytes = len(stage.todo), 0, int(sizes[list(stage.todo)].sum())
        units = iter(records.pending() if stage.todo is None else stage.todo)
        if task is not None:  # about its part of what is left
            total, done, input_bytes = -(-(total - done) // task.of), 0, input_bytes // task.of
            units = (unit for unit in units if unit is None or unit % task.of == task.index)
        workers = stage.workers or Workers(self.workers, 1)

        def assign(number: int) -> Assigned:
            unit = number if parse is None else listed.at(number, parse)
            return Assigned(unit, records.key(number), int(sizes[number]), records.begun(number), stage.facts(number))

        def on_event(event: Event) -> None:
            if event.kind == PART:
                records.add(event.value)
            self._take(event)

        self.enter(stage.name, total, done, input_bytes)
        try:
            with _thread_limit(workers):
                self.pool.run(workers, Todo(stage.load, units, assign, on_event))
            self._report(force=True)
        finally:
            records.close()
        self._work_seconds += self._snapshot.seconds
        # A stage that ran in this process must not weigh on the next one.
        release()

    def _take(self, event: Event) -> None:
        snapshot = self._snapshot
        if event.host and event.kind in (PROGRESS, ENDED):
            self.monitor.note(event.host, event.pid, event.value["anonymous_bytes"] if event.value else 0)
        if event.kind == PROGRESS:
            self._running[event.unit] = event.value
            held = {"anonymous_bytes": event.value["anonymous_bytes"], **event.value["counts"]}
            snapshot.workers[event.worker] = {"pid": event.pid, "unit": event.unit, "time": time.time(), **held}
        elif event.kind == DONE:
            finished = self._running.pop(event.unit, {"counts": {}, "seconds": {}})
            snapshot.counts.update(finished["counts"])
            snapshot.seconds.update(finished["seconds"])
            snapshot.units_done += 1
            snapshot.workers.pop(event.worker, None)
        elif event.kind == CRASH:
            self._running.pop(event.unit, None)
            self.observer.warn(f"A worker on unit {event.unit} {event.value}; the unit is tried once more.")
        self._report()

    def _report(self, *, force: bool = False) -> None:
        """Show progress, and write it for `milldam status`; not for each of a million small units."""
        now = time.monotonic()
        if not force and now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        counts, seconds = Counter(self._snapshot.counts), Counter(self._snapshot.seconds)
        for running in self._running.values():
            counts.update(running["counts"])
            seconds.update(running["seconds"])
        held, elapsed = self.monitor.now.anonymous, now - self._stage_started
        shown = replace(self._snapshot, counts=counts, seconds=seconds, anonymous_bytes=held, elapsed=elapsed)
        self.observer.progress(shown)
        if now - self._written >= _STATUS_SECONDS or force:
            self._written = now
            names = ("stage", "units", "units_done", "budget_bytes", "workers", "anonymous_bytes")
            status = {name: getattr(shown, name) for name in names} | {"elapsed": now - self._started}
            status |= {"command": self.observer.command, "directory": str(Path.cwd()), "counts": dict(counts)}
            self.folder.write_status(status)


@contextlib.contextmanager
def _thread_limit(workers: Workers) -> Iterator[None]:
    """Keep the encoders' thread pools to the workers asked for; a pool reads this when it is first used."""
    names = ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    before = {name: os.environ[name] for name in names if name in os.environ}
    if workers.count == 1 and workers.threads < cores():
        os.environ.setdefault("RAYON_NUM_THREADS", str(workers.threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers.threads > 1 else "false"
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
