"""What workers load in the executors' tests: a worker process finds them by this module's name.

A unit is its number; what is told of it is in the facts of its record.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import InputError
from milldam.run.records import Record
from milldam.run.tasks import PART, Assigned, Event, Make, Progress


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


@dataclass(frozen=True)
class Square:
    """Tells the square of its unit."""

    def load(self) -> Make:
        return recording(lambda unit: unit**2)


@dataclass(frozen=True)
class Deadly:
    """Ends a process at one unit, so many times; `folder` counts them. `server`: the one that forked the worker."""

    folder: Path
    unit: int
    times: int
    number: int = signal.SIGKILL
    server: bool = False

    def load(self) -> Make:
        def make(unit: int) -> int:
            died = len(list(self.folder.iterdir()))
            if unit == self.unit and died < self.times:
                (self.folder / str(died)).touch()
                os.kill(os.getppid() if self.server else os.getpid(), self.number)
                time.sleep(10)
            time.sleep(0.02)
            return unit

        return recording(make)


@dataclass(frozen=True)
class DiesAfterwards:
    """Makes one unit, and is killed while it waits for the next one; only the first worker is."""

    folder: Path

    def load(self) -> Make:
        def make(unit: int) -> int:
            if not (self.folder / "died").exists():
                (self.folder / "died").touch()
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return unit

        return recording(make)


@dataclass(frozen=True)
class DiesLoading:
    """Ends the process that loads it."""

    number: int

    def load(self) -> Make:
        os.kill(os.getpid(), self.number)
        raise AssertionError("not reached")


class UnpicklableError(Exception):
    """An exception that can't be sent to another process as it is."""

    def __init__(self, value: Any, needed: int) -> None:
        super().__init__(value)


@dataclass(frozen=True)
class Failing:
    """Raises what it is told to, when it is loaded or when it works."""

    kind: str
    at_start: bool = False

    def load(self) -> Make:
        if self.at_start:
            self._fail(0)
        return recording(self._fail)

    def _fail(self, unit: int) -> None:
        if self.kind == "ours":
            raise InputError("corpus.jsonl:7: not readable")
        if self.kind == "unpicklable":
            raise UnpicklableError(lambda: None, 1)
        raise ZeroDivisionError("somewhere in a worker")


_KEPT: list[Any] = []


@dataclass(frozen=True)
class Hoarder:
    """Keeps some memory of every unit for good, and tells its process."""

    kept_bytes: int

    def load(self) -> Make:
        def make(unit: int) -> int:
            _KEPT.append(bytearray(b"x") * self.kept_bytes)
            return os.getpid()

        return recording(make)


@dataclass(frozen=True)
class Loaded:
    """Leaves a file in `folder` where it is loaded, and something else behind; tells where it was loaded, and what a
    worker sees of its surroundings."""

    folder: Path
    leaves: str = ""

    def load(self) -> Make:
        loaded_in = os.getpid()
        (self.folder / str(loaded_in)).touch()
        if self.leaves == "file":
            _KEPT.append((self.folder / "open").open("w"))
        elif self.leaves:
            wait = threading.Event().wait if self.leaves == "thread" else lambda: time.sleep(0.01)
            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            if self.leaves == "ended thread":
                thread.join()

        def make(unit: int) -> dict[str, Any]:
            time.sleep(0.05)  # so that no worker gets all units
            seen = {"threads": os.environ.get("RAYON_NUM_THREADS"), "cwd": str(Path.cwd())}
            return {"loaded": loaded_in, "worker": os.getpid(), "parent": os.getppid(), **seen}

        return recording(make)
