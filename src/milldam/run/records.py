"""The finished work of a stage: records by key, each part of a unit once, a unit's parts in order.

A record is appended once everything that it names is durable; from then on its part is never made again, in this run
or in a later one whose plan has the same unit. A record stands as long as its unit is in the plan and its files are as
they were written; what does not stand is made again.

Records are lines of a journal. A line reaches the kernel before `add` returns, so a killed process loses none. It is
synced at once when the last sync is more than a moment ago, else with the lines that follow: a power failure costs at
most what was done within that moment, which is then done again. Each line is sealed (`milldam.files`): one that was
torn by a crash, or damaged since, is passed over, and its part is made again. A task of a job array, which
works beside others on other machines, appends to a file of its own: `records@<task>.jsonl` beside `records.jsonl`.
Readers get the lines of all of them.

Memory: a byte a unit, 32 bytes a record and as much again to put them in order, an entry for each unit that is begun.
A pass over a million records takes some seconds: most of it is reading JSON.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
from milldam.run.units import KeyArray

if TYPE_CHECKING:
    from milldam.run.folder import RunFolder

SYNC_SECONDS = 0.2
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


def journal_paths(run_folder: Path, name: str) -> list[Path]:
    """The files of records of that name: the run's own, then those of array tasks."""
    stem, _, ending = name.rpartition(".")
    names = [name, *sorted(names_matching(run_folder, f"{stem}@*.{ending}"))]
    return [path for path in map(run_folder.joinpath, names) if path.exists()]


def read_records(run_folder: Path, name: str) -> Iterator[Record]:
    """The records of that name, without torn and damaged lines."""
    for path in journal_paths(run_folder, name):
        with path.open("rb") as lines:
            yield from filter(None, map(parse_record, lines))


def forget_records(run_folder: Path, name: str) -> None:
    for path in journal_paths(run_folder, name):
        path.unlink()


class Records:
    """The records of one stage: a file of the run's journal, read against the keys of the plan's units."""

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        keys: KeyArray,
        on_record: Callable[[int, Record], None] = lambda unit, record: None,
    ) -> None:
        """`on_record`: gets each record that stands, as it is read or added, with the number of its unit."""
        self.keys, self.out, self._on_record = keys, folder.out, on_record
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        stem, _, ending = name.rpartition(".")
        self._own = folder.folder / (name if folder.task is None else f"{stem}@{folder.task.label}.{ending}")
        """The file that this process appends to."""
        self._is_complete = bytearray(len(keys))
        self._begun: dict[int, Record] = {}
        """The last record of each unit that is begun and not complete."""
        self._paths, self._places = journal_paths(folder.folder, name), array("q")
        """Files of the journal; (unit, part, file, byte) of each record."""
        self.complete = 0
        """Units that are complete."""
        self.counts: Counter[str] = Counter()
        self._file: IO[bytes] | None = None
        self._synced, all_stand = 0.0, True
        for number, path in enumerate(self._paths):
            with path.open("rb") as lines:
                at = 0
                for line in lines:
                    record = parse_record(line)
                    unit = None if record is None else self._next_of(record)
                    # A record falls with the one before it in its unit.
                    if record is not None and unit is not None and self._has_files(record):
                        self._book(unit, record, number, at)
                    else:
                        all_stand = False
                    at += len(line)
        if folder.task is None and (not all_stand or len(self._paths) > 1):
            self._rewrite()
        self.reused, self.before = self.complete, self.counts.copy()
        """Units that were complete, and what was recorded, when the run began."""

    def key(self, number: int) -> str:
        return f"{int(self.keys[number]):016x}"

    def _next_of(self, record: Record) -> int | None:
        """The number of its unit; None where it is not of the plan, or not the part that is to be made next."""
        value = np.uint64(int(record.key, 16))
        place = int(np.searchsorted(self._sorted, value))
        if place == len(self._sorted) or self._sorted[place] != value:
            return None
        number = int(self._order[place])
        begun = self._begun.get(number)
        is_next = not self._is_complete[number] and record.part == (0 if begun is None else begun.part + 1)
        return number if is_next else None

    def _has_files(self, record: Record) -> bool:
        # By plain strings: pathlib takes longer than the system, and there may be millions of files.
        out = str(self.out)
        return all(has_size(f"{out}/{name}", file["bytes"]) for name, file in record.outputs.items()) and all(
            is_whole(f"{out}/{name}", file) for name, file in record.files.items()
        )

    def _book(self, number: int, record: Record, file: int, at: int) -> None:
        self._on_record(number, record)
        self._places.extend((number, record.part, file, at))
        self.counts.update(record.counts)
        if record.last:
            self._is_complete[number] = 1
            self.complete += 1
            self._begun.pop(number, None)
        else:
            self._begun[number] = record

    def _rewrite(self) -> None:
        """Keep what stands, in one file."""
        places = array("q")
        with NewFile(self._own) as new:
            for unit, part, line in self._lines(self._table()):
                places.extend((unit, part, 0, new.size))
                new.write(line if line.endswith(b"\n") else line + b"\n")
            new.commit()
        for path in self._paths:
            if path != self._own:
                path.unlink()
        self._paths, self._places = [self._own], places

    def _table(self) -> npt.NDArray[np.int64]:
        return np.array(self._places, np.int64).reshape(-1, 4)

    def _lines(self, table: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
        """(unit, part, line) of records, in the order of a table of their places."""
        with ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb", buffering=1 << 18)) for path in self._paths]
            for unit, part, file, at in map(np.ndarray.tolist, table):
                opened[file].seek(at)
                yield unit, part, opened[file].readline()

    def add(self, record: Record) -> None:
        """Record a part whose files are durable, so that it is never made again.

        A part that is recorded already is left out: its worker may have died before it reported the end of its unit.
        """
        unit = self._next_of(record)
        if unit is None:
            return
        with explain_os_errors(self._own):
            if self._file is None:
                self._file = self._own.open("a+b", buffering=0)
                if self._own not in self._paths:
                    self._paths.append(self._own)
                if self._file.tell():  # a line that was torn by a crash must not take the next one with it
                    self._file.seek(-1, os.SEEK_END)
                    if self._file.read(1) != b"\n":
                        write_whole(self._file.fileno(), b"\n")
            at = self._file.seek(0, os.SEEK_END)
            try:
                write_whole(self._file.fileno(), seal_line(record.as_json()))
            except OSError:
                self._file.close()
                self._file = None  # opened again, its last line is seen to be torn
                raise
        self._book(unit, record, self._paths.index(self._own), at)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        if self._file is not None:
            with explain_os_errors(self._own):
                os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Make every line durable; the file is opened again when something is added."""
        try:
            self._sync()
        finally:
            if self._file is not None:
                self._file.close()
            self._file = None

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
        table = self._table()
        for unit, _, line in self._lines(table[np.lexsort((table[:, 1], table[:, 0]))]):
            record = parse_record(line)
            if record is None:
                raise StoreError(
                    f"{self._own}: damaged: not all of its {len(table):,} records can be read.\n"
                    "Run the same command again: it makes what is missing."
                )
            yield unit, record


def safe_counts(run_folder: Path, name: str) -> dict[str, int]:
    """The sums of what is recorded, seen from another process."""
    done: Counter[str] = Counter(units_done=0)
    parts: set[tuple[str, int]] = set()
    for record in read_records(run_folder, name):
        if (record.key, record.part) not in parts:
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
