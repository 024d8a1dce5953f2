"""What jobs have in common whose units all go through one stage: plan, stage, and how a worker tells of its unit.

Import, export, push and pull are such jobs.
"""

from __future__ import annotations

import time
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
    """Tells now and then how a unit gets on."""

    def __init__(self, report: Report, size: int) -> None:
        self._report, self._size = report, size
        self._counts = {"documents": 0, "tokens": 0, "input_bytes": 0}
        self._last = time.monotonic()

    def add(self, *, documents: int = 0, tokens: int = 0, input_bytes: int = 0) -> None:
        counts = self._counts
        counts["documents"] += documents
        counts["tokens"] += tokens
        # Of what is compressed, what comes out of it is more than what it takes.
        counts["input_bytes"] = min(self._size, counts["input_bytes"] + input_bytes)
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.tell()

    def tell(self) -> None:
        self._last = time.monotonic()
        self._report(PROGRESS, {"counts": dict(self._counts), "seconds": {}, "anonymous_bytes": usage().anonymous})
