"""Who works on a stage: how many workers the budget holds, what each takes, and the smallest budget that works; and the
executor for them. On this machine: this process, or workers of a server that is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import ResourceError, Setting
from milldam.memory import Budget, format_size, stays_shared, usage
from milldam.run.tasks import (
    CAN_FORK,
    DONE,
    PAUSE_SECONDS,
    Assigned,
    Event,
    Executor,
    Load,
    NothingYetError,
    begin,
    cores,
)

if TYPE_CHECKING:
    from milldam.run.fork import ForkedWorkers

# Measured (docs/log.md): a worker's imports, what batches on their way may take, a loaded tokenizer by its file's size.
WORKER_BYTES = 42 * 10**6
WORK_BYTES = 60 * 10**6
BATCHES_BYTES = 16 * 10**6
TABLE_BYTES = 34 * 10**6
"""gigatoken's cache of the words of half a gigabyte of text, without which it is still fast."""
TOKENIZER_FACTOR = 16
FILTER_BYTES, LANGUAGE_BYTES, FUNCTION_BYTES = 40 * 10**6, 85 * 10**6, 64 * 10**6
"""What text rules, the language model, and a function that gets documents whole take beside the rest."""
GROUPING_WORKER_BYTES, LEAST_GROUPING_BYTES = 60 * 10**6, 101 * 10**6
"""The process that groups hashes, and the least that grouping works with."""
SMALL_INPUT = 16 * 10**6
"""Bytes of input for which starting worker processes takes longer than the work."""


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """What follows from the budget and the input."""

    budget: Budget
    units: int
    input_bytes: int
    shard_size: int
    workers: int
    threads: int
    share_bytes: int
    note: str = ""
    encoder: str = ""
    encoder_note: str = ""
    stages: tuple[str, ...] = ()
    left_out: str = ""
    """Files of the input's folders that are not read, and why."""
    done: int = 0
    """Units that were done before, where that is known."""
    conversations: str = ""
    """The form of the records, and how they become texts; empty: they are none."""
    text_columns: dict[str, str | None] = field(default_factory=dict)
    """The field that is read, by dataset; None: plain text."""
    preferred: str = ""
    """Which of near-duplicates stays, where a field decides."""
    changes: tuple[str, ...] = ()
    """Input files that are new, changed or gone since an earlier run."""

    @classmethod
    def of(cls, budget: Budget, *, workers: int, useful: int, cores: int, held_bytes: int, **facts: Any) -> WorkPlan:
        """A plan in which `workers`, of as many as would be useful, share the cores and what the budget leaves them."""
        return cls(
            budget=budget,
            workers=workers,
            threads=max(1, cores // workers),
            share_bytes=(budget.limit_bytes - held_bytes) // workers,
            note=f"the budget holds {workers} of {useful} workers" if workers < useful else "",
            **facts,
        )


def fit_workers(
    budget: Budget, parent_bytes: int, loaded_bytes: int, wanted: int, *, own_bytes: int = 0, forked: bool = False
) -> int:
    """How many workers the budget holds, at most `wanted`; one works in this process.

    A worker loads `loaded_bytes`, which forked workers share but for what each writes to, and holds `own_bytes` beside
    what every worker holds. Raises ResourceError with the smallest budget that would do when it holds none.
    """
    alone = least_bytes(parent_bytes, loaded_bytes + own_bytes)
    require_room(budget, {"this job": alone})
    loaded, own = WORKER_BYTES + loaded_bytes, own_bytes + WORK_BYTES
    left = budget.limit_bytes - parent_bytes
    several = (left - loaded) // (own + loaded - stays_shared(loaded)) if forked else left // (own + loaded)
    return max(1, min(wanted, several))


def least_bytes(parent_bytes: int, loaded_bytes: int) -> int:
    """What a run takes in which this process does the work itself."""
    return max(parent_bytes, WORKER_BYTES) + loaded_bytes + WORK_BYTES


def least_grouping_bytes(parent_bytes: int) -> int:
    """What dedup takes to group in a process of its own."""
    return parent_bytes + GROUPING_WORKER_BYTES + LEAST_GROUPING_BYTES


def require_room(budget: Budget, needed: Mapping[str, int], *, another_time: int = 0) -> None:
    """Raise ResourceError when a budget does not hold all of these, by name, one at a time; it names the largest.

    `another_time`: what the same job may take beside it then, so that the budget it names does whenever it is tried.
    """
    what, most = max(needed.items(), key=lambda one: one[1])
    if budget.limit_bytes < most:
        raise ResourceError(
            f"A budget of {format_size(budget.limit_bytes)} is too small for {what}: it takes at least ",
            enough_memory(most + another_time),
            ".",
        )


def enough_memory(least: int, held_bytes: int = 0) -> Setting:
    """A budget that does, on top of what the program held before; a process does not weigh the same twice, so it is a
    little more."""
    return Setting("memory", f"{max(0, least * 103 // 100 - held_bytes) // 10**6 + 1}MB")


class SerialExecutor:
    """One unit after another, in this process: no start-up, the least memory."""

    def run(
        self,
        load: Load,
        units: Iterable[int],
        assign: Callable[[int], Assigned],
        on_event: Callable[[Event], None],
    ) -> None:
        work, pid = begin(load), os.getpid()
        for unit in _as_they_come(iter(units)):

            def report(kind: str, value: Any, unit: int = unit) -> None:
                on_event(Event(0, pid, unit, kind, value))

            work(assign(unit), report)
            report(DONE, None)


def _as_they_come(units: Iterator[int]) -> Iterator[int]:
    while True:
        try:
            yield next(units)
        except StopIteration:
            return
        except NothingYetError:
            time.sleep(PAUSE_SECONDS)


# ---- pools ----

ROOM_BYTES = 100 * 10**6
"""With less left of the budget, the process that starts workers ends before this one works itself."""


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
    """Of what the first worker measures (`Progress.tell`), how many workers there may be, and what one may hold after a
    unit; until then there is one."""


class Pool:
    """Gives an executor for each stage, on this machine. The process that starts workers is kept for the next stage;
    its workers end with theirs. `server`: begun ahead."""

    overhead_bytes = 0
    """What a worker holds more than one on this machine would."""
    forks = CAN_FORK
    """Whether workers share what they load, where nothing forbids it."""
    machine = ""
    """What events call the machine that this process is on; empty where there is no other."""

    def __init__(self, budget_bytes: int, server: ForkedWorkers | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._forked = server
        if not self._has_room():
            self.close()

    @property
    def cores(self) -> int:
        """Of a machine, the largest."""
        return cores()

    def executor(self, workers: Workers) -> Executor:
        if (workers.count == 1 and not workers.apart) or workers.here:
            # What works here as a worker may take the whole budget.
            if not workers.here or self.budget_bytes - self._held() < ROOM_BYTES:
                self.close()
            return SerialExecutor()
        forked = self._start()
        forked.wanted = replace(workers, count=1) if workers.apart else workers
        return forked

    def expect(self, modules: Sequence[str]) -> None:
        """Workers will be needed that use these modules: have them imported while this process goes on."""
        if self._has_room():
            self._start().expect(modules)

    def _start(self) -> ForkedWorkers:
        if self._forked is None:
            # Loaded for who needs workers: one that works in this process does not.
            from milldam.run.fork import ForkedWorkers

            self._forked = ForkedWorkers()
        return self._forked

    def _has_room(self) -> bool:
        """For a process that starts workers, and for what this one still loads itself."""
        return self.budget_bytes - self._held() >= 2 * ROOM_BYTES

    def _held(self) -> int:
        return sum(usage(pid).anonymous for pid in (os.getpid(), *(self._forked.pids if self._forked else ())))

    def require_shared(self, folder: Path) -> None:
        """Raise ConfigError when a machine that takes part does not see a folder."""

    def close(self) -> None:
        """End what was kept."""
        if self._forked is not None:
            self._forked.close()

    def leave(self) -> None:
        """No more stages come."""
        self.close()


def pool_for(executor: str, address: str | None, budget_bytes: int, server: ForkedWorkers | None) -> Pool:
    """The pool of an executor, "local" or "ray"; `budget_bytes`: for each machine. `server`: begun ahead, here."""
    if executor == "local":
        return Pool(budget_bytes, server)
    from milldam.run.ray_cluster import RayPool

    return RayPool(address, budget_bytes)
