"""Units of a stage through an executor, while the user is told how it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from milldam.memory import Budget, release
from milldam.run.lean_arrow import keep_arrow_lean
from milldam.run.monitor import Monitor
from milldam.run.old_folder import Run
from milldam.run.planning import cores
from milldam.run.pools import Pool as Crew
from milldam.run.pools import Workers as Staff
from milldam.run.pools import pool_for as crew_for
from milldam.run.progress import Observer, Snapshot
from milldam.run.tasks import CRASH, DONE, MEMORY, PART, PROGRESS, Event, Task

REPORT_SECONDS = 0.2
STATUS_SECONDS = 1.0
__all__ = ["Staff", "Stage", "Workforce", "at_work"]


@dataclass(frozen=True, slots=True)
class Stage:
    """What is to be done, and how much of it there is."""

    name: str
    task: Task
    units: Iterable[int]
    """What is still to be done."""
    assign: Callable[[int], Any]
    total: int = 0
    """Units in all, for progress."""
    done: int = 0
    """Units that were done before."""
    input_bytes: int = 0
    """Input of what is still to be done."""


@contextlib.contextmanager
def at_work(run: Run, observer: Observer, budget: Budget, engine: str, address: str | None) -> Iterator[Workforce]:
    """A workforce for a run, on this machine or a cluster, while its memory is watched."""
    crew = crew_for(engine, address, budget.limit_bytes)
    with contextlib.ExitStack() as stack:
        stack.callback(crew.leave)
        monitor = stack.enter_context(Monitor(run.own / "memory.csv", stage="prepare", here=crew.machine))
        workforce = Workforce(run, observer, monitor, budget, crew)
        crew.require_shared(run.folder)
        yield workforce


class Workforce:
    """Runs stage after stage; keeps count of time and memory."""

    def __init__(self, run: Run, observer: Observer, monitor: Monitor, budget: Budget, crew: Crew) -> None:
        keep_arrow_lean()
        self.monitor, self.crew = monitor, crew
        self._run, self._observer = run, observer
        self._snapshot = Snapshot(budget_bytes=budget.limit_bytes)
        self._by_unit: dict[int, dict[str, Any]] = {}
        self._started = self._stage_started = time.monotonic()
        self._told = self._written = 0.0
        self.seconds: Counter[str] = Counter()
        """Work by kind, summed over workers."""
        self._wall: defaultdict[str, float] = defaultdict(float)
        self.dedup: dict[str, Any] = {}
        self.near: dict[str, Any] = {}

    def hire(self, crew: Crew) -> None:
        """Work with another crew from now on."""
        self.crew.close()
        self.crew = crew

    @property
    def wall(self) -> dict[str, float]:
        """Seconds by stage, up to now."""
        now = time.monotonic() - self._stage_started
        return {**self._wall, self.monitor.stage: self._wall[self.monitor.stage] + now}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def enter(self, stage: str, units: int = 0, done: int = 0, input_bytes: int = 0) -> None:
        """Book what follows under another stage, and say so."""
        now = time.monotonic()
        self._wall[self.monitor.stage] += now - self._stage_started
        self._stage_started = now
        self.monitor.enter_stage(stage)
        budget = self._snapshot.budget_bytes
        self._snapshot = Snapshot(stage, units, units_done=done, input_total=input_bytes, budget_bytes=budget)
        self._tell(force=True)

    def work(self, stage: Stage, staff: Staff, on_part: Callable[[Any], None]) -> None:
        """Have every unit of a stage done. `on_part` gets what workers finish."""
        self.enter(stage.name, *self._expected(stage))
        with _thread_limit(staff):
            self.crew.executor(stage.name, staff).run(
                stage.task, stage.units, stage.assign, lambda event: self._on_event(event, on_part)
            )
            self._tell(force=True)
        self._run.sync()
        self.seconds += self._snapshot.seconds
        # A stage that ran in this process must not weigh on the next one.
        release()

    def _expected(self, stage: Stage) -> tuple[int, int, int]:
        """Units, those done before, bytes of input: for a share, about its part of what is left."""
        if self._run.share is None:
            return stage.total, stage.done, stage.input_bytes
        of = self._run.share.of
        return -(-(stage.total - stage.done) // of), 0, stage.input_bytes // of

    def close(self) -> None:
        """End the worker processes."""
        self.crew.close()

    def _on_event(self, event: Event, on_part: Callable[[Any], None]) -> None:
        if event.kind == PART:
            on_part(event.value)
        elif event.kind == PROGRESS:
            self._by_unit[event.unit] = event.value
            self._snapshot.workers[event.worker] = _worker_status(event)
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
            self._observer.warn(f"A worker on unit {event.unit} {event.value}; the unit is tried once more.")
        self._tell()

    def _tell(self, *, force: bool = False) -> None:
        """Show where the run stands, and write it down for `milldam status`; not for each of a million small units."""
        now = time.monotonic()
        if not force and now - self._told < REPORT_SECONDS:
            return
        self._told = now
        snapshot = self._current()
        self._observer.progress(snapshot)
        if now - self._written >= STATUS_SECONDS or force:
            self._written = now
            self._run.write_status(
                {
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


def _worker_status(event: Event) -> dict[str, Any]:
    told = event.value
    return {
        "pid": event.pid,
        "unit": event.unit,
        "time": time.time(),
        "anonymous_bytes": told["anonymous_bytes"],
        **told["counts"],
    }


@contextlib.contextmanager
def _thread_limit(staff: Staff) -> Iterator[None]:
    """Keep the engines' thread pools to the workers asked for; a pool reads this when it is first used."""
    before = dict(os.environ)
    if staff.count == 1 and staff.threads < cores():
        os.environ.setdefault("RAYON_NUM_THREADS", str(staff.threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if staff.threads > 1 else "false"
    try:
        yield
    finally:
        for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
