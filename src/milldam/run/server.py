"""The server: a process that imports and loads once what every worker needs, and forks the workers.

A worker starts in milliseconds, and what was loaded before the fork is in memory once. The server is the workers'
parent: it tells how each of them ended, and none outlives it. It holds no state of the job: when it is killed, another
one is started.

Nothing is forked where a thread runs (a lock it holds would stay locked for ever in the copy), nor where loading has
left a file or socket open (the copies would share its position). Then the server says so, and ends; another one, apart,
starts every worker as a program of its own, which loads for itself. So it is where forking is not safe at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

from milldam.memory import Inherited, inherit, keep_arrow_lean, release, usage
from milldam.run.tasks import APART, END, ENDED, ERROR, FORK, IMPORT, LOADED, ONE_THREAD, TASK, Loading, Work
from milldam.run.worker import GONE, as_sent, attach, die_with, serve

_LAST_THREADS_SECONDS = 0.2
"""A thread that was waited for may still be ending."""
_LEFT_BYTES = 4 << 20
"""So little may stay of tasks in cycles of objects: to look for them among all that is imported takes 20 ms."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")


def main() -> None:
    server = _Server(attach(), apart=sys.argv[3:] == [APART])
    if not server.apart:
        keep_arrow_lean()  # before a task brings imports along
    try:
        with contextlib.suppress(*GONE):
            server.serve()
    finally:
        server.end_all()


class _Server:
    def __init__(self, control: Connection, *, apart: bool) -> None:
        self.apart, self._control = apart, control
        self._workers: dict[int, int] = {}
        """Number of a worker -> its process."""
        self._work: Work | None = None
        self._inherited = Inherited()
        self._bare_bytes = 0
        """What was held without a task, when that was last looked for."""
        self._threads = 1
        self._ended, self._bell = socket.socketpair()
        for end in (self._ended, self._bell):
            end.setblocking(False)
        self._listen()

    def serve(self) -> None:
        try:
            while True:
                for ready in wait([self._control, self._ended]):
                    if ready is self._control:
                        self._hear(*self._control.recv())
                    else:
                        self._reap()
        except GONE:
            raise
        except Exception as error:
            self._control.send((ERROR, as_sent(error)))

    def _listen(self) -> None:
        """Have the end of a child wake us."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)

    def _hear(self, kind: str, value: Any) -> None:
        if kind == IMPORT:
            for name in value:
                with contextlib.suppress(Exception):  # what the task needs will be missed when it is loaded
                    importlib.import_module(name)
        elif kind == TASK:
            self._load(value)
        elif kind == FORK:
            self._fork(value, recv_handle(self._control))
        else:
            assert kind == END
            self._end(value)

    def _load(self, loading: Loading) -> None:
        # What the task before held must be gone before this one takes its place.
        self._work = None
        release()
        if usage().anonymous > self._bare_bytes + _LEFT_BYTES:
            gc.unfreeze()
            gc.collect()
            release()
            self._bare_bytes = usage().anonymous
        os.environ |= loading.environment
        open_before = _open_files()
        self._work = loading.task.start()
        self._listen()  # the task may have listened to signals itself
        if reason := _running_threads() or _left_open(open_before):
            self._control.send((APART, reason))
        gc.collect()
        release()
        # The collector would write to every object there is, and so give each worker a copy of its own.
        gc.freeze()
        self._inherited, self._threads = Inherited(usage().anonymous, loading.workers), loading.threads
        self._control.send((LOADED, self._inherited.anonymous))

    def _fork(self, number: int, handle: int) -> None:
        if not self.apart and (reason := _running_threads()):
            os.close(handle)
            self._control.send((APART, reason))
            self._control.send((ENDED, (number, 0)))
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or each copy would write it
        pid = os.fork()
        if pid == 0:
            self._become_worker(handle)
        os.close(handle)
        self._workers[number] = pid

    def _become_worker(self, handle: int) -> NoReturn:
        code = 1
        try:
            parent = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._ended, self._bell):
                end.close()
            if self.apart:
                os.set_inheritable(handle, True)
                program = [sys.executable, "-P", "-m", "milldam.run.worker", str(handle), str(parent)]
                os.execv(sys.executable, program)
            die_with(parent)
            inherit(self._inherited)
            _let_blas_use(self._threads)
            with contextlib.suppress(*GONE):
                serve(Connection(handle), self._work)
            code = 0
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ended.recv(512):
                pass
        for number, pid in list(self._workers.items()):
            self._take_note(number, *os.waitpid(pid, os.WNOHANG))

    def _end(self, numbers: list[int]) -> None:
        """End workers now, side by side: what they have not committed is not kept, nothing needs to be wound up."""
        ending = {number: self._workers[number] for number in numbers if number in self._workers}
        for pid in ending.values():
            os.kill(pid, signal.SIGKILL)
        for number, pid in ending.items():
            self._take_note(number, *os.waitpid(pid, 0))

    def _take_note(self, number: int, pid: int, status: int) -> None:
        if pid:
            del self._workers[number]
            self._control.send((ENDED, (number, os.waitstatus_to_exitcode(status))))

    def end_all(self) -> None:
        pids, self._workers = list(self._workers.values()), {}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _let_blas_use(threads: int) -> None:
    """numpy's library was loaded for one thread, so that none ran before the fork; a worker may use its share."""
    if threads == 1 or "numpy" not in sys.modules or os.environ.get("OPENBLAS_NUM_THREADS") != ONE_THREAD:
        return
    paths = set(re.findall(r"/\S*openblas\S*", Path("/proc/self/maps").read_text()))
    for library in map(ctypes.CDLL, paths):
        for name in _SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(threads)


def _left_open(before: set[str]) -> str:
    """What loading left open, as a reason not to fork; empty: nothing."""
    return next((f"has left {path} open" for path in sorted(_open_files() - before)), "")


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


if __name__ == "__main__":
    main()
