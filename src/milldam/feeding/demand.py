"""Which units loaders wait for: a small file of the run folder for each loader, on any machine that sees the folder.

`demand/HOST-PROCESS-n.json` lists the next units in the order in which they are needed. What is no longer wanted costs
nothing but time: every unit is made some day. So a file whose process is gone is removed by who sees it on its own
machine, and one that nobody has touched for long is passed over.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milldam.files import read_sealed, replace_unsynced, seal_file
from milldam.memory import is_alive, process_identity

FOLDER = "demand"
_numbers = itertools.count()
_STALE_SECONDS = 600.0
"""By then all that was wanted has been made, unless its loader is on a machine that is gone."""


class Demand:
    """What one loader of this process wants."""

    def __init__(self, run_folder: Path) -> None:
        self._folder, self._number = run_folder / FOLDER, next(_numbers)
        self._units: list[int] | None = None

    @property
    def _path(self) -> Path:
        # By the process that asks: a forked one has wishes of its own.
        return self._folder / f"{socket.gethostname()}-{process_identity(os.getpid())}-{self._number}.json"

    def put(self, units: Sequence[int]) -> None:
        """Want these units, in this order."""
        if list(units) != self._units:
            self._units = list(units)
            self.renew()

    def renew(self) -> None:
        """Say it again where it was removed."""
        if self._units is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_unsynced(self._path, json.dumps(self._units).encode())

    def is_known(self) -> bool:
        return self._units is None or self._path.exists()

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def forget_all(run_folder: Path) -> None:
    """Remove what is left of those who wanted something, when nothing is left to make."""
    shutil.rmtree(run_folder / FOLDER, ignore_errors=True)


def demanded(run_folder: Path) -> Iterator[int]:
    """Units that loaders want, the most urgent ones of each first; some come more than once."""
    wishes = (_read(path) for path in sorted((run_folder / FOLDER).glob("*.json")))
    for units in itertools.zip_longest(*wishes):
        yield from (unit for unit in units if unit is not None)


def _read(path: Path) -> list[int]:
    try:
        if _is_dead(path):
            path.unlink(missing_ok=True)
            return []
        units: list[int] = json.loads(path.read_bytes())
    except (OSError, ValueError):  # withdrawn, or torn by a crash of the machine
        return []
    return units


def _is_dead(path: Path) -> bool:
    host, process, _ = path.stem.rsplit("-", 2)
    if host != socket.gethostname():
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    return not is_alive(process)


NAME = "feed.json"


@dataclass(frozen=True, slots=True)
class Planned:
    name: str
    """What was asked for: who asks for something else does not share it."""
    host: str
    process: str
    """The maker."""
    identity: str = ""
    """Of the store that is being made; empty: nothing is planned yet."""
    units: int = 0
    index_key: int = 0
    """What the keys of units take in of a dedup index."""
    splits: tuple[str, ...] = ()
    vocab_size: int = 0
    tokenizer: str = ""
    pad_id: int = 0
    chat: bool = False
    pairs: bool = False
    workers: int = 0
    budget_bytes: int = 0

    @classmethod
    def here(cls, name: str) -> Planned:
        """By a maker that is this process, before it has planned."""
        return cls(name, socket.gethostname(), process_identity(os.getpid()))

    def write(self, run_folder: Path) -> None:
        replace_unsynced(run_folder / NAME, seal_file(asdict(self)))

    @staticmethod
    def read(run_folder: Path) -> Planned | None:
        """What a maker that is at work has told; None: there is none."""
        told: dict[str, Any] | None = read_sealed(run_folder / NAME)
        if told is None:
            return None
        planned = Planned(**told | {"splits": tuple(told["splits"])})
        return planned if planned.host != socket.gethostname() or is_alive(planned.process) else None

    @staticmethod
    def forget(run_folder: Path) -> None:
        (run_folder / NAME).unlink(missing_ok=True)
