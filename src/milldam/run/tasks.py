"""Where units are worked on: in this process (serial), in several (local), on a cluster (Ray), in array tasks (Slurm).

An executor gets a task and the indexes of units. It knows nothing of text: `task.start()` builds a worker's state
once, and the callable it returns works on one assignment at a time, reporting what it commits and how it gets on.
Local workers are forked from a process in which the task was started: what the callable finds at its first call is
shared by all of them.

`ArrayTask` is what one of several machines does of a stage, beside the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from milldam.errors import ConfigError, Setting

PART, PROGRESS, DONE, CRASH, MEMORY = "part", "progress", "done", "crash", "memory"
"""What an event tells; "memory": bytes that a worker on another machine holds, 0 when it has ended."""
CAN_FORK = sys.platform == "linux"
PAUSE_SECONDS = 0.02
"""Until units are asked for again that did not come yet."""
Report = Callable[[str, Any], None]
"""(kind, value): "part" with a record to keep, "progress" with counters."""
Work = Callable[[Any, Report], None]


class NothingYetError(Exception):
    """Raised by an iterator of units that has none to hand out just now, and may have one later."""


class Task(Protocol):
    """What a worker does. It must pickle."""

    def start(self) -> Work:
        """Build what a worker needs; the callable does an assignment.

        The workers may be forked afterwards: what belongs to one process is made at the first call. A thread, or a file
        left open, prevents forking, and is not forbidden.
        """
        ...


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


def cores() -> int:
    """Of this machine, those that this process may use."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    # Slurm tells what it gave, also where it binds nobody to it.
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(usable, int(given)) if given.isdigit() and int(given) else usable


class Executor(Protocol):
    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        """Work on every unit. `assign(unit)` makes what is handed to the worker, at the time it is handed out.

        Executors of this machine wait for units that come later (`NothingYetError`), while workers go on.
        """
        ...


PREPARE, FINISH = "prepare", "finish"
"""Before the first stage and behind the last: each for one task alone."""


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """Every `of`-th unit of a stage, from the `index`-th on."""

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

    def overlaps(self, label: str) -> bool:
        """Whether a task of that label is of the same stage, cut into another number of tasks.

        >>> task = ArrayTask("tokenize", 3, 8)
        >>> task.overlaps("tokenize-1-of-2"), task.overlaps("tokenize-1-of-8"), task.overlaps("arrange-1-of-2")
        (True, False, False)
        """
        stage, _, rest = label.partition("-")
        return stage == self.stage and not rest.endswith(f"-of-{self.of}")

    def holds(self, unit: int) -> bool:
        return unit % self.of == self.index
