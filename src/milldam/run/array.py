"""A job as tasks of a job array, on machines that see its output folder.

`prepare` is one task, then tasks share each stage, then `finish` is one. A task does every n-th unit of a stage beside
the others, with a lock, a status and a journal of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from milldam.errors import ConfigError, MilldamError, NotReadyError, Setting, StoreError
from milldam.run.engine import (
    Job,
    Options,
    Session,
    at_work,
    complete,
    make_plan,
    plan_work,
)
from milldam.run.folder import FINISHED, PREPARE_FIRST, UNFINISHED, read_status
from milldam.run.summary import Observer
from milldam.run.tasks import FINISH, PREPARE

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """Every `of`-th unit of a stage, from the `index`-th on: the part of one of several machines."""

    stage: str
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            message = f": {self.index} of {self.of} array tasks: the index is 0 to {max(0, self.of - 1)}."
            raise ConfigError(Setting("index"), message)

    @property
    def label(self) -> str:
        """
        >>> ArrayTask("tokenize", 3, 8).label
        'tokenize-3-of-8'
        """
        return f"{self.stage}-{self.index}-of-{self.of}"


@dataclass(frozen=True, slots=True)
class ArrayWork(Generic[S]):
    """A job for the tasks of a job array."""

    job: Job[S]
    options: Options

    def __post_init__(self) -> None:
        if (executor := self.options.executor) != "local":
            raise ConfigError(Setting("executor"), f": {executor}: array tasks work each on its own machine.")

    def run(self, task: ArrayTask, observer: Observer | None = None) -> S | None:
        """Do what is left of a task. PREPARE plans for the others; FINISH makes the result and returns its summary.

        Raises NotReadyError when the job is not prepared or an earlier stage is not done, TaskHeldError when another
        process is at work on this task.
        """
        job, options = self.job, self.options
        if task.stage not in (PREPARE, FINISH):
            with at_work(job, options, observer, task) as work:
                self._share(work, task)
            return None
        with at_work(job, options, observer) as work:
            if task.stage == PREPARE:
                identity = job.prepare(work)
                begin = work.folder.where_to_begin(identity, overwrite=options.overwrite, adapts=options.adapts)
                if begin != FINISHED:
                    make_plan(job, work, identity, begin)
                    # What stands before the first stage is settled once, for all tasks.
                    next(job.stages(work), None)
                    work.folder.forget_tasks()
                return None
            if work.folder.is_new():
                raise NotReadyError(f"{work.folder.name}: not prepared. First: {PREPARE_FIRST}")
            identity = job.prepare(work)
            was_finished = work.folder.require_same(identity) == FINISHED
            summary = job.up_to_date(work) if was_finished else None
            if summary is not None:
                return summary
            # What a finished store has lost is made again here: tasks leave it alone.
            return complete(job, work, identity, UNFINISHED, shared=() if was_finished else job.stage_names)

    def _share(self, work: Session, task: ArrayTask) -> None:
        """Do what is left of a task of a stage, beside other tasks."""
        folder, names = work.folder, self.job.stage_names
        try:
            if folder.require_same(self.job.prepare(work)) != FINISHED:
                if not folder.lists_units():
                    lists = f"{folder.folder / 'units.jsonl'} or units.offsets"
                    raise StoreError(f"{lists}: damaged. Make it again: {PREPARE_FIRST}")
                work.observer.planned(plan_work(work, self.job))
                if task.stage not in names:
                    known = f"this job has the stages {', '.join(names)}; {PREPARE} before and {FINISH} after."
                    raise ConfigError(Setting("stage"), f": {task.stage}: {known}")
                for stage in self.job.stages(work):
                    if stage.name == task.stage:
                        work.work(stage, task)
                        break
                    if stage.name in names and names.index(stage.name) > names.index(task.stage):
                        break  # nothing of the stage was left to do
                    stage.require_done(task.stage)
        except MilldamError as error:
            failed = {"stage": task.stage, "state": "failed", "message": str(error)}
            folder.write_status(read_status(folder.own) | failed)
            raise
        folder.write_status(read_status(folder.own) | {"stage": task.stage, "state": "done"})
