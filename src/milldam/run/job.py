"""The frame of every job: a job knows its recipe, units, stages and finish; the frame does all the rest.

    lock -> prepare -> where to begin -> plan -> stage after stage -> finish

`run` is the only loop. A unit whose key has a record is never made again: so the same call resumes after a kill, redoes
what changed of an input that changed, and does nothing when nothing did.

What one job can, all can: run on this machine, on a Ray cluster, as tasks of a job array; be interrupted and resumed;
be watched by `milldam status`; keep to a budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from milldam.errors import ConfigError, MilldamError, NotReadyError, Setting, os_error
from milldam.memory import Budget
from milldam.run.folder import FINISHED, NEW, PREPARE_FIRST, UNFINISHED, RunFolder
from milldam.run.pools import WorkPlan, pool_for
from milldam.run.session import Session, Stage, session
from milldam.run.summary import Observer, Quiet
from milldam.run.tasks import FINISH, PREPARE, ArrayTask
from milldam.run.units import Identity
from milldam.stores.kinds import Kind

if TYPE_CHECKING:
    from milldam.run.fork import ForkedWorkers


class Prepared(Protocol):
    """What a job knows once it has looked at settings and input."""

    @property
    def identity(self) -> Identity:
        """What the result depends on: the recipe, and the state of the input."""
        ...


P = TypeVar("P", bound=Prepared)
W = TypeVar("W", bound=WorkPlan)
D = TypeVar("D")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Job(Protocol[P, W, D, S_co]):
    """What only one kind of job knows. Phases hand on values: prepared -> plan -> done -> summary."""

    kind: Kind
    """What it makes."""

    def prepare(self, session: Session) -> P:
        """Look at settings and input (`folder.inputs.write`): what can be wrong without work is found here."""
        ...

    def plan(self, session: Session, prepared: P, begin: str) -> W:
        """Settle units and workers: `folder.stage` and `folder.start` where `folder.needs_plan`. `begin`: NEW, then
        with `outputs`, or UNFINISHED. Refuse before anything in the folder changes."""
        ...

    def stages(self, session: Session, prepared: P, plan: W) -> Generator[Stage, None, D]:
        """Yield stage after stage; each is done when the next one is asked for. Returns what `finish` needs."""
        ...

    def finish(self, session: Session, prepared: P, plan: W, done: D) -> S_co:
        """Gather what workers left, write the manifest last; the summary."""
        ...

    def up_to_date(self, session: Session, prepared: P) -> S_co | None:
        """The summary of a store that was made from the same; None: it is not whole, so that something is to do."""
        ...

    def has_results(self, folder: RunFolder) -> bool:
        """Whether an unfinished run has done anything that would have to be done again."""
        ...


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


def run(job: Job[P, W, D, S_co], options: Options, observer: Observer | None = None) -> S_co:
    """Do a job, or what is left of it."""
    with _at_work(job, options, observer) as work:
        prepared = job.prepare(work)
        begin = _where_to_begin(job, work.folder, prepared, options)
        if begin == FINISHED:
            work.folder.tidy()
            summary = job.up_to_date(work, prepared)
            if summary is not None:
                return summary
            begin = UNFINISHED
        plan = _planned(job, work, prepared, begin)
        done = _all_stages(job.stages(work, prepared, plan), work.work)
        return _finished(job, work, prepared, plan, done)


def _where_to_begin(job: Job[P, W, D, S_co], folder: RunFolder, prepared: P, options: Options) -> str:
    return folder.where_to_begin(
        prepared.identity,
        overwrite=options.overwrite,
        has_results=job.has_results(folder),
        adapts=options.adapts,
    )


@contextlib.contextmanager
def _at_work(
    job: Job[P, W, D, S_co], options: Options, observer: Observer | None, task: ArrayTask | None = None
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


def _planned(job: Job[P, W, D, S_co], work: Session, prepared: P, begin: str) -> W:
    if begin == NEW:
        work.monitor.restart()
    else:
        work.folder.tidy()
    changes = () if begin == NEW else tuple(work.folder.inputs.changes())
    plan = replace(job.plan(work, prepared, begin), changes=changes)
    work.observer.planned(plan)
    return plan


def _all_stages(stages: Generator[Stage, None, D], do: Callable[[Stage], None]) -> D:
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            done: D = end.value
            return done
        do(stage)


def _finished(job: Job[P, W, D, S_co], work: Session, prepared: P, plan: W, done: D) -> S_co:
    work.pool.close()
    work.enter("finish")
    summary = job.finish(work, prepared, plan, done)
    work.folder.presence.tell({"stage": "finished", "units": plan.units, "units_done": plan.units})
    return summary


# ---- the same job as tasks of a job array, on machines that see its output folder ----


class ArrayJob(Job[P, W, D, S_co], Protocol[P, W, D, S_co]):
    """A job that several machines can share."""

    def require_shareable(self) -> None:
        """Raise ConfigError when other machines can't do it."""
        ...

    def pieces(self) -> Mapping[str, int | None]:
        """The stages that are shared, in order, and into how many pieces each can be cut at most; None: that is known
        when the job is prepared. Writes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayWork(Generic[S]):
    """A job for the tasks of a job array."""

    job: ArrayJob[Any, Any, Any, S]
    options: Options
    made_before: Callable[[bool], S | None] = lambda anew: None
    """Tells of a result that is up to date in a place of its own, unless it is to be made anew."""
    publish: Callable[[], None] = lambda: None
    """Puts a finished result in its place."""

    def check(self) -> None:
        """Raise ConfigError when it can't be done by array tasks."""
        if self.options.executor != "local":
            said = f": {self.options.executor}: array tasks work each on its own machine."
            raise ConfigError(Setting("executor"), said)
        self.job.require_shareable()

    def run(self, task: ArrayTask, observer: Observer | None = None) -> S | None:
        """Do what is left of a task. PREPARE plans for the others; FINISH makes the result and gives its summary.

        Raises NotReadyError when the job is not prepared or a stage before is not done, TaskHeldError when somebody is
        at work on this task.
        """
        self.check()
        summary = self.made_before(self.options.overwrite and task.stage == PREPARE)
        if summary is None and task.stage == PREPARE:
            _prepare_array(self.job, self.options, observer)
        elif summary is None and task.stage == FINISH:
            summary = _finish_array(self.job, self.options, observer)
            self.publish()
        elif summary is None:
            _run_array_task(self.job, self.options, task, observer)
        return summary if task.stage == FINISH else None


def _prepare_array(job: Job[P, W, D, S_co], options: Options, observer: Observer | None) -> None:
    """Check and plan a job; what is there of it already stays."""
    with _at_work(job, options, observer) as work:
        prepared = job.prepare(work)
        begin = _where_to_begin(job, work.folder, prepared, options)
        if begin != FINISHED:
            plan = _planned(job, work, prepared, begin)
            # What stands before the first stage is settled once, for all tasks.
            next(job.stages(work, prepared, plan), None)
            work.folder.presence.forget_tasks()


def _run_array_task(job: Job[P, W, D, S_co], options: Options, task: ArrayTask, observer: Observer | None) -> None:
    """Do what is left of a task of a stage, beside others that do theirs."""
    with _at_work(job, options, observer, task) as work:
        folder = work.folder
        try:
            prepared = job.prepare(work)
            if folder.require_same(prepared.identity) != FINISHED:
                folder.require_units()
                plan = job.plan(work, prepared, UNFINISHED)
                work.observer.planned(plan)
                _one_stage(job.stages(work, prepared, plan), work, task, tuple(plan.pieces))
        except MilldamError as error:
            _close_status(folder, stage=task.stage, state="failed", message=str(error))
            raise
        _close_status(folder, stage=task.stage, state="done")


def _one_stage(stages: Iterable[Stage], work: Session, task: ArrayTask, names: tuple[str, ...]) -> None:
    if task.stage not in names:
        raise ConfigError(
            Setting("stage"),
            f": {task.stage}: this job has the stages {', '.join(names)}; {PREPARE} before and {FINISH} after.",
        )
    for stage in stages:
        if stage.name == task.stage:
            left, of = stage.total - stage.done, task.of
            # About its part of what is left.
            part = replace(stage, total=-(-left // of), done=0, input_bytes=stage.input_bytes // of)
            work.work(replace(part, units=filter(task.holds, stage.units)))
            return
        if names.index(stage.name) > names.index(task.stage):
            return  # nothing of the stage was left to do
        _require_done(stage, task.stage)


def _require_done(stage: Stage, wanted: str) -> None:
    if next(iter(stage.units), None) is not None:
        raise NotReadyError(
            Setting("stage"),
            f": {wanted}: the stage {stage.name} before it is not done. Run its tasks first; "
            "the job's own command does all that is left on one machine.",
        )


def _finish_array(job: Job[P, W, D, S_co], options: Options, observer: Observer | None) -> S_co:
    """Make the store of what array tasks have done. Raises NotReadyError when something of theirs is left."""
    with _at_work(job, options, observer) as work:
        if work.folder.is_new():
            raise NotReadyError(f"{work.folder.name}: not prepared. First: {PREPARE_FIRST}")
        prepared = job.prepare(work)
        was_finished = work.folder.require_same(prepared.identity) == FINISHED
        if was_finished and (summary := job.up_to_date(work, prepared)) is not None:
            return summary
        plan = _planned(job, work, prepared, UNFINISHED)

        def do(stage: Stage) -> None:
            # What a finished store has lost is made again here: tasks leave it alone.
            if stage.in_arrays and not was_finished:
                _require_done(stage, FINISH)
            else:
                work.work(stage)

        done = _all_stages(job.stages(work, prepared, plan), do)
        return _finished(job, work, prepared, plan, done)


def _close_status(folder: RunFolder, **values: Any) -> None:
    """Add how it ended to what was last told."""
    folder.presence.tell(folder.presence.told() | values)
