"""Which units loaders wait for: a small file of the run folder for each loader, on any machine that sees the folder.

`run/demand/*.json` lists the next units in the order in which they are needed. A file that outlives its loader costs
nothing but time, since every unit is made some day; it is removed when it was not written for long.

`run/feed.json` is what loaders need to know of the maker at work: the name of its order and its own id; once it has
planned, the facts about its store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from milldam.files import replace_unsynced

DEMAND, FEED = "demand", "feed.json"
_STALE_SECONDS = 600.0
"""By then all that was wanted has been made, unless its loader is gone."""


class Demand:
    """The units that one loader wants, in this order."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / DEMAND / f"{uuid.uuid4().hex}.json"
        self._units: list[int] | None = None

    def put(self, units: Sequence[int]) -> None:
        """Replace what was wanted before; write it again if it was removed."""
        wanted = list(units)
        while wanted != self._units or not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a maker that just finished removed the folder again
                replace_unsynced(self._path, json.dumps(wanted).encode())
                self._units = wanted

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)


def demanded(run_folder: Path) -> Iterator[int]:
    """Units that loaders want, the most urgent ones of each first; some come more than once."""
    lists = []
    for path in sorted((run_folder / DEMAND).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # withdrawn, or torn by a crash of the machine
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
            else:
                lists.append(json.loads(path.read_bytes()))
    for units in itertools.zip_longest(*lists):
        yield from (unit for unit in units if unit is not None)
