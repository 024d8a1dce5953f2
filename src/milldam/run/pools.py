"""Who works on a stage, and the executor for it. On this machine: this process, or workers of a server that is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from milldam.memory import usage
from milldam.run.tasks import CAN_FORK, DONE, PAUSE_SECONDS, Event, Executor, NothingYetError, Task, cores

if TYPE_CHECKING:
    from milldam.run.local import LocalExecutor
    from milldam.run.server_handle import ServerProcess


class SerialExecutor:
    """One unit after another, in this process: no start-up, the least memory."""

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        work, pid = task.start(), os.getpid()
        for unit in _as_they_come(iter(units)):
            work(assign(unit), partial(_report, on_event, pid, unit))
            on_event(Event(0, pid, unit, DONE))


def _as_they_come(units: Iterator[int]) -> Iterator[int]:
    while True:
        try:
            yield next(units)
        except StopIteration:
            return
        except NothingYetError:
            time.sleep(PAUSE_SECONDS)


def _report(on_event: Callable[[Event], None], pid: int, unit: int, kind: str, value: Any) -> None:
    on_event(Event(0, pid, unit, kind, value))


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
    alone: int | None = None
    """How many there may be where they share nothing, since each has to load for itself; None: as many."""


class Pool(Protocol):
    """Gives an executor for each stage; keeps what the next stage can use."""

    def executor(self, stage: str, workers: Workers) -> Executor: ...

    def expect(self, modules: Sequence[str]) -> None:
        """Workers will be needed that use these modules: have them imported while this process goes on."""
        ...

    @property
    def cores(self) -> int:
        """Of a machine, the largest."""
        ...

    @property
    def overhead_bytes(self) -> int:
        """What a worker holds more than one on this machine would."""
        ...

    @property
    def forks(self) -> bool:
        """Whether workers share what they load, where nothing forbids it."""
        ...

    @property
    def machine(self) -> str:
        """What events call the machine that this process is on; empty where there is no other."""
        ...

    def require_shared(self, folder: Path) -> None:
        """Raise ConfigError when a machine that takes part does not see a folder."""
        ...

    def close(self) -> None:
        """End what was kept."""
        ...

    def leave(self) -> None:
        """No more stages come."""
        ...


def pool_for(executor: str, address: str | None, budget_bytes: int, server: ServerProcess | None) -> Pool:
    """The pool of an executor, "local" or "ray"; `budget_bytes`: for each machine. `server`: begun ahead, here."""
    if executor == "local":
        return LocalPool(budget_bytes, server)
    from milldam.run.ray_cluster import RayPool

    return RayPool(address, budget_bytes)


class LocalPool:
    """This machine. The process that starts workers is kept for the next stage; its workers end with theirs."""

    def __init__(self, budget_bytes: int, server: ServerProcess | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._local: LocalExecutor | None = None if server is None else _local_executor(0, kept=server)
        if not self._has_room():
            self.close()

    def executor(self, stage: str, workers: Workers) -> Executor:
        if (workers.count == 1 and not workers.apart) or workers.here:
            if self._budget_bytes - self._held() < ROOM_BYTES:
                self.close()
            return SerialExecutor()
        count = 1 if workers.apart else workers.count
        local = _local_executor(
            count, workers.threads, keep=True, worker_bytes=workers.worker_bytes, alone=workers.alone
        )
        if self._local is not None:
            local.take_over(self._local)
        self._local = local
        return local

    def expect(self, modules: Sequence[str]) -> None:
        if self._has_room():
            self._local = self._local or _local_executor(0)
            self._local.expect(modules)

    def _has_room(self) -> bool:
        """For a process that starts workers, and for what this one still loads itself."""
        return self._budget_bytes - self._held() >= 2 * ROOM_BYTES

    @property
    def cores(self) -> int:
        return cores()

    overhead_bytes = 0
    forks = CAN_FORK
    machine = ""

    def require_shared(self, folder: Path) -> None:
        """There is one machine."""

    def _held(self) -> int:
        return sum(usage(pid).anonymous for pid in (os.getpid(), *(() if self._local is None else self._local.pids)))

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def leave(self) -> None:
        self.close()


def _local_executor(*given: Any, **options: Any) -> LocalExecutor:
    """Loaded for who needs workers: one that works in this process does not."""
    from milldam.run.local import LocalExecutor

    return LocalExecutor(*given, **options)
