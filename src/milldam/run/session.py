"""What a job works with: a run folder, a budget, workers. Has the units of a stage made, counts time and memory, and
tells how it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from milldam import memory
from milldam.memory import Budget, release
from milldam.run.folder import RunFolder
from milldam.run.monitor import Monitor
from milldam.run.pools import Pool, Workers
from milldam.run.summary import Observer, Snapshot, Summary, describe_machine, package_versions
from milldam.run.tasks import CRASH, DONE, MEMORY, PART, PROGRESS, ArrayTask, Assigned, Event, cores

if TYPE_CHECKING:
    from milldam.run.engine import Stage

F = TypeVar("F", bound=Mapping[str, object])

REPORT_SECONDS, STATUS_SECONDS = 0.2, 1.0


@contextlib.contextmanager
def session(folder: RunFolder, observer: Observer, budget: Budget, pool: Pool) -> Iterator[Session]:
    """A session in a run folder, on this machine or a cluster, while its memory is watched."""
    with contextlib.ExitStack() as stack:
        stack.callback(pool.leave)
        monitor = stack.enter_context(Monitor(folder.own / "memory.csv", stage="prepare", here=pool.machine))
        pool.require_shared(folder.folder)
        yield Session(folder, observer, monitor, budget, pool, stack)


class Session:
    def __init__(
        self,
        folder: RunFolder,
        observer: Observer,
        monitor: Monitor,
        budget: Budget,
        pool: Pool,
        held: contextlib.ExitStack,
    ) -> None:
        if memory.own_process:
            memory.keep_arrow_lean()
        self.folder, self.observer, self.monitor, self.budget, self.pool = folder, observer, monitor, budget, pool
        self.held = held
        """Takes what a job wants closed at the end."""
        self.workers = 1
        """As planned, for stages that do not say."""
        self._snapshot = Snapshot(budget_bytes=budget.limit_bytes)
        self._by_unit: dict[int, dict[str, Any]] = {}
        """What was last told of the units at work."""
        self._started = self._stage_started = time.monotonic()
        self._told = self._written = 0.0
        self._seconds: Counter[str] = Counter()
        """Work by kind, summed over workers."""
        self._wall: defaultdict[str, float] = defaultdict(float)
        """Seconds of the stages that are over."""

    def measured(self, summary: Summary[F]) -> Summary[F]:
        """A summary with what is known of every job: where and when, time and memory as they are now."""
        now, stage = time.monotonic(), self.monitor.stage
        return dataclasses.replace(
            summary,
            seconds=now - self._started,
            stages={**self._wall, stage: self._wall[stage] + now - self._stage_started},
            work=dict(self._seconds),
            memory=self.monitor.use(self.budget.limit_bytes),
            machine=describe_machine(),
            versions=package_versions(),
            started=self.folder.plan().get("started", 0.0),
            finished=time.time(),
        )

    def enter(self, stage: str, units: int = 0, done: int = 0, input_bytes: int = 0) -> None:
        """Book what follows under another stage, and say so."""
        now = time.monotonic()
        self._wall[self.monitor.stage] += now - self._stage_started
        self._stage_started = now
        self.monitor.enter_stage(stage)
        budget = self.budget.limit_bytes
        self._snapshot = Snapshot(stage, units, units_done=done, input_total=input_bytes, budget_bytes=budget)
        self._tell(force=True)

    def work(self, stage: Stage, task: ArrayTask | None = None) -> None:
        """Have every unit of a stage made, or those of an array task."""
        records, parse, todo, listed = stage.records, stage.parse, stage.todo, stage.listed or self.folder.units
        sizes = np.zeros(len(records.keys), np.int64) if parse is None else listed.sizes()
        total, done, input_bytes = len(records.keys), records.complete, records.pending_bytes(sizes)
        if isinstance(todo, Sized):
            total, done, input_bytes = len(todo), 0, int(sizes[list(todo)].sum())
        units = iter(records.pending() if todo is None else todo)
        if task is not None:
            # About its part of what is left.
            total, done, input_bytes = -(-(total - done) // task.of), 0, input_bytes // task.of
            units = filter(task.holds, units)
        workers = stage.workers or Workers(self.workers, 1)

        def assign(number: int) -> Assigned:
            unit = number if parse is None else listed.at(number, parse)
            return Assigned(unit, records.keys[number], int(sizes[number]), records.begun(number), stage.facts(number))

        def on_event(event: Event) -> None:
            if event.kind == PART:
                records.add(event.value)
            self._take(event)

        self.enter(stage.name, total, done, input_bytes)
        with _thread_limit(workers):
            self.pool.executor(workers).run(stage.load, units, assign, on_event)
            self._tell(force=True)
        self.folder.journal.sync()
        self._seconds += self._snapshot.seconds
        # A stage that ran in this process must not weigh on the next one.
        release()

    def _take(self, event: Event) -> None:
        if event.kind == PROGRESS:
            self._by_unit[event.unit] = told = event.value
            self._snapshot.workers[event.worker] = {
                "pid": event.pid,
                "unit": event.unit,
                "time": time.time(),
                "anonymous_bytes": told["anonymous_bytes"],
                **told["counts"],
            }
        elif event.kind == MEMORY:
            self.monitor.note(event.host, event.pid, event.value)
        elif event.kind == DONE:
            finished = self._by_unit.pop(event.unit, {"counts": {}, "seconds": {}})
            self._snapshot.counts.update(finished["counts"])
            self._snapshot.seconds.update(finished["seconds"])
            self._snapshot.units_done += 1
            self._snapshot.workers.pop(event.worker, None)
        elif event.kind == CRASH:
            self._by_unit.pop(event.unit, None)
            self.observer.warn(f"A worker on unit {event.unit} {event.value}; the unit is tried once more.")
        self._tell()

    def _tell(self, *, force: bool = False) -> None:
        """Show where the run stands, and write it down for `milldam status`; not for each of a million small units."""
        now = time.monotonic()
        if not force and now - self._told < REPORT_SECONDS:
            return
        self._told = now
        counts, seconds = Counter(self._snapshot.counts), Counter(self._snapshot.seconds)
        for running in self._by_unit.values():
            counts.update(running["counts"])
            seconds.update(running["seconds"])
        held, elapsed = self.monitor.now.anonymous, now - self._stage_started
        snapshot = dataclasses.replace(
            self._snapshot, counts=counts, seconds=seconds, anonymous_bytes=held, elapsed=elapsed
        )
        self.observer.progress(snapshot)
        if now - self._written >= STATUS_SECONDS or force:
            self._written = now
            self.folder.presence.tell(
                {
                    "command": self.observer.command,
                    "directory": str(Path.cwd()),
                    "stage": snapshot.stage,
                    "units": snapshot.units,
                    "units_done": snapshot.units_done,
                    "counts": dict(counts),
                    "elapsed": now - self._started,
                    "anonymous_bytes": held,
                    "budget_bytes": snapshot.budget_bytes,
                    "workers": snapshot.workers,
                }
            )


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
