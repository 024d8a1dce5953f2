"""What jobs have in common whose units all go through one stage: plan, stage, and how a worker tells of its unit.

Import, export, push and pull are such jobs; the units of map and qa tell of themselves in the same way.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from milldam.memory import usage
from milldam.run.folder import RunFolder
from milldam.run.pools import SMALL_INPUT, Workers, WorkPlan, fit_workers, make_plan
from milldam.run.records import Records
from milldam.run.session import Session, Stage
from milldam.run.tasks import PROGRESS, Report, Task

REPORT_SECONDS = 0.25


def plan_work(
    session: Session, stages: tuple[str, ...], *, units: int, input_bytes: int, shard_size: int, workers: int | None
) -> WorkPlan:
    """As many workers as are wanted, useful and fit into the budget."""
    cores = session.pool.cores if workers is None else workers
    useful = 1 if input_bytes < SMALL_INPUT else max(1, min(units, cores))
    held = usage().anonymous
    return make_plan(
        session.budget,
        kind=WorkPlan,
        workers=fit_workers(session.budget, held, 0, useful),
        useful=useful,
        cores=cores,
        held_bytes=held,
        units=units,
        input_bytes=input_bytes,
        shard_size=shard_size,
        encoder="",
        encoder_note="",
        stages=stages,
        pieces=dict.fromkeys(stages, units),
    )


def stage_of(
    name: str, task: Task, folder: RunFolder, records: Records, assign: Callable[[int], Any], plan: WorkPlan
) -> Stage:
    """The stage that makes every unit of the plan that has no record."""
    return Stage(
        name,
        task,
        records.pending(),
        assign,
        Workers(plan.workers, 1),
        records.add,
        total=plan.units,
        done=records.complete,
        input_bytes=records.pending_bytes(folder.units.sizes()),
    )


class Telling:
    """Tells now and then how a unit gets on, and where its time goes."""

    def __init__(self, report: Report, size: int) -> None:
        self._report, self._size = report, size
        self._counts: Counter[str] = Counter(documents=0, tokens=0, input_bytes=0)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last, self._lap = time.monotonic(), time.perf_counter()

    def lap(self, step: str | None = None) -> None:
        """Book the time since the last lap under a step, or leave it out."""
        now = time.perf_counter()
        if step is not None:
            self._seconds[step] += now - self._lap
        self._lap = now

    def add(self, **counts: int) -> None:
        self._counts.update(counts)
        # Of what is compressed, what comes out of it is more than what it takes.
        self._counts["input_bytes"] = min(self._size, self._counts["input_bytes"])
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.tell()

    def reached(self, input_bytes: int) -> None:
        """So much of its input is through."""
        self._counts["input_bytes"] = input_bytes
        self.tell()

    def end(self) -> None:
        self.reached(self._size)

    def tell(self) -> None:
        self._last = time.monotonic()
        told = {"counts": dict(self._counts), "seconds": dict(self._seconds)}
        self._report(PROGRESS, told | {"anonymous_bytes": usage().anonymous})
