"""The shingles of documents that may be near-duplicates, for one unit: read again, from where the first pass kept it.

Runs in a worker. Holds one batch. A unit's two files appear whole; one without such documents is not read and has none.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from milldam.dedup.candidates import Bools, Documents, NearWork, marked_rows
from milldam.dedup.minhash import unit_name
from milldam.dedup.sketches import Sketcher, SketchWriter, sketch_paths
from milldam.memory import usage
from milldam.pipeline.documents import REPORT_SECONDS, Assignment, Reading, SetRules
from milldam.pipeline.documents import Documents as Batch
from milldam.pipeline.fingerprinting import PRINTS
from milldam.pipeline.text_cache import open_reader, print_paths
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.run.tasks import PART, PROGRESS, Report
from milldam.text.rules import CleanRules


@dataclass(frozen=True, slots=True)
class SketchTask:
    """What every worker needs to know; it pickles."""

    out: Path
    sets: tuple[SetRules, ...]
    clean: CleanRules | None
    work: NearWork
    threads: int

    def start(self) -> UnitSketcher:
        return UnitSketcher(self)


class UnitSketcher:
    """A worker's state."""

    def __init__(self, task: SketchTask) -> None:
        self._task = task
        self._sketcher = Sketcher(task.work.rules.ngram)
        self._signatures = Documents(task.work).signatures

    def __call__(self, assignment: Assignment, report: Report) -> None:
        unit = assignment.unit.index
        base, stop = self._signatures.before(unit), self._signatures.before(unit + 1)
        marked = marked_rows(self._task.work.folder, base, stop - base)
        files = {}
        with ExitStack() as stack:
            if marked.any():
                writer = stack.enter_context(SketchWriter(*sketch_paths(self._task.work.folder, unit_name(unit))))
                self._write(assignment, marked, writer, report)
                files = writer.commit()
        below = self._task.work.folder.relative_to(self._task.out)
        report(PART, Record(assignment.key, files={f"{below}/{name}": file for name, file in files.items()}))

    def _write(self, assignment: Assignment, marked: Bools, writer: SketchWriter, report: Report) -> None:
        task, unit, last = self._task, assignment.unit, int(np.flatnonzero(marked)[-1])
        assert assignment.prints is not None
        reading = Reading(
            unit,
            task.sets[unit.dataset],
            task.clean,
            rows=assignment.rows,
            spool=str(task.out / RUN_FOLDER),
            ahead=task.threads > 1,
        )
        reader = open_reader(reading, print_paths(task.out / RUN_FOLDER / PRINTS, assignment.prints)[2])
        told, read, reported = Counter[str](), 0, time.monotonic()
        for batch in reader:
            if batch.first_row > last:
                break
            self._add(batch, marked, task.sets[unit.dataset], writer)
            read += batch.bytes_read
            told["documents"] += len(batch.texts) if batch.last else 0
            told["input_bytes"] = unit.input_bytes(read)
            if time.monotonic() - reported > REPORT_SECONDS:
                report(PROGRESS, _progress(told, reader.seconds))
                reported = time.monotonic()
        told["input_bytes"] = unit.size
        report(PROGRESS, _progress(told, reader.seconds))

    def _add(self, batch: Batch, marked: Bools, rules: SetRules, writer: SketchWriter) -> None:
        if batch.cancel:
            self._sketcher.cancel()
        elif batch.part:
            if marked[batch.first_row]:
                self._sketcher.feed(batch.bytes)
                if batch.last:
                    values = self._sketcher.finish()
                    writer.add(np.array([batch.first_row]), values, np.array([len(values)]))
        elif len(batch.texts):
            rows = batch.first_row + np.flatnonzero(marked[batch.first_row : batch.first_row + len(batch.texts)])
            texts = rules.compared(batch).take(pa.array(rows - batch.first_row))
            done = 0
            for values, counts in self._sketcher.sketches(texts):
                writer.add(rows[done : done + len(counts)], values, counts)
                done += len(counts)


def _progress(counts: Counter[str], seconds: dict[str, float]) -> dict[str, object]:
    return {"counts": dict(counts), "seconds": seconds, "anonymous_bytes": usage().anonymous}
