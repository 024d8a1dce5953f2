"""Samples of like length together: batches that are padded to their longest sample waste little.

An order is cut into windows of `_GROUPS` groups; the samples of a window are sorted by length, cut into groups, and
the groups are shuffled. So batches differ in length at random, and what comes at a place follows from seed, epoch and
place alone: not from batch size or ranks. Holds the numbers of four windows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from milldam.loader.order import Order, Stateless, by_group
from milldam.loader.permutation import Int64s, Permutation, mix

_GROUPS = 64
_GROUP_SEED = 5
"""Apart from the numbers that other orders mix into their seeds."""


class LengthGrouped(Stateless):
    """An order with samples of like length in groups of `group`."""

    def __init__(self, order: Order, samples: int, seed: int, group: int, lengths: Callable[[Int64s], Int64s]) -> None:
        self._order, self._samples, self._seed, self._group = order, samples, seed, group
        self._lengths = lengths
        self._windows = lru_cache(maxsize=4)(self._sorted)

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self._samples, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Int64s) -> Int64s:
        return by_group(places, _GROUPS * self._group, lambda window, inside: self._windows(epoch, window)[inside])

    def _sorted(self, epoch: int, window: int) -> Int64s:
        """The numbers of a window, groups of like length in random order; what fills no group comes last."""
        first = window * _GROUPS * self._group
        stop = min(first + _GROUPS * self._group, self._samples)
        numbers = self._order.numbers(epoch * self._samples + np.arange(first, stop))
        numbers = numbers[self._lengths(numbers).argsort(kind="stable")]
        groups = len(numbers) // self._group
        if groups:
            order = Permutation(groups, mix(self._seed, epoch, _GROUP_SEED, window))(np.arange(groups))
            grouped = groups * self._group
            numbers[:grouped] = numbers[:grouped].reshape(groups, self._group)[order].reshape(-1)
        return numbers
