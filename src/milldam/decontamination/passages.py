"""What is looked for: the passages of evaluation sets, gathered end to end.

A passage is one text of one column of an item, an item being a row of its set. A passage that was there before, letter
for letter, is counted and not gathered again. Memory: the texts, and 30 bytes a passage.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import xxhash

from milldam.decontamination.letters import Int64s

MIN_LETTERS = 16
"""Bytes of letters; what has fewer is too short to tell anything."""


@dataclass(slots=True)
class Passages:
    """Fill it with `add`."""

    texts: bytearray = field(default_factory=bytearray)
    stops: array[int] = field(default_factory=lambda: array("q", [0]))
    sets: array[int] = field(default_factory=lambda: array("H"))
    items: array[int] = field(default_factory=lambda: array("q"))
    columns: array[int] = field(default_factory=lambda: array("H"))
    follows: array[int] = field(default_factory=lambda: array("B"))
    """Whether another passage of its item came before, which says more."""
    names: dict[str, int] = field(default_factory=dict)
    """Of columns, with their numbers."""
    repeated: Counter[int] = field(default_factory=Counter)
    """Passages that were there before, by set."""
    read: int = 0
    """With those."""
    _seen: set[int] = field(default_factory=set)
    _leader: tuple[int, int] | None = None
    """The last item of which a passage came that is not too short."""

    def add(self, set: int, item: int, column: str, text: str) -> None:
        """A text of an evaluation set. `item`: row of the set, from 0."""
        data = text.encode("utf-8", "replace")
        self.read += 1
        mine = set, item
        follows = self._leader == mine
        if len(data) >= MIN_LETTERS:
            self._leader = mine
        seen = xxhash.xxh3_64_intdigest(data)
        if seen in self._seen:
            self.repeated[set] += 1
            return
        self._seen.add(seen)
        self.texts += data
        self.stops.append(len(self.texts))
        self.follows.append(follows)
        self.sets.append(set)
        self.items.append(item)
        self.columns.append(self.names.setdefault(column, len(self.names)))

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def offsets(self) -> Int64s:
        """Where each begins, and the end."""
        return np.frombuffer(self.stops, np.int64)

    @property
    def digest(self) -> str:
        """Another one whenever what is looked for, or said of it, is another."""
        told = xxhash.xxh3_128(repr((list(self.names), sorted(self.repeated.items()), len(self))).encode())
        for part in (self.stops, self.sets, self.items, self.columns, self.follows, self.texts):
            told.update(part)
        return told.hexdigest()
