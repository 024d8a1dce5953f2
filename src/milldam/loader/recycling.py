"""Arrays of earlier batches for new ones: memory that was just used costs nothing, new memory a fault for every page.

`Recycled`: those that nobody holds any more, so a batch stays what it is for as long as it is kept.
`InTurn`: always the same few, so a batch is overwritten when its turn comes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic

import numpy as np

from milldam.loader.types import BatchT


class InTurn(Generic[BatchT]):
    """A number of batches, one after the other."""

    def __init__(self, count: int) -> None:
        self._batches: deque[BatchT | None] = deque([None] * count)

    def take(self) -> BatchT | None:
        """A batch to overwrite; None: there is none yet."""
        self._batches.rotate(-1)
        return self._batches[-1]

    def keep(self, batch: BatchT) -> None:
        """A full batch of new arrays, which may serve again."""
        self._batches[-1] = batch


class Recycled(Generic[BatchT]):
    """Up to `most` batches, each used again when nothing refers to its arrays or to views of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[_Kept] = []
        # Where references are not counted exactly, nothing is known to be free.
        self._counts = hasattr(sys, "getrefcount") and getattr(sys, "_is_gil_enabled", lambda: True)()

    def take(self) -> BatchT | None:
        for kept in self._kept:
            if kept.is_free():
                batch: BatchT = kept.batch
                return batch
        return None

    def keep(self, batch: BatchT) -> None:
        if self._counts and len(self._kept) < self._most:
            self._kept.append(_Kept(batch))


class _Kept:
    """A batch of our own, whose arrays others may hold."""

    def __init__(self, batch: Any) -> None:
        # Another tuple or dict than the one that is handed out: who holds that one holds the arrays.
        self.batch: Any = dict(batch) if isinstance(batch, dict) else [*batch]
        arrays = [value for value in _values(batch) if isinstance(value, np.ndarray)]
        # Views of a view refer to the array that owns the memory: both are looked at.
        owners = [array.base for array in arrays if array.base is not None]
        self._watched = [*arrays, *{id(owner): owner for owner in owners}.values()]
        # This list and the call that asks; our batch where the array is in it; our arrays where they are views of it.
        self._own = [2 + sum(one is other for other in (*arrays, *owners)) for one in self._watched]

    def is_free(self) -> bool:
        """Whether all references are our own."""
        # By number: a loop over the objects would hold them too.
        return all(sys.getrefcount(self._watched[at]) <= own for at, own in enumerate(self._own))


def _values(batch: Any) -> Iterable[Any]:
    return batch.values() if isinstance(batch, dict) else batch
