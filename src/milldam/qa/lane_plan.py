"""Which window each lane reads next: a rank's documents in order, each given to the first lane that is free.

Holds the places of the next `DOCUMENTS_AT_ONCE` documents; reads no windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from milldam.loader.batches import Delivery
from milldam.loader.order import Order
from milldam.loader.permutation import Int64s
from milldam.qa.batches import DocumentSamples

DOCUMENTS_AT_ONCE = 1024
"""Documents whose order and windows are looked up in one call."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where lanes stand behind a step: all that is needed to go on."""

    begin: int
    """The place in the global order where this loop began."""
    taken: int
    """Documents of this loop that this rank went through or has in its lanes."""
    steps: int
    windows: int
    """Rows of these steps that were no padding."""
    documents: tuple[int | Literal[-1], ...]
    """By lane: the document's number, with its epoch; -1: none."""
    segments: tuple[int, ...]
    """By lane: how many of its segments are through."""


class Queue:
    """A rank's documents of one loop, in order, with the windows chosen of each."""

    def __init__(
        self, samples: DocumentSamples, order: Order, delivery: Delivery, begin: int, end: int | None, taken: int
    ) -> None:
        self._samples, self._order, self._delivery = samples, order, delivery
        self._begin, self._end = begin, end
        self._looked_up = taken
        self._waiting = _none()

    def take(self, most: int) -> Int64s:
        """(documents, 4): number, first window, windows, and how many documents are taken with it.

        As many as were asked for, unless there are no more. Documents without windows are passed over.
        """
        parts, missing = [_none()], most
        while missing and (len(self._waiting) or self._look_up()):
            parts.append(self._waiting[:missing])
            self._waiting = self._waiting[missing:]
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def windows_left(self, documents: Int64s, through: Int64s) -> tuple[Int64s, Int64s]:
        """The next window of documents of which some segments are through, and how many are left; -1: none."""
        there = documents >= 0
        windows, left = self._samples.chosen(np.maximum(documents, 0))
        return windows + through, (left - through) * there

    def _look_up(self) -> bool:
        """Whether there were any documents left."""
        ranks = self._delivery.world_size
        first = self._begin + self._looked_up * ranks
        stop = first + DOCUMENTS_AT_ONCE * ranks
        numbers = self._order.numbers(self._delivery.mine(first, stop if self._end is None else min(stop, self._end)))
        taken = self._looked_up + 1 + np.arange(len(numbers))
        self._looked_up += len(numbers)
        found = np.column_stack((numbers, *self._samples.chosen(numbers), taken))
        self._waiting = found[found[:, 2] > 0]
        return len(numbers) > 0


def _none() -> Int64s:
    return np.empty((0, 4), np.int64)


class LanePlan:
    """What every lane reads next."""

    def __init__(self, queue: Queue, standing: Standing) -> None:
        self._queue, self._begin = queue, standing.begin
        self._taken, self.steps, self._windows = standing.taken, standing.steps, standing.windows
        self._document = np.array(standing.documents, np.int64)
        self.through = np.array(standing.segments, np.int64)
        """(lanes,): segments of its document that are through."""
        self.window, self.left = queue.windows_left(self._document, self.through)
        """(lanes,): the window that comes next, and how many are left of its document."""

    def refill(self) -> bool:
        """Give a document to every lane without one; whether any lane has one then."""
        free = np.flatnonzero(self.left == 0)
        if len(free) and len(found := self._queue.take(len(free))):
            lanes = free[: len(found)]
            self._document[lanes], self.window[lanes], self.left[lanes] = found[:, 0], found[:, 1], found[:, 2]
            self._taken = int(found[-1, 3])
        return bool(self.left.any())

    def advance(self) -> None:
        """A step is through."""
        busy = self.left > 0
        self.steps += 1
        self._windows += int(busy.sum())
        for column, change in ((self.window, 1), (self.left, -1), (self.through, 1)):
            column[busy] += change
        ended = self.left == 0
        self._document[ended], self.through[ended] = -1, 0

    def standing(self) -> Standing:
        lanes = tuple(self._document.tolist()), tuple(self.through.tolist())
        return Standing(self._begin, self._taken, self.steps, self._windows, *lanes)
