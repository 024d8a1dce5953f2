"""What a worker holds between two calls of the function: a function that keeps ever more stops the run in time."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

from milldam.errors import ResourceError
from milldam.memory import format_size, release, usage

_LARGE_TIMES = 2
"""A row that is larger than a batch may be: some readers hold it, and what it left behind, until the next one."""
_SMALLEST_GROWTH = 10**5
_FEW = 4


@dataclass(slots=True)
class Holding:
    """Looks at the memory of this process after each batch. Costs the reading of one small file."""

    most_bytes: int
    """What the budget leaves this worker."""
    batch_bytes: int
    name: str
    """Of the function."""
    here: bool
    """The worker is the process that planned, which can't be replaced."""
    calls: int = 0
    first: int = 0
    """Memory after the first call, which may load something that stays."""
    last: int = field(default_factory=lambda: usage().anonymous)
    """Memory after the last call."""
    read: int = 0
    """What was read since then: not only the batch, also a large row that comes after it."""

    too_much: str = ""
    """Why another batch would be too much, if it would."""

    def begin(self, *, is_first: bool) -> None:
        """Before a batch. Raises ResourceError when more was held after the last one than the budget leaves; not before
        the first of a unit, when a worker that is too large has been replaced."""
        if self.too_much and (self.here or not is_first):
            raise ResourceError(self.too_much)
        self.read = max(0, usage().anonymous - self.last)

    def end(self, size: int) -> None:
        """After a batch of so many bytes: is more held than the budget leaves, now or (as it looks) after the next?"""
        self.last = usage().anonymous
        held = self.last - self.read
        self.calls += 1
        if self.calls == 1:
            self.first = held
        is_large = size > self.batch_bytes
        most = self.most_bytes + (_LARGE_TIMES * size if is_large else 0)
        if self._next(held, is_large=is_large) > most:
            gc.collect()
            release()
            self.last = usage().anonymous
            held = self.last - self.read
        self.too_much = self._told(held) if self._next(held, is_large=is_large) > most else ""

    def _growth(self, held: int) -> int:
        """Bytes a call, on average since the first."""
        return max(0, held - self.first) // max(1, self.calls - 1)

    def _next(self, held: int, *, is_large: bool) -> int:
        """What is held after the next call, as it looks; the first few tell little of that, nor does a large row."""
        return held + (self._growth(held) if self.calls > _FEW and not is_large else 0)

    def _told(self, held: int) -> str:
        growth = self._growth(held)
        keeps = f"the function keeps about {format_size(growth)} more after each call (a default argument, a global, "
        what = keeps + "a cache?)" if growth >= _SMALLEST_GROWTH else "the function loads that much and keeps it"
        replaced = "a smaller shard_size, so that workers are replaced between units"
        if self.here:
            replaced += " (with workers=2 or more: this one is the program itself)"
        return (
            f"{self.name}: between two calls a worker holds {format_size(held)}, too much for the "
            f"{format_size(self.most_bytes)} that the budget leaves it: {what}. Every finished unit is safe.\n"
            f"Let it keep less; or use {replaced}; or give more with memory=."
        )
