"""Several worker processes on this machine, one unit at a time each.

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which is given
to a fresh one, once. A server process loads the task once and forks the workers (run/server.py); it is started as
`python -m milldam.run.server`, so a script that calls milldam needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from milldam.errors import WorkerError
from milldam.memory import shared_bytes, usage
from milldam.run.server_handle import ADVICE, RETRIES, ServerProcess, Servers, cause_of
from milldam.run.tasks import (
    CAN_FORK,
    CRASH,
    DONE,
    ERROR,
    PAUSE_SECONDS,
    READY,
    TASK,
    WORK,
    Event,
    NothingYetError,
    Task,
)


@dataclass(slots=True)
class _Worker:
    number: int
    server: ServerProcess
    connection: Connection
    pid: int | None = None
    """None until it is ready."""
    unit: int | None = None


class LocalExecutor:
    """`keep`: the server stays for the next task, until `close`; starting it takes half a second.

    `alone`: how many workers there may be where each must load for itself; as many as else, unless given.
    `worker_bytes`: a worker that holds more memory than this after a unit makes room for a fresh one: what a user's
    function keeps must not add up.
    """

    def __init__(
        self,
        workers: int,
        threads: int = 1,
        *,
        keep: bool = False,
        worker_bytes: int | None = None,
        alone: int | None = None,
        kept: ServerProcess | None = None,
    ) -> None:
        self.workers, self.threads, self.worker_bytes = workers, threads, worker_bytes
        self.alone = workers if alone is None else min(alone, workers)
        self._keep = keep
        self._kept = kept

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        servers, self._kept = Servers(task, self.threads, self.workers, self._kept), None
        job = _Job(self, servers, task, iter(units), assign, on_event)
        try:
            job.run()
            if self._keep:
                self._kept = job.release()
        finally:
            job.stop()

    def expect(self, modules: Sequence[str]) -> None:
        """Have what is needed for a task imported in the background; it is kept until the task comes."""
        if self._kept is None and CAN_FORK:
            self._kept = ServerProcess({}, apart=False)
            self._kept.expect(modules)

    def take_over(self, other: LocalExecutor) -> None:
        """Use what another executor has kept."""
        self._kept, other._kept = other._kept, None

    @property
    def pids(self) -> list[int]:
        """The process that is kept."""
        return [] if self._kept is None else [self._kept.pid]

    def close(self) -> None:
        """End what was kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class _Job:
    def __init__(
        self,
        executor: LocalExecutor,
        servers: Servers,
        task: Task,
        units: Iterator[int],
        assign: Callable[[int], Any],
        on_event: Callable[[Event], None],
    ) -> None:
        self._executor, self._servers, self._task = executor, servers, task
        self._units, self._assign, self._on_event = units, assign, on_event
        self._all_given = False
        """No more units come."""
        self._crashes: dict[int, int] = {}
        self._again: list[int] = []
        self._workers: dict[Connection, _Worker] = {}

    def run(self) -> None:
        first = self._next_unit()
        if first is not None:
            self._again.append(first)
        elif self._all_given:
            return
        self._servers.begin()
        for number in range(self._count):
            self._start_worker(number)
        while self._is_busy():
            idle = () if self._all_given else self._idle()
            for ready in wait([*self._workers, *self._servers.controls], PAUSE_SECONDS if idle else None):
                self._attend(ready)
            for worker in idle:
                if worker.connection in self._workers:
                    self._hand_out(worker)

    def _is_busy(self) -> bool:
        workers = self._workers.values()
        return (
            not self._all_given
            or bool(self._again)
            or any(worker.pid is None or worker.unit is not None for worker in workers)
        )

    def _idle(self) -> list[_Worker]:
        """Workers that wait for units which may still come."""
        return [worker for worker in self._workers.values() if worker.pid is not None and worker.unit is None]

    @property
    def _count(self) -> int:
        return self._executor.alone if self._servers.current.apart else self._executor.workers

    def stop(self) -> None:
        """End every process at once: what is not committed is not kept, so nothing needs to be wound up."""
        for connection in self._workers:
            connection.close()
        self._servers.close()

    def release(self) -> ServerProcess | None:
        """The server for another task, if it can take one; its workers end."""
        self._dismiss(list(self._workers.values()))
        return self._servers.release()

    def _start_worker(self, number: int) -> None:
        server, connection = self._servers.fork(number)
        self._workers[connection] = _Worker(number, server, connection)

    def _attend(self, ready: Any) -> None:
        worker = self._workers.get(ready)
        if worker is not None:
            self._hear(worker)
        else:
            self._servers.hear(ready)
        if self._servers.current.cannot_fork:
            self._go_apart()

    def _go_apart(self) -> None:
        """Start the workers that could not be forked as programs of their own."""
        waiting = [worker for worker in self._workers.values() if worker.pid is None]
        for worker in waiting:
            self._forget(worker)
        self._servers.go_apart(still_needed=bool(self._workers))
        for worker in waiting[: max(0, self._count - len(self._workers))]:
            self._start_worker(worker.number)

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if kind == ERROR:
            raise value
        if kind == READY:
            worker.server.await_loaded()
            worker.pid = value
            self._welcome(worker)
        elif worker.unit is not None and worker.pid is not None:
            self._on_event(Event(worker.number, worker.pid, worker.unit, kind, value))
            if kind == DONE:
                self._servers.note_progress()
                self._go_on(worker)

    def _welcome(self, worker: _Worker) -> None:
        if worker.server.apart:
            with contextlib.suppress(OSError):
                worker.connection.send((TASK, self._task))
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._next_unit()
        if worker.unit is not None:
            assignment = self._assign(worker.unit)
            try:
                worker.connection.send((WORK, assignment))
            except OSError:  # it died while it waited, which will be heard: not by this unit
                self._again.append(worker.unit)
                worker.unit = None

    def _go_on(self, worker: _Worker) -> None:
        """The next unit, for this worker or for a fresh one in its place."""
        if not self._is_too_large(worker):
            self._hand_out(worker)
            return
        worker.unit, unit = None, self._next_unit()
        if unit is not None:
            self._again.append(unit)
        if unit is not None or not self._all_given:
            self._dismiss([worker])
            self._start_worker(worker.number)

    def _is_too_large(self, worker: _Worker) -> bool:
        most = self._executor.worker_bytes
        if most is None or worker.pid is None:
            return False
        held, inherited = usage(worker.pid).anonymous, self._servers.inherited(worker.server)
        if held <= inherited.allowance(most, 0):
            return False
        return held > inherited.allowance(most, shared_bytes(worker.pid) if inherited.anonymous else 0)

    def _next_unit(self) -> int | None:
        """None: there is none just now, or no more come."""
        if self._again:
            return self._again.pop()
        try:
            return next(self._units)
        except NothingYetError:
            return None
        except StopIteration:
            self._all_given = True
            return None

    def _dismiss(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._forget(worker)
        for server in {id(worker.server): worker.server for worker in workers}.values():
            server.end(worker.number for worker in workers if worker.server is server)

    def _forget(self, worker: _Worker) -> None:
        del self._workers[worker.connection]
        worker.connection.close()

    def _replace(self, worker: _Worker) -> None:
        """A worker died: say so, and give its unit to a new one, unless it has killed one before."""
        code = worker.server.code(worker.number)
        if worker.pid is None and worker.server.cannot_fork:
            return  # it never was: others are started in its place
        self._forget(worker)
        if worker.pid is not None and worker.unit is None and self._all_given and not self._again:
            return  # it had nothing to do
        if worker.unit is not None:
            self._take_back(worker, worker.unit, code)
        elif code is not None and worker.pid is None:
            self._servers.count_failed_start(f"A worker {cause_of(code)}")
        self._start_worker(worker.number)

    def _take_back(self, worker: _Worker, unit: int, code: int | None) -> None:
        cause = cause_of(code) if code is not None else "was ended with the process that started it"
        if code is not None:
            self._crashes[unit] = self._crashes.get(unit, 0) + 1
        if self._crashes.get(unit, 0) > RETRIES:
            raise WorkerError(
                f"Unit {unit} ended its worker process {self._crashes[unit]} times; the last one {cause}.\n", *ADVICE
            )
        assert worker.pid is not None
        self._on_event(Event(worker.number, worker.pid, unit, CRASH, cause))
        self._again.append(unit)
