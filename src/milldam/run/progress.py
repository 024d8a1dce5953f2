"""What a run tells while it works, and who listens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from milldam.memory import format_size
from milldam.run.planning import WorkPlan

log = logging.getLogger("milldam")


@dataclass(slots=True)
class Snapshot:
    """Where a stage of a run stands."""

    stage: str = ""
    units: int = 0
    units_done: int = 0
    input_total: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    anonymous_bytes: int = 0
    budget_bytes: int = 0
    elapsed: float = 0.0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)


class Observer(Protocol):
    """Who wants to know: the command line's progress display, or nobody."""

    def planned(self, plan: WorkPlan) -> None: ...
    def progress(self, snapshot: Snapshot) -> None: ...
    def warn(self, message: str) -> None: ...


class Quiet:
    """The library's own observer: warnings go to `logging`, the rest nowhere."""

    def planned(self, plan: WorkPlan) -> None:
        sizes = format_size(plan.input_bytes), format_size(plan.budget.limit_bytes)
        log.info(
            "plan: %d of %d units to do; %s of input, %d workers, a budget of %s; %s",
            plan.units - plan.done,
            plan.units,
            sizes[0],
            plan.workers,
            sizes[1],
            "; ".join(filter(None, (plan.encoder_note, plan.note))),
        )
        if plan.left_out:
            log.warning('not read: %s. To read text among them, name it with input_format="txt".', plan.left_out)

    def progress(self, snapshot: Snapshot) -> None:
        pass

    def warn(self, message: str) -> None:
        log.warning(message)
