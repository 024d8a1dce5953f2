"""The server that starts workers (run/server.py), as the process that runs the job sees it.

`Servers` gives a job its workers, whatever happens: a server that was killed is replaced by another one, and one that
may not fork by one that starts each worker as a program of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from milldam.errors import Setting, WorkerError
from milldam.memory import Inherited
from milldam.run.tasks import APART, CAN_FORK, END, ENDED, ERROR, FORK, IMPORT, LOADED, ONE_THREAD, TASK, Loading, Task

log = logging.getLogger(__name__)

RETRIES = 1
_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""
_FAREWELL_SECONDS = 10.0
_LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of Arrow's allocators the one that gives back what is no longer used: mimalloc keeps some 10 MB in every worker."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": ONE_THREAD} | _LEAN
"""Keeps numpy and pyarrow from starting threads when they are imported: where a thread runs, nothing is forked."""
ADVICE = (
    "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
    Setting("workers"),
    ".",
)


class ServerProcess:
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
        with _without_interrupts():
            self._process = subprocess.Popen(
                [*command, APART] if apart else command,
                pass_fds=[theirs.fileno()],
                env=(_LEAN if apart else _NO_THREADS) | os.environ | environment | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
            )
        theirs.close()
        self.control = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, modules: Sequence[str]) -> None:
        """Import what a task will need, before it comes."""
        self._is_loading = True
        with self._noticing_loss():
            self.control.send((IMPORT, list(modules)))

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
            self.control.send((END, numbers))
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
        return cause_of(self._process.wait())

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.is_lost = True


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Have a process that is started now not hear Ctrl-C, which reaches the whole group, until it ignores it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Servers:
    """Those of one job: one that starts workers, and perhaps some whose workers are still there."""

    def __init__(self, task: Task, threads: int, workers: int, kept: ServerProcess | None) -> None:
        """`workers`: how many share what is loaded."""
        self._environment = _environment(threads)
        self._loading = Loading(task, self._environment, workers, threads)
        self._all = [] if kept is None else [kept]
        self._current: ServerProcess | None = None
        self._failed_starts = 0
        """One after the other, of workers or servers, without a finished unit between them."""

    def begin(self) -> None:
        """Have the task loaded."""
        self._use(self._all[0] if self._all else self._new(apart=not CAN_FORK))

    @property
    def current(self) -> ServerProcess:
        assert self._current is not None
        return self._current

    def fork(self, number: int) -> tuple[ServerProcess, Connection]:
        """A worker, by the current server or, where that is lost, by another one."""
        if self.current.is_lost:
            self.count_failed_start(f"The process that starts the workers {self.current.cause()}")
            self._use(self._new(apart=self.current.apart))
        return self.current, self.current.fork(number)

    def go_apart(self, *, still_needed: bool) -> None:
        """Start workers as programs of their own from now on. `still_needed`: some that were forked are at work."""
        before = self.current
        if not still_needed:
            self._all.remove(before)
            before.close()  # what it loaded is of no use
        self._use(self._new(apart=True))

    def inherited(self, server: ServerProcess) -> Inherited:
        return Inherited(server.loaded_bytes, self._loading.workers)

    @property
    def controls(self) -> list[Connection]:
        """Where something may be heard from."""
        return [server.control for server in self._all if not server.is_lost]

    def hear(self, control: Any) -> None:
        for server in self._all:
            # What was there may have been heard meanwhile.
            if server.control is control and control.poll():
                server.hear()

    def release(self) -> ServerProcess | None:
        """One for another job, if there is one that can take it; it has no workers."""
        server = self._current or next(iter(self._all), None)
        if server is None or server.apart or server.is_lost:
            return None
        self._all.remove(server)
        return server

    def close(self) -> None:
        for server in self._all:
            server.close()

    def note_progress(self) -> None:
        self._failed_starts = 0

    def count_failed_start(self, told: str) -> None:
        """Raise WorkerError when it is not the first."""
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(f"{told}; so did the one before it, and no unit was finished between them.\n", *ADVICE)
        log.warning("%s; another one takes its place.", told)

    def _new(self, *, apart: bool) -> ServerProcess:
        server = ServerProcess(self._environment, apart=apart)
        self._all.append(server)
        return server

    def _use(self, server: ServerProcess) -> None:
        self._current = server
        if not server.apart:
            server.load(self._loading)


def _environment(threads: int) -> dict[str, str]:
    """Keeps the encoders' thread pools to the threads of a worker."""
    names = {"RAYON_NUM_THREADS": str(threads)}
    parallel = os.environ.get("TOKENIZERS_PARALLELISM")
    return names if parallel is None else names | {"TOKENIZERS_PARALLELISM": parallel}


def cause_of(code: int) -> str:
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
