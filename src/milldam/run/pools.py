"""Where the units of a stage are made: in this process, by forked workers, or on a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from milldam.memory import usage
from milldam.run.tasks import CAN_FORK, DONE, PAUSE_SECONDS, Event, Todo, Workers, begin, cores

if TYPE_CHECKING:
    from milldam.run.fork import ForkServer

ROOM_BYTES = 100 * 10**6
"""With less left of the budget, the process that starts workers ends before this one works itself."""


class Pool:
    """Workers on this machine. The process that starts them is kept for the next stage. `server`: begun ahead."""

    overhead_bytes = 0
    """Memory of a worker beyond that of one on this machine."""
    forks = CAN_FORK
    """Whether workers share what they load, where nothing forbids it."""
    machine = ""
    """The name in events of the machine that this process is on; empty where there is no other."""

    def __init__(self, budget_bytes: int, server: ForkServer | None = None) -> None:
        self.budget_bytes, self._server = budget_bytes, server
        self.folder: Path | None = None
        """The run folder, which every machine that takes part must see."""
        if self._left() < 2 * ROOM_BYTES:
            self.close()

    @property
    def cores(self) -> int:
        """Of a machine, the largest."""
        return cores()

    def run(self, workers: Workers, todo: Todo) -> None:
        """Make every unit of a stage."""
        if workers.here or (workers.count == 1 and not workers.apart):
            # A worker in this process may take the whole budget.
            if not workers.here or self._left() < ROOM_BYTES:
                self.close()
            run_here(todo)
        else:
            self._start().run(replace(workers, count=1) if workers.apart else workers, todo)

    def expect(self, modules: Sequence[str]) -> None:
        """Workers will be needed that use these modules: have them imported while this process goes on."""
        if self._left() >= 2 * ROOM_BYTES:  # for the server, and for what this process still loads itself
            self._start().expect(modules)

    def _start(self) -> ForkServer:
        from milldam.run.fork import ForkServer

        self._server = self._server or ForkServer()
        return self._server

    def _left(self) -> int:
        server = None if self._server is None else self._server.process
        return self.budget_bytes - usage().anonymous - (0 if server is None else usage(server.pid).anonymous)

    def close(self) -> None:
        """End what was kept."""
        if self._server is not None:
            self._server.close()

    def leave(self) -> None:
        """No more stages come."""
        self.close()


def run_here(todo: Todo) -> None:
    """One unit after another in this process: no start-up, the least memory."""
    work, pid = begin(todo.load), os.getpid()
    while todo.is_unit_left:
        unit = todo.next_unit()
        if unit is not None:
            event = partial(Event, 0, pid, unit)
            work(todo.assign(unit), lambda kind, value, event=event: todo.on_event(event(kind, value)))  # type: ignore[misc]
            todo.on_event(event(DONE))
        elif todo.is_unit_left:
            time.sleep(PAUSE_SECONDS)


def pool_for(executor: str, address: str | None, budget_bytes: int, server: ForkServer | None) -> Pool:
    """The pool of an executor, "local" or "ray". `budget_bytes`: for each machine."""
    if executor == "local":
        return Pool(budget_bytes, server)
    from milldam.run.ray_cluster import RayPool

    return RayPool(address, budget_bytes)
