"""The parts of a store that is being made: they are wanted, made by a maker process, and read as they come.

Holds the keys of the plan's units and where their records lie: some 100 bytes a unit. Nothing is prepared or tokenized
in this process. The run's records are read while the maker writes them, by position, so that forked processes do not
share a file; a record is read again when it is asked for. When the maker is replaced, the file may be: then it is read
from its begin.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import MismatchError, StoreError
from milldam.feeding.demand import Demand, Planned
from milldam.feeding.making import Making, Order
from milldam.files import has_size
from milldam.input_files import RUN_FOLDER
from milldam.loader.stores import Store, token_file
from milldam.loader.unit_order import FeedFacts, FinishedParts, Part, Parts
from milldam.prefetch import leave_if_closed
from milldam.run.folder import read_status
from milldam.run.records import RECORDS, Record, parse_record
from milldam.run.units import Identity, Keys, UnitList
from milldam.stores.kinds import TOKENS
from milldam.stores.place import Folder, Place
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import Shard

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between looks for a part that is waited for."""
_BLOCK = 1 << 20
_FINISH_SECONDS = 10.0


class GrowingParts:
    """See `loader.unit_order.Parts`. What is unpickled or forked only reads, unless nobody makes what it waits for."""

    def __init__(self, order: Order, planned: Planned, making: Making | None = None) -> None:
        self._order, self._planned = order, planned
        run_folder = order.out / RUN_FOLDER
        units = UnitList(run_folder, "units")
        if len(units) != planned.units:
            raise MismatchError(f"{order.out}: is being redone. Open the data again.")
        # As `TokenJob` has them where nothing is sliced or deduplicated in two passes.
        keys = units.keys().mixed(np.full(planned.units, planned.index_key, np.uint64))
        self._made = MadeParts(run_folder / RECORDS, keys)
        self._demand = Demand(run_folder)
        self._making = making or Making(order)
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._wanted: Sequence[int] = ()
        self._finished = False
        self._waits, self._waited = 0, 0.0
        self._made.begin()
        self._began = time.monotonic()

    @property
    def facts(self) -> FeedFacts:
        planned = self._planned
        return FeedFacts(
            name=str(self._order.out),
            identity=planned.identity,
            units=planned.units,
            splits=planned.splits,
            dtype=np.dtype(token_dtype(planned.vocab_size)),
            vocab_size=planned.vocab_size,
            rows=self._order.out / "rows",
            pad_id=planned.pad_id,
            tokenizer=planned.tokenizer,
            chat=planned.chat,
            pairs=planned.pairs,
        )

    def part(self, unit: int, number: int) -> Part:
        self._notice_fork()
        with self._lock:
            record = self._made.find(unit, number) or self._wait(unit, number)
            folder = Folder(self._order.out)
            shards = [Shard(**shard) for shard in record.facts["shards"]]
            for name, file in record.outputs.items():
                if not has_size(self._order.out / name, file["bytes"]):
                    raise StoreError(f"{self._order.out / name}: gone, or not as it was made. Open the data again.")
            return Part({shard.split: token_file(folder, shard) for shard in shards}, record.last)

    def _wait(self, unit: int, number: int) -> Record:
        if unit not in self._wanted:
            self._demand.put((unit, *self._wanted))
        began, pause = time.monotonic(), _FIRST_PAUSE
        self._waits += 1
        try:
            while (record := self._made.find(unit, number)) is None:
                if not self._demand.is_known():
                    self._demand.renew()
                self._making.tend(self._planned.identity, len(self._made))
                leave_if_closed()
                # Others look meanwhile how far the feed is.
                threading.Condition(self._lock).wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._waited += time.monotonic() - began
        return record

    def want(self, units: Sequence[int]) -> None:
        self._notice_fork()
        with self._lock:
            self._wanted = tuple(units)
            self._made.look()
            if all(self._made.is_complete(unit) for unit in units):
                return
            self._demand.put(self._wanted)
            self._making.tend(self._planned.identity, len(self._made))

    def finished(self) -> Place | None:
        self._notice_fork()
        with self._lock:
            self._finished = self._finished or self._is_finished()
        return Folder(self._order.out) if self._finished else None

    def _is_finished(self) -> bool:
        """Whether the manifest is that of what is made here: until then it may be that of the input before."""
        self._made.look()
        if self._made.units < self._planned.units:
            return False
        manifest = self._order.out / TOKENS.manifest
        if manifest.exists() and Identity.of_store(self._order.out, TOKENS).run_id == self._planned.identity:
            return True
        # Nobody waits for a unit any more: a maker that died at the very end would not be replaced.
        self._making.tend(self._planned.identity, len(self._made))
        return False

    def stats(self) -> dict[str, float]:
        self._notice_fork()
        with self._lock:
            self._made.look()
            status = read_status(self._order.out / RUN_FOLDER)
            seconds = time.monotonic() - self._began
            return {
                "units": self._planned.units,
                "units_made": self._made.units,
                "tokens_made": self._made.tokens,
                "tokens_made_per_second": self._made.tokens / seconds,
                "units_ahead": sum(self._made.is_complete(unit) for unit in self._wanted),
                "waits": self._waits,
                "waited_seconds": self._waited,
                "memory_bytes": status.get("anonymous_bytes", 0),
                "budget_bytes": self._planned.budget_bytes,
                "workers": self._planned.workers,
            }

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._demand.withdraw()
            self._made.look()
            # The last unit is made: what is left takes a moment.
            self._making.close(patience=_FINISH_SECONDS if self._made.units == self._planned.units else 0.0)

    def _notice_fork(self) -> None:
        """A forked process has no maker, and locks that another thread held stay locked in it."""
        if os.getpid() != self._owner:
            self._owner, self._lock = os.getpid(), threading.RLock()
            self._demand, self._making = Demand(self._order.out / RUN_FOLDER), Making(self._order)

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingParts, (self._order, self._planned)


def open_parts(order: Order) -> Parts:
    """The parts of a store that is made from text: where it is finished, those that are there."""
    making = Making(order)
    planned = making.await_planned()
    return FinishedParts(Store(order.out)) if planned is None else GrowingParts(order, planned, making)


# ---- the records of the run ----


class MadeParts:
    """Where the record of each part lies."""

    def __init__(self, path: Path, keys: Keys) -> None:
        self._path, self._keys = path, keys
        self._file: tuple[int, int] | None = None
        self._at, self._rest = 0, b""
        self._places: dict[tuple[int, int], int] = {}
        self._complete: set[int] = set()
        self._counts_from: float = math.inf
        self.tokens = 0
        """Made since `begin`."""

    def find(self, unit: int, part: int) -> Record | None:
        """The record of a part; None: it is not made yet."""
        self.look()
        place = self._places.get((unit, part))
        record = None if place is None else self._read(place)
        # The file may have been replaced just now.
        return record if record is not None and (record.key, record.part) == (self._keys[unit], part) else None

    def begin(self) -> None:
        """Count tokens from here on."""
        self.look()
        self._counts_from = self._at

    def is_complete(self, unit: int) -> bool:
        return unit in self._complete

    @property
    def units(self) -> int:
        """Units that are complete."""
        return len(self._complete)

    def __len__(self) -> int:
        """Parts that are made."""
        return len(self._places)

    def look(self) -> None:
        """Take note of what was written meanwhile."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._at:
                if self._file is not None:  # what was counted is in it again
                    self._counts_from = found.st_size
                self._file, self._at, self._rest = (found.st_dev, found.st_ino), 0, b""
                self._places.clear()
                self._complete.clear()
            while block := os.pread(descriptor, _BLOCK, self._at):
                self._take(block)
        finally:
            os.close(descriptor)

    def _take(self, block: bytes) -> None:
        begin = self._at - len(self._rest)
        lines = (self._rest + block).split(b"\n")
        # The last one is empty, or still being written.
        self._at, self._rest = self._at + len(block), lines.pop()
        for line in lines:
            record = parse_record(line)
            unit = None if record is None else self._keys.number_of(record.key)
            if record is not None and unit is not None and (unit, record.part) not in self._places:
                self._places[unit, record.part] = begin
                if record.last:
                    self._complete.add(unit)
                if begin >= self._counts_from:
                    self.tokens += record.counts["tokens"]
            begin += len(line) + 1

    def _read(self, place: int) -> Record | None:
        with self._path.open("rb") as lines:
            lines.seek(place)
            return parse_record(lines.readline())
