"""Everything the page tells, gathered from a store and its run folder.

Only the manifest and the index are needed. What `run/summary.json` and `run/memory.csv` tell comes on top; a damaged or
missing one costs only what it would tell: a page with less in it is better than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.report.documents import Lengths, Sample, count_lengths, sample_documents, sample_dropped
from milldam.report.timeline import Timeline, read_timeline
from milldam.sealed import read_sealed
from milldam.stores.tokens import open_store
from milldam.stores.tokens.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Facts:
    path: Path
    manifest: Manifest
    summary: dict[str, Any]
    """What every kind of job tells; empty where the run left none."""
    told: dict[str, Any]
    """What only this kind does."""
    timeline: Timeline | None
    lengths: dict[str, Lengths]
    samples: tuple[Sample, ...]
    dropped_samples: tuple[Sample, ...]

    @property
    def sessions(self) -> int:
        """How many times the run was begun; 1 unless it was ended and resumed."""
        return 1 + (len(self.timeline.restarts) if self.timeline else 0)

    @property
    def seconds(self) -> float:
        """How long it took; 0: not recorded. The summary knows its own session only; the timeline knows all."""
        seconds = float(self.summary.get("seconds", 0.0))
        if self.timeline is not None and (self.sessions > 1 or not seconds):
            return max(self.timeline.seconds, seconds)
        return seconds

    @property
    def memory(self) -> dict[str, Any]:
        return self.summary.get("memory") or {}

    @property
    def budget(self) -> int | None:
        return self.memory.get("budget")

    @property
    def peak_memory(self) -> int:
        """The most that was measured, in any session; 0: not recorded."""
        return max(int(self.memory.get("peak", 0)), self.timeline.peak.anonymous if self.timeline else 0)


def gather(out: Path) -> Facts:
    """Read it all, in memory that does not grow with the store."""
    store = open_store(out)
    summary = read_sealed(out / "run" / "summary.json") or {}
    return Facts(
        path=out,
        manifest=store.manifest,
        summary=summary,
        told=summary.get("facts", {}),
        timeline=_read_timeline(out / "run", summary.get("finished")),
        lengths=count_lengths(out, store.manifest),
        samples=sample_documents(store),
        dropped_samples=sample_dropped(out / "dropped.jsonl.zst"),
    )


def _read_timeline(run: Path, finished: float | None) -> Timeline | None:
    """The file outlives an overwritten run, and a later command that finds nothing to do adds to it: both are cut off.

    When this run was planned is seen from its file. A copied store has later times: then all is shown.
    """
    plan = run / "plan.json"
    begin = plan.stat().st_mtime if plan.exists() else -math.inf
    end = math.inf if finished is None else finished + 1
    return read_timeline(run / "memory.csv", begin=begin, end=end) or read_timeline(run / "memory.csv")
