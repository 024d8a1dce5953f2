"""Exact dedup in a feed: a document is dropped when an equal one came before it in the order of the plan.

Units are fingerprinted in plan order, ahead of what loaders want; each is decided on when all before it are, and is
then tokenized as any other. So its drops are those that `milldam preprocess` finds of all units, and so are its keys:
what is made here is not made again when the ordinary job finishes the store.

Decided in the maker's own process: the hashes lie on disk (`dedup/earlier.py`). They are gone through again when a
maker is started, which takes some microseconds for each document that was fingerprinted before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from milldam.dedup.drops import EQUAL, EXACT, DropWriter, drop_file_name, unit_folder
from milldam.dedup.earlier import EarlierHashes
from milldam.dedup.exact import ROW_BITS, Positions, write_drops
from milldam.feeding.job import DemandedUnits
from milldam.pipeline.deduplicating import Deduplication, drop_digests
from milldam.pipeline.documents import Assignment, print_paths
from milldam.pipeline.fingerprinting import PRINTS, FingerprintTask
from milldam.pipeline.tokenizing import TokenizeTask
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.tasks import NothingYetError, Report
from milldam.run.units import Keys, KnownKeys
from milldam.sources.units import Unit

if TYPE_CHECKING:
    from milldam.stores.tokens.format import Int64s

FINGERPRINT_BYTES = 32 << 20
"""What a worker holds while it fingerprints, beside its encoder."""
_ROW = (1 << ROW_BITS) - 1


@dataclass(frozen=True, slots=True)
class InOrderTask:
    """Fingerprints a unit, or tokenizes one that is decided on; it pickles."""

    fingerprint: FingerprintTask
    tokenize: TokenizeTask

    @classmethod
    def of(cls, fingerprint: FingerprintTask, tokenize: TokenizeTask, drops: Path) -> InOrderTask:
        """`drops`: where those of each unit are put."""
        selection = replace(tokenize.selection, drops=drops)
        share = tokenize.share_bytes - FINGERPRINT_BYTES
        return cls(fingerprint, replace(tokenize, selection=selection, share_bytes=share))

    def start(self) -> Callable[[Assignment, Report], None]:
        fingerprint, tokenize = self.fingerprint.start(), self.tokenize.start()

        def work(assignment: Assignment, report: Report) -> None:
            (fingerprint if assignment.prints is None else tokenize)(assignment, report)

        return work


class Deciding:
    """Drop sets and keys of units, one after the other, as their fingerprints come."""

    def __init__(self, folder: RunFolder, dedup: Deduplication, prints: Records, keys: KnownKeys) -> None:
        """`keys`: those of units with their drops, which are found here; none is known yet."""
        self._folder, self._base, self._prints, self.keys = folder, dedup.keys, prints, keys
        self.drops, runs = dedup.folder / "units", dedup.folder / "earlier"
        for place in (self.drops, runs):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        self._earlier, self._exempt_below = EarlierHashes(runs), dedup.exempt_below
        self._tells_all = dedup.tells_all
        self._verdicts = np.zeros(len(dedup.keys), np.uint64)
        keys.begin()
        self.go_on()

    def go_on(self) -> None:
        """Decide on the units whose turn it is."""
        while self.keys.known < len(self.keys):
            number = self.keys.known
            unit = self._folder.units.at(number, Unit.from_json)
            if unit.origin not in self._prints:
                return
            if not unit.copy:
                self._decide(number)
            verdict = self._verdicts[unit.origin : unit.origin + 1]
            if self._tells_all:
                verdict = verdict + np.uint64(number)
            self.keys.append(self._base.mixed_one(number, verdict))

    def _decide(self, number: int) -> None:
        hashes = print_paths(self._folder.folder / PRINTS, self._base[number])[0]
        position, first = self._earlier.decide(number, hashes)
        if number < self._exempt_below or not len(position):
            return
        place = unit_folder(self.drops, number)
        place.mkdir()
        with DropWriter(place / drop_file_name(EXACT, 0)) as writer:
            write_drops(writer, position, first)
            writer.commit()
        told = _told(position, first) if self._tells_all else [position & _ROW]
        self._verdicts[number] = drop_digests(EXACT, told).sum(dtype=np.uint64)


def _told(position: Positions, first: Positions) -> list[Int64s]:
    """All that a drop file says of dropped documents of a unit."""
    return [position & _ROW, first >> ROW_BITS, first & _ROW, np.full(len(first), EQUAL)]


class UnitsInOrder(DemandedUnits):
    """Units that are decided on; else the next one to be fingerprinted, up to the last that is wanted. A number from
    the number of units on: fingerprint the one that is so many further back."""

    def __init__(self, folder: RunFolder, deciding: Deciding, prints: Records, records: Records) -> None:
        super().__init__(folder, records)
        self._deciding, self._prints = deciding, prints
        self._next = 0

    def is_ready(self, unit: int) -> bool:
        return unit < self._deciding.keys.known

    def meanwhile(self, wanted: list[int]) -> int:
        while self._next <= max(wanted, default=-1):
            self._next += 1
            if self._is_to_print(self._next - 1):
                return len(self._records.keys) + self._next - 1
        raise NothingYetError

    def _is_to_print(self, number: int) -> bool:
        unit = self._folder.units.at(number, Unit.from_json)
        return not unit.copy and number not in self._prints


@dataclass(frozen=True, slots=True)
class InOrder:
    """What a stage needs that works on units in order."""

    keys: Keys
    """Of fingerprints."""
    prints: Records
    records: Records
    deciding: Deciding

    @classmethod
    def of(cls, folder: RunFolder, dedup: Deduplication, keys: KnownKeys, names: tuple[str, str]) -> InOrder:
        """`names`: of the records of fingerprints, and of tokens."""
        dedup.provide_folders()
        prints = Records(folder.journal, names[0], folder.out, dedup.keys)
        # Before the records of tokens are read: what has no key is none.
        deciding = Deciding(folder, dedup, prints, keys)
        return cls(dedup.keys, prints, Records(folder.journal, names[1], folder.out, deciding.keys), deciding)

    def keep(self, record: Record) -> None:
        if self.keys.number_of(record.key) is None:
            self.records.add(record)
        else:
            self.prints.add(record)
            self.deciding.go_on()

    def number_of(self, record: Record) -> int | None:
        number = self.keys.number_of(record.key)
        return self.records.keys.number_of(record.key) if number is None else number
