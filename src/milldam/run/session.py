"""Runs the units of a stage on a pool of workers, and reports progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from milldam import memory
from milldam.memory import Budget, release
from milldam.run.folder import RunFolder
from milldam.run.monitor import Monitor
from milldam.run.pools import Pool, Workers
from milldam.run.summary import Observer, Snapshot, Summary, describe_machine, package_versions
from milldam.run.tasks import CRASH, DONE, MEMORY, PART, PROGRESS, Event, Task, cores

F = TypeVar("F", bound=Mapping[str, object])

REPORT_SECONDS = 0.2
STATUS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What is to be done, by whom, and how much of it there is."""

    name: str
    task: Task
    units: Iterable[int]
    """What is still to be done."""
    assign: Callable[[int], Any]
    """What a worker is given for a unit, made when it is handed out."""
    workers: Workers
    keep: Callable[[Any], None] = lambda part: None
    """Gets what workers finish."""
    total: int = 0
    """Units in all, for progress."""
    done: int = 0
    """Units that were done before."""
    input_bytes: int = 0
    """Input of what is still to be done."""
    in_arrays: bool = True
    """Whether tasks of a job array can share it."""


@contextlib.contextmanager
def session(folder: RunFolder, observer: Observer, budget: Budget, pool: Pool) -> Iterator[Session]:
    """A session in a run folder, on this machine or a cluster, while its memory is watched."""
    with contextlib.ExitStack() as stack:
        stack.callback(pool.leave)
        monitor = stack.enter_context(Monitor(folder.own / "memory.csv", stage="prepare", here=pool.machine))
        pool.require_shared(folder.folder)
        yield Session(folder, observer, monitor, budget, pool, stack)


class Session:
    """What a job works with: its folder, budget and pool of workers. Runs stage after stage; counts time and memory."""

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
        self._snapshot = Snapshot(budget_bytes=budget.limit_bytes)
        self._by_unit: dict[int, dict[str, Any]] = {}
        self._started = self._stage_started = time.monotonic()
        self._told = self._written = 0.0
        self.seconds: Counter[str] = Counter()
        """Work by kind, summed over workers."""
        self._wall: defaultdict[str, float] = defaultdict(float)

    @property
    def wall(self) -> dict[str, float]:
        """Seconds by stage, up to now."""
        now = time.monotonic() - self._stage_started
        return {**self._wall, self.monitor.stage: self._wall[self.monitor.stage] + now}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def measured(self, summary: Summary[F]) -> Summary[F]:
        """A summary with what is known of every job: where and when, time and memory as they are now."""
        return dataclasses.replace(
            summary,
            seconds=self.elapsed,
            stages=self.wall,
            work=dict(self.seconds),
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
        budget = self._snapshot.budget_bytes
        self._snapshot = Snapshot(stage, units, units_done=done, input_total=input_bytes, budget_bytes=budget)
        self._tell(force=True)

    def work(self, stage: Stage) -> None:
        """Have every unit of a stage done."""
        self.enter(stage.name, stage.total, stage.done, stage.input_bytes)
        with _thread_limit(stage.workers):
            self.pool.executor(stage.name, stage.workers).run(
                stage.task, stage.units, stage.assign, lambda event: self._on_event(event, stage.keep)
            )
            self._tell(force=True)
        self.folder.journal.sync()
        self.seconds += self._snapshot.seconds
        # A stage that ran in this process must not weigh on the next one.
        release()

    def _on_event(self, event: Event, on_part: Callable[[Any], None]) -> None:
        if event.kind == PART:
            on_part(event.value)
        elif event.kind == PROGRESS:
            self._by_unit[event.unit] = event.value
            told = event.value
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
        snapshot = self._current()
        self.observer.progress(snapshot)
        if now - self._written >= STATUS_SECONDS or force:
            self._written = now
            self.folder.presence.tell(
                {
                    "command": self.observer.command,
                    "directory": str(Path.cwd()),
                    "stage": self.monitor.stage,
                    "units": snapshot.units,
                    "units_done": snapshot.units_done,
                    "counts": dict(snapshot.counts),
                    "elapsed": now - self._started,
                    "anonymous_bytes": snapshot.anonymous_bytes,
                    "budget_bytes": snapshot.budget_bytes,
                    "workers": snapshot.workers,
                }
            )

    def _current(self) -> Snapshot:
        counts, seconds = Counter(self._snapshot.counts), Counter(self._snapshot.seconds)
        for running in self._by_unit.values():
            counts.update(running["counts"])
            seconds.update(running["seconds"])
        return dataclasses.replace(
            self._snapshot,
            counts=counts,
            seconds=seconds,
            anonymous_bytes=self.monitor.now.anonymous,
            elapsed=time.monotonic() - self._stage_started,
        )


@contextlib.contextmanager
def _thread_limit(workers: Workers) -> Iterator[None]:
    """Keep the encoders' thread pools to the workers asked for; a pool reads this when it is first used."""
    before = dict(os.environ)
    if workers.count == 1 and workers.threads < cores():
        os.environ.setdefault("RAYON_NUM_THREADS", str(workers.threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers.threads > 1 else "false"
    try:
        yield
    finally:
        for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
