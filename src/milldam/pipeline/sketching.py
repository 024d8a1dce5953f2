"""The shingles of documents that may be near-duplicates, for one unit: read again, from where the first pass kept it.

What is cut out of documents is not looked at, and what filters will drop is judged here already: it gets no shingles,
so that no document is dropped for one that does not stay. (Filters by tokens are not asked: nothing is encoded yet.)

Runs in a worker. Holds one batch. A unit's two files appear whole; one without such documents is not read and has none.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from milldam.dedup.candidates import Bools, Documents, NearWork, marked_rows
from milldam.dedup.minhash import unit_name
from milldam.dedup.sketches import Sketcher, SketchWriter, sketch_paths
from milldam.filters.judging import Filters
from milldam.memory import usage
from milldam.pipeline.documents import (
    REPORT_SECONDS,
    Assignment,
    CachedReader,
    Reading,
    SetRules,
    UnitReader,
    open_reader,
    print_paths,
)
from milldam.pipeline.documents import Documents as Batch
from milldam.pipeline.fingerprinting import PRINTS, whole
from milldam.rules import CleanRules, FilterRules
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.run.tasks import PART, PROGRESS, Report
from milldam.text.arrays import Verdicts


@dataclass(frozen=True, slots=True)
class SketchTask:
    """What every worker needs to know; it pickles."""

    out: Path
    sets: tuple[SetRules, ...]
    clean: CleanRules | None
    filters: FilterRules
    work: NearWork
    threads: int

    def start(self) -> UnitSketcher:
        return UnitSketcher(self)


class UnitSketcher:
    """A worker's state."""

    def __init__(self, task: SketchTask) -> None:
        self._task = task
        self._signatures = Documents(task.work).signatures
        Filters(task.filters)  # what rules load is there before workers are forked

    def __call__(self, assignment: Assignment, report: Report) -> None:
        task, unit = self._task, assignment.unit.index
        base, stop = self._signatures.before(unit), self._signatures.before(unit + 1)
        marked = marked_rows(task.work.folder, base, stop - base)
        files = {}
        if marked.any():
            with SketchWriter(*sketch_paths(task.work.folder, unit_name(unit))) as writer:
                _UnitWork(task, assignment, marked, writer).run(report)
                files = writer.put_in_place()
        below = task.work.folder.relative_to(task.out)
        report(PART, Record(assignment.key, files={f"{below}/{name}": file for name, file in files.items()}))


class _UnitWork:
    """One unit, read once more."""

    def __init__(self, task: SketchTask, assignment: Assignment, marked: Bools, writer: SketchWriter) -> None:
        self._task, self._assignment, self._marked, self._writer = task, assignment, marked, writer
        self._set = task.sets[assignment.unit.dataset]
        # A dataset that is a split of its own is used whole.
        self._filters = Filters(task.filters if self._set.split is None else FilterRules())
        self._sketcher = Sketcher(task.work.rules.ngram)
        self._parts: list[bytes] = []

    def run(self, report: Report) -> None:
        unit, last = self._assignment.unit, int(np.flatnonzero(self._marked)[-1])
        reader = self._open()
        told, read, reported = Counter[str](), 0, time.monotonic()
        for batch in reader:
            if batch.first_row > last:
                break
            self._add(whole(batch, self._parts))
            read += batch.bytes_read
            told["documents"] += len(batch.texts) if batch.last else 0
            told["input_bytes"] = unit.input_bytes(read)
            if time.monotonic() - reported > REPORT_SECONDS:
                report(PROGRESS, _progress(told, reader.seconds))
                reported = time.monotonic()
        told["input_bytes"] = unit.size
        report(PROGRESS, _progress(told, reader.seconds))

    def _open(self) -> UnitReader | CachedReader:
        task, given = self._task, self._assignment
        assert given.prints is not None
        spool = str(task.out / RUN_FOLDER)
        reading = Reading(given.unit, self._set, task.clean, rows=given.rows, spool=spool, ahead=task.threads > 1)
        return open_reader(reading, print_paths(task.out / RUN_FOLDER / PRINTS, given.prints)[2])

    def _add(self, batch: Batch) -> None:
        if not len(batch.texts):
            return
        rows = np.flatnonzero(self._marked[batch.first_row : batch.first_row + len(batch.texts)])
        verdicts = Verdicts(len(rows))
        self._filters.judge(batch.texts.take(pa.array(rows)), verdicts)
        done = 0
        for values, counts in self._sketcher.sketches(self._set.compared(batch).take(pa.array(rows))):
            part = slice(done, done + len(counts))
            keep = verdicts.keep[part]
            if not keep.all():
                values = values[np.repeat(keep, counts)]
            self._writer.add(batch.first_row + rows[part], values, np.where(keep, counts, 0))
            done += len(counts)


def _progress(counts: Counter[str], seconds: dict[str, float]) -> dict[str, object]:
    return {"counts": dict(counts), "seconds": seconds, "anonymous_bytes": usage().anonymous}
