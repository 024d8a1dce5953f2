"""Messages between a run and its workers, wherever they are: here, in other processes, on a cluster, in array tasks.

A stage gives a `Load`, which pickles; each worker builds its `Make` of it once, and makes one assigned unit after the
other, reporting its records and its progress. Nothing here knows of text.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from milldam.memory import usage

if TYPE_CHECKING:
    from milldam.run.records import Record

PART, PROGRESS, DONE, CRASH = "part", "progress", "done", "crash"
"""Kinds of events: a record to keep; counters; a unit is made; its worker died."""
ERROR, ENDED = "error", "ended"
"""A worker raised an error, which ends the stage; a worker of a cluster has ended."""
PREPARE, FINISH = "prepare", "finish"
"""Stages of a job array before the first and after the last: one task each."""
CAN_FORK = sys.platform == "linux"
PAUSE_SECONDS = 0.02
"""Until units are asked for again that were not there yet."""
REPORT_SECONDS = 0.25
Report = Callable[[str, Any], None]
"""(kind, value)."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """A unit as a worker gets it."""

    unit: Any
    key: str
    size: int
    """Bytes of input."""
    begun: Record | None = None
    """The last part that an earlier run left; None: the unit is not begun."""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON that only the job understands: which rows are wanted, the key of what an earlier stage left."""

    @property
    def next_part(self) -> int:
        return 0 if self.begun is None else self.begun.part + 1


class Progress:
    """Reports how far a unit is, now and then, and where its time goes."""

    def __init__(self, report: Report, size: int) -> None:
        self._report, self._size = report, size
        self._counts: Counter[str] = Counter(documents=0, tokens=0, input_bytes=0)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._reported, self._lap = time.monotonic(), time.perf_counter()

    def lap(self, step: str | None = None) -> None:
        """Book the time since the last lap under a step, or leave it out."""
        now = time.perf_counter()
        if step is not None:
            self.seconds[step] += now - self._lap
        self._lap = now

    def add(self, **counts: int) -> None:
        self._counts.update(counts)
        # Compressed input gives more bytes than it takes.
        self._counts["input_bytes"] = min(self._size, self._counts["input_bytes"])
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self.report()

    def report(self, **measured: int) -> None:
        self._reported = time.monotonic()
        value = {"counts": dict(self._counts), "seconds": dict(self.seconds)}
        self._report(PROGRESS, value | {"anonymous_bytes": usage().anonymous} | measured)


Make = Callable[[Assigned, Progress], Iterator["Record"]]
Work = Callable[[Assigned, Report], None]


class Load(Protocol):
    """Settings for a worker, and where to find the rest. It pickles."""

    def load(self) -> Make:
        """Build what a worker needs. The workers may be forked afterwards: a thread, or a file left open, prevents
        that, and is not forbidden."""
        ...


def begin(load: Load) -> Work:
    """Load; the result makes a unit and reports its records as they come."""
    make = load.load()

    def work(assigned: Assigned, report: Report) -> None:
        progress = Progress(report, assigned.size)
        for record in make(assigned, progress):
            report(PART, record)
        progress.add(input_bytes=assigned.size)
        progress.report()

    return work


@dataclass(frozen=True, slots=True)
class Event:
    """A report of a worker on a unit."""

    worker: int
    pid: int
    unit: int
    kind: str
    value: Any = None
    host: str = ""
    """The machine it is on, when it is another one."""


@dataclass(slots=True)
class Todo:
    """The units of a stage that are to be made, wherever that is."""

    load: Load
    units: Iterator[int | None]
    """None: there is none to hand out just now; one may come later, on this machine."""
    assign: Callable[[int], Assigned]
    """Makes what is handed to a worker, at the time it is handed out."""
    on_event: Callable[[Event], None]
    again: list[int] = field(default_factory=list)
    """Units whose worker has died."""
    is_over: bool = False
    """No more units come."""

    @property
    def is_unit_left(self) -> bool:
        return bool(self.again) or not self.is_over

    def next_unit(self) -> int | None:
        """None: there is none just now, or no more come."""
        if self.again:
            return self.again.pop()
        try:
            return next(self.units)
        except StopIteration:
            self.is_over = True
            return None


@dataclass(frozen=True, slots=True)
class Workers:
    """Who works on a stage, on each machine that takes part."""

    count: int
    threads: int
    apart: bool = False
    """In a process of its own even when alone, so that all its memory comes back."""
    here: bool = False
    """In this process: the work can't be seen from elsewhere, or needs to know at once what is done."""
    worker_bytes: int | None = None
    """After a unit, a worker that holds more than this is replaced by a fresh one; None: none is."""
    fit: Callable[[dict[str, int]], tuple[int, int]] | None = None
    """From what the first worker measures (`Progress.report`), how many workers there may be, and what one may hold
    after a unit; until then there is one."""


def cores() -> int:
    """Of this machine, those that this process may use."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    # Slurm names the cores of a job even where it binds no process to them.
    slurm = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(usable, int(slurm)) if slurm.isdigit() and int(slurm) else usable
