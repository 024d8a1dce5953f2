"""What a run tells while it works and when it is done, and who listens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from milldam.planning import WorkPlan

log = logging.getLogger("milldam")


@dataclass(slots=True)
class Snapshot:
    """Where a run stands."""

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
        log.info("plan: %s", plan)

    def progress(self, snapshot: Snapshot) -> None:
        pass

    def warn(self, message: str) -> None:
        log.warning(message)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished run tells."""

    out: Path
    up_to_date: bool
    documents: int
    tokens: int
    text_bytes: int
    characters: int
    dropped: dict[str, int]
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    engine: str = ""
    inexact_cuts: int = 0
