"""The order in which samples come: absolute places (epoch after epoch, without end) to numbers of samples.

Every order is a function of seed, epoch and place, so it can be entered anywhere and holds next to nothing. In every
epoch each sample comes exactly once.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np

from milldam.errors import ConfigError, ResourceError
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.reading import ranges
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.types import State
from milldam.memory import format_size

Shuffle = bool | Literal["block", "shard"]
Until = Callable[[int], int]
"""How far a loop goes: asked for a place, that place, or the end of the loop where that comes before it."""
BLOCK_BYTES = 128 * 1024
WINDOW_BLOCKS = 512
WINDOW_SHARDS = 4
_PIECES = 64
"""A shard's samples are announced in so many pieces, so that reading ahead goes with reading."""
_GROUPS, _GROUP_SEED = 64, 5
"""Groups that are sorted together; a number apart from those that other orders mix into their seeds."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Samples that lie side by side: numbers [first, first + count) each."""

    firsts: Int64s
    counts: Int64s

    @classmethod
    def single(cls, numbers: Int64s) -> Stretches:
        """Samples by number, each on its own."""
        return cls(numbers, np.ones_like(numbers))

    @property
    def numbers(self) -> Int64s:
        return ranges(self.firsts, self.counts)

    def __getitem__(self, part: slice) -> Stretches:
        return Stretches(self.firsts[part], self.counts[part])


class Order(ABC):
    """Which sample comes at a place, and where epochs and loops over some of them end."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        """Samples of an epoch."""

    @abstractmethod
    def numbers(self, places: Int64s) -> Int64s:
        """Numbers of the samples at ascending places."""

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        """Where the window that a place lies in ends, and what of the data it is made of; None: no windows."""
        return None

    def state(self, place: int) -> Any:
        """State besides the place, as JSON."""
        return None

    def restored(self, state: Any, place: int, *, new_weights: bool) -> Self:
        """The order that continues from a state."""
        return self

    @property
    def first_end(self) -> int:
        """Where the first epoch ends."""
        return self.samples

    def epoch_at(self, place: int) -> int:
        """Number of epochs that are over at a place."""
        behind = place - self.first_end
        return 0 if behind < 0 else 1 + behind // self.samples

    def until(self, place: int, epochs: int | None) -> Until:
        """How far the loop over so many epochs goes that a place belongs to."""
        if epochs is None:
            return lambda stop: stop
        length = epochs * self.samples
        first = self.first_end + length - self.samples
        end = first if place < first else first + ((place - first) // length + 1) * length
        return lambda stop: min(stop, end)

    def loop_at(self, place: int, epochs: int) -> tuple[int, bool]:
        """Number of loops over so many epochs that are over at a place, and whether one begins there."""
        number, rest = divmod(place, epochs * self.samples)
        return number, rest == 0

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
    if shuffle == "shard":
        raise ConfigError('shuffle: "shard" is for windows and rows of tokens; use True, "block" or False.')
    raise ConfigError(f'shuffle: {shuffle!r}; use True, "block", "shard" or False.')


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
        return by_group(places, self.samples, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Int64s) -> Int64s:
        ends = self._ends(epoch)
        windows = ends.searchsorted(places, side="right")
        numbers = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            begin = int(ends[window - 1]) if window else 0
            numbers[here] = self._in_window(epoch, window, places[here] - begin)
        return numbers

    @abstractmethod
    def _ends(self, epoch: int) -> Int64s:
        """Places in an epoch behind each window."""

    @abstractmethod
    def _in_window(self, epoch: int, window: int, inside: Int64s) -> Int64s:
        """The samples at places of a window."""

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        epoch, inside = divmod(place, self.samples)
        ends = self._ends(epoch)
        window = int(ends.searchsorted(inside, side="right"))
        return epoch * self.samples + int(ends[window]), self._stretches_of(epoch, window)

    @abstractmethod
    def _stretches_of(self, epoch: int, window: int) -> Stretches:
        """The stretches of the data that a window is made of."""


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
        self._inside = lru_cache(maxsize=2)(self._order_inside)

    def _ends(self, epoch: int) -> Int64s:
        return self._borders[1:]

    def _order_inside(self, epoch: int, window: int) -> Permutation:
        size = int(self._borders[window + 1] - self._borders[window])
        return Permutation(size, mix(self._seed, epoch, 2, window))

    def _in_window(self, epoch: int, window: int, inside: Int64s) -> Int64s:
        return self._sample(epoch, self._borders[window] + self._inside(epoch, window)(inside))

    def _sample(self, epoch: int, slots: Int64s) -> Int64s:
        """The sample in each slot of the shuffled row of blocks."""
        block, inside = np.divmod(slots, self._block)
        in_block = block < self._blocks
        block[in_block] = self._block_orders(epoch)(block[in_block])
        return (block * self._block + inside + mix(self._seed, epoch, 3) % self.samples) % self.samples

    def _stretches_of(self, epoch: int, window: int) -> Stretches:
        stop = int(self._borders[window + 1])
        begins = np.arange(int(self._borders[window]), stop, self._block)
        counts = np.minimum(begins + self._block, stop) - begins
        # Cut the stretch that goes over the last sample to the first.
        firsts = self._sample(epoch, begins)
        over = np.maximum(firsts + counts - self.samples, 0)
        wrapped = over > 0
        firsts = np.concatenate((firsts, np.zeros(int(wrapped.sum()), np.int64)))
        return Stretches(firsts, np.concatenate((counts - over, over[wrapped])))


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
        self._orders = lru_cache(maxsize=2)(self._order_inside)

    def _first(self, position: int, side: int) -> int:
        """The first sample whose begin (side 0) or last token (side 1) lies at a position or behind it."""
        return bisect_left(range(self.samples), position, key=lambda number: self._extent(number)[side])

    def _plan(self, epoch: int) -> _Epoch:
        count = len(self._file_ends)
        begin = mix(self._seed, epoch, 3) % min(WINDOW_SHARDS, count)
        cuts = sorted({0, *range(begin, count, WINDOW_SHARDS), count})
        pairs = [(a, b) for a, b in itertools.pairwise(cuts) if self._firsts[a] < self._firsts[b]]
        order = Permutation(len(pairs), mix(self._seed, epoch, 1))(np.arange(len(pairs)))
        files = [pairs[number] for number in order.tolist()]
        firsts = np.array([self._firsts[a] for a, _ in files])
        stops = np.array([self._firsts[b] for _, b in files])
        over = np.array([self._first(int(self._file_ends[b - 1]), 1) for _, b in files])
        return _Epoch(files, firsts, np.clip(over, firsts, stops) - firsts, (stops - firsts).cumsum())

    def _order_inside(self, epoch: int, window: int) -> Permutation:
        return Permutation(int(self._epochs(epoch).inside[window]), mix(self._seed, epoch, 2, window))

    def _ends(self, epoch: int) -> Int64s:
        return self._epochs(epoch).ends

    def _in_window(self, epoch: int, window: int, inside: Int64s) -> Int64s:
        plan = self._epochs(epoch)
        shuffled = inside < plan.inside[window]
        if shuffled.any():
            inside[shuffled] = self._orders(epoch, window)(inside[shuffled])
        inside += plan.firsts[window]
        return inside

    def _stretches_of(self, epoch: int, window: int) -> Stretches:
        begins: list[int] = []
        counts: list[int] = []
        for file in range(*self._epochs(epoch).files[window]):
            first, stop = int(self._firsts[file]), int(self._firsts[file + 1])
            step = max(1, -(-(stop - first) // _PIECES))
            begins += range(first, stop, step)
            counts += (min(step, stop - begin) for begin in range(first, stop, step))
        return Stretches(np.array(begins, np.int64), np.array(counts, np.int64))
