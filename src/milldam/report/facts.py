"""Everything the page tells, gathered from a store and its run folder.

Only the manifest and the index are needed. What `run/summary.json` and `run/memory.csv` tell comes on top, and what
they lack, or have in another shape than we know, is left out: a page with less in it is better than none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.report.lengths import Lengths, count_lengths
from milldam.report.samples import Sample, sample_documents, sample_dropped
from milldam.report.timeline import Timeline, read_timeline
from milldam.stores.tokens import open_store
from milldam.stores.tokens.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Passage:
    """What a stage let through."""

    stage: str
    documents_in: int
    documents_out: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class StageMemory:
    stage: str
    start: int
    peak: int
    final: int


@dataclass(frozen=True, slots=True)
class Clusters:
    """What deduplication found."""

    kind: str
    documents: int
    dropped: int
    sizes: dict[int, int]
    """How many clusters there are of each size, those of one document left out."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The rows of a split."""

    split: str
    strategy: str
    seq_len: int
    rows: int
    padding: int
    tail: int
    cut_documents: int
    efficiency: float
    """The part of the rows that holds tokens, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Facts:
    path: Path
    manifest: Manifest
    summary: dict[str, Any]
    timeline: Timeline | None
    lengths: dict[str, Lengths]
    samples: tuple[Sample, ...]
    dropped_samples: tuple[Sample, ...]

    @property
    def told(self) -> dict[str, Any]:
        """What the run told beside what every kind of job tells."""
        return as_dict(self.summary.get("facts"))

    @property
    def sessions(self) -> int:
        """How many times the run was begun; 1 unless it was ended and resumed."""
        return 1 + (len(self.timeline.restarts) if self.timeline else 0)

    @property
    def seconds(self) -> float | None:
        """How long it took. The summary knows its own session only; the timeline knows all."""
        seconds = as_number(self.summary.get("seconds")) or None
        if self.timeline is not None and (self.sessions > 1 or seconds is None):
            return max(self.timeline.seconds, seconds or 0.0)
        return seconds

    @property
    def budget(self) -> int | None:
        return _positive(as_dict(self.summary.get("memory")).get("budget"))

    @property
    def peak_memory(self) -> int | None:
        """The most that was measured, in any session."""
        told = _positive(as_dict(self.summary.get("memory")).get("peak"))
        drawn = self.timeline.peak.anonymous if self.timeline else None
        return max((one for one in (told, drawn) if one is not None), default=None)

    @property
    def stage_memory(self) -> tuple[StageMemory, ...]:
        stages = as_dict(as_dict(self.summary.get("memory")).get("stages"))
        found = []
        for name, value in stages.items():
            start, peak, final = (_positive(as_dict(value).get(key)) for key in ("start", "peak", "final"))
            if start is not None and peak is not None and final is not None:
                found.append(StageMemory(name, start, peak, final))
        return tuple(found)

    @property
    def flow(self) -> tuple[Passage, ...]:
        """Records in and out per stage."""
        return tuple(Passage(**stage) for stage in self.manifest.tally.flow())

    @property
    def packing(self) -> tuple[Packing, ...]:
        """Rows by split, or of all splits together: as the run told it."""
        told = as_dict(self.told.get("packing"))
        by_split = {"all": told} if "rows" in told else told
        found = (_packing(split, as_dict(one)) for split, one in by_split.items())
        return tuple(one for one in found if one is not None)

    @property
    def clusters(self) -> tuple[Clusters, ...]:
        found = (_clusters(kind, as_dict(self.told.get(key))) for key, kind in _DEDUP_KINDS.items())
        return tuple(one for one in found if one is not None)


_DEDUP_KINDS = {"dedup": "exact duplicates", "near": "near duplicates"}


def gather(out: Path) -> Facts:
    """Read it all, in memory that does not grow with the store."""
    store = open_store(out)
    summary = _read_summary(out / "run" / "summary.json")
    return Facts(
        path=out,
        manifest=store.manifest,
        summary=summary,
        timeline=_read_timeline(out / "run", summary),
        lengths=count_lengths(out, store.manifest),
        samples=sample_documents(store),
        dropped_samples=sample_dropped(out / "dropped.jsonl.zst"),
    )


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        return as_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _read_timeline(run: Path, summary: dict[str, Any]) -> Timeline | None:
    """The file outlives an overwritten run, and a later command that finds nothing to do adds to it: both are cut off.

    When this run was planned and summed up is seen from its files. A copied store has later times: then all is shown.
    """
    begin = _modified(run / "plan.json")
    end = as_number(summary.get("finished")) or _modified(run / "summary.json")
    timeline = read_timeline(run / "memory.csv", begin=begin or -math.inf, end=math.inf if end is None else end + 1)
    return timeline or read_timeline(run / "memory.csv")


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _clusters(kind: str, told: dict[str, Any]) -> Clusters | None:
    if not told:
        return None
    sizes = {int(size): n for size, n in as_counts(told.get("clusters")).items() if size.isdecimal() and int(size) > 1}
    documents, dropped = (_positive(told.get(key)) or 0 for key in ("documents", "dropped"))
    return Clusters(kind, documents, dropped, dict(sorted(sizes.items())))


def _packing(split: str, told: dict[str, Any]) -> Packing | None:
    names = ("seq_len", "rows", "padding", "tail", "cut_documents")
    row_length, rows, padding, tail, cut = (_positive(told.get(name)) or 0 for name in names)
    efficiency = as_number(told.get("efficiency"))
    if not rows:
        return None
    if efficiency is None:
        room = rows * row_length
        efficiency = (room - padding) / room if room else 0.0
    return Packing(split, str(told.get("strategy", "")), row_length, rows, padding, tail, cut, efficiency)


# ---- values of a file that others may have written ----


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def as_counts(value: Any) -> dict[str, int]:
    """What in a dict is a whole number above 0, by name."""
    return {str(name): n for name, n in as_dict(value).items() if isinstance(n, int) and n > 0}


def _positive(value: Any) -> int | None:
    number = as_number(value)
    return None if number is None or number < 0 else int(number)
