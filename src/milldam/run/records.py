"""What is done of a stage: records by key, each part of a unit once, a unit's parts in order.

A record is appended after everything that it names is durable; from then on its part is never made again, in this run
or in a later one whose plan has the same unit. A record stands as long as its unit is in the plan and its files are as
they were written; what does not stand is made again.

Memory: a byte a unit, an entry for each unit that is begun; to put records in order, 32 bytes each and as much again
for a moment. A pass over a million records takes some seconds: most of it is reading JSON.

Records are lines of a journal. A line reaches the kernel before `append` returns, so that a killed process loses none.
It is synced to disk at once when the last sync is more than a moment ago, else with the lines that follow: a power
failure costs at most what was done within that moment, which is then done again. A line says itself whether it is whole
(`milldam.files`): what was torn by a crash, or damaged since, is passed over, and what it told of is done again.

A task of a job array, which works beside others on other machines, appends to files of its own: `records@<task>.jsonl`
beside `records.jsonl`. Whoever reads gets the lines of all of them.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from milldam.errors import StoreError
from milldam.files import (
    NewFile,
    ended,
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
    """The appended files of a folder; `task`: whose lines these are, when others append too."""

    def __init__(self, folder: Path, task: str | None = None) -> None:
        self.folder, self._task = folder, task
        self._open: dict[str, IO[bytes]] = {}
        self._unsynced: set[str] = set()
        self._synced = 0.0

    def append(self, name: str, value: dict[str, Any]) -> None:
        line = seal_line(value)
        with explain_os_errors(self.folder / name):
            file = self._open.get(name) or self._open_file(name)
            try:
                write_whole(file.fileno(), line)
            except OSError:
                # Opened again, it is seen not to end a line.
                self._open.pop(name).close()
                self._unsynced.discard(name)
                raise
            self._unsynced.add(name)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()

    def _open_file(self, name: str) -> IO[bytes]:
        path = self.folder / (name if self._task is None else _of_task(name, self._task))
        file = path.open("a+b", buffering=0)
        self._open[name] = file
        # A line that was torn by a crash must not take the next one with it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                write_whole(file.fileno(), b"\n")
        return file

    def sync(self) -> None:
        """Make every line durable."""
        with explain_os_errors(self.folder):
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

    def paths(self, name: str) -> list[Path]:
        """The files of that name: of who works alone, then those of tasks."""
        tasks = sorted(names_matching(self.folder, _of_task(name, "*")))
        return [self.folder / found for found in (name, *tasks) if (self.folder / found).exists()]

    def forget(self, name: str) -> None:
        """Remove the files of that name."""
        self.close()
        for path in self.paths(name):
            path.unlink()

    def rewrite(self, name: str, lines: Iterable[bytes]) -> None:
        """Have these lines, and no others, in one file."""
        self.close()
        before, path = self.paths(name), self.folder / name
        with NewFile(path) as new:
            for line in lines:
                new.write(ended(line))
            new.commit()
        for other in before:
            if other != path:
                other.unlink()

    def lines(self, name: str) -> Iterator[bytes]:
        """Every line, also one that was torn or damaged."""
        for path in self.paths(name):
            with path.open("rb") as lines:
                yield from lines

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """What was appended; a torn or damaged line is left out."""
        return (value for line in self.lines(name) if (value := unseal_line(line)) is not None)


def _of_task(name: str, task: str) -> str:
    """
    >>> _of_task("records.jsonl", "tokenize-3-of-8")
    'records@tokenize-3-of-8.jsonl'
    """
    stem, _, ending = name.rpartition(".")
    return f"{stem}@{task}.{ending}"


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
    """What the job reads again: hashes are compared too."""
    counts: dict[str, int] = field(default_factory=dict)
    """What is safe with it: documents, tokens, rows."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the job wants to know of it."""

    def as_json(self) -> dict[str, Any]:
        # Not by asdict, which copies all that is in it.
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(one.name for one in fields(Record))


def parse_record(line: bytes) -> Record | None:
    """A record, unless its line is not as it was written."""
    value = unseal_line(line)
    return None if value is None else Record(**value)


class Records:
    """The records of one stage: a file of the run's journal, read against the keys of the plan's units."""

    def __init__(self, journal: Journal, name: str, out: Path, keys: Keys) -> None:
        self.keys, self.out = keys, out
        self._journal, self._name, self._out = journal, name, str(out)
        self._begin()
        is_in_one_file = len(journal.paths(name)) <= 1
        dropped = sum(not stands for _, stands in self._book_standing())
        if not journal.is_shared and (dropped or not is_in_one_file):
            # Who works alone leaves none but the records that stand, in one file.
            self._begin()
            journal.rewrite(name, (line for line, stands in self._book_standing() if stands))
        self.reused, self.before = self.complete, self.counts.copy()
        """Units that were complete, and what was recorded, when the run began."""

    def _begin(self) -> None:
        self._is_complete = bytearray(len(self.keys))
        self._partial: dict[int, Record] = {}
        """The last record of each unit that is begun and not complete."""
        self.complete = self._booked = 0
        """Units that are complete; records."""
        self.counts: Counter[str] = Counter()
        """Of what is recorded."""

    def _book_standing(self) -> Iterator[tuple[bytes, bool]]:
        """Every line, and whether its record stands. With a record falls what follows it in its unit."""
        for line in self._journal.lines(self._name):
            record = parse_record(line)
            stands = record is not None and self._is_next(record) and self.holds(record)
            if record is not None and stands:
                self._book(record)
            yield line, stands

    def _is_next(self, record: Record) -> bool:
        """Whether it is of the plan, and of the part of its unit that is to be made next."""
        number = self.keys.number_of(record.key)
        if number is None or self._is_complete[number]:
            return False
        begun = self._partial.get(number)
        return record.part == (0 if begun is None else begun.part + 1)

    def holds(self, record: Record) -> bool:
        """Whether the files of a record are as they were written."""
        # By plain strings: pathlib takes longer than the system, and there may be millions of files.
        sizes = ((f"{self._out}/{name}", file["bytes"]) for name, file in record.outputs.items())
        return all(has_size(*one) for one in sizes) and all(
            is_whole(f"{self._out}/{name}", file) for name, file in record.files.items()
        )

    def _book(self, record: Record) -> None:
        number = self.keys.number_of(record.key)
        assert number is not None
        self._booked += 1
        self.counts.update(record.counts)
        if record.last:
            self._is_complete[number] = 1
            self.complete += 1
            self._partial.pop(number, None)
        else:
            self._partial[number] = record

    def add(self, record: Record) -> None:
        """Record a part whose files are durable: from here on it is never made again.

        Once, though a worker that died before it could say that it is done is made up for by another.
        """
        if self._is_next(record):
            self._journal.append(self._name, record.as_json())
            self._book(record)

    def __contains__(self, number: int) -> bool:
        """Whether a unit is complete."""
        return bool(self._is_complete[number])

    def begun(self, number: int) -> Record | None:
        """The last record of a unit that is begun and not complete."""
        return self._partial.get(number)

    def pending(self) -> Iterator[int]:
        """Every unit that is not complete, in plan order."""
        return (number for number in range(len(self.keys)) if not self._is_complete[number])

    def pending_bytes(self, sizes: npt.NDArray[np.int64]) -> int:
        """Input of the units that are not complete."""
        return int(sizes[np.frombuffer(self._is_complete, np.uint8) == 0].sum())

    def all(self) -> Iterator[Record]:
        """In the order they were written."""
        return (record for line in self._journal.lines(self._name) if (record := parse_record(line)) is not None)

    def in_plan_order(self) -> Iterator[tuple[int, Record]]:
        """The records of the plan's units with their numbers, by unit and part, whatever the order of work.

        Raises StoreError when fewer are there than were recorded.
        """
        paths = self._journal.paths(self._name)
        table = self._places(paths)
        there = len(table) - int((table[1:, 2:] == table[:-1, 2:]).all(axis=1).sum())
        if there < self._booked:
            raise StoreError(
                f"{self._journal.folder / self._name}: damaged: {there:,} of {self._booked:,} records can be read.\n"
                "Run the same command again: it makes what is missing."
            )
        with ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb", buffering=1 << 18)) for path in paths]
            done = (-1, -1)
            for row in table:
                file, at, unit, part = row.tolist()
                if (unit, part) == done:
                    continue  # made twice, by tasks that were cut in different ways: the same bytes
                opened[file].seek(at)
                record = parse_record(opened[file].readline())
                if record is not None:
                    done = unit, part
                    yield unit, record

    def _places(self, paths: list[Path]) -> npt.NDArray[np.int64]:
        """(file, byte, unit, part) of every record, in plan order."""
        places = array("q")
        for file, path in enumerate(paths):
            with path.open("rb") as lines:
                at = 0
                for line in lines:
                    record = parse_record(line)
                    number = None if record is None else self.keys.number_of(record.key)
                    if record is not None and number is not None:
                        places.extend((file, at, number, record.part))
                    at += len(line)
        table = np.frombuffer(places, np.int64).reshape(-1, 4)
        return table[np.lexsort((table[:, 3], table[:, 2]))]


def safe_counts(journal: Journal, name: str) -> dict[str, int]:
    """What is recorded as done, seen from another process."""
    done: Counter[str] = Counter(units_done=0)
    seen: set[tuple[str, int]] = set()
    for line in journal.lines(name):
        record = parse_record(line)
        if record is not None and (record.key, record.part) not in seen:
            seen.add((record.key, record.part))
            done.update(record.counts)
            done["units_done"] += record.last
    return dict(done)


def sweep(folder: Path, patterns: Iterable[str], live: Iterable[str]) -> None:
    """Remove the files of a folder that match a pattern and that nobody names. 8 bytes a live name."""
    known = np.sort(np.fromiter((xxh3_64_intdigest(name.encode()) for name in live), np.uint64))
    for name in list(names_matching(folder, *patterns)):
        digest = np.uint64(xxh3_64_intdigest(name.encode()))
        place = int(np.searchsorted(known, digest))
        if place == len(known) or known[place] != digest:
            (folder / name).unlink(missing_ok=True)
