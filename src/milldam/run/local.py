"""Several worker processes on this machine, one unit at a time each.

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which is given
to a fresh one, once. A server process loads the task once and forks the workers (run/server.py); it is started as
`python -m milldam.run.server`, so a script that calls milldam needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

from milldam.errors import Setting, WorkerError
from milldam.memory import Inherited, shared_bytes, usage
from milldam.run.server import CAN_FORK
from milldam.run.tasks import (
    APART,
    CRASH,
    DONE,
    END,
    ENDED,
    ERROR,
    FORK,
    LOADED,
    READY,
    TASK,
    WORK,
    Event,
    Loading,
    Task,
)

log = logging.getLogger(__name__)

RETRIES = 1
_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""
_FAREWELL_SECONDS = 10.0
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps numpy and pyarrow from starting threads when they are imported: where a thread runs, nothing is forked."""


class _Server:
    """The process that forks workers, as it is seen from here."""

    def __init__(self, environment: dict[str, str], *, apart: bool) -> None:
        self.apart = apart
        """Its workers are programs of their own, each of which is sent the task."""
        self.cannot_fork = False
        """It has said so: it takes no more work."""
        self.is_lost = False
        self.loaded_bytes = 0
        self._is_loading = False
        self._codes: dict[int, int] = {}
        """Worker -> how it ended, unless that is known here."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        # -P: what lies in the current folder must not stand in for an installed package.
        command = [sys.executable, "-P", "-m", "milldam.run.server", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*command, APART] if apart else command,
            pass_fds=[theirs.fileno()],
            env=({} if apart else _NO_THREADS) | os.environ | environment | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
        )
        theirs.close()
        self.control = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, loading: Loading) -> None:
        self._is_loading = True
        with self._noticing_loss():
            self.control.send((TASK, loading))

    def fork(self, number: int) -> Connection:
        """A worker that will say when it is ready; its connection ends at once where the server is lost."""
        ours, theirs = socket.socketpair()
        with self._noticing_loss(), theirs:
            self.control.send((FORK, number))
            send_handle(self.control, theirs.fileno(), self.pid)
        return Connection(ours.detach())

    def hear(self) -> None:
        """Take the next message. Raises the error that loading ended with."""
        kind, value = "", None
        with self._noticing_loss():
            kind, value = self.control.recv()
        if kind == ERROR:
            raise value
        if kind == ENDED:
            self._codes[value[0]] = value[1]
        elif kind == LOADED:
            self.loaded_bytes, self._is_loading = value, False
        elif kind == APART:
            log.info("Workers are not forked, each loads for itself: the process that loaded for all %s.", value)
            self.cannot_fork = True

    def await_loaded(self) -> None:
        while self._is_loading and not self.is_lost:
            self.hear()

    def code(self, number: int) -> int | None:
        """How a worker ended that has ended; None: the server is lost, and the worker with it."""
        while number not in self._codes and not self.is_lost:
            self.hear()
        return self._codes.pop(number, None)

    def end(self, numbers: Iterable[int]) -> None:
        """End some workers; when this returns, their memory is free."""
        numbers = list(numbers)
        with self._noticing_loss():
            for number in numbers:
                self.control.send((END, number))
        for number in numbers:
            self.code(number)

    def close(self) -> None:
        """End it, with every worker."""
        self.control.close()
        try:
            if self._is_loading:  # it has no workers, and hears nothing until it has loaded
                self._process.kill()
            self._process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cause(self) -> str:
        """How it ended, once it is lost."""
        return _cause(self._process.wait())

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.is_lost = True


@dataclass(slots=True)
class _Worker:
    number: int
    server: _Server
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
    ) -> None:
        self.workers, self.threads, self.worker_bytes = workers, threads, worker_bytes
        self.alone = workers if alone is None else min(alone, workers)
        self._keep = keep
        self._kept: _Server | None = None

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        job = _Job(self, task, iter(units), assign, on_event)
        kept, self._kept = self._kept, None
        try:
            job.run(kept)
            if self._keep:
                self._kept = job.release()
        finally:
            job.stop()

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
        task: Task,
        units: Iterator[int],
        assign: Callable[[int], Any],
        on_event: Callable[[Event], None],
    ) -> None:
        self._executor, self._task, self._units = executor, task, units
        self._assign, self._on_event = assign, on_event
        self._environment = _environment(executor.threads)
        self._crashes: dict[int, int] = {}
        self._failed_starts = 0
        """One after the other, of workers or servers, without a finished unit between them."""
        self._again: list[int] = []
        self._workers: dict[Connection, _Worker] = {}
        self._server: _Server | None = None
        self._servers: list[_Server] = []

    def run(self, kept: _Server | None) -> None:
        if kept is not None:
            self._servers.append(kept)
        first = self._next_unit()
        if first is None:
            self._server = kept
            return
        self._again.append(first)
        self._begin_with(kept if kept is not None else self._new_server(apart=not CAN_FORK))
        for number in range(self._count):
            self._start_worker(number)
        while any(worker.pid is None or worker.unit is not None for worker in self._workers.values()):
            for ready in wait([*self._workers, *(one.control for one in self._servers if not one.is_lost)]):
                self._attend(ready)

    @property
    def _count(self) -> int:
        return self._executor.alone if self._current.apart else self._executor.workers

    @property
    def _current(self) -> _Server:
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        """End every process at once: what is not committed is not kept, so nothing needs to be wound up."""
        for connection in self._workers:
            connection.close()
        for server in self._servers:
            server.close()

    def release(self) -> _Server | None:
        """The server for another task, if it can take one; its workers end."""
        self._dismiss(list(self._workers.values()))
        server = self._server
        if server is None or server.apart or server.is_lost:
            return None
        self._servers.remove(server)
        return server

    def _new_server(self, *, apart: bool) -> _Server:
        return _Server(self._environment, apart=apart)

    def _begin_with(self, server: _Server) -> None:
        """Have workers started by this server from now on."""
        self._server = server
        if server not in self._servers:
            self._servers.append(server)
        if not server.apart:
            server.load(Loading(self._task, self._environment, self._executor.workers))

    def _start_worker(self, number: int) -> None:
        if self._current.is_lost:
            self._count_failed_start(f"The process that starts the workers {self._current.cause()}")
            self._begin_with(self._new_server(apart=self._current.apart))
        worker = _Worker(number, self._current, self._current.fork(number))
        self._workers[worker.connection] = worker

    def _attend(self, ready: Any) -> None:
        worker = self._workers.get(ready)
        if worker is not None:
            self._hear(worker)
            return
        for server in self._servers:
            # What was there may have been heard meanwhile.
            if ready is server.control and server.control.poll():
                server.hear()
                if server is self._server and server.cannot_fork:
                    self._go_apart()

    def _go_apart(self) -> None:
        """Start the workers that could not be forked as programs of their own."""
        before, waiting = self._current, [worker for worker in self._workers.values() if worker.pid is None]
        for worker in waiting:
            del self._workers[worker.connection]
            worker.connection.close()
        if not self._workers:
            self._servers.remove(before)
            before.close()  # what it loaded is of no use
        self._begin_with(self._new_server(apart=True))
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
                self._failed_starts = 0
                self._go_on(worker)

    def _welcome(self, worker: _Worker) -> None:
        if worker.server.apart:
            try:
                worker.connection.send((TASK, self._task))
            except OSError:
                return  # it died: that will be heard
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._next_unit()
        if worker.unit is not None:
            assignment = self._assign(worker.unit)
            # Where it died meanwhile, that will be heard.
            with contextlib.suppress(OSError):
                worker.connection.send((WORK, assignment))

    def _go_on(self, worker: _Worker) -> None:
        """The next unit, for this worker or for a fresh one in its place."""
        if not self._is_too_large(worker):
            self._hand_out(worker)
            return
        worker.unit, unit = None, self._next_unit()
        if unit is not None:
            self._again.append(unit)
            self._dismiss([worker])
            self._start_worker(worker.number)

    def _is_too_large(self, worker: _Worker) -> bool:
        most = self._executor.worker_bytes
        if most is None or worker.pid is None:
            return False
        held, inherited = usage(worker.pid).anonymous, Inherited(worker.server.loaded_bytes, self._executor.workers)
        if held <= inherited.allowance(most, 0):
            return False
        return held > inherited.allowance(most, shared_bytes(worker.pid) if inherited.anonymous else 0)

    def _next_unit(self) -> int | None:
        return self._again.pop() if self._again else next(self._units, None)

    def _dismiss(self, workers: list[_Worker]) -> None:
        for worker in workers:
            del self._workers[worker.connection]
            worker.connection.close()
        for server in {id(worker.server): worker.server for worker in workers}.values():
            server.end(worker.number for worker in workers if worker.server is server)

    def _replace(self, worker: _Worker) -> None:
        """A worker died: say so, and give its unit to a new one, unless it has killed one before."""
        code = worker.server.code(worker.number)
        if worker.pid is None and worker.server.cannot_fork:
            self._go_apart()
            return
        del self._workers[worker.connection]
        worker.connection.close()
        if worker.pid is not None and worker.unit is None:
            return  # it had nothing to do
        if worker.unit is not None:
            self._take_back(worker, worker.unit, code)
        elif code is not None:
            self._count_failed_start(f"A worker {_cause(code)}")
        self._start_worker(worker.number)

    def _take_back(self, worker: _Worker, unit: int, code: int | None) -> None:
        cause = _cause(code) if code is not None else "was ended with the process that started it"
        if code is not None:
            self._crashes[unit] = self._crashes.get(unit, 0) + 1
        if self._crashes.get(unit, 0) > RETRIES:
            raise WorkerError(
                f"Unit {unit} ended its worker process {self._crashes[unit]} times; the last one {cause}.\n", *_ADVICE
            )
        assert worker.pid is not None
        self._on_event(Event(worker.number, worker.pid, unit, CRASH, cause))
        self._again.append(unit)

    def _count_failed_start(self, told: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(f"{told}; so did the one before it, and no unit was finished between them.\n", *_ADVICE)
        log.warning("%s; another one takes its place.", told)


_ADVICE = (
    "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
    Setting("workers"),
    ".",
)


def _environment(threads: int) -> dict[str, str]:
    """Keeps the encoders' thread pools to the threads of a worker."""
    names = {"RAYON_NUM_THREADS": str(threads)}
    parallel = os.environ.get("TOKENIZERS_PARALLELISM")
    return names if parallel is None else names | {"TOKENIZERS_PARALLELISM": parallel}


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
