"""Stores of given units and parts, and parts that come late: what the tests of feeds read from."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from milldam.loader.stores import Store
from milldam.loader.unit_order import FeedFacts, FinishedParts, Part
from milldam.stores.place import Place
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

Lengths = Sequence[int]
Plan = Sequence[Sequence[Mapping[str, Lengths]]]
"""Units, each of parts, each of documents by split."""
SETTINGS = {"datasets": [{}], "validation": [], "splits": {}}


def unit_store(folder: Path, plan: Plan) -> Store:
    """A store whose tokens count up from 1 over all of it, in the order of splits, units and parts."""
    folder.mkdir(parents=True, exist_ok=True)
    position, written = 0, list[Shard]()
    splits = dict.fromkeys(split for unit in plan for part in unit for split in part)
    for split in splits:
        for unit, parts in enumerate(plan):
            for number, part in enumerate(parts):
                if not part.get(split):
                    continue
                count = sum(part[split])
                flat = np.arange(position + 1, position + count + 1)
                position += count
                with ShardWriter(folder, split, "int32") as writer:
                    writer.append(Tokens(flat.astype("int32"), np.array(part[split], np.int64)))
                    written.append(replace(writer.commit(), unit=unit, part=number))
    asked = SETTINGS | {"splits": {split: 0.1 for split in splits if split != "train"}}
    facts = {"files": len(plan), "bytes": position, "fingerprint": str(plan)}
    manifest = Manifest("int32", 1 << 30, {"name": "counting", "eos": 0}, "none", asked, facts, tuple(written))
    replace(manifest, units=len(plan)).write(folder)
    return Store(folder)


def random_plan(seed: int, units: int = 20, *, most: int = 200) -> list[list[dict[str, list[int]]]]:
    """Units of one to three parts, some of which have nothing at all or nothing of a split."""
    rng = random.Random(seed)
    plan = []
    for _ in range(units):
        parts = rng.choice([1, 1, 1, 2, 3])
        unit: list[dict[str, list[int]]] = []
        for _ in range(parts):
            documents = [] if rng.random() < 0.2 else [rng.randrange(1, most) for _ in range(rng.randrange(1, 9))]
            unit.append({"train": documents, "val": [7, 9] if rng.random() < 0.2 else []})
        plan.append(unit)
    return plan


class LateParts:
    """The parts of a store as if they were being made: by a thread, in the order in which they are wanted.

    What is asked for is made a little later, parts of a unit in order; nothing is known of what is not made.
    """

    def __init__(self, store: Store, plan: Plan, *, late: bool = True) -> None:
        self._inner, self._plan = FinishedParts(store), plan
        self.asked: list[tuple[int, int]] = []
        self._made: set[int] = set()
        self._wanted: list[int] = []
        self._changed = threading.Condition()
        self._closed = False
        if late:
            threading.Thread(target=self._make, daemon=True).start()

    @property
    def facts(self) -> FeedFacts:
        return self._inner.facts

    def _make(self) -> None:
        rng = random.Random(1)
        while not self._closed:
            with self._changed:
                missing = [unit for unit in self._wanted if unit not in self._made]
                if not missing:
                    self._changed.wait(0.05)
                    continue
                # Several workers: nearly in order.
                self._made.add(rng.choice(missing[:3]))
                self._changed.notify_all()

    def part(self, unit: int, number: int) -> Part:
        self.asked.append((unit, number))
        with self._changed:
            if unit not in self._wanted:
                self._wanted.insert(0, unit)
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: unit in self._made, timeout=20)
        # As a journal has it: also parts that left nothing, and which one is the last.
        made = self._inner.part(unit, number)
        return Part(made.files, last=number == len(self._plan[unit]) - 1)

    def want(self, units: Sequence[int]) -> None:
        with self._changed:
            self._wanted = list(units)
            self._changed.notify_all()

    def finished(self) -> Place | None:
        return None

    def stats(self) -> dict[str, float]:
        return {"units_made": len(self._made)}

    def close(self) -> None:
        self._closed = True
