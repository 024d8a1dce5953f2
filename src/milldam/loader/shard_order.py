"""Shuffled so that whole shards are read one window after another: for data that comes through a cache.

A window is `WINDOW_SHARDS` shards that lie side by side; windows come in random order, and the samples of a window in
any order. Where windows begin differs from epoch to epoch. The few samples that go over the end of a window's last
shard come last in it, so that one more shard is touched once, and not all the while: an epoch fetches about
1 + 1 / WINDOW_SHARDS times the data, whatever the cache holds beyond one window.

The order follows from the data, the seed and the epoch alone: the same for a store here and at an address, and for any
cache. Holds two numbers for each shard; about 0.2 ms for each when it is made.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from milldam.errors import ConfigError, ResourceError
from milldam.loader.order import Shuffle, Stateless, Stretches, by_group
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.stream import TokenFile, TokenStream
from milldam.memory import format_size

WINDOW_SHARDS = 4
_PIECES = 64
"""A shard's samples are announced in so many pieces, so that reading ahead goes with reading."""

Extent = Callable[[int], tuple[int, int]]
"""A sample's number -> where it begins, and where the last token that it needs lies."""


def require_cache(stream: TokenStream, shuffle: Shuffle) -> None:
    """Refuse an order that would fetch a shard for every sample."""
    if stream.origin is None or stream.fits_cache or shuffle is False:
        return
    holds = f"the cache holds {format_size(stream.origin.cache_bytes)} of {format_size(stream.size_bytes)}"
    if shuffle != "shard":
        raise ConfigError(
            f"{stream.name}: shuffle={shuffle!r} takes every sample from another shard, and {holds}, so that a shard "
            "would be fetched for each sample.\n"
            'Use shuffle="shard" (any order within some shards at a time) or shuffle=False, a larger cache=..., or '
            "bring the store here with `milldam pull`."
        )
    sizes = [file.tokens * stream.dtype.itemsize for file in stream.files if file.tokens]
    largest = max(sum(sizes[first : first + WINDOW_SHARDS]) for first in range(len(sizes)))
    if largest > stream.origin.cache_bytes:
        raise ResourceError(
            f'{stream.name}: shuffle="shard" reads {WINDOW_SHARDS} shards at a time, which take up to '
            f"{format_size(largest)}, and {holds}. Use a larger cache=..., or shuffle=False."
        )


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The windows of an epoch, in the order in which they come."""

    files: list[tuple[int, int]]
    """First file of each, and one past its last."""
    firsts: Int64s
    """First sample of each."""
    inside: Int64s
    """How many of its samples lie in its files alone; the others follow."""
    ends: Int64s
    """Places behind each."""


class ShardShuffled(Stateless):
    """Windows of neighbouring shards in random order; of the samples of a window, any order."""

    def __init__(self, files: Sequence[TokenFile], samples: int, seed: int, extent: Extent) -> None:
        self._samples, self._seed, self._extent = samples, seed, extent
        self._ends = np.cumsum([file.tokens for file in files if file.tokens])
        """Positions behind the last token of each file."""
        begins = [0, *self._ends[:-1].tolist()]
        firsts = [self._first(begin, 0) for begin in begins[1:]]
        # Samples of a packing need not begin in order; each belongs to exactly one file all the same.
        self._firsts = np.maximum.accumulate(np.array([0, *firsts, samples]))
        self._epochs = lru_cache(maxsize=2)(self._plan)
        self._orders = lru_cache(maxsize=2)(self._order_inside)

    def _first(self, position: int, side: int) -> int:
        """The first sample whose begin (side 0) or last token (side 1) lies at a position or behind it."""
        return bisect_left(range(self._samples), position, key=lambda number: self._extent(number)[side])

    def _plan(self, epoch: int) -> _Epoch:
        count = len(self._ends)
        begin = mix(self._seed, epoch, 3) % min(WINDOW_SHARDS, count)
        cuts = sorted({0, *range(begin, count, WINDOW_SHARDS), count})
        pairs = [(a, b) for a, b in itertools.pairwise(cuts) if self._firsts[a] < self._firsts[b]]
        order = Permutation(len(pairs), mix(self._seed, epoch, 1))(np.arange(len(pairs)))
        files = [pairs[number] for number in order.tolist()]
        firsts = np.array([self._firsts[a] for a, _ in files])
        stops = np.array([self._firsts[b] for _, b in files])
        over = np.array([self._first(int(self._ends[b - 1]), 1) for _, b in files])
        return _Epoch(files, firsts, np.clip(over, firsts, stops) - firsts, (stops - firsts).cumsum())

    def _order_inside(self, epoch: int, window: int) -> Permutation:
        return Permutation(int(self._epochs(epoch).inside[window]), mix(self._seed, epoch, 2, window))

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self._samples, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Int64s) -> Int64s:
        plan = self._epochs(epoch)
        windows = plan.ends.searchsorted(places, side="right")
        numbers = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            begin = int(plan.ends[window - 1]) if window else 0
            numbers[here] = self._in_window(epoch, window, places[here] - begin)
        return numbers

    def _in_window(self, epoch: int, window: int, places: Int64s) -> Int64s:
        plan = self._epochs(epoch)
        shuffled = places < plan.inside[window]
        numbers = places.copy()
        if shuffled.any():
            numbers[shuffled] = self._orders(epoch, window)(places[shuffled])
        numbers += plan.firsts[window]
        return numbers

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        epoch, inside = divmod(place, self._samples)
        plan = self._epochs(epoch)
        window = int(plan.ends.searchsorted(inside, side="right"))
        first, stop = plan.files[window]
        parts = [_pieces(int(self._firsts[file]), int(self._firsts[file + 1])) for file in range(first, stop)]
        begins = np.concatenate([begin for begin, _ in parts])
        counts = np.concatenate([count for _, count in parts])
        return epoch * self._samples + int(plan.ends[window]), Stretches(begins, counts)


def _pieces(first: int, stop: int) -> tuple[Int64s, Int64s]:
    step = max(1, -(-(stop - first) // _PIECES))
    begins = np.arange(first, stop, step)
    return begins, np.minimum(begins + step, stop) - begins
