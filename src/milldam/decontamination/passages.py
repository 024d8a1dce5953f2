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


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of an evaluation set."""

    set: int
    item: int
    """Row of the set, from 0."""
    column: str
    text: str


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
    names: list[str] = field(default_factory=list)
    """Of columns."""
    repeated: Counter[int] = field(default_factory=Counter)
    """Passages that were there before, by set."""
    read: int = 0
    """With those."""
    _digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    _seen: set[int] = field(default_factory=set)
    _leader: tuple[int, int] | None = None
    """The last item of which a passage came that is not too short."""

    def add(self, passage: Passage) -> None:
        data = passage.text.encode("utf-8", "replace")
        self._digest.update(b"%d %d %b %d " % (passage.set, passage.item, passage.column.encode(), len(data)) + data)
        self.read += 1
        follows = self._leader == (passage.set, passage.item)
        if len(data) >= MIN_LETTERS:
            self._leader = passage.set, passage.item
        seen = xxhash.xxh3_64_intdigest(data)
        if seen in self._seen:
            self.repeated[passage.set] += 1
            return
        self._seen.add(seen)
        if passage.column not in self.names:
            self.names.append(passage.column)
        self.texts += data
        self.stops.append(len(self.texts))
        self.follows.append(follows)
        self.sets.append(passage.set)
        self.items.append(passage.item)
        self.columns.append(self.names.index(passage.column))

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def offsets(self) -> Int64s:
        """Where each begins, and the end."""
        return np.frombuffer(self.stops, np.int64)

    @property
    def digest(self) -> str:
        """Another one whenever a passage is another one."""
        return self._digest.hexdigest()
