"""Which rows of which units a dataset gives, when not all of its documents are wanted.

Documents are counted by reading them, unit by unit in plan order, no further than needed: the first hundred thousand
of a terabyte are found in the first units; a share of all (10%:20%) reads the dataset once more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from milldam.pipeline.documents import Reading, SetRules, UnitReader
from milldam.pipeline.preparing import Source, wanted_rows
from milldam.run.engine import Assigned, Make, Telling
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.sources.units import Unit

NAME = "counts.jsonl"
_HEAR_SECONDS = 5.0
Rows = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CountLoad:
    """Counts the documents of units."""

    sets: tuple[SetRules, ...]
    spool: str

    def load(self) -> Make:
        return self._count

    def _count(self, assigned: Assigned, telling: Telling) -> Iterator[Record]:
        unit = assigned.unit
        count = 0
        for documents in UnitReader(Reading(unit, self.sets[unit.dataset], None, spool=self.spool)):
            count += len(documents.texts) if documents.last else 0
        telling.add(documents=count)
        yield Record(assigned.key, counts={"documents": count})


class RowCounts(Records):
    """What has been counted, and what follows from it. Holds a number per unit of the datasets that are counted."""

    def __init__(self, folder: RunFolder, sources: tuple[Source, ...]) -> None:
        self._folder, self._sources = folder, sources
        self._units: dict[int, list[int]] = {k: [] for k, source in enumerate(sources) if source.counted}
        """Dataset -> its units in order."""
        for unit in folder.units.all(Unit.from_json):
            if unit.dataset in self._units and not unit.copy:
                self._units[unit.dataset].append(unit.index)
        super().__init__(folder.journal, NAME, folder.out, folder.units.keys())
        self._counts: dict[int, int] = {}
        """Unit -> its documents."""
        self._learn(self.all())
        self._heard = time.monotonic()
        self._reached = dict.fromkeys(self._units, (0, 0))
        """Dataset -> how many of its units are counted without a gap, and their documents."""

    def _learn(self, records: Iterable[Record]) -> None:
        for record in records:
            number = self.keys.number_of(record.key)
            if number is not None:
                self._counts[number] = record.counts["documents"]

    def add(self, record: Record) -> None:
        super().add(record)
        self._learn([record])

    def missing(self) -> Iterator[int]:
        """Units to count, in plan order, as long as more are needed."""
        for dataset, units in self._units.items():
            for unit in units:
                self._hear_of_others()
                if self._is_settled(dataset):
                    break
                if unit not in self._counts:
                    yield unit

    def _hear_of_others(self) -> None:
        """An array task alone, which leaves units out, would never know that enough are counted."""
        if self._folder.task is not None and time.monotonic() - self._heard > _HEAR_SECONDS:
            self._learn(self.all())
            self._heard = time.monotonic()

    def _is_settled(self, dataset: int) -> bool:
        """Whether enough units are counted, without a gap, to reach the last document wanted."""
        stop = _known_stop(self._sources[dataset])
        units, (position, documents) = self._units[dataset], self._reached[dataset]
        while position < len(units) and units[position] in self._counts:
            documents += self._counts[units[position]]
            position += 1
        self._reached[dataset] = (position, documents)
        return stop is not None and documents >= stop

    def ranges(self) -> dict[int, Rows]:
        """Unit -> the rows wanted of it, for every unit of the datasets that are counted."""
        found: dict[int, Rows] = {}
        for dataset, units in self._units.items():
            total = sum(self._counts.get(unit, 0) for unit in units)
            first, stop = wanted_rows(self._sources[dataset], total)
            before = 0
            for unit in units:
                count = self._counts.get(unit, 0)
                found[unit] = (max(0, min(count, first - before)), max(0, min(count, stop - before)))
                before += count
        return found


def _known_stop(source: Source) -> int | None:
    """The number of documents to count to; None when all have to be counted."""
    if source.rows is not None and source.rows.needs_total:
        return None
    _, stop = wanted_rows(source, 2**62)
    return stop if stop < 2**62 else None
