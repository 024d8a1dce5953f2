"""Tasks for the executors' tests: a worker process finds them by this module's name."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import InputError
from milldam.run.tasks import PART, PROGRESS, Report, Work


@dataclass(frozen=True)
class Square:
    """Reports the square of what it is assigned, and who it is."""

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            report(PROGRESS, os.getpid())
            report(PART, assignment**2)

        return work


@dataclass(frozen=True)
class Deadly:
    """Ends its own process at one assignment, so many times; `folder` counts them."""

    folder: Path
    assignment: int
    times: int
    number: int = signal.SIGKILL

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            died = len(list(self.folder.iterdir()))
            if assignment == self.assignment and died < self.times:
                (self.folder / str(died)).touch()
                os.kill(os.getpid(), self.number)
                time.sleep(10)
            report(PART, assignment)

        return work


@dataclass(frozen=True)
class DiesAfterwards:
    """Does one assignment, says so, and is killed while it waits for the next one; only the first worker is."""

    folder: Path

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            report(PART, assignment)
            if not (self.folder / "died").exists():
                (self.folder / "died").touch()
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

        return work


@dataclass(frozen=True)
class Failing:
    """Raises what it is told to, when it starts or when it works."""

    kind: str
    at_start: bool = False

    def start(self) -> Work:
        if self.at_start:
            self._fail()

        def work(assignment: Any, report: Report) -> None:
            self._fail()

        return work

    def _fail(self) -> None:
        if self.kind == "ours":
            raise InputError("corpus.jsonl:7: not readable")
        if self.kind == "unpicklable":
            raise UnpicklableError(lambda: None, 1)
        raise ZeroDivisionError("somewhere in a worker")


class UnpicklableError(Exception):
    """An exception that can't be sent to another process as it is."""

    def __init__(self, value: Any, needed: int) -> None:
        super().__init__(value)


@dataclass(frozen=True)
class Environment:
    """Reports what a worker sees of its surroundings."""

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            report(PART, {"threads": os.environ.get("RAYON_NUM_THREADS"), "cwd": str(Path.cwd())})

        return work


_HOARD: list[bytearray] = []


@dataclass(frozen=True)
class Hoarder:
    """Keeps some memory of every assignment for good, and reports its process."""

    kept_bytes: int

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            _HOARD.append(bytearray(b"x") * self.kept_bytes)
            report(PART, os.getpid())

        return work


_LEFT: list[Any] = []


@dataclass(frozen=True)
class Started:
    """Counts how often it is started, in `folder`, and leaves something behind; reports where it was started."""

    folder: Path
    leaves: str = ""

    def start(self) -> Work:
        started_in = os.getpid()
        (self.folder / str(started_in)).touch()
        if self.leaves == "thread":
            thread = threading.Thread(target=threading.Event().wait, daemon=True)
            thread.start()
        if self.leaves == "file":
            _LEFT.append((self.folder / "open").open("w"))
        if self.leaves == "ended thread":
            thread = threading.Thread(target=time.sleep, args=(0.01,))
            thread.start()
            thread.join()

        def work(assignment: Any, report: Report) -> None:
            time.sleep(0.05)  # so that no worker gets all units
            report(PART, {"started": started_in, "worker": os.getpid(), "parent": os.getppid()})

        return work


@dataclass(frozen=True)
class KillsServer:
    """Kills the process that forked its worker, at one assignment, so many times; `folder` counts them."""

    folder: Path
    assignment: int
    times: int

    def start(self) -> Work:
        def work(assignment: Any, report: Report) -> None:
            killed = len(list(self.folder.iterdir()))
            if assignment == self.assignment and killed < self.times:
                (self.folder / str(killed)).touch()
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(10)
            time.sleep(0.02)
            report(PART, assignment)

        return work


@dataclass(frozen=True)
class DiesLoading:
    """Ends the process that loads it."""

    number: int

    def start(self) -> Work:
        os.kill(os.getpid(), self.number)
        raise AssertionError("not reached")


@dataclass(frozen=True)
class Multiplies:
    """Multiplies matrices with numpy, loaded before; reports the threads of its process then."""

    def start(self) -> Work:
        import numpy as np

        matrix = np.ones((600, 600))

        def work(assignment: Any, report: Report) -> None:
            assert (matrix @ matrix)[0, 0] == 600
            report(PART, len(os.listdir("/proc/self/task")))

        return work
