"""What a run tells while it works and when it is done, and who listens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from milldam.memory import format_size
from milldam.run.planning import WorkPlan
from milldam.stores.tokens.tally import Tally

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
            "; ".join(filter(None, (plan.engine_note, plan.note))),
        )
        if plan.left_out:
            log.warning('not read: %s. To read text among them, name it with input_format="txt".', plan.left_out)

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
    read: int
    """Records that were read: documents kept, dropped and rejected together."""
    rejected: dict[str, int]
    """Records that could not be read, by reason."""
    dropped: dict[str, int]
    """Documents that were dropped, by reason."""
    flow: list[dict[str, Any]]
    """Records into and out of each stage, with the reasons of what was lost there."""
    sources: tuple[Tally, ...]
    """The same figures by data set."""
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    engine: str = ""
    inexact_cuts: int = 0
    damaged_files: int = 0
    text_columns: dict[str, str | None] = field(default_factory=dict)
    """The field that was read, by data set; None: plain text."""
    output_bytes: int = 0
    """Size of the result on disk, without what tells how it was made."""
    session_text_bytes: int = 0
    """Text that was tokenized in `seconds`: what a run that went on had done before is not in it."""
    wall: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""
    dedup: dict[str, Any] = field(default_factory=dict)
    near: dict[str, Any] = field(default_factory=dict)
    packing: dict[str, Any] = field(default_factory=dict)
    """Figures of the rows, by split."""
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    finished: float = 0.0
    report: str | None = None
    """Where the report is."""
    units: int = 0
    units_reused: int = 0
    """Units that an earlier run had made."""
    changes: tuple[str, ...] = ()
    """Input files that were new, changed or gone since that run."""
