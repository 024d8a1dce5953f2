"""Several worker processes on this machine, one unit at a time each.

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which is given
to a fresh one, once. Workers are started as `python -m milldam.run.worker`, so a script that calls milldam
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

from milldam.errors import Setting, WorkerError
from milldam.memory import usage
from milldam.run.tasks import CRASH, DONE, TASK, WORK, Event, Task

RETRIES = 1
_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""


@dataclass(slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    unit: int | None = None


class LocalExecutor:
    """`keep`: the processes stay for the next task, until `close`; starting them takes half a second.

    `worker_bytes`: a worker that holds more memory than this after a unit makes room for a fresh one: what a user's
    function keeps must not add up.
    """

    def __init__(self, workers: int, threads: int = 1, *, keep: bool = False, worker_bytes: int | None = None) -> None:
        self.workers, self.threads, self.worker_bytes = workers, threads, worker_bytes
        self._keep = keep
        self._kept: list[_Worker] = []

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        job = _Job(task, iter(units), assign, on_event, self.threads, self.worker_bytes)
        kept, self._kept = self._kept, []
        try:
            job.run(self.workers, kept)
            if self._keep:
                self._kept = job.release()
        finally:
            job.stop()

    @property
    def pids(self) -> list[int]:
        """The processes that are kept."""
        return [worker.process.pid for worker in self._kept]

    def close(self) -> None:
        """End the processes that were kept."""
        _end(self._kept)
        self._kept = []


class _Job:
    def __init__(
        self,
        task: Task,
        units: Iterator[int],
        assign: Callable[[int], Any],
        on_event: Callable[[Event], None],
        threads: int,
        worker_bytes: int | None,
    ) -> None:
        self._task, self._units, self._assign, self._on_event = task, units, assign, on_event
        self._threads, self._worker_bytes = threads, worker_bytes
        self._crashes: dict[int, int] = {}
        self._again: list[int] = []
        self._workers: dict[Connection, _Worker] = {}

    def run(self, count: int, kept: list[_Worker]) -> None:
        for worker in kept:
            self._workers[worker.connection] = worker
        for worker in kept:
            self._give_task(worker)
        for number in range(len(kept), count):
            self._start_worker(number)
        while any(worker.unit is not None for worker in self._workers.values()):
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                self._hear(self._workers[connection])

    def stop(self) -> None:
        """End every worker at once: what is not committed is not kept, so nothing needs to be wound up."""
        _end(self._workers.values())

    def release(self) -> list[_Worker]:
        """The workers, idle now, for another task."""
        workers, self._workers = list(self._workers.values()), {}
        return workers

    def _start_worker(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"RAYON_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
        # -P: what lies in the current folder must not stand in for an installed package.
        command = [sys.executable, "-P", "-m", "milldam.run.worker", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=_STDERR
        )
        theirs.close()
        connection = Connection(ours.detach())
        worker = _Worker(number, process, connection)
        self._workers[connection] = worker
        self._give_task(worker)

    def _give_task(self, worker: _Worker) -> None:
        try:
            worker.connection.send((TASK, self._task))
        except OSError:
            # It died while nobody asked anything of it: another one takes its place.
            del self._workers[worker.connection]
            _end([worker])
            self._start_worker(worker.number)
            return
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._next_unit()
        if worker.unit is None:
            return
        assignment = self._assign(worker.unit)
        try:
            worker.connection.send((WORK, assignment))
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
            self._go_on(worker)

    def _go_on(self, worker: _Worker) -> None:
        """The next unit, for this worker or for a fresh one in its place."""
        if self._worker_bytes is None or usage(worker.process.pid).anonymous <= self._worker_bytes:
            self._hand_out(worker)
            return
        worker.unit, unit = None, self._next_unit()
        if unit is None:
            return
        self._again.append(unit)
        del self._workers[worker.connection]
        _end([worker])
        self._start_worker(worker.number)

    def _next_unit(self) -> int | None:
        return self._again.pop() if self._again else next(self._units, None)

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
                "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
                Setting("workers"),
                ".",
            )
        self._on_event(Event(worker.number, worker.process.pid, unit, CRASH, cause))
        self._again.append(unit)
        self._start_worker(worker.number)


def _end(workers: Iterable[_Worker]) -> None:
    workers = list(workers)
    for worker in workers:
        worker.connection.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
