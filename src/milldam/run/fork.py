"""Units in several processes of this machine, one at a time each.

    this process    hands out units, journals records: `_Stage.run`, one loop
    server          imports and loads once what every worker needs, forks the workers, tells how one ended: `_Forker`
    workers         make units: `_work`

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which another one
tries once more. Nothing is forked from the process of the caller, who may have threads: the server is started as
`python -m milldam.run.fork`, so a script that calls milldam needs no `if __name__ == "__main__"`. The server is the
workers' parent, and none outlives it. When it is killed, another one is started.

Where loading has left a thread running (a lock that it holds would stay locked for ever in the copy) or a file open
(the copies would share its position), nothing is forked: the server begins anew without what it had loaded ("apart"),
and starts each worker as a program of its own, which loads for itself. So it is where forking is not safe at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from milldam.errors import MilldamError, Setting, WorkerError
from milldam.memory import allowance, inherit, keep_arrow_lean, release, usage
from milldam.run.pools import Workers
from milldam.run.tasks import (
    CAN_FORK,
    CRASH,
    DONE,
    PAUSE_SECONDS,
    PROGRESS,
    Assigned,
    Event,
    Load,
    NothingYetError,
    Work,
    begin,
)

log = logging.getLogger(__name__)

RETRIES = 1
ADVICE = (
    "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
    Setting("workers"),
    ".",
)
ERROR, STARTED = "error", "started"
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""Raised where the process at the other end is no more."""


# ---- this process ----


class ForkedWorkers:
    """Runs stage after stage; the server stays for the next one, until `close`: starting it takes half a second.

    A worker that holds more than `wanted.worker_bytes` after a unit is replaced: what a user's function keeps must not
    add up.
    """

    def __init__(self, wanted: Workers | None = None) -> None:
        self.wanted = wanted or Workers(1, 1)
        self._server: _Server | None = None

    def expect(self, modules: Sequence[str]) -> None:
        """Have what a stage will need imported in the background."""
        if self._server is None and CAN_FORK:
            self._server = _Server()
            self._server.send("import", list(modules))

    def run(
        self, load: Load, units: Iterable[int], assign: Callable[[int], Assigned], on_event: Callable[[Event], None]
    ) -> None:
        running = _Stage(self, load, iter(units), assign, on_event)
        try:
            running.run()
        except BaseException:
            # At once: what is not recorded is not kept, so nothing needs to be wound up.
            self.close()
            raise
        finally:
            for connection in running.workers:
                connection.close()

    def server_for(self, load: Load) -> _Server:
        """The server with a stage loaded: one that is of no use for it is replaced. It may be lost at any time."""
        if (
            self._server is not None
            and (self._server.is_lost or self._server.apart)
            and self._server.loaded is not load
        ):
            self.close()
        self._server = self._server or _Server()
        if self._server.loaded is not load:
            self._server.load(load, self.wanted)
        return self._server

    @property
    def pids(self) -> list[int]:
        """The server's, if there is one."""
        return [] if self._server is None else [self._server.pid]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass(slots=True)
class _Worker:
    """At work on a unit, idle (no unit), or about to end by itself (outgrown)."""

    number: int
    server: _Server
    connection: Connection
    pid: int = 0
    """0: it has not told yet."""
    unit: int | None = None
    outgrown: bool = False

    @property
    def is_idle(self) -> bool:
        return self.unit is None and not self.outgrown


class _Stage:
    """Every unit of a stage through a worker: each gets one when it starts, and when it has done the one before."""

    def __init__(
        self,
        pool: ForkedWorkers,
        load: Load,
        units: Iterator[int],
        assign: Callable[[int], Assigned],
        on_event: Callable[[Event], None],
    ) -> None:
        self._pool, self._load, self._units, self._assign, self._on_event = pool, load, units, assign, on_event
        self._is_over = False
        """No more units come."""
        self._again: list[int] = []
        """Units whose worker was killed."""
        self._crashes = Counter[int]()
        self._lost_servers = 0
        """One after the other, without a finished unit between them."""
        self.workers: dict[Connection, _Worker] = {}

    def run(self) -> None:
        first = self._next_unit()
        if first is None and self._is_over:
            return
        self._again += [] if first is None else [first]
        # How many may work side by side is measured by the first one, or planned; where they share nothing, it is less.
        count = 1 if self._pool.wanted.fit is not None else self._pool.wanted.count
        if CAN_FORK and self._pool.server_for(self._load).apart:
            count = max(1, count // 2)
        for number in range(count):
            self._start(number)
        while self._is_unit_left() or any(worker.unit is not None for worker in self.workers.values()):
            idle = [worker for worker in self.workers.values() if worker.is_idle] if self._is_unit_left() else []
            for ready in wait(list(self.workers), PAUSE_SECONDS if idle else None):
                assert isinstance(ready, Connection)
                self._hear(self.workers[ready])
            for worker in idle:
                if worker.is_idle and worker.connection in self.workers:
                    self._hand_out(worker)
        for worker in self.workers.values():
            worker.connection.close()
        for worker in self.workers.values():
            worker.server.code(worker.number)  # when it is told, its memory is free

    def _is_unit_left(self) -> bool:
        return bool(self._again) or not self._is_over

    def _next_unit(self) -> int | None:
        """None: there is none just now, or no more come."""
        if self._again:
            return self._again.pop()
        try:
            return next(self._units)
        except NothingYetError:
            return None
        except StopIteration:
            self._is_over = True
            return None

    def _start(self, number: int) -> None:
        while (server := self._pool.server_for(self._load)).is_lost:
            self._lost_servers += 1
            if self._lost_servers > RETRIES:
                cause = f"The process that starts the workers {server.cause()}; so did the one before it"
                raise WorkerError(f"{cause}, and no unit was finished between them.\n", *ADVICE)
            self._pool.close()
        connection = server.fork(number)
        self.workers[connection] = worker = _Worker(number, server, connection)
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._next_unit()
        if worker.unit is not None:
            assignment = self._assign(worker.unit)
            try:
                worker.connection.send((assignment, self._pool.wanted.worker_bytes))
            except OSError:  # it died while it was idle, which will be heard: not by this unit
                self._again.append(worker.unit)
                worker.unit = None

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if kind == ERROR:
            raise value
        if kind == STARTED:
            worker.pid = value
            return
        assert worker.unit is not None
        self._on_event(Event(worker.number, worker.pid, worker.unit, kind, value))
        if kind == DONE:
            self._lost_servers, worker.outgrown, worker.unit = 0, value, None
            if not worker.outgrown:
                self._hand_out(worker)
        elif kind == PROGRESS and (fit := self._pool.wanted.fit) is not None and "peak_bytes" in value:
            count, most = fit(value)
            self._pool.wanted = replace(self._pool.wanted, count=count, worker_bytes=most, fit=None)
            for number in range(1, count):
                self._start(number)

    def _replace(self, worker: _Worker) -> None:
        """A worker has ended: its unit, unless it has killed one before, goes to another one in its place."""
        code = worker.server.code(worker.number)
        del self.workers[worker.connection]
        worker.connection.close()
        if worker.unit is not None:
            cause = "was ended with the process that started it" if code is None else cause_of(code)
            self._crashes[worker.unit] += code is not None
            times = self._crashes[worker.unit]
            if times > RETRIES:
                said = f"Unit {worker.unit} ended its worker process {times} times; the last one {cause}.\n"
                raise WorkerError(said, *ADVICE)
            self._on_event(Event(worker.number, worker.pid, worker.unit, CRASH, cause))
            self._again.append(worker.unit)
        if self._is_unit_left():
            self._start(worker.number)


def cause_of(code: int) -> str:
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


# ---- the server, as this process sees it ----

_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""
_FAREWELL_SECONDS = 10.0
_LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of Arrow's allocators the one that gives back what is no longer used: mimalloc keeps some 10 MB in every worker."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps numpy from starting threads when it is imported: where a thread runs, nothing is forked."""


class _Server:
    """The process that starts workers. It does what it is sent, one after the other, and answers `load` and `code`."""

    def __init__(self) -> None:
        self.loaded: Load | None = None
        self.apart = self.is_lost = self._is_busy = False
        ours, theirs = socket.socketpair()
        role = "server" if CAN_FORK else "apart"
        path = os.pathsep.join(filter(None, sys.path))
        # Ctrl-C reaches the whole group: it is not heard until the process ignores it itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                _command(role, theirs.fileno(), os.getpid()),
                pass_fds=[theirs.fileno()],
                env=(_LEAN | _NO_THREADS if CAN_FORK else _LEAN) | os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._control = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, kind: str, value: Any) -> None:
        self._is_busy = kind in ("import", "load")
        try:
            self._control.send((kind, value))
        except OSError:
            self.is_lost = True

    def _answer(self) -> tuple[str, Any]:
        """Raises the error that loading ended with."""
        try:
            kind, value = self._control.recv()
        except (EOFError, OSError):
            self.is_lost = True
            return "lost", None
        self._is_busy = False
        if kind == ERROR:
            raise value
        return kind, value

    def load(self, load: Load, workers: Workers) -> None:
        """Returns when it is done, or the process is lost. Raises what loading raises."""
        # Keeps the encoders' thread pools to the threads of a worker.
        environment = {"RAYON_NUM_THREADS": str(workers.threads)}
        environment |= {name: os.environ[name] for name in ("TOKENIZERS_PARALLELISM",) if name in os.environ}
        self.send("load", (load, environment, workers.count))
        kind, reason = self._answer()
        self.loaded, self.apart = load, kind == "apart"
        if reason:
            log.info("Workers are not forked, each loads for itself: the process that loaded for all %s.", reason)

    def fork(self, number: int) -> Connection:
        """A worker; its connection ends at once where the server is lost."""
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        with theirs:
            self.send("fork", number)
            with contextlib.suppress(OSError):
                send_handle(self._control, theirs.fileno(), self.pid)
        if self.apart:
            with contextlib.suppress(OSError):
                connection.send(self.loaded)
        return connection

    def code(self, number: int) -> int | None:
        """How a worker ended that has ended, or ends now; None: the server is lost, and the worker with it."""
        if not self.is_lost:
            self.send("code", number)
        return None if self.is_lost else self._answer()[1]

    def cause(self) -> str:
        """How it ended, once it is lost."""
        return cause_of(self._process.wait())

    def close(self) -> None:
        """End it, with every worker."""
        self._control.close()
        try:
            if self._is_busy:  # it has no workers, and hears nothing until it has loaded
                self._process.kill()
            self._process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _command(role: str, handle: int, parent: int) -> list[str]:
    # -P: what lies in the current folder must not stand in for an installed package.
    return [sys.executable, "-P", "-m", "milldam.run.fork", role, str(handle), str(parent)]


# ---- the server itself ----

_LAST_THREADS_SECONDS = 0.2
"""A thread that was waited for may still be ending."""
_LEFT_BYTES = 4 << 20
"""So little may stay of tasks in cycles of objects: to look for them among all that is imported takes 20 ms."""


class _Forker:
    """What the server is: it does what comes, one after the other, until the other end is closed."""

    def __init__(self, control: Connection, *, apart: bool) -> None:
        self._control, self._apart = control, apart
        self._work: Work | None = None
        self._workers: dict[int, int] = {}
        """Number of a worker -> its process."""
        self._inherited = 0, 1
        """Bytes that every worker gets, and how many workers."""
        self._bare_bytes = 0
        """Held with nothing loaded, when that was last looked for."""

    def serve(self) -> None:
        try:
            while True:
                kind, value = self._control.recv()
                getattr(self, f"_{kind}")(value)
        except _GONE:
            return
        except Exception as error:
            self._control.send((ERROR, as_sent(error)))
        finally:
            with contextlib.suppress(OSError):
                for pid in self._workers.values():
                    os.kill(pid, signal.SIGKILL)
                for pid in self._workers.values():
                    os.waitpid(pid, 0)

    def _import(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):  # missed, if it is needed, when the stage is loaded
                importlib.import_module(name)

    def _load(self, loading: tuple[Load, dict[str, str], int]) -> None:
        load, environment, workers = loading
        os.environ |= environment
        if self._apart:
            self._control.send(("apart", ""))
            return
        # The stage before must be gone before this one takes its place.
        self._work = None
        release()
        if usage().anonymous > self._bare_bytes + _LEFT_BYTES:
            gc.unfreeze()
            gc.collect()
            release()
            self._bare_bytes = usage().anonymous
        before = _open_files()
        self._work = begin(load)
        if reason := _why_not_fork(before):
            self._control.send(("apart", reason))
            os.set_inheritable(self._control.fileno(), True)
            os.execv(sys.executable, _command("apart", self._control.fileno(), os.getppid()))
        gc.collect()
        release()
        # The collector would write to every object there is, and so give each worker a copy of its own.
        gc.freeze()
        self._inherited = usage().anonymous, workers
        self._control.send(("loaded", ""))

    def _fork(self, number: int) -> None:
        handle = recv_handle(self._control)
        if self._apart:
            command = _command("worker", handle, os.getpid())
            self._workers[number] = subprocess.Popen(command, pass_fds=[handle]).pid
            os.close(handle)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or each copy would write it
        server, pid = os.getpid(), os.fork()
        if pid:
            self._workers[number] = pid
            os.close(handle)
            return
        code = 1
        try:
            self._control.close()
            die_with(server)
            inherit(*self._inherited)
            _work(Connection(handle), self._work)
            code = 0
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _code(self, number: int) -> None:
        _, status = os.waitpid(self._workers.pop(number), 0)
        self._control.send(("ended", os.waitstatus_to_exitcode(status)))


def _why_not_fork(open_before: set[str]) -> str:
    """What loading has left that must not be copied; empty: nothing."""
    until = time.monotonic() + _LAST_THREADS_SECONDS
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > until:
            return f"runs {count} threads"
        time.sleep(0.001)
    return next((f"has left {path} open" for path in sorted(_open_files() - open_before)), "")


def _open_files() -> set[str]:
    """Whatever is open: files by their paths, others by their kind and number."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    harmless = {"/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"}
    return {path for path in found - harmless if not path.startswith("/proc/")}


# ---- a worker ----


def _work(connection: Connection, work: Work | None = None) -> None:
    """Make what is assigned, until the other end is closed or this process has outgrown its share of memory. Without
    `work`, what to load comes first."""
    with contextlib.suppress(*_GONE):
        try:
            connection.send((STARTED, os.getpid()))
            work = work or begin(connection.recv())
            outgrown = False
            while not outgrown:
                assignment, most_bytes = connection.recv()
                work(assignment, lambda kind, value: connection.send((kind, value)))
                outgrown = most_bytes is not None and usage().anonymous > allowance(most_bytes)
                connection.send((DONE, outgrown))
        except _GONE:
            raise
        except Exception as error:
            connection.send((ERROR, as_sent(error)))


def as_sent(error: BaseException) -> Any:
    """An error of ours or of the system, or a bug in a worker with its traceback, which does not pickle by itself."""
    if isinstance(error, MilldamError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
        return error
    return RuntimeError(f"{error!r} in a worker\n{traceback.format_exc()}")


def die_with(parent: int) -> None:
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(pr_set_pdeathsig, signal.SIGKILL)
    # It may be gone already. Whether the parent is process 1 says nothing: in a container it is.
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    role, handle, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Ctrl-C reaches the whole group: only the process that runs the job decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(parent)
    if role != "apart":
        keep_arrow_lean()  # before a stage brings imports along
    if role == "worker":
        _work(Connection(handle))
        sys.stdout.flush()
        os._exit(0)  # whatever threads a function has left
    else:
        _Forker(Connection(handle), apart=role == "apart").serve()


if __name__ == "__main__":
    main()
