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
from milldam.feeding.demand import Demand, Planned
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
    planned = making.await_planned()
    return FinishedParts(Store(order.out)) if planned is None else GrowingParts(order, planned, making)


class GrowingParts:
    """See `loader.unit_order.Parts`. What is unpickled or forked only reads, unless no maker is left."""

    def __init__(self, order: Order, planned: Planned, making: Making | None = None) -> None:
        self._order, self._planned, self._run = order, planned, order.out / RUN_FOLDER
        units = UnitList(self._run, "units")
        if len(units) != planned.units:
            raise MismatchError(f"{order.out}: is being redone. Open the data again.")
        # As `TokenJob` has them where nothing is sliced or deduplicated in two passes.
        keys = mixed_keys(units.keys(), planned.index_key)
        self._made = MadeParts(self._run / RECORDS, keys)
        self._demand, self._making = Demand(self._run), making or Making(order)
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._wanted: Sequence[int] = ()
        self._finished = False
        self._waits, self._waited = 0, 0.0
        self._made.look()
        self._tokens_before, self._began = self._made.tokens, time.monotonic()

    @property
    def facts(self) -> FeedFacts:
        planned, out = self._planned, self._order.out
        facts = planned.facts | {"splits": tuple(planned.facts["splits"]), "dtype": np.dtype(planned.dtype)}
        return FeedFacts(name=str(out), identity=planned.identity, units=planned.units, rows=out / "rows", **facts)

    def part(self, unit: int, number: int) -> Part:
        self._notice_fork()
        with self._lock:
            record, out = self._made.find(unit, number) or self._wait(unit, number), self._order.out
            for name, file in record.outputs.items():
                if not has_size(out / name, file["bytes"]):
                    raise StoreError(f"{out / name}: gone, or not as it was made. Open the data again.")
            shards = [Shard(**shard) for shard in record.facts["shards"]]
            return Part({shard.split: token_file(Folder(out), shard) for shard in shards}, record.last)

    def _wait(self, unit: int, number: int) -> Record:
        if unit not in self._wanted:
            self._demand.put((unit, *self._wanted))
        began, pause = time.monotonic(), _FIRST_PAUSE
        self._waits += 1
        try:
            while (record := self._made.find(unit, number)) is None:
                self._demand.renew()
                self._making.tend(self._planned.identity, self._made.parts)
                leave_if_closed()
                # Other threads look meanwhile how far the feed is.
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
            if not self._made.complete.issuperset(units):
                self._demand.put(self._wanted)
                self._making.tend(self._planned.identity, self._made.parts)

    def finished(self) -> Place | None:
        self._notice_fork()
        with self._lock:
            self._finished = self._finished or self._is_finished()
        return Folder(self._order.out) if self._finished else None

    def _is_finished(self) -> bool:
        """Whether the manifest is that of what is made here: until then it may be that of the input before."""
        self._made.look()
        if len(self._made.complete) < self._planned.units:
            return False
        manifest = self._order.out / TOKENS.manifest
        if manifest.exists() and Identity.of_store(self._order.out, TOKENS).run_id == self._planned.identity:
            return True
        # No loader waits for a unit any more: a maker that died at the very end would not be replaced.
        self._making.tend(self._planned.identity, self._made.parts)
        return False

    def stats(self) -> dict[str, float]:
        self._notice_fork()
        with self._lock:
            self._made.look()
            tokens = self._made.tokens - self._tokens_before
            return {
                "units": self._planned.units,
                "units_made": len(self._made.complete),
                "tokens_made": tokens,
                "tokens_made_per_second": tokens / (time.monotonic() - self._began),
                "units_ahead": len(self._made.complete.intersection(self._wanted)),
                "waits": self._waits,
                "waited_seconds": self._waited,
                "memory_bytes": read_status(self._run).get("anonymous_bytes", 0),
                "budget_bytes": self._planned.budget_bytes,
                "workers": self._planned.workers,
            }

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._demand.withdraw()
            self._made.look()
            # The last unit is made: what is left takes a moment.
            is_made = len(self._made.complete) == self._planned.units
            self._making.close(patience=_FINISH_SECONDS if is_made else 0.0)

    def _notice_fork(self) -> None:
        """A forked process has no maker, and locks that another thread held stay locked in it."""
        if os.getpid() != self._owner:
            self._owner, self._lock = os.getpid(), threading.RLock()
            self._demand, self._making = Demand(self._run), Making(self._order)

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingParts, (self._order, self._planned)


class MadeParts:
    """Where the record of each part lies in the records of the run."""

    def __init__(self, path: Path, keys: KeyArray) -> None:
        self._path, self._units = path, {f"{key:016x}": unit for unit, key in enumerate(keys.tolist())}
        self._file: tuple[int, int] | None = None
        self._at = 0
        self._places: dict[tuple[int, int], tuple[int, str]] = {}
        """(unit, part) -> where its line begins, its key."""
        self.complete: set[int] = set()
        """Units of which every part is made."""
        self.tokens = 0

    @property
    def parts(self) -> int:
        return len(self._places)

    def find(self, unit: int, part: int) -> Record | None:
        """The record of a part; None: it is not made yet."""
        self.look()
        if (unit, part) not in self._places:
            return None
        place, key = self._places[unit, part]
        with self._path.open("rb") as lines:
            lines.seek(place)
            record = parse_record(lines.readline())
        # The file may have been replaced just now.
        return record if record is not None and (record.key, record.part) == (key, part) else None

    def look(self) -> None:
        """Take note of what was written meanwhile."""
        with contextlib.suppress(FileNotFoundError), naming(self._path), self._path.open("rb") as lines:
            status = os.fstat(lines.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
                self._file, self._at, self.tokens = (status.st_dev, status.st_ino), 0, 0
                self._places.clear()
                self.complete.clear()
            lines.seek(self._at)
            for line in lines:
                if not line.endswith(b"\n"):  # it is still being written
                    return
                record, begin = parse_record(line), self._at
                unit = None if record is None else self._units.get(record.key)
                self._at += len(line)
                if record is not None and unit is not None and (unit, record.part) not in self._places:
                    self._places[unit, record.part] = begin, record.key
                    self.tokens += record.counts["tokens"]
                    if record.last:
                        self.complete.add(unit)
