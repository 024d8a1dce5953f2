"""Which rows of which units a dataset gives, when not all of its documents are wanted.

Documents are counted by reading them, unit by unit in plan order, no further than needed: the first hundred thousand
of a terabyte are found in the first units; a share of all (10%:20%) reads the dataset once more. Tasks of a job array
count all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from milldam.pipeline.documents import SetRules, read_documents
from milldam.run.engine import Assigned, Make, Progress, Stage
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.tasks import Workers
from milldam.sources.units import Unit

COUNT, NAME = "count", "counts.jsonl"
Rows = tuple[int, int]
_NO_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Counting:
    """A unit to the number of its documents."""

    sets: tuple[SetRules, ...]

    def load(self) -> Make:
        return self._make

    def _make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        unit, count = assigned.unit, 0
        for batch in read_documents(unit, self.sets[unit.dataset]):
            count += len(batch.texts)
        progress.add(documents=count)
        yield Record(assigned.key, counts={"documents": count})


class RowCounts:
    """The documents counted so far, and the rows that follow from them. Holds a number a unit of counted datasets."""

    def __init__(self, folder: RunFolder, sets: tuple[SetRules, ...]) -> None:
        self._sets, self._documents = sets, dict[int, int]()

        def count(unit: int, record: Record) -> None:
            self._documents[unit] = record.counts["documents"]

        self._records = Records(folder, NAME, folder.units.keys(), count)
        self._units: dict[int, list[int]] = {k: [] for k, rules in enumerate(sets) if rules.counted}
        """Dataset -> its units in order."""
        for unit in folder.units.all(Unit.from_json):
            if unit.dataset in self._units and not unit.copy:
                self._units[unit.dataset].append(unit.index)

    def stage(self, readers: Workers) -> Stage:
        load = Counting(self._sets)
        return Stage(COUNT, load, self._records, Unit.from_json, readers, todo=self._missing())

    def _missing(self) -> Iterator[int]:
        """Units to count, in plan order, until those without a gap reach the last document that is wanted."""
        counted = self._documents
        for dataset, units in self._units.items():
            rules, reached, documents = self._sets[dataset], 0, 0
            needs_all = rules.rows is not None and rules.rows.needs_total
            stop = _NO_END if needs_all else rules.wanted(_NO_END)[1]
            for unit in units:
                while reached < len(units) and units[reached] in counted:
                    documents += counted[units[reached]]
                    reached += 1
                if documents >= stop:
                    break
                if unit not in counted:
                    yield unit

    def ranges(self) -> dict[int, Rows]:
        """Unit -> the rows wanted of it, for every unit of the datasets that are counted."""
        found: dict[int, Rows] = {}
        for dataset, units in self._units.items():
            counts = [self._documents.get(unit, 0) for unit in units]
            first, stop = self._sets[dataset].wanted(sum(counts))
            before = 0
            for unit, count in zip(units, counts, strict=True):
                found[unit] = (max(0, min(count, first - before)), max(0, min(count, stop - before)))
                before += count
        return found
