"""Which units loaders wait for: a small file of the run folder for each loader, on any machine that sees the folder.

`demand/HOST-PROCESS-n.json` lists the next units in the order in which they are needed. A file that outlives its loader
costs nothing but time, since every unit is made some day: it is removed when its process is gone from this machine, and
passed over when it has not been touched for long.

`run/feed.json` is what loaders need to know of the run that makes units for them; there while a maker is at work.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from milldam.files import read_sealed, replace_unsynced, seal_file

_FOLDER, _NAME = "demand", "feed.json"
_numbers = itertools.count()
_STALE_SECONDS = 600.0
"""By then all that was wanted has been made, unless its loader is on a machine that is gone."""


def process_identity(pid: int) -> str:
    """A process's number and start time, since numbers are used again; empty when there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The second field, in brackets, may hold anything; the start time is the twentieth after it.
        return f"{pid}.{status.rpartition(')')[2].split()[19]}"
    except OSError:
        with contextlib.suppress(psutil.Error):  # a system without /proc
            return f"{pid}.{psutil.Process(pid).create_time()}" if not Path("/proc/self").exists() else ""
        return ""


def _is_alive(process: str) -> bool:
    """Whether a process of this machine, by its identity, is still there."""
    return process_identity(int(process.partition(".")[0])) == process


class Demand:
    """The units that one loader of this process wants, in this order."""

    def __init__(self, run_folder: Path) -> None:
        self._folder, self._number = run_folder / _FOLDER, next(_numbers)
        self._units: list[int] | None = None

    @property
    def _path(self) -> Path:
        # By the process that asks: a forked one has a demand of its own.
        return self._folder / f"{socket.gethostname()}-{process_identity(os.getpid())}-{self._number}.json"

    def put(self, units: Sequence[int]) -> None:
        if list(units) != self._units:
            self._units = list(units)
            self._write()

    def renew(self) -> None:
        """Write it again if it was removed."""
        if self._units is not None and not self._path.exists():
            self._write()

    def _write(self) -> None:
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a maker that just finished removed the folder again
                replace_unsynced(self._path, json.dumps(self._units).encode())
                return

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def forget_all(run_folder: Path) -> None:
    """Remove the demands that are left when nothing is left to make."""
    shutil.rmtree(run_folder / _FOLDER, ignore_errors=True)


def demanded(run_folder: Path) -> Iterator[int]:
    """Units that loaders want, the most urgent ones of each first; some come more than once."""
    lists = []
    for path in sorted((run_folder / _FOLDER).glob("*.json")):
        host, process, _ = path.stem.rsplit("-", 2)
        with contextlib.suppress(OSError, ValueError):  # withdrawn, or torn by a crash of the machine
            if host != socket.gethostname():
                is_gone = time.time() - path.stat().st_mtime > _STALE_SECONDS
            else:
                is_gone = not _is_alive(process)
            if is_gone:
                path.unlink(missing_ok=True)
            else:
                lists.append(json.loads(path.read_bytes()))
    for units in itertools.zip_longest(*lists):
        yield from (unit for unit in units if unit is not None)


@dataclass(frozen=True, slots=True)
class Planned:
    """The store that the maker makes."""

    name: str
    """Of the order: loaders with another order do not share it."""
    host: str
    process: str
    """The maker."""
    identity: str = ""
    """Of the store that is being made; empty: nothing is planned yet."""
    units: int = 0
    index_key: int = 0
    """Part of the keys of units, from a dedup index."""
    dtype: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Other fields of `FeedFacts`."""
    workers: int = 0
    budget_bytes: int = 0

    @classmethod
    def here(cls, name: str) -> Planned:
        """By a maker that is this process, before it has planned."""
        return cls(name, socket.gethostname(), process_identity(os.getpid()))

    def write(self, run_folder: Path) -> None:
        replace_unsynced(run_folder / _NAME, seal_file(asdict(self)))

    @staticmethod
    def read(run_folder: Path) -> Planned | None:
        """As written by a maker that is at work; None: there is none."""
        value = read_sealed(run_folder / _NAME)
        planned = None if value is None else Planned(**value)
        if planned is None or (planned.host == socket.gethostname() and not _is_alive(planned.process)):
            return None
        return planned

    @staticmethod
    def forget(run_folder: Path) -> None:
        (run_folder / _NAME).unlink(missing_ok=True)
