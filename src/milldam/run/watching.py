"""Running any command as if nobody watched, while a monitor samples its process tree.

The command has our files; a signal that somebody sends to us is passed on. Neither that nor Ctrl-C ends the watch: the
command decides. From a thread that is not the main one, signals are left alone. What the command leaves running is
named and left alone, as a shell does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.memory import Usage
from milldam.run.monitor import SAMPLE_SECONDS, Monitor, ProcessTree, adopting_orphans, listed

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FAREWELL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what only the kernel could tell of its memory; the rest is in the timeline."""

    exit_code: int
    """Minus the signal's number when one ended it."""
    seconds: float
    largest_resident: int
    """The most that any one process had resident, file-backed too, by the kernel's count: no spike is missed. Of
    processes too brief to be sampled as far as they were larger than this one; 0: none."""
    counted_once: Usage | None
    """The most, with each page counted once, sampled more seldom; None where the kernel does not tell."""
    still_running: tuple[int, ...]


def watch(command: Sequence[str], timeline: Path, *, every: float = SAMPLE_SECONDS) -> Ended:
    """Run a command to its end; the memory of its process tree goes to a timeline, as it is sampled.

    While it runs, processes that lose their parent become children of this process; children that this process starts
    meanwhile by other ways count as well.
    """
    if not command:
        raise ConfigError("watch: no command to run.")
    if not every > 0:
        raise ConfigError(f"every={every}: the time between two samples must be above 0 s.")
    strangers, started = frozenset(listed()), time.monotonic()
    with adopting_orphans() as adopting, _passing_signals() as pass_to:
        try:
            process = subprocess.Popen(list(command))
        except OSError as error:
            raise InputError(_why_not(command[0], error)) from error
        own_resident = _resident_peak()
        pass_to(process.pid)
        tree = ProcessTree(process.pid, adopting=adopting, strangers=strangers)
        with Monitor(timeline, stage="watch", tree=tree, every=every) as monitor, _CountOnce(tree) as once:
            exit_code, largest = _wait(process)
        seconds = time.monotonic() - started
        left = _left_running(tree)
    # Until it has become the command, a child counts with our own pages.
    brief = largest if largest > own_resident else 0
    return Ended(exit_code, seconds, max(brief, monitor.resident_peak), once.most, left)


@contextmanager
def _passing_signals() -> Iterator[Callable[[int], None]]:
    """Signals that reach us go to the process that is named, also those that came before there was one."""
    running: list[int] = []
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not running:
            early.append(number)
        # At a terminal, Ctrl-C reaches the command by itself: it is in our process group.
        elif not (number == signal.SIGINT and _at_terminal()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(running[0], number)

    def name(pid: int) -> None:
        running.append(pid)
        for number in early:
            pass_on(number, None)

    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # What we are told to ignore, as by nohup, the command ignores too.
        heard = (number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN)
        handlers = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield name
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _at_terminal() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """(exit code, largest resident memory of it and all it waited for)"""
    _, status, used = os.wait4(process.pid, 0)
    # Or Popen would look for a process that is no more.
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_maxrss * _RSS_UNIT


def _resident_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


_RSS_UNIT = 1 if os.uname().sysname == "Darwin" else 1024


def _left_running(tree: ProcessTree) -> tuple[int, ...]:
    """After a moment for what ends with the command, such as its helpers."""
    until = time.monotonic() + _FAREWELL_SECONDS
    while (left := tree.read()) and time.monotonic() < until:
        time.sleep(0.01)
    return tuple(one.pid for one in left)


class _CountOnce:
    """Asks once a second, and less often where it takes long, for memory with each page counted once."""

    def __init__(self, tree: ProcessTree) -> None:
        self.most: Usage | None = None
        self._tree, self._stop = tree, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="milldam-count-once", daemon=True)

    def __enter__(self) -> _CountOnce:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        cost, wait = 0.0, 0.05
        while not self._stop.wait(max(wait, 100 * cost)):
            began = time.thread_time()
            found = self._tree.count_once()
            if found is not None and (self.most is None or found.anonymous > self.most.anonymous):
                self.most = found
            cost, wait = time.thread_time() - began, min(1.0, 1.5 * wait)


def _why_not(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{name}: command not found. Is it installed, and its folder in PATH?"
    return f"{name}: can't be run ({error.strerror}). Is it executable?"
