"""The leak check: a function that keeps more memory with every call stops the run before the budget is broken."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

from milldam.errors import ResourceError, Setting
from milldam.memory import format_size, release, usage

_LARGE_TIMES = 2
"""For a row larger than a batch: some readers hold it, and what it left behind, until the next one."""
_SMALLEST_GROWTH = 10**5
_FEW = 4
"""Calls that say little about growth."""


@dataclass(slots=True)
class LeakCheck:
    """Compares this process's memory after each batch with what the budget leaves it. Reads one small file a batch."""

    most_bytes: int
    """What the budget leaves this worker."""
    batch_bytes: int
    name: str
    """Of the function."""
    is_parent: bool
    """This process planned the run and can't be replaced by a fresh one."""
    calls: int = 0
    first: int = 0
    """Memory after the first call, which may load something that stays."""
    last: int = field(default_factory=lambda: usage().anonymous)
    """Memory after the last call."""
    read: int = 0
    """What was read since the last call: the batch, and perhaps a large row that follows it."""
    leak: tuple[object, ...] = ()
    """Why another batch would be too much, as parts of a message; empty while all is well."""

    def begin(self, *, is_first: bool) -> None:
        """Before a batch. Raises ResourceError when too much was held after the last one; not before the first of a
        unit, since a worker that was too large has just been replaced."""
        if self.leak and (self.is_parent or not is_first):
            raise ResourceError(*self.leak)
        self.read = max(0, usage().anonymous - self.last)

    def end(self, size: int) -> None:
        """After a batch of this size: is more held than the budget leaves, now or probably after the next one?"""
        is_large = size > self.batch_bytes
        most = self.most_bytes + (_LARGE_TIMES * size if is_large else 0)
        held = self._held()
        self.calls += 1
        if self.calls == 1:
            self.first = held
        if self._after_next(held, is_large=is_large) > most:
            gc.collect()
            release()
            held = self._held()
        self.leak = self._told(held) if self._after_next(held, is_large=is_large) > most else ()

    def _held(self) -> int:
        self.last = usage().anonymous
        return self.last - self.read

    def _growth(self, held: int) -> int:
        """Bytes a call, on average since the first."""
        return max(0, held - self.first) // max(1, self.calls - 1)

    def _after_next(self, held: int, *, is_large: bool) -> int:
        return held + (self._growth(held) if self.calls > _FEW and not is_large else 0)

    def _told(self, held: int) -> tuple[object, ...]:
        growth = self._growth(held)
        keeps = f"the function keeps about {format_size(growth)} more after each call (a default argument, a global, "
        what = keeps + "a cache?)" if growth >= _SMALLEST_GROWTH else "the function loads that much and keeps it"
        here = (" (with ", Setting("workers", 2), " or more: this one is the program)") if self.is_parent else ()
        return (
            f"{self.name}: between two calls a worker holds {format_size(held)}, too much for the "
            f"{format_size(self.most_bytes)} that the budget leaves it: {what}. Every finished unit is safe.\n"
            "Let it keep less; or use a smaller ",
            Setting("shard_size"),
            ", so that workers are replaced between units",
            *here,
            "; or give more ",
            Setting("memory"),
            ".",
        )
