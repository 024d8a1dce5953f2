"""Running a command as if nobody watched: its files are ours, signals reach it, and its end is noticed at once.

Ctrl-C at a terminal goes to the command by itself, since it is in our process group; a signal that somebody sends to
us is passed on. Neither ends the watch: the command decides. From a thread that is not the main one, signals are left
alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from milldam.errors import InputError
from milldam.watching.tree import most_resident

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KERNEL = 0x80
"""`si_code` of a signal that the terminal made."""


class Command:
    """A command that runs; use it as a context manager. What it leaves running is left alone, as a shell does."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.exit_code: int | None = None
        """As Python has it: minus the signal's number when one ended it."""
        self.largest_resident = 0
        """Of the command and all it waited for, the most that one process had resident, by the kernel's count; 0 when
        that was no more than this process had: until it has become the command, a child counts with our own pages."""
        self._handlers: dict[signal.Signals, Any] = {}
        self._early: list[int] = []
        self._waits_for_signals = hasattr(signal, "sigtimedwait")

    def __enter__(self) -> Command:
        if threading.current_thread() is threading.main_thread():
            self._catch()
        try:
            # Python handlers are not handed on to another program; a mask of blocked signals would be.
            self._process = subprocess.Popen(self.words)
        except OSError as error:
            self._restore()
            raise InputError(_why_not(self.words[0], error)) from error
        self.pid = self._process.pid
        self._own_resident = most_resident()
        if self._handlers and self._waits_for_signals:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._handlers, signal.SIGCHLD})
        self._pass_on_early()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers and self._waits_for_signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._restore()

    def _catch(self) -> None:
        def remember(number: int, _frame: FrameType | None) -> None:
            self._early.append(number)

        for number in _PASSED_ON:
            # What we are told to ignore, as by nohup, the command ignores too.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, remember)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def wait(self, seconds: float) -> bool:
        """Whether the command ended within this time; signals are passed on meanwhile."""
        until = time.monotonic() + seconds
        while not self._ended():
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._handlers and self._waits_for_signals:
                self._wait_for_signal(left)
            else:
                time.sleep(min(left, 0.02))
                self._pass_on_early()
        return True

    def _wait_for_signal(self, seconds: float) -> None:
        found = signal.sigtimedwait({*self._handlers, signal.SIGCHLD}, seconds)
        if found is None or found.si_signo == signal.SIGCHLD:
            return
        if found.si_code != _FROM_KERNEL:
            self._send(found.si_signo)

    def _pass_on_early(self) -> None:
        while self._early:
            number = self._early.pop(0)
            # At a terminal, Ctrl-C has reached the command already.
            if number != signal.SIGINT or not _at_terminal():
                self._send(number)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def _ended(self) -> bool:
        if self.exit_code is not None:
            return True
        done = reap(self.pid)
        if done is None:
            return False
        self.exit_code, largest = done
        self.largest_resident = largest if largest > self._own_resident else 0
        # Or Popen would look for a process that is no more.
        self._process.returncode = self.exit_code
        return True


def _why_not(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{name}: command not found. Is it installed, and its folder in PATH?"
    return f"{name}: can't be run ({error.strerror}). Is it executable?"


def reap(pid: int) -> tuple[int, int] | None:
    """(exit code, largest resident memory) of a child that has ended, after which it is gone; None while it runs."""
    wait: Callable[..., tuple[int, int, Any]] = os.wait4
    try:
        found, status, used = wait(pid, os.WNOHANG)
    except ChildProcessError:
        return -1, 0
    if not found:
        return None
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return os.waitstatus_to_exitcode(status), used.ru_maxrss * unit


def _at_terminal() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
