"""The steps of a loader: samples are looked up together, announced some time before, and read a batch at a time.

Batches are read into arrays of earlier ones: memory that was just used costs nothing, new memory a fault for every
page. `Recycled`: those that nobody holds any more, so a batch stays what it is for as long as it is kept. `InTurn`:
always the same few, so a batch is overwritten when its turn comes.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from milldam.loader.order import Order, Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.samples import ReadPart, Samples, Until
from milldam.loader.types import BatchT

if TYPE_CHECKING:
    from milldam.loader.batches import Delivery

_NUMBERS_AT_ONCE = 4096
"""Places whose samples are computed in one call: the permutation's cost a number falls until about here."""
_ANNOUNCED_SAMPLES = 1024
_ANNOUNCED_BYTES = 1 << 25


class _Step(NamedTuple):
    """This rank's samples of one step: a part of those that were looked up together."""

    numbers: Int64s
    read: ReadPart[Any]
    part: slice
    behind: int
    """The place behind the step."""


@dataclass(frozen=True, slots=True)
class Work(Generic[BatchT]):
    """Makes batches; knows nothing of who takes them, so that a thread can run it."""

    samples: Samples[object, BatchT]
    order: Order
    delivery: Delivery
    dtype: np.dtype[Any]
    spare: Recycled[BatchT] | InTurn[BatchT]

    def batches(self, place: int, until: Until, turns: int) -> Iterator[tuple[BatchT, int]]:
        """(batch, the place behind it), of every `turns`-th step."""
        steps: Iterator[_Step] = itertools.islice(self._steps(place, until), 0, None, turns)
        if any(reader.announces for reader in self.samples._readers):
            steps = self._announced(steps, place)
        for step in steps:
            # Nothing here may hold a batch while its user has it: its arrays could not be used again.
            yield self._read(step), step.behind

    def _read(self, step: _Step) -> BatchT:
        out = self.spare.take()
        batch: BatchT = step.read(step.part, out)
        if out is None and step.part.stop <= len(step.numbers):
            self.spare.keep(batch)
        return batch

    def _steps(self, place: int, until: Until) -> Iterator[_Step]:
        size, step = self.delivery.batch_size, self.delivery.step
        # Few at first, for an early first batch.
        steps, most = 1, max(1, _NUMBERS_AT_ONCE // size)
        # Whether a full step is the last one shows only when one looks beyond it.
        beyond = step if self.delivery.drop_last else 0
        ended = False
        while not ended:
            asked = place + steps * step + beyond
            end = until(asked)
            ended = end < asked
            stop = asked - beyond if not ended else end - ((end - place) % step if beyond else 0)
            if stop == place:
                return
            steps = min(2 * steps, most)
            numbers = self.order.numbers(self.delivery.mine(place, stop))
            read = self.samples._look_up(numbers, self.dtype)
            for first in range(0, len(numbers), size):
                place = min(place + step, stop)
                # What is left out at the end counts as seen with the last batch: nothing follows it.
                behind = end if ended and place == stop else place
                yield _Step(numbers, read, slice(first, first + size), behind)
            place = stop

    def _announced(self, steps: Iterator[_Step], place: int) -> Iterator[_Step]:
        """The same steps, each announced some time before it comes."""
        if self.order.stretches(place) is not None:
            announcer = _WindowAnnouncer(self.samples, self.order, place)
            for step in steps:
                yield step
                announcer.advance(step.behind)
            return
        # Many at a time, since a call costs as much as several samples; few at first, for an early first batch.
        sample_bytes = self.samples.token_dtype.itemsize * self.samples.sample_tokens
        samples = min(_ANNOUNCED_SAMPLES, _ANNOUNCED_BYTES // sample_bytes)
        ahead, most = 1, max(1, samples // self.delivery.batch_size)
        announced: list[_Step] = []
        while coming := list(itertools.islice(steps, ahead)):
            _announce(self.samples, Stretches.single(np.concatenate([step.numbers[step.part] for step in coming])))
            yield from announced
            announced, ahead = coming, min(2 * ahead, most)
        yield from announced


def _announce(samples: Samples[object, Any], stretches: Stretches) -> None:
    """These samples are read soon."""
    for reader, starts, lengths in samples._spans(stretches):
        reader.announce(starts, lengths)


class _WindowAnnouncer:
    """Announces the window that comes next, little by little while this one is read; gives back the one before."""

    def __init__(self, samples: Samples[object, Any], order: Order, place: int) -> None:
        self._samples, self._order = samples, order
        self._begin = place
        self._end, self._now = self._window(place)
        _announce(samples, self._now)
        self._next_end, self._next = self._window(self._end)
        self._announced = 0

    def _window(self, place: int) -> tuple[int, Stretches]:
        found = self._order.stretches(place)
        assert found is not None
        return found

    def advance(self, place: int) -> None:
        done = min(1.0, (place - self._begin) / max(1, self._end - self._begin))
        due = int(len(self._next.firsts) * done)
        _announce(self._samples, self._next[self._announced : due])
        self._announced = max(self._announced, due)
        if place >= self._end:
            for reader, starts, lengths in self._samples._spans(self._now):
                reader.release(starts, lengths)
            self._begin, self._end, self._now = self._end, self._next_end, self._next
            self._next_end, self._next = self._window(self._end)
            self._announced = 0


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
