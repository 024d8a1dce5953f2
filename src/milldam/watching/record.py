"""Samples -> memory.csv, as they come: `time,stage,pid,anonymous_bytes,file_bytes,name`, a row a process.

Every sample for five minutes; from then on one for each 1/1,500 of the time that has passed, the highest of its
stretch. A day of samples, five a second, is about 10,000 of them; the file can be cut off anywhere and is still
readable.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Sequence
from pathlib import Path

from milldam.errors import MismatchError
from milldam.files import explain_os_errors
from milldam.watching.tree import Reading

HEADER = ["time", "stage", "pid", "anonymous_bytes", "file_bytes", "name"]
STAGE = "watch"
_WHOLE_SECONDS = 300.0
_SHARE = 1500


class Recorder:
    """Writes the file; holds one sample. A full disk ends the record, not the watch."""

    def __init__(self, path: Path) -> None:
        with explain_os_errors(path):
            refuse_foreign(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._highest: tuple[int, float, Sequence[Reading]] | None = None
        self._written = 0.0
        with contextlib.suppress(OSError):
            self._writer.writerow(HEADER)

    def add(self, elapsed: float, time: float, readings: Sequence[Reading]) -> None:
        total = sum(one.anonymous for one in readings)
        if self._highest is None or total >= self._highest[0]:
            self._highest = (total, time, readings)
        if elapsed < _WHOLE_SECONDS or elapsed - self._written >= elapsed / _SHARE:
            self._write()
            self._written = elapsed

    def _write(self) -> None:
        if self._highest is None:
            return
        _, time, readings = self._highest
        with contextlib.suppress(OSError):
            for one in readings:
                self._writer.writerow([f"{time:.2f}", STAGE, one.pid, one.anonymous, one.file, one.name])
            self._file.flush()
        self._highest = None

    def close(self) -> None:
        self._write()
        with contextlib.suppress(OSError):
            self._file.close()


def refuse_foreign(path: Path) -> None:
    """An earlier watch is written over; the record of a run, or anything else, never."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        found = file.readline(200).strip()
        if found != ",".join(HEADER):
            raise MismatchError(f"{path}: not written by `milldam watch`. Name another folder with -o.")
