"""Units in several processes of this machine, one at a time each.

    this process    hands out units, journals records: `ForkedWorkers.run`, one loop
    server          imports and loads once what every worker needs, and forks the workers: `_Server`
    workers         make units: `_work`

Processes, not threads (docs/decisions/0003): a worker that dies takes nothing with it but its unit, which another one
tries once more. Nothing is forked from the process of the caller, who may have threads: the server is started as
`python -m milldam.run.fork`, so a script that calls milldam needs no `if __name__ == "__main__"`. The server is the
workers' parent: it reports how each of them ended, and none outlives it. When it is killed, another one is started.

Where loading has left a thread running (a lock that it holds would stay locked for ever in the copy) or a file open
(the copies would share its position), nothing is forked: another server starts each worker as a program of its own,
which loads for itself. So it is where forking is not safe at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from milldam.errors import MilldamError, Setting, WorkerError
from milldam.memory import Inherited, inherit, keep_arrow_lean, release, shared_bytes, usage
from milldam.run.tasks import (
    CAN_FORK,
    CRASH,
    DONE,
    ONE_THREAD,
    PAUSE_SECONDS,
    PROGRESS,
    Event,
    NothingYetError,
    Task,
    Work,
)

log = logging.getLogger(__name__)

RETRIES = 1
ADVICE = (
    "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
    Setting("workers"),
    ".",
)
ERROR = "error"
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""Raised where the process at the other end is no more."""


# ---- this process: the loop ----


class ForkedWorkers:
    """Runs stage after stage; the server stays for the next one, until `close`: starting it takes half a second.

    `alone`: how many workers there may be where each must load for itself; as many as else, unless given.
    `worker_bytes`: a worker that holds more memory than this after a unit is replaced: what a user's function keeps
    must not add up.
    """

    def __init__(self, workers: int, threads: int = 1, **more: Any) -> None:
        self.set(workers, threads, **more)
        self.server: Server | None = None

    def set(
        self,
        workers: int,
        threads: int,
        *,
        worker_bytes: int | None = None,
        alone: int | None = None,
        fit: Callable[[dict[str, int]], tuple[int, int]] | None = None,
    ) -> None:
        """Have so many workers for the next stage."""
        self.workers, self.threads, self.worker_bytes, self.fit = workers, threads, worker_bytes, fit
        self.alone = workers if alone is None else min(alone, workers)

    def expect(self, modules: Sequence[str]) -> None:
        """Have what a task will need imported in the background."""
        if self.server is None and CAN_FORK:
            self.server = Server({}, apart=False)
            self.server.expect(modules)

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        running = _Running(self, task, iter(units), assign, on_event)
        try:
            running.run()
        except BaseException:
            # At once: what is not recorded is not kept, so nothing needs to be wound up.
            self.close()
            raise
        finally:
            for connection in running.workers:
                connection.close()

    def server_for(self, task: Task) -> Server:
        """The server with a task loaded: one that is of no use for it is replaced. It may be lost at any time."""
        server = self.server
        if server is not None and (server.is_lost or (server.apart and server.task is not task)):
            server.close()
            server = None
        environment = _environment(self.threads)
        server = self.server = server or Server(environment, apart=not CAN_FORK)
        if server.task is not task and not server.apart:
            server.load(task, environment, self.workers, self.threads)
            if server.cannot_fork:
                server.close()
                server = self.server = Server(environment, apart=True)
        server.task = task
        return server

    @property
    def pids(self) -> list[int]:
        """The server's, if there is one."""
        return [] if self.server is None else [self.server.pid]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


@dataclass(slots=True)
class _Worker:
    """Starting (no pid), idle (no unit), at work, or gone."""

    number: int
    server: Server
    connection: Connection
    pid: int | None = None
    unit: int | None = None


class _Running:
    """One stage: every unit through a worker."""

    def __init__(
        self,
        executor: ForkedWorkers,
        task: Task,
        units: Iterator[int],
        assign: Callable[[int], Any],
        on_event: Callable[[Event], None],
    ) -> None:
        self._executor, self._task, self._units = executor, task, units
        self._assign, self._on_event = assign, on_event
        self._is_over = False
        """No more units come."""
        self._again: list[int] = []
        self._crashes = Counter[int]()
        self._failed_starts = 0
        """One after the other, of workers or servers, without a finished unit between them."""
        self.workers: dict[Connection, _Worker] = {}

    def run(self) -> None:
        first = self._next_unit()
        if first is None and self._is_over:
            return
        self._again += [] if first is None else [first]
        server = self._executor.server_for(self._task)
        most = self._executor.alone if server.apart else self._executor.workers
        for number in range(most if self._executor.fit is None else 1):
            self._start(number)
        while self._again or not self._is_over or any(not one.pid or one.unit is not None for one in self._all()):
            idle = [] if self._is_over else [one for one in self._all() if one.pid and one.unit is None]
            controls = {one.server.control: one.server for one in self._all() if not one.server.is_lost}
            for ready in wait([*self.workers, *controls], PAUSE_SECONDS if idle else None):
                if ready in controls:
                    if not controls[ready].is_lost and controls[ready].control.poll():  # else it was heard meanwhile
                        controls[ready].hear()
                elif ready in self.workers:
                    self._hear(self.workers[ready])
            for worker in idle:
                if worker.connection in self.workers:
                    self._hand_out(worker)
        self._end(self._all())

    def _all(self) -> list[_Worker]:
        return list(self.workers.values())

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
        server = self._executor.server
        if server is not None and server.is_lost:
            self._count_failed_start(f"The process that starts the workers {server.cause()}")
        server = self._executor.server_for(self._task)
        connection = server.fork(number)
        self.workers[connection] = _Worker(number, server, connection)

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._next_unit()
        if worker.unit is not None:
            assignment = self._assign(worker.unit)
            try:
                worker.connection.send(("work", assignment))
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
        if kind == "started":
            worker.pid = value
            if worker.server.apart:
                with contextlib.suppress(OSError):
                    worker.connection.send(("task", self._task))
            self._hand_out(worker)
            return
        assert worker.unit is not None and worker.pid is not None
        self._on_event(Event(worker.number, worker.pid, worker.unit, kind, value))
        if self._executor.fit is not None and kind == PROGRESS and "peak_bytes" in value:
            count, self._executor.worker_bytes = self._executor.fit(value)
            self._executor.workers = count
            self._executor.fit = None
            for number in range(1, count):
                self._start(number)
        if kind == DONE:
            self._failed_starts = 0
            if self._is_too_large(worker):
                self._end([worker])
                self._start(worker.number)
            else:
                self._hand_out(worker)

    def _replace(self, worker: _Worker) -> None:
        """A worker has died: its unit, unless it has killed one before, goes to another one in its place."""
        code = worker.server.code(worker.number)
        del self.workers[worker.connection]
        worker.connection.close()
        cause = "was ended with the process that started it" if code is None else cause_of(code)
        if worker.unit is not None:
            self._crashes[worker.unit] += code is not None
            if self._crashes[worker.unit] > RETRIES:
                times = self._crashes[worker.unit]
                said = f"Unit {worker.unit} ended its worker process {times} times; the last one {cause}.\n"
                raise WorkerError(said, *ADVICE)
            self._on_event(Event(worker.number, worker.pid or 0, worker.unit, CRASH, cause))
            self._again.append(worker.unit)
        elif self._is_over and not self._again and worker.pid is not None:
            return  # it had nothing to do
        if worker.pid is None and code is not None:
            self._count_failed_start(f"A worker {cause}")
        self._start(worker.number)

    def _count_failed_start(self, what: str) -> None:
        """Raise WorkerError when it is not the first."""
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(f"{what}; so did the one before it, and no unit was finished between them.\n", *ADVICE)
        log.warning("%s; another one takes its place.", what)

    def _is_too_large(self, worker: _Worker) -> bool:
        """Whether a worker holds more than it may after a unit; what all have inherited counts once."""
        most = self._executor.worker_bytes
        if most is None or worker.pid is None or (self._is_over and not self._again):
            return False
        held, inherited = usage(worker.pid).anonymous, Inherited(worker.server.loaded_bytes, self._executor.workers)
        if held <= inherited.allowance(most, 0):
            return False
        return held > inherited.allowance(most, shared_bytes(worker.pid) if inherited.anonymous else 0)

    def _end(self, workers: list[_Worker]) -> None:
        for server in {id(one.server): one.server for one in workers}.values():
            server.end(one.number for one in workers if one.server is server)
        for worker in workers:
            del self.workers[worker.connection]
            worker.connection.close()


# ---- the server, as this process sees it ----

_STDERR = 2
"""Where what a user's function prints goes: standard output is for results."""
_FAREWELL_SECONDS = 10.0
_LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of Arrow's allocators the one that gives back what is no longer used: mimalloc keeps some 10 MB in every worker."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": ONE_THREAD} | _LEAN
"""Keeps numpy and pyarrow from starting threads when they are imported: where a thread runs, nothing is forked."""


class Server:
    """The process that starts workers. `apart`: as programs of their own, each of which is sent the task."""

    def __init__(self, environment: dict[str, str], *, apart: bool) -> None:
        self.apart = apart
        self.task: Task | None = None
        self.cannot_fork = self.is_lost = False
        self.loaded_bytes = 0
        self._is_loading = False
        self._codes: dict[int, int] = {}
        """Worker -> how it ended, unless that is known here."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        # -P: what lies in the current folder must not stand in for an installed package.
        role = "apart" if apart else "server"
        command = [sys.executable, "-P", "-m", "milldam.run.fork", role, str(theirs.fileno()), str(os.getpid())]
        # Ctrl-C reaches the whole group: it is not heard until the process ignores it itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=(_LEAN if apart else _NO_THREADS) | os.environ | environment | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.control = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, modules: Sequence[str]) -> None:
        """Import what a task will need, before it comes."""
        self._is_loading = True
        self._send("import", list(modules))

    def load(self, task: Task, environment: dict[str, str], workers: int, threads: int) -> None:
        """Returns when it is done, or the process is lost. Raises what loading raises."""
        self._is_loading = True
        self._send("load", (task, environment, workers, threads))
        while self._is_loading and not self.is_lost:
            self.hear()

    def fork(self, number: int) -> Connection:
        """A worker that will say when it has started; its connection ends at once where the server is lost."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send("fork", number)
            with contextlib.suppress(OSError):
                send_handle(self.control, theirs.fileno(), self.pid)
        return Connection(ours.detach())

    def hear(self) -> None:
        """Take the next message. Raises the error that loading ended with."""
        try:
            kind, value = self.control.recv()
        except (EOFError, OSError):
            self.is_lost = True
            return
        if kind == ERROR:
            raise value
        if kind == "ended":
            self._codes[value[0]] = value[1]
        elif kind == "loaded":
            self.loaded_bytes, self._is_loading = value, False
        elif kind == "cannot fork":
            log.info("Workers are not forked, each loads for itself: the process that loaded for all %s.", value)
            self.cannot_fork = True

    def code(self, number: int) -> int | None:
        """How a worker ended that has ended; None: the server is lost, and the worker with it."""
        while number not in self._codes and not self.is_lost:
            self.hear()
        return self._codes.pop(number, None)

    def end(self, numbers: Iterable[int]) -> None:
        """End some workers; when this returns, their memory is free."""
        numbers = list(numbers)
        self._send("end", numbers)
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

    def _send(self, kind: str, value: Any) -> None:
        try:
            self.control.send((kind, value))
        except OSError:
            self.is_lost = True


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


# ---- the server itself ----

_LAST_THREADS_SECONDS = 0.2
"""A thread that was waited for may still be ending."""
_LEFT_BYTES = 4 << 20
"""So little may stay of tasks in cycles of objects: to look for them among all that is imported takes 20 ms."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")


class _Server:
    def __init__(self, control: Connection, *, apart: bool) -> None:
        self._apart, self._control = apart, control
        self._workers: dict[int, int] = {}
        """Number of a worker -> its process."""
        self._work: Work | None = None
        self._inherited, self._threads = Inherited(), 1
        self._bare_bytes = 0
        """Held without a task, when that was last looked for."""
        self._ended, self._bell = socket.socketpair()
        self._ended.setblocking(False)
        self._bell.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        """Have the end of a child wake us."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        try:
            while True:
                for ready in wait([self._control, self._ended]):
                    if ready is self._control:
                        self._obey(*self._control.recv())
                    else:
                        self._bury_the_dead()
        except _GONE:
            raise
        except Exception as error:
            self._control.send((ERROR, as_sent(error)))

    def _obey(self, kind: str, value: Any) -> None:
        if kind == "import":
            for name in value:
                with contextlib.suppress(Exception):  # missed, if it is needed, when the task is loaded
                    importlib.import_module(name)
        elif kind == "load":
            self._load(*value)
        elif kind == "fork":
            self._fork(value, recv_handle(self._control))
        else:
            self._end({number: self._workers[number] for number in value if number in self._workers})

    def _bury_the_dead(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ended.recv(512):
                pass
        for number, pid in list(self._workers.items()):
            self._bury(number, *os.waitpid(pid, os.WNOHANG))

    def _load(self, task: Task, environment: dict[str, str], workers: int, threads: int) -> None:
        # The task before must be gone before this one takes its place.
        self._work = None
        release()
        if usage().anonymous > self._bare_bytes + _LEFT_BYTES:
            gc.unfreeze()
            gc.collect()
            release()
            self._bare_bytes = usage().anonymous
        os.environ |= environment
        open_before = _open_files()
        self._work = task.start()
        self._listen()  # the task may have listened to signals itself
        left_open = next((f"has left {path} open" for path in sorted(_open_files() - open_before)), "")
        if reason := _running_threads() or left_open:
            self._control.send(("cannot fork", reason))
        gc.collect()
        release()
        # The collector would write to every object there is, and so give each worker a copy of its own.
        gc.freeze()
        self._inherited, self._threads = Inherited(usage().anonymous, workers), threads
        self._control.send(("loaded", self._inherited.anonymous))

    def _fork(self, number: int, handle: int) -> None:
        if self._apart:
            command = [sys.executable, "-P", "-m", "milldam.run.fork", "worker", str(handle), str(os.getpid())]
            self._workers[number] = subprocess.Popen(command, pass_fds=[handle]).pid
            os.close(handle)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or each copy would write it
        pid = os.fork()
        if pid:
            os.close(handle)
            self._workers[number] = pid
            return
        code = 1
        try:
            parent = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._ended, self._bell):
                end.close()
            die_with(parent)
            inherit(self._inherited)
            _let_blas_use(self._threads)
            with contextlib.suppress(*_GONE):
                _work(Connection(handle), self._work)
            code = 0
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _end(self, workers: dict[int, int]) -> None:
        """End workers now, side by side: what they have not recorded is not kept, nothing needs to be wound up."""
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        for number, pid in workers.items():
            self._bury(number, *os.waitpid(pid, 0))

    def _bury(self, number: int, pid: int, status: int) -> None:
        if pid:
            del self._workers[number]
            self._control.send(("ended", (number, os.waitstatus_to_exitcode(status))))

    def end_all(self) -> None:
        with contextlib.suppress(*_GONE):
            self._end(dict(self._workers))


def _let_blas_use(threads: int) -> None:
    """numpy's library was loaded for one thread, so that none ran before the fork; a worker may use its share."""
    if threads == 1 or "numpy" not in sys.modules or os.environ.get("OPENBLAS_NUM_THREADS") != ONE_THREAD:
        return
    paths = set(re.findall(r"/\S*openblas\S*", Path("/proc/self/maps").read_text()))
    for library in map(ctypes.CDLL, paths):
        for name in _SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(threads)


def _running_threads() -> str:
    """That there are threads, as a reason not to fork; empty: there are none."""
    until = time.monotonic() + _LAST_THREADS_SECONDS
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > until:
            return f"runs {count} threads"
        time.sleep(0.001)
    return ""


def _open_files() -> set[str]:
    """Whatever is open: files by their paths, others by their kind and number."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return {path for path in found if path not in _HARMLESS and not path.startswith("/proc/")}


# ---- a worker ----


def _work(connection: Connection, work: Work | None = None) -> None:
    """Make what is assigned, until the other end is closed. Without `work`, the task comes first."""
    try:
        connection.send(("started", os.getpid()))
        while True:
            kind, value = connection.recv()
            if kind == "task":
                work = value.start()
                continue
            assert work is not None
            work(value, lambda kind, value: connection.send((kind, value)))
            connection.send((DONE, None))
    except _GONE:
        raise
    except Exception as error:
        connection.send((ERROR, as_sent(error)))


def as_sent(error: Exception) -> Any:
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
        keep_arrow_lean()  # before a task brings imports along
    if role == "worker":
        with contextlib.suppress(*_GONE):
            _work(Connection(handle))
        return
    server = _Server(Connection(handle), apart=role == "apart")
    try:
        with contextlib.suppress(*_GONE):
            server.serve()
    finally:
        server.end_all()


if __name__ == "__main__":
    main()
