"""Several worker processes on this machine, one unit at a time each.

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which is given
to a fresh one, once. Workers are started as `python -m milldam.executors.worker`, so a script that calls milldam
needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from milldam.errors import WorkerError
from milldam.executors import CRASH, DONE, Event, Task

RETRIES = 1


@dataclass(slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    unit: int | None = None


class LocalExecutor:
    def __init__(self, workers: int, threads: int = 1) -> None:
        self._count, self._threads = workers, threads

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        job = _Job(task, iter(units), assign, on_event, self._threads)
        try:
            job.run(self._count)
        finally:
            job.stop()


class _Job:
    def __init__(
        self,
        task: Task,
        units: Iterator[int],
        assign: Callable[[int], Any],
        on_event: Callable[[Event], None],
        threads: int,
    ) -> None:
        self._task, self._units, self._assign, self._on_event = task, units, assign, on_event
        self._threads = threads
        self._crashes: dict[int, int] = {}
        self._again: list[int] = []
        self._workers: dict[Connection, _Worker] = {}

    def run(self, count: int) -> None:
        for number in range(count):
            self._start_worker(number)
        while any(worker.unit is not None for worker in self._workers.values()):
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                self._hear(self._workers[connection])

    def stop(self) -> None:
        """End every worker at once: what is not committed is not kept, so nothing needs to be wound up."""
        for worker in self._workers.values():
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()

    def _start_worker(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"RAYON_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
        # -P: what lies in the current folder must not stand in for an installed package.
        command = [sys.executable, "-P", "-m", "milldam.executors.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        connection = Connection(ours.detach())
        worker = _Worker(number, process, connection)
        self._workers[connection] = worker
        connection.send(self._task)
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._again.pop() if self._again else next(self._units, None)
        if worker.unit is None:
            return
        assignment = self._assign(worker.unit)
        try:
            worker.connection.send(assignment)
        except OSError:
            self._replace(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if kind == "error":
            raise value
        if worker.unit is not None:
            self._on_event(Event(worker.number, worker.process.pid, worker.unit, kind, value))
        if kind == DONE:
            self._hand_out(worker)

    def _replace(self, worker: _Worker) -> None:
        """A worker died: say so, and give its unit to a new one, unless it has killed one before."""
        code = worker.process.wait()
        del self._workers[worker.connection]
        worker.connection.close()
        unit = worker.unit
        if unit is None:
            return
        cause = _cause(code)
        self._crashes[unit] = self._crashes.get(unit, 0) + 1
        if self._crashes[unit] > RETRIES:
            raise WorkerError(
                f"Unit {unit} ended its worker process {self._crashes[unit]} times; the last one {cause}.\n"
                "Every finished unit is safe. Run the same command again; if it was memory, with fewer --workers."
            )
        self._on_event(Event(worker.number, worker.process.pid, unit, CRASH, cause))
        self._again.append(unit)
        self._start_worker(worker.number)


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
