"""What workers load in the executors' tests: a worker process finds it by this module's name.

A unit is its number; what is told of it is in the facts of its record.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milldam.errors import InputError
from milldam.run.records import Record
from milldam.run.tasks import PART, Assigned, Event, Make, Progress

_KEPT: list[Any] = []


def assigned(unit: int) -> Assigned:
    return Assigned(unit, f"{unit:016x}", 1)


def values(events: list[Event]) -> list[Any]:
    """What the records among events tell."""
    return [event.value.facts["value"] for event in events if event.kind == PART]


def recording(make: Callable[[int], Any]) -> Make:
    """A make whose records tell what a function says of a unit."""

    def of_unit(given: Assigned, told: Progress) -> Iterator[Record]:
        yield Record(given.key, facts={"value": make(given.unit)})

    return of_unit


class Work:
    """Tells what a function of this module says of a unit, given some arguments before it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def load(self) -> Make:
        return recording(partial(self._function, *self._arguments))


def square(unit: int) -> int:
    return unit**2


def deadly(folder: Path, fatal: int, times: int, number: int, server: bool, unit: int) -> int:
    """Ends a process at one unit, so many times; `folder` counts them. `server`: the one that forked the worker."""
    died = len(list(folder.iterdir()))
    if unit == fatal and died < times:
        (folder / str(died)).touch()
        os.kill(os.getppid() if server else os.getpid(), number)
        time.sleep(10)
    time.sleep(0.02)
    return unit


class UnpicklableError(Exception):
    """An exception that can't be sent to another process as it is."""

    def __init__(self, value: Any, needed: int) -> None:
        super().__init__(value)


def failing(kind: str, unit: int = 0) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "ours":
        raise InputError("corpus.jsonl:7: not readable")
    if kind == "unpicklable":
        raise UnpicklableError(lambda: None, 1)
    raise ZeroDivisionError("somewhere in a worker")


@dataclass(frozen=True)
class FailsLoading:
    """Fails, or ends the process that loads it."""

    kind: str

    def load(self) -> Make:
        failing(self.kind)
        raise AssertionError("not reached")


def hoard(kept_bytes: int, unit: int) -> int:
    """Keeps some memory of every unit for good, and tells its process."""
    _KEPT.append(bytearray(b"x") * kept_bytes)
    return os.getpid()


@dataclass(frozen=True)
class Loaded:
    """Leaves a file in `folder` where it is loaded, after a thread has ended; tells where it was loaded, and what a
    worker sees of its surroundings."""

    folder: Path

    def load(self) -> Make:
        loaded_in = os.getpid()
        (self.folder / str(loaded_in)).touch()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

        def make(unit: int) -> dict[str, Any]:
            time.sleep(0.05)  # so that no worker gets all units
            seen = {"threads": os.environ.get("RAYON_NUM_THREADS"), "cwd": str(Path.cwd())}
            return {"loaded": loaded_in, "worker": os.getpid(), "parent": os.getppid(), **seen}

        return recording(make)
