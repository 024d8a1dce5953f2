"""Units in several processes of this machine, one at a time each.

    this process    hands out units, journals records: `_Stage.run`, one loop
    server          imports and loads once what every worker needs, forks the workers, reports how one ended: `serve`
    workers         make units: `work`

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which another one
tries once more. Nothing is forked from the process of the caller, who may have threads: the server is started as
`python -m milldam.run.fork`, so a script that calls milldam needs no `if __name__ == "__main__"`. The server is the
workers' parent, and none outlives it.

Where loading has left a thread running (a lock that it holds would stay locked for ever in the copy) or a file open
(the copies would share its position), nothing is forked: each worker is a program of its own ("apart"), which loads for
itself. So it is where forking is not safe at all.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from milldam import memory
from milldam.errors import MilldamError, Setting, WorkerError
from milldam.memory import held_bytes, keep_arrow_lean, release
from milldam.run.tasks import (
    CAN_FORK,
    CRASH,
    DONE,
    ERROR,
    PAUSE_SECONDS,
    PROGRESS,
    Event,
    Load,
    Todo,
    Work,
    Workers,
    begin,
)

log = logging.getLogger(__name__)

RETRIES = 1
ADVICE = (
    "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
    Setting("workers"),
    ".",
)
STARTED = "started"
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""Raised where the process at the other end is no more."""
_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""
_FAREWELL_SECONDS, _LAST_THREADS_SECONDS = 1.0, 0.2
"""For the server to end its workers; for a thread that was waited for, and may still be ending."""
_LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of Arrow's allocators the one that gives back what is no longer used: mimalloc keeps some 10 MB in every worker."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps numpy from starting threads when it is imported: where a thread runs, nothing is forked."""


# ---- this process ----


def _program(role: str, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start this module as a program in a role, and connect to it."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(filter(None, sys.path))
    # Ctrl-C reaches the whole group: it is blocked until the process ignores it itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            # -P: what lies in the current folder must not stand in for an installed package.
            [sys.executable, "-P", "-m", "milldam.run.fork", role, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=_LEAN | environment | os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, Connection(ours.detach())


class ForkServer:
    """The process that forks workers; it runs stage after stage until `close`, as starting it takes half a second."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._loaded: Load | None = None

    def expect(self, modules: Sequence[str]) -> None:
        """Have what a stage will need imported in the background."""
        if self.process is None and CAN_FORK:
            self._send("import", list(modules))

    def run(self, workers: Workers, todo: Todo) -> None:
        """Make every unit of a stage."""
        stage = _Stage(self, workers, todo)
        try:
            stage.run()
        except BaseException:
            self.close()  # at once: what is not recorded is not kept, so nothing needs to be wound up
            for worker in stage.workers.values():
                if worker.process is not None:
                    worker.process.kill()
            raise
        finally:
            for connection in stage.workers:
                connection.close()

    def can_fork(self, load: Load, workers: Workers) -> bool:
        """Load a stage, unless that is done. False: something forbids forking, and the server has ended."""
        if not CAN_FORK:
            return False
        if self.process is not None and self.process.poll() is not None:
            self.close()  # it died between two stages
        if self._loaded is not load:
            environment = {"RAYON_NUM_THREADS": str(workers.threads)}  # for the encoders' thread pools
            environment |= {name: os.environ[name] for name in ("TOKENIZERS_PARALLELISM",) if name in os.environ}
            self._send("load", (load, environment))
            self._loaded = load
            if reason := self._answer():
                log.info("Workers are not forked, each loads for itself: the process that loaded for all %s.", reason)
                self.close()
        return self.process is not None

    def _send(self, kind: str, value: Any) -> None:
        if self.process is None:
            self.process, self._control = _program("server", _NO_THREADS)
        with contextlib.suppress(OSError):  # it has died, which whoever waits for an answer is told
            self._control.send((kind, value))

    def _answer(self) -> Any:
        """Raises the error that loading ended with; WorkerError when the server has died."""
        try:
            kind, value = self._control.recv()
        except (EOFError, OSError):
            assert self.process is not None
            cause = f"The process that starts the workers {cause_of(self.process.wait())}.\n"
            raise WorkerError(cause, *ADVICE) from None
        if kind == ERROR:
            raise value
        return value

    def fork(self, number: int) -> _Worker:
        """Start a worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send("fork", number)
            assert self.process is not None
            with contextlib.suppress(OSError):
                send_handle(self._control, theirs.fileno(), self.process.pid)
        return _Worker(number, Connection(ours.detach()))

    def exit_code(self, worker: _Worker) -> int:
        """How a worker ended that has ended, or ends now."""
        if worker.process is not None:
            return worker.process.wait()
        self._send("code", worker.number)
        return int(self._answer())

    def close(self) -> None:
        """End the server, with every worker."""
        if self.process is None:
            return
        self._control.close()
        if self._loaded is None:  # it has no workers, and may still import what is expected
            self.process.kill()
        try:
            self.process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:  # it is loading
            self.process.kill()
            self.process.wait()
        self.process = self._loaded = None


@dataclass(slots=True)
class _Worker:
    """At work on a unit, idle (no unit), or about to end by itself (outgrown)."""

    number: int
    connection: Connection
    process: subprocess.Popen[bytes] | None = None
    """None: it was forked by the server."""
    pid: int = 0
    unit: int | None = None
    outgrown: bool = False


class _Stage:
    """Gives every unit of a stage to a worker: one when it starts, and one when it has done the one before.

    A worker that dies is replaced, and its unit tried once more. One that holds more than `workers.worker_bytes` after
    a unit is replaced, too: what a user's function keeps must not add up.
    """

    def __init__(self, server: ForkServer, wanted: Workers, todo: Todo) -> None:
        self._server, self._wanted, self._todo = server, wanted, todo
        self._crashes = Counter[int]()
        self.workers: dict[Connection, _Worker] = {}

    def run(self) -> None:
        todo = self._todo
        first = todo.next_unit()
        if first is None and todo.is_over:
            return
        todo.again += [] if first is None else [first]
        self._forks = self._server.can_fork(todo.load, self._wanted)
        # The first worker measures how many there may be, if `fit` decides; where they share nothing, it is half.
        count = 1 if self._wanted.fit is not None else self._wanted.count
        for number in range(count if self._forks or not CAN_FORK else max(1, count // 2)):
            self._start(number)
        while todo.is_unit_left or any(worker.unit is not None for worker in self.workers.values()):
            idle = [worker for worker in self.workers.values() if worker.unit is None and not worker.outgrown]
            for ready in wait(list(self.workers), PAUSE_SECONDS if idle and todo.is_unit_left else None):
                assert isinstance(ready, Connection)
                self._receive(self.workers[ready])
            for worker in idle:
                if worker.unit is None and worker.connection in self.workers and todo.is_unit_left:
                    self._hand_out(worker)
        for worker in self.workers.values():
            worker.connection.close()
        for worker in self.workers.values():
            self._server.exit_code(worker)  # once it is known, the worker's memory is free

    def _start(self, number: int) -> None:
        if self._forks:
            worker = self._server.fork(number)
        else:
            environment = {"RAYON_NUM_THREADS": str(self._wanted.threads)}
            process, connection = _program("worker", environment)
            worker = _Worker(number, connection, process)
            connection.send(self._todo.load)
        self.workers[worker.connection] = worker
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._todo.next_unit()
        if worker.unit is not None:
            assignment = self._todo.assign(worker.unit)
            try:
                worker.connection.send((assignment, self._wanted.worker_bytes))
            except OSError:  # it died while it was idle, which `recv` will show: not of this unit
                self._todo.again.append(worker.unit)
                worker.unit = None

    def _receive(self, worker: _Worker) -> None:
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
        self._todo.on_event(Event(worker.number, worker.pid, worker.unit, kind, value))
        if kind == DONE:
            worker.outgrown, worker.unit = value, None
            if not worker.outgrown:
                self._hand_out(worker)
        elif kind == PROGRESS and self._wanted.fit is not None and "peak_bytes" in value:
            count, most = self._wanted.fit(value)
            self._wanted = replace(self._wanted, count=count, worker_bytes=most, fit=None)
            for number in range(1, count):
                self._start(number)

    def _replace(self, worker: _Worker) -> None:
        """A worker has ended: its unit is tried once more, unless it has ended two."""
        del self.workers[worker.connection]
        worker.connection.close()
        cause, unit = cause_of(self._server.exit_code(worker)), worker.unit
        if unit is not None:
            self._crashes[unit] += 1
            if self._crashes[unit] > RETRIES:
                times = f"{self._crashes[unit]} times; the last one {cause}"
                raise WorkerError(f"Unit {unit} ended its worker process {times}.\n", *ADVICE)
            self._todo.on_event(Event(worker.number, worker.pid, unit, CRASH, cause))
            self._todo.again.append(unit)
        if self._todo.is_unit_left:
            self._start(worker.number)


def cause_of(code: int) -> str:
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed (signal 9), perhaps by the system for want of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


# ---- the server ----


def serve(control: Connection) -> None:
    """Do what is requested, one after the other, until the other end is closed."""
    loaded: Work | None = None
    pids: dict[int, int] = {}  # number of a worker -> its process
    try:
        while True:
            kind, value = control.recv()
            if kind == "import":
                for name in value:
                    with contextlib.suppress(Exception):  # missed, if it is needed, when the stage is loaded
                        importlib.import_module(name)
            elif kind == "code":
                _, status = os.waitpid(pids.pop(value), 0)
                control.send((DONE, os.waitstatus_to_exitcode(status)))
            elif kind == "fork":
                assert loaded is not None
                pids[value] = _fork_worker(control, loaded)
            else:
                load, environment = value
                os.environ |= environment
                loaded = None  # it must be gone before the next one takes its place
                loaded, reason = _load_for_forks(load)
                control.send((DONE, reason))
    except _GONE:
        return
    except Exception as error:
        control.send((ERROR, as_sent(error)))
    finally:
        with contextlib.suppress(OSError):
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            for pid in pids.values():
                os.waitpid(pid, 0)


def _load_for_forks(load: Load) -> tuple[Work, str]:
    """Load a stage; why the result must not be copied, where that is so."""
    gc.unfreeze()
    gc.collect()  # of the stage before
    release()
    before = _open_files()
    loaded, reason = begin(load), ""
    until = time.monotonic() + _LAST_THREADS_SECONDS
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    if threads > 1:
        reason = f"runs {threads} threads"
    elif opened := sorted(_open_files() - before):
        reason = f"has left {opened[0]} open"
    gc.collect()
    release()
    # The collector would write to every object there is, and so give each worker a copy of its own.
    gc.freeze()
    return loaded, reason


def _open_files() -> set[str]:
    """Whatever is open: files by their paths, others by their kind and number."""
    paths = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.add(str(link.readlink()))
    harmless = {"/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"}
    return {path for path in paths - harmless if not path.startswith("/proc/")}


def _fork_worker(control: Connection, loaded: Work) -> int:
    handle = recv_handle(control)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each copy would write it
    server, pid = os.getpid(), os.fork()
    if pid:
        os.close(handle)
        return pid
    code = 1
    try:
        control.close()
        die_with(server)
        memory.forked = True
        work(Connection(handle), loaded)
        code = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ---- a worker ----


def work(connection: Connection, make: Work | None = None) -> None:
    """Make what is assigned, until the other end is closed or this process has outgrown its share of memory. Without
    `make`, what to load comes first."""
    with contextlib.suppress(*_GONE):
        try:
            connection.send((STARTED, os.getpid()))
            make = make or begin(connection.recv())
            outgrown = False
            while not outgrown:
                assignment, most_bytes = connection.recv()
                make(assignment, lambda kind, value: connection.send((kind, value)))
                outgrown = most_bytes is not None and held_bytes() > most_bytes
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
    keep_arrow_lean()  # before a stage brings imports along
    if role == "worker":
        work(Connection(handle))
        sys.stdout.flush()
        os._exit(0)  # whatever threads a function has left
    serve(Connection(handle))


if __name__ == "__main__":
    main()
