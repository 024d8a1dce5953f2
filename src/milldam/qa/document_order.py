"""The order in which documents come, and how a document's number says in which epoch it is.

number = epoch * documents + document. So whoever reads a number knows the epoch, which decides the segments that are
chosen at random, and needs nothing else: not the place, the rank nor the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from milldam.loader.order import Order, Stateless
from milldam.loader.permutation import Int64s, Permutation, mix

GROUP = 2048
"""Documents that are sorted by length together: as far as one moves from its place in the shuffled order."""
CELL = 32
"""Documents of about one length that stay together."""
_CELL_KEY = 4


class DocumentOrder(Stateless):
    """An order of documents, as numbers that carry their epoch."""

    def __init__(self, order: Order, documents: int) -> None:
        self._order, self._documents = order, documents

    def numbers(self, places: Int64s) -> Int64s:
        return self._order.numbers(places) + places // self._documents * self._documents


class GroupedByLength(DocumentOrder):
    """The same documents, with those of about one length beside each other.

    Of every `GROUP` places of the order below, the documents are sorted by length and cut into cells of `CELL`, which
    come in random order (`seed`; None: from short to long). Cells begin at multiples of `CELL` of all places, over the
    epochs' borders too, so a step of all ranks that divides or is a multiple of a cell takes cells whole. A function of
    the place alone; holds the last groups, 16 KB each.
    """

    def __init__(self, order: Order, documents: int, lengths: Callable[[Int64s], Int64s], seed: int | None) -> None:
        super().__init__(order, documents)
        self._lengths, self._seed = lengths, seed
        self._groups = lru_cache(maxsize=4)(self._group)

    def numbers(self, places: Int64s) -> Int64s:
        if not len(places):
            return places
        epochs, groups = places // self._documents, places // GROUP
        cuts = np.flatnonzero((np.diff(epochs) != 0) | (np.diff(groups) != 0)) + 1
        return np.concatenate([self._of_one_group(part) for part in np.split(places, cuts)])

    def _of_one_group(self, places: Int64s) -> Int64s:
        first = int(places[0])
        begin, numbers = self._groups(first // self._documents, first // GROUP)
        return numbers[places - begin]

    def _group(self, epoch: int, group: int) -> tuple[int, Int64s]:
        """Where a group begins in an epoch, and its documents."""
        begin = max(epoch * self._documents, group * GROUP)
        stop = min((epoch + 1) * self._documents, (group + 1) * GROUP)
        return begin, self._arranged(begin, super().numbers(np.arange(begin, stop)))

    def _arranged(self, begin: int, numbers: Int64s) -> Int64s:
        """What fills no cell, at an epoch's begin and end, stays as it is."""
        lead = min(-begin % CELL, len(numbers))
        cells = (len(numbers) - lead) // CELL
        inside = slice(lead, lead + cells * CELL)
        lengths = self._lengths(numbers[inside] % self._documents)
        table = numbers[inside][np.argsort(lengths, kind="stable")].reshape(cells, CELL)
        if self._seed is not None:
            table = table[Permutation(cells, mix(self._seed, _CELL_KEY, begin))(np.arange(cells))]
        numbers[inside] = table.reshape(-1)
        return numbers
