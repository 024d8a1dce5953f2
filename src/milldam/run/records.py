"""The finished work of a stage: records by key, each part of a unit once, a unit's parts in order.

A record is appended once everything that it names is durable; from then on its part is never made again, in this run
or in a later one whose plan has the same unit. A record stands as long as its unit is in the plan and its files are as
they were written; what does not stand is made again.

Records are lines of a journal. A line reaches the kernel before `append` returns, so a killed process loses none. It is
synced to disk at once when the last sync is more than a moment ago, else with the lines that follow: a power failure
costs at most what was done within that moment, which is then done again. Each line is sealed (`milldam.files`): one
that was torn by a crash, or damaged since, is passed over, and its part is made again. A task of a job array, which
works beside others on other machines, appends to a file of its own: `records@<task>.jsonl` beside `records.jsonl`.
Readers get the lines of all of them.

Memory: a byte a unit, an entry for each unit that is begun; to put records in order, 32 bytes each and as much again
for a moment. A pass over a million records takes some seconds: most of it is reading JSON.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from milldam.errors import StoreError
from milldam.files import (
    NewFile,
    explain_os_errors,
    has_size,
    is_whole,
    names_matching,
    seal_line,
    unseal_line,
    write_whole,
)
from milldam.run.units import Keys

SYNC_SECONDS = 0.2


class Journal:
    """The appended files of a folder. `task`: the label of the array task whose lines these are."""

    def __init__(self, folder: Path, task: str | None = None) -> None:
        self.folder, self.task = folder, task
        self._open: dict[str, IO[bytes]] = {}
        self._unsynced: set[str] = set()
        self._synced = 0.0

    def append(self, name: str, value: dict[str, Any]) -> None:
        stem, _, ending = name.rpartition(".")
        with explain_os_errors(self.folder / name):
            file = self._open.get(name)
            if file is None:
                path = self.folder / (name if self.task is None else f"{stem}@{self.task}.{ending}")
                file = self._open[name] = path.open("a+b", buffering=0)
                if file.tell():  # a line that was torn by a crash must not take the next one with it
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        write_whole(file.fileno(), b"\n")
            try:
                write_whole(file.fileno(), seal_line(value))
            except OSError:
                self._open.pop(name).close()  # opened again, its last line is seen to be torn
                self._unsynced.discard(name)
                raise
            self._unsynced.add(name)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()

    def sync(self) -> None:
        """Make every line durable."""
        with explain_os_errors(self.folder):
            for name in self._unsynced:
                os.fsync(self._open[name].fileno())
        self._unsynced.clear()
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the files; they may be replaced now, and are opened again when something is appended."""
        try:
            self.sync()
        finally:
            for file in self._open.values():
                file.close()
            self._open.clear()
            self._unsynced.clear()

    def paths(self, name: str) -> list[Path]:
        """The files of that name: the run's own, then those of array tasks."""
        stem, _, ending = name.rpartition(".")
        names = [name, *sorted(names_matching(self.folder, f"{stem}@*.{ending}"))]
        return [path for path in map(self.folder.joinpath, names) if path.exists()]

    def forget(self, name: str) -> None:
        """Remove the files of that name."""
        self.close()
        for path in self.paths(name):
            path.unlink()

    def rewrite(self, name: str, lines: Iterable[bytes]) -> None:
        """Replace the files of that name by one with these lines."""
        self.close()
        before, path = self.paths(name), self.folder / name
        with NewFile(path) as new:
            for line in lines:
                new.write(line if line.endswith(b"\n") else line + b"\n")
            new.commit()
        for other in before:
            if other != path:
                other.unlink()

    def lines(self, name: str) -> Iterator[bytes]:
        """Every line, including torn and damaged ones."""
        for path in self.paths(name):
            with path.open("rb") as lines:
                yield from lines

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """The appended values, without torn and damaged lines."""
        return (value for line in self.lines(name) if (value := unseal_line(line)) is not None)


RECORDS = "records.jsonl"
"""Of the stage that makes the result."""
Files = dict[str, dict[str, Any]]
"""Size and hash of files, by their paths below the output folder."""


@dataclass(frozen=True, slots=True)
class Record:
    """A finished part of a unit."""

    key: str
    part: int = 0
    last: bool = True
    """The unit is complete."""
    outputs: Files = field(default_factory=dict)
    """Files of the result: their sizes are compared when a run resumes, their hashes by `milldam verify`."""
    files: Files = field(default_factory=dict)
    """Files that the job reads again: hashes are compared too."""
    counts: dict[str, int] = field(default_factory=dict)
    """Documents, tokens, rows that are safe with it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that only the job understands."""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Record.__slots__}  # not by asdict, which copies


def parse_record(line: bytes) -> Record | None:
    """The record of a line, or None if the line is torn or damaged."""
    value = unseal_line(line)
    return None if value is None else Record(**value)


class Records:
    """The records of one stage: a file of the run's journal, read against the keys of the plan's units."""

    def __init__(self, journal: Journal, name: str, out: Path, keys: Keys) -> None:
        self.keys, self.out = keys, out
        self._journal, self._name = journal, name
        self._is_complete = bytearray(len(keys))
        self._begun: dict[int, Record] = {}
        """The last record of each unit that is begun and not complete."""
        self.complete = self._booked = 0
        """Units that are complete; records."""
        self.counts: Counter[str] = Counter()
        stands = bytearray()  # a record falls with the one before it in its unit
        for record in map(parse_record, journal.lines(name)):
            stands.append(record is not None and self._is_next(record) and self._has_files(record))
            if record is not None and stands[-1]:
                self._book(record)
        if journal.task is None and (not all(stands) or len(journal.paths(name)) > 1):
            journal.rewrite(name, compress(journal.lines(name), stands))
        self.reused, self.before = self.complete, self.counts.copy()
        """Units that were complete, and what was recorded, when the run began."""

    def _is_next(self, record: Record) -> bool:
        """Whether it is of the plan, and of the part of its unit that is to be made next."""
        number = self.keys.number_of(record.key)
        if number is None or self._is_complete[number]:
            return False
        begun = self._begun.get(number)
        return record.part == (0 if begun is None else begun.part + 1)

    def _has_files(self, record: Record) -> bool:
        # By plain strings: pathlib takes longer than the system, and there may be millions of files.
        out = str(self.out)
        return all(has_size(f"{out}/{name}", file["bytes"]) for name, file in record.outputs.items()) and all(
            is_whole(f"{out}/{name}", file) for name, file in record.files.items()
        )

    def _book(self, record: Record) -> None:
        number = self.keys.number_of(record.key)
        assert number is not None
        self._booked += 1
        self.counts.update(record.counts)
        if record.last:
            self._is_complete[number] = 1
            self.complete += 1
            self._begun.pop(number, None)
        else:
            self._begun[number] = record

    def add(self, record: Record) -> None:
        """Record a part whose files are durable, so that it is never made again.

        A part that is recorded already is left out: its worker may have died before it reported the end of its unit.
        """
        if self._is_next(record):
            self._journal.append(self._name, record.as_json())
            self._book(record)

    def __contains__(self, number: int) -> bool:
        """Whether a unit is complete."""
        return bool(self._is_complete[number])

    def begun(self, number: int) -> Record | None:
        """The last record of a unit that is begun and not complete."""
        return self._begun.get(number)

    def pending(self) -> Iterator[int]:
        """Every unit that is not complete, in plan order."""
        return (number for number in range(len(self.keys)) if not self._is_complete[number])

    def pending_bytes(self, sizes: npt.NDArray[np.int64]) -> int:
        """Input of the units that are not complete."""
        return int(sizes[np.frombuffer(self._is_complete, np.uint8) == 0].sum())

    def in_plan_order(self) -> Iterator[tuple[int, Record]]:
        """The records of the plan's units with their numbers, by unit and part, whatever the order of work.

        Raises StoreError when fewer can be read than were recorded.
        """
        paths, places = self._journal.paths(self._name), array("q")
        for file, path in enumerate(paths):
            with path.open("rb") as lines:
                at = 0
                for line in lines:
                    record = parse_record(line)
                    number = None if record is None else self.keys.number_of(record.key)
                    if record is not None and number is not None:
                        places.extend((number, record.part, file, at))
                    at += len(line)
        table = np.frombuffer(places, np.int64).reshape(-1, 4)  # (unit, part, file, byte)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        # Tasks that were cut in different ways may have made a part twice, with the same bytes.
        is_first = np.concatenate(([True], (table[1:, :2] != table[:-1, :2]).any(axis=1)))[: len(table)]
        if is_first.sum() < self._booked:
            raise StoreError(
                f"{self._journal.folder / self._name}: damaged: {is_first.sum():,} of {self._booked:,} records can be "
                "read.\nRun the same command again: it makes what is missing."
            )
        with ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb", buffering=1 << 18)) for path in paths]
            for unit, _, file, at in map(np.ndarray.tolist, table[is_first]):
                opened[file].seek(at)
                if (record := parse_record(opened[file].readline())) is not None:
                    yield unit, record


def safe_counts(journal: Journal, name: str) -> dict[str, int]:
    """The sums of what is recorded, seen from another process."""
    done: Counter[str] = Counter(units_done=0)
    parts: set[tuple[str, int]] = set()
    for record in map(parse_record, journal.lines(name)):
        if record is not None and (record.key, record.part) not in parts:
            parts.add((record.key, record.part))
            done.update(record.counts)
            done["units_done"] += record.last
    return dict(done)


def sweep(folder: Path, patterns: Iterable[str], live: Iterable[str]) -> None:
    """Remove the files of a folder that match a pattern and are not in `live`. 8 bytes a live name."""
    known = np.sort(np.fromiter((xxh3_64_intdigest(name.encode()) for name in live), np.uint64))
    for name in list(names_matching(folder, *patterns)):
        digest = np.uint64(xxh3_64_intdigest(name.encode()))
        place = int(np.searchsorted(known, digest))
        if place == len(known) or known[place] != digest:
            (folder / name).unlink(missing_ok=True)
