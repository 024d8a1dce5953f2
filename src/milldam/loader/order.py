"""The order in which samples come: absolute places (epoch after epoch, without end) to numbers of samples.

Every order is a function of seed, epoch and place, so it can be entered anywhere and holds next to nothing. In every
epoch each sample comes exactly once.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np

from milldam.errors import ConfigError, ResourceError
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.types import State
from milldam.memory import format_size

Shuffle = bool | Literal["block", "shard"]
Until = Callable[[int], int]
"""How far a loop goes: asked for a place, that place, or the end of the loop where that comes before it."""
BLOCK_BYTES = 128 * 1024
WINDOW_BLOCKS = 512
WINDOW_SHARDS = 4
_GROUPS, _GROUP_SEED = 64, 5
"""Groups that are sorted together; a number apart from those that other orders mix into their seeds."""


class Order(ABC):
    """Which sample comes at a place, and where epochs and loops over some of them end."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        """Samples of an epoch."""

    @abstractmethod
    def numbers(self, places: Int64s) -> Int64s:
        """Numbers of the samples at ascending places."""

    def window(self, place: int) -> tuple[int, int]:
        """[begin, end): the places around one whose samples are shuffled among themselves; empty: there are none."""
        return place, place

    def stored(self, places: Int64s) -> Int64s:
        """Numbers of the samples of windows in the order in which they are stored."""
        return self.numbers(places)

    def state(self, place: int) -> Any:
        """State besides the place, as JSON."""
        return None

    def restored(self, state: Any, place: int) -> Self:
        """The order that continues from a state."""
        return self

    def epoch_at(self, place: int) -> int:
        """Number of epochs that are over at a place."""
        return place // self.samples

    def up_to(self, stop: int, epoch: int) -> int:
        """A place, or the end of an epoch where that comes before it."""
        return min(stop, (epoch + 1) * self.samples)

    def until(self, place: int, epochs: int | None) -> Until:
        """How far the loop over so many epochs goes that a place belongs to."""
        if epochs is None:
            return lambda stop: stop
        last = (self.epoch_at(place) // epochs + 1) * epochs - 1
        return lambda stop: self.up_to(stop, last)

    def is_begin(self, place: int) -> bool:
        """Whether an epoch begins at a place."""
        return place % self.samples == 0

    def epoch_begin(self, epoch: int) -> State:
        """The part of a state that differs where an epoch begins."""
        return {"samples_seen": epoch * self.samples}


def make_order(shuffle: Shuffle, samples: int, seed: int, sample_bytes: int) -> Order:
    if shuffle is True:
        return Shuffled(samples, seed)
    if shuffle is False:
        return InSequence(samples)
    if shuffle == "block":
        return BlockShuffled(samples, seed, max(1, BLOCK_BYTES // sample_bytes))
    raise ConfigError(f'shuffle: {shuffle!r}; use True, "block" or False; "shard" for windows and rows of tokens.')


def by_group(places: Int64s, size: int, numbers: Callable[[int, Int64s], Int64s]) -> Int64s:
    """Ascending places to numbers, a call for each group of `size` places that they lie in."""
    if not len(places):
        return places
    first, last = int(places[0]) // size, int(places[-1]) // size
    if first == last:
        return numbers(first, places - first * size)
    borders = itertools.pairwise(places.searchsorted(np.arange(first, last + 2) * size).tolist())
    parts = [(group, places[begin:end]) for group, (begin, end) in enumerate(borders, first) if begin < end]
    return np.concatenate([numbers(group, part - group * size) for group, part in parts])


class InSequence(Order):
    """Samples as they are stored."""

    def numbers(self, places: Int64s) -> Int64s:
        return places % self.samples


class Shuffled(Order):
    """Anywhere from anywhere, by a keyed permutation that is another one in every epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        super().__init__(samples)
        self._permutations = lru_cache(maxsize=2)(lambda epoch: Permutation(samples, mix(seed, epoch)))

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self.samples, lambda epoch, inside: self._permutations(epoch)(inside))


class LengthGrouped(Order):
    """An order with samples of like length together, so that batches padded to their longest sample waste little.

    The samples of every `_GROUPS` groups of places are sorted by length and cut into groups of `group`, which come in
    random order. Groups begin at multiples of `group` of all places, over the
    epochs' borders too, so a step of all ranks that divides or is a multiple of a group takes groups whole. What fills
    no group, at an epoch's begin and end, stays as it is. Holds the numbers of four windows.
    """

    def __init__(self, order: Order, samples: int, seed: int, group: int, lengths: Callable[[Int64s], Int64s]) -> None:
        super().__init__(samples)
        self._order, self._seed, self._group, self._lengths = order, seed, group, lengths
        self._windows = lru_cache(maxsize=4)(self._sorted)

    def numbers(self, places: Int64s) -> Int64s:
        size = _GROUPS * self._group

        def in_epoch(epoch: int, inside: Int64s) -> Int64s:
            def in_window(window: int, inside: Int64s) -> Int64s:
                first, numbers = self._windows(epoch, window)
                return numbers[inside + window * size - first]

            return by_group(inside + epoch * self.samples, size, in_window)

        return by_group(places, self.samples, in_epoch)

    def _sorted(self, epoch: int, window: int) -> tuple[int, Int64s]:
        """The first place of a window in an epoch, and its numbers."""
        size, group = _GROUPS * self._group, self._group
        first = max(epoch * self.samples, window * size)
        numbers = self._order.numbers(np.arange(first, min((epoch + 1) * self.samples, (window + 1) * size)))
        lead = min(-first % group, len(numbers))
        groups = (len(numbers) - lead) // group
        inside = slice(lead, lead + groups * group)
        table = numbers[inside][self._lengths(numbers[inside]).argsort(kind="stable")].reshape(groups, group)
        in_turn = Permutation(groups, mix(self._seed, epoch, _GROUP_SEED, window))(np.arange(groups))
        numbers[inside] = table[in_turn].reshape(-1)
        return first, numbers


class _Windowed(Order):
    """Windows of an epoch one after the other, the samples of each in an order of their own."""

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self.samples, lambda epoch, inside: self._in_epoch(epoch, inside, stored=False))

    def stored(self, places: Int64s) -> Int64s:
        return by_group(places, self.samples, lambda epoch, inside: self._in_epoch(epoch, inside, stored=True))

    def _in_epoch(self, epoch: int, places: Int64s, *, stored: bool) -> Int64s:
        ends = self._ends(epoch)
        windows = ends.searchsorted(places, side="right")
        numbers = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            begin = int(ends[window - 1]) if window else 0
            numbers[here] = self._in_window(epoch, window, places[here] - begin, stored)
        return numbers

    def window(self, place: int) -> tuple[int, int]:
        epoch, inside = divmod(place, self.samples)
        ends = self._ends(epoch)
        window = int(ends.searchsorted(inside, side="right"))
        begin = int(ends[window - 1]) if window else 0
        return epoch * self.samples + begin, epoch * self.samples + int(ends[window])

    @abstractmethod
    def _ends(self, epoch: int) -> Int64s:
        """Places in an epoch behind each window."""

    @abstractmethod
    def _in_window(self, epoch: int, window: int, inside: Int64s, stored: bool) -> Int64s:
        """The samples at places of a window, shuffled or as they are stored."""


class BlockShuffled(_Windowed):
    """Blocks of neighbouring samples in random order; of the samples of `WINDOW_BLOCKS` blocks, any order.

    So a window reads whole blocks, for media where many small reads are slow. Where blocks begin is another place
    in every epoch. The samples that fill no block are in the last window. Holds a number for each window.
    """

    def __init__(self, samples: int, seed: int, block: int) -> None:
        super().__init__(samples)
        self._seed, self._block, self._blocks = seed, block, samples // block
        # What is too little for a window joins the last one.
        count, size = max(1, samples // (block * WINDOW_BLOCKS)), block * WINDOW_BLOCKS
        self._borders = np.array([*range(0, count * size, size), samples])
        self._block_orders = lru_cache(maxsize=2)(lambda epoch: Permutation(self._blocks, mix(seed, epoch, 1)))
        self._orders = lru_cache(maxsize=2)(lambda epoch, window, size: Permutation(size, mix(seed, epoch, 2, window)))

    def _ends(self, epoch: int) -> Int64s:
        return self._borders[1:]

    def _in_window(self, epoch: int, window: int, inside: Int64s, stored: bool) -> Int64s:
        begin, end = self._borders[window : window + 2].tolist()
        slots = inside if stored else self._orders(epoch, window, end - begin)(inside)
        block, within = np.divmod(begin + slots, self._block)
        in_block = block < self._blocks
        block[in_block] = self._block_orders(epoch)(block[in_block])
        numbers: Int64s = (block * self._block + within + mix(self._seed, epoch, 3) % self.samples) % self.samples
        return numbers


def require_cache(stream: TokenStream, at_once: int | None) -> None:
    """Refuse to read from more shards at a time than a cache holds; None: from all of them."""
    if stream.origin is None or stream.fits_cache:
        return
    sizes = sorted((file.tokens * stream.dtype.itemsize for file in stream.files), reverse=True)
    needed = sum(sizes[:at_once])
    if needed > stream.origin.cache_bytes:
        raise ResourceError(
            f"{stream.name}: this order reads from {len(sizes[:at_once]):,} shards at a time, {format_size(needed)}, "
            f"and the cache holds {format_size(stream.origin.cache_bytes)}: it would fetch them again and again.\n"
            'Use a larger cache=..., shuffle="shard" or False, fewer streams, or `milldam pull`.'
        )


class ShardShuffled(_Windowed):
    """Windows of neighbouring shards in random order; of the samples of a window, any order: for data that comes
    through a cache.

    Where windows begin differs from epoch to epoch. The few samples that go over the end of a window's last shard come
    last in it, so that one more shard is touched once, and not all the while: an epoch fetches about
    1 + 1 / WINDOW_SHARDS times the data. The order is the same for a store here and at an address, and for any cache.
    Holds two numbers for each shard; about 0.2 ms for each when it is made.
    """

    def __init__(
        self, files: Sequence[TokenFile], samples: int, seed: int, extent: Callable[[int], tuple[int, int]]
    ) -> None:
        """`extent`: a sample's number -> where it begins, and where the last token that it needs lies."""
        super().__init__(samples)
        self._seed, self._extent = seed, extent
        self._file_ends = np.cumsum([file.tokens for file in files if file.tokens])
        """Positions behind the last token of each file."""
        firsts = [self._first(begin, 0) for begin in self._file_ends[:-1].tolist()]
        # Samples of a packing need not begin in order; each belongs to exactly one file all the same.
        self._firsts = np.maximum.accumulate(np.array([0, *firsts, samples]))
        self._epochs = lru_cache(maxsize=2)(self._plan)
        self._orders = lru_cache(maxsize=2)(lambda epoch, window, size: Permutation(size, mix(seed, epoch, 2, window)))

    def _first(self, position: int, side: int) -> int:
        """The first sample whose begin (side 0) or last token (side 1) lies at a position or behind it."""
        return bisect_left(range(self.samples), position, key=lambda number: self._extent(number)[side])

    def _plan(self, epoch: int) -> tuple[Int64s, Int64s, Int64s]:
        """Of the windows of an epoch in their order: the first sample of each, how many of its samples lie in its files
        alone (the others follow), and the places behind each."""
        count = len(self._file_ends)
        begin = mix(self._seed, epoch, 3) % min(WINDOW_SHARDS, count)
        cuts = sorted({0, *range(begin, count, WINDOW_SHARDS), count})
        pairs = [(a, b) for a, b in itertools.pairwise(cuts) if self._firsts[a] < self._firsts[b]]
        order = Permutation(len(pairs), mix(self._seed, epoch, 1))(np.arange(len(pairs)))
        # files: (windows, 2), the first of each, and one past its last
        files = np.array(pairs)[order]
        firsts, stops = self._firsts[files].T
        over = np.array([self._first(end, 1) for end in self._file_ends[files[:, 1] - 1].tolist()])
        return firsts, np.clip(over, firsts, stops) - firsts, (stops - firsts).cumsum()

    def _ends(self, epoch: int) -> Int64s:
        return self._epochs(epoch)[2]

    def _in_window(self, epoch: int, window: int, inside: Int64s, stored: bool) -> Int64s:
        first, size = (int(column[window]) for column in self._epochs(epoch)[:2])
        shuffled = inside < size
        if shuffled.any() and not stored:
            inside[shuffled] = self._orders(epoch, window, size)(inside[shuffled])
        return inside + first
