"""What crosses to workers and comes back, wherever they are: in this process (serial), in several (local), on a cluster
(Ray), in array tasks (Slurm).

An executor gets what a worker loads and the numbers of units. It knows nothing of text: `begin(load)` builds a worker's
state once, and the callable it returns makes one assigned unit at a time, reporting its records and how it gets on.
Local workers are forked from a process in which that was loaded: all of them share it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from milldam.errors import ConfigError, Setting
from milldam.memory import usage

if TYPE_CHECKING:
    from milldam.run.records import Record

PART, PROGRESS, DONE, CRASH, MEMORY = "part", "progress", "done", "crash", "memory"
"""What an event tells: a record to keep; counters; a unit is made; a worker died; what a worker elsewhere holds, 0
when it has ended."""
CAN_FORK = sys.platform == "linux"
PAUSE_SECONDS = 0.02
"""Until units are asked for again that did not come yet."""
REPORT_SECONDS = 0.25
Report = Callable[[str, Any], None]
"""(kind, value)."""


class NothingYetError(Exception):
    """Raised by an iterator of units that has none to hand out just now, and may have one later."""


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

    def finish(self) -> None:
        """Report that all of the input is read."""
        self._counts["input_bytes"] = self._size
        self.report()

    def report(self, **measured: int) -> None:
        self._reported = time.monotonic()
        value = {"counts": dict(self._counts), "seconds": dict(self.seconds)}
        self._report(PROGRESS, value | {"anonymous_bytes": usage().anonymous} | measured)


Make = Callable[[Assigned, Progress], Iterator["Record"]]


class Load(Protocol):
    """What crosses to a worker: settings, and where to find the rest. It pickles."""

    def load(self) -> Make:
        """Build what a worker needs. The workers may be forked afterwards: a thread, or a file left open, prevents
        that, and is not forbidden."""
        ...


Work = Callable[[Assigned, Report], None]


def begin(load: Load) -> Work:
    """Load; what is given back makes a unit and reports its records as they come."""
    make = load.load()

    def work(assigned: Assigned, report: Report) -> None:
        progress = Progress(report, assigned.size)
        for record in make(assigned, progress):
            report(PART, record)
        progress.finish()

    return work


@dataclass(frozen=True, slots=True)
class Event:
    """Something a worker tells."""

    worker: int
    pid: int
    unit: int
    kind: str
    value: Any = None
    host: str = ""
    """The machine it is on, when it is another one."""


class Executor(Protocol):
    def run(
        self,
        load: Load,
        units: Iterable[int],
        assign: Callable[[int], Assigned],
        on_event: Callable[[Event], None],
    ) -> None:
        """Make every unit. `assign(unit)` makes what is handed to the worker, at the time it is handed out.

        Executors of this machine wait for units that come later (`NothingYetError`), while workers go on.
        """
        ...


def cores() -> int:
    """Of this machine, those that this process may use."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    # Slurm tells what it gave, also where it binds nobody to it.
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(usable, int(given)) if given.isdigit() and int(given) else usable


# ---- tasks of a job array ----

PREPARE, FINISH = "prepare", "finish"
"""Before the first stage and behind the last: each for one task alone."""


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """Every `of`-th unit of a stage, from the `index`-th on: what one of several machines does, beside the others."""

    stage: str
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            said = f": {self.index} of {self.of} array tasks: the index is 0 to {max(0, self.of - 1)}."
            raise ConfigError(Setting("index"), said)

    @property
    def label(self) -> str:
        """
        >>> ArrayTask("tokenize", 3, 8).label
        'tokenize-3-of-8'
        """
        return f"{self.stage}-{self.index}-of-{self.of}"
