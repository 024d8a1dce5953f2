"""The parts of a store that is being made: they are wanted, made by a maker process, and read as they come.

Holds the keys of the plan's units and where their records lie: some 100 bytes a unit. Nothing is prepared or tokenized
in this process. The run's records are read while the maker writes them, by position, so that forked processes do not
share a file; a record is read again when it is asked for. When the maker is replaced, the file may be: then it is read
from its begin.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import MismatchError, StoreError
from milldam.feeding.demand import Demand
from milldam.feeding.making import Making, Order
from milldam.files import has_size, naming
from milldam.loader.stores import Store, token_file
from milldam.loader.unit_order import FeedFacts, FinishedParts, Part, Parts
from milldam.prefetch import leave_if_closed
from milldam.run.folder import RUN_FOLDER, read_status
from milldam.run.records import RECORDS, Record, parse_record
from milldam.run.units import Identity, KeyArray, UnitList, mixed_keys
from milldam.stores.kinds import TOKENS
from milldam.stores.place import Folder, Place
from milldam.stores.tokens.manifest import Shard

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between looks for a part that is waited for."""
_FINISH_SECONDS = 10.0


def open_parts(order: Order) -> Parts:
    """The parts of a store that is made from text; those of the store once it is finished."""
    making = Making(order)
    feed = making.await_feed()
    return FinishedParts(Store(order.out)) if feed is None else GrowingParts(order, feed, making)


class GrowingParts:
    """See `loader.unit_order.Parts`. What is unpickled or forked only reads, unless no maker is left."""

    def __init__(self, order: Order, feed: dict[str, Any], making: Making | None = None) -> None:
        self._order, self._feed, self._out, self._run = order, feed, order.out, order.out / RUN_FOLDER
        facts = feed["facts"] | {"name": str(self._out), "rows": self._out / "rows"}
        facts |= {"splits": tuple(facts["splits"]), "dtype": np.dtype(facts["dtype"])}
        self.facts = FeedFacts(**facts)
        units = UnitList(self._run, "units")
        if len(units) != self.facts.units:
            raise MismatchError(f"{self._out}: is being redone. Open the data again.")
        # As `TokenJob` has them where nothing is sliced or deduplicated in two passes.
        self._made = MadeParts(self._run / RECORDS, mixed_keys(units.keys(), feed["index_key"]))
        self._wanted: Sequence[int] = ()
        self._finished = False
        self._waits, self._waited = 0, 0.0
        self._made.look()
        self._tokens_before, self._began = self._made.tokens, time.monotonic()
        self._own(making or Making(order))

    def _own(self, making: Making) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._demand, self._making = Demand(self._run), making

    def _locked(self) -> threading.RLock:
        """The lock of this process: a forked one has no maker, and locks that another thread held stay locked in it."""
        if os.getpid() != self._owner:
            self._own(Making(self._order))
        return self._lock

    def _tend(self) -> None:
        self._making.tend(self.facts.identity, len(self._made.places))

    def part(self, unit: int, number: int) -> Part:
        with self._locked():
            record = self._made.find(unit, number) or self._wait(unit, number)
            for name, file in record.outputs.items():
                if not has_size(self._out / name, file["bytes"]):
                    raise StoreError(f"{self._out / name}: gone, or not as it was made. Open the data again.")
            shards = [Shard(**shard) for shard in record.facts["shards"]]
            return Part({shard.split: token_file(Folder(self._out), shard) for shard in shards}, record.last)

    def _wait(self, unit: int, number: int) -> Record:
        began, pause = time.monotonic(), _FIRST_PAUSE
        self._waits += 1
        try:
            while (record := self._made.find(unit, number)) is None:
                self._demand.put(self._wanted if unit in self._wanted else (unit, *self._wanted))
                self._tend()
                leave_if_closed()
                # Other threads look meanwhile how far the feed is.
                threading.Condition(self._lock).wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._waited += time.monotonic() - began
        return record

    def want(self, units: Sequence[int]) -> None:
        with self._locked():
            self._wanted = tuple(units)
            self._made.look()
            if not self._made.complete.issuperset(units):
                self._demand.put(self._wanted)
                self._tend()

    def finished(self) -> Place | None:
        """Where the manifest is that of what is made here: until then it may be that of the input before."""
        with self._locked():
            self._made.look()
            if not self._finished and len(self._made.complete) == self.facts.units:
                manifest = self._out / TOKENS.manifest
                there = manifest.exists() and Identity.of_store(self._out, TOKENS).run_id
                self._finished = there == self.facts.identity
                if not self._finished:
                    # No loader waits for a unit any more: a maker that died at the very end would not be replaced.
                    self._tend()
        return Folder(self._out) if self._finished else None

    def stats(self) -> dict[str, float]:
        with self._locked():
            self._made.look()
            tokens = self._made.tokens - self._tokens_before
            return {
                "units": self.facts.units,
                "units_made": len(self._made.complete),
                "tokens_made": tokens,
                "tokens_made_per_second": tokens / (time.monotonic() - self._began),
                "units_ahead": len(self._made.complete.intersection(self._wanted)),
                "waits": self._waits,
                "waited_seconds": self._waited,
                "memory_bytes": read_status(self._run).get("anonymous_bytes", 0),
                "budget_bytes": self._feed["budget_bytes"],
                "workers": self._feed["workers"],
            }

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._demand.withdraw()
            self._made.look()
            # The last unit is made: what is left takes a moment.
            is_made = len(self._made.complete) == self.facts.units
            self._making.close(patience=_FINISH_SECONDS if is_made else 0.0)

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingParts, (self._order, self._feed)


class MadeParts:
    """Where the record of each part lies in the records of the run."""

    def __init__(self, path: Path, keys: KeyArray) -> None:
        self._path, self._units = path, {f"{key:016x}": unit for unit, key in enumerate(keys.tolist())}
        self._file: tuple[int, int] | None = None
        self._at = 0
        self.places: dict[tuple[int, int], int] = {}
        """(unit, part) -> where its line begins."""
        self.complete: set[int] = set()
        """Units of which every part is made."""
        self.tokens = 0

    def find(self, unit: int, part: int) -> Record | None:
        """The record of a part; None: it is not made yet."""
        self.look()
        if (unit, part) not in self.places:
            return None
        with self._path.open("rb") as lines:
            lines.seek(self.places[unit, part])
            record = parse_record(lines.readline())
        # The file may have been replaced just now.
        is_same = record is not None and (self._units.get(record.key), record.part) == (unit, part)
        return record if is_same else None

    def look(self) -> None:
        """Take note of what was written meanwhile."""
        with contextlib.suppress(FileNotFoundError), naming(self._path), self._path.open("rb") as lines:
            status = os.fstat(lines.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
                self._file, self._at, self.tokens = (status.st_dev, status.st_ino), 0, 0
                self.places.clear()
                self.complete.clear()
            lines.seek(self._at)
            for line in lines:
                if not line.endswith(b"\n"):  # it is still being written
                    return
                record, begin = parse_record(line), self._at
                self._at += len(line)
                unit = None if record is None else self._units.get(record.key)
                if record is not None and unit is not None and (unit, record.part) not in self.places:
                    self.places[unit, record.part] = begin
                    self.tokens += record.counts["tokens"]
                    if record.last:
                        self.complete.add(unit)
