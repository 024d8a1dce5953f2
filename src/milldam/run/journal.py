"""Lines appended to files of a run folder, durably.

A line reaches the kernel before `append` returns, so that a killed process loses none. It is synced to disk at once
when the last sync is more than a moment ago, else with the lines that follow: a power failure costs at most what was
done within that moment, which is then done again.

A line says itself whether it is whole (`milldam.sealed`): what was torn by a crash, or damaged since, is passed over,
and what it told of is done again.

A task of a job array, which works beside others on other machines, appends to files of its own: `records@<task>.jsonl`
beside `records.jsonl`. Whoever reads gets the lines of all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from milldam.files import explain_os_errors, names_matching
from milldam.sealed import seal_line, unseal_line

SYNC_SECONDS = 0.2


class Journal:
    """The appended files of a folder; `task`: whose lines these are, when others append too."""

    def __init__(self, folder: Path, task: str | None = None) -> None:
        self._folder, self._task = folder, task
        self._open: dict[str, IO[bytes]] = {}
        self._unsynced: set[str] = set()
        self._synced = 0.0

    def append(self, name: str, value: dict[str, Any]) -> None:
        line = seal_line(value)
        with explain_os_errors(self._folder):
            file = self._open.get(name) or self._open_file(name)
            file.write(line)
            self._unsynced.add(name)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()

    def _open_file(self, name: str) -> IO[bytes]:
        path = self._folder / (name if self._task is None else _of_task(name, self._task))
        file = path.open("a+b", buffering=0)
        self._open[name] = file
        # A line that was torn by a crash must not take the next one with it.
        if file.tell() and not _ends_a_line(file):
            file.write(b"\n")
        return file

    def sync(self) -> None:
        """Make every line durable."""
        with explain_os_errors(self._folder):
            for name in self._unsynced:
                os.fsync(self._open[name].fileno())
        self._unsynced.clear()
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the files, for a while or for good: they may be replaced now."""
        try:
            self.sync()
        finally:
            for file in self._open.values():
                file.close()
            self._open.clear()
            self._unsynced.clear()

    @property
    def is_shared(self) -> bool:
        """Whether others append too."""
        return self._task is not None

    def path(self, name: str) -> Path:
        """The file of who works alone."""
        return self._folder / name

    def paths(self, name: str) -> list[Path]:
        """The files of that name: this one's, and those of tasks."""
        path = self.path(name)
        tasks = [self._folder / found for found in sorted(names_matching(self._folder, _of_task(name, "*")))]
        return ([path] if path.exists() else []) + tasks

    def lines(self, name: str) -> Iterator[bytes]:
        """Every line, also one that was torn or damaged."""
        for path in self.paths(name):
            with path.open("rb") as lines:
                yield from lines

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """What was appended; a torn or damaged line is left out."""
        for line in self.lines(name):
            value = unseal_line(line)
            if value is not None:
                yield value


def _of_task(name: str, task: str) -> str:
    """
    >>> _of_task("records.jsonl", "tokenize-3-of-8")
    'records@tokenize-3-of-8.jsonl'
    """
    stem, _, ending = name.rpartition(".")
    return f"{stem}@{task}.{ending}"


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
