"""Which units loaders wait for: a small file of the run folder for each loader, on any machine that sees the folder.

`demand/HOST-PID-n.json` lists the next units in the order in which they are needed. What is no longer wanted costs
nothing but time: every unit is made some day. So a file whose process is gone is removed by who sees it on its own
machine, and one that nobody has touched for long is passed over.
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
from pathlib import Path

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
        return self._folder / f"{socket.gethostname()}-{os.getpid()}-{self._number}.json"

    def put(self, units: Sequence[int]) -> None:
        """Want these units, in this order."""
        if list(units) != self._units:
            self._units = list(units)
            self.renew()

    def renew(self) -> None:
        """Say it again where it was removed."""
        path = self._path
        if self._units is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self._units))
        new.replace(path)

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
    host, pid, _ = path.stem.rsplit("-", 2)
    if host != socket.gethostname():
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    return not is_alive(int(pid))


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
