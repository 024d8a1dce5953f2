"""The order in which samples come: absolute places (epoch after epoch, without end) to numbers of samples.

Every order is a function of seed, epoch and place, so it can be entered anywhere and holds next to nothing. In every
epoch each sample comes exactly once.

"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, Self

import numpy as np

from milldam.errors import ConfigError, ResourceError
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.reading import ranges
from milldam.loader.stream import TokenFile, TokenStream
from milldam.memory import format_size

Shuffle = bool | Literal["block", "shard"]
BLOCK_BYTES = 128 * 1024
WINDOW_BLOCKS = 512


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


class Order(Protocol):
    """Which sample comes at a place."""

    def numbers(self, places: Int64s) -> Int64s:
        """Numbers of the samples at ascending places."""

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        """Where the window that a place lies in ends, and what of the data it is made of; None: no windows."""

    def state(self, place: int) -> Any:
        """What must be kept besides the place, as JSON."""

    def restored(self, state: Any, place: int, *, new_weights: bool) -> Order:
        """The order that goes on from a state."""

    @property
    def first_end(self) -> int | None:
        """Where the first epoch ends, when it is shorter than the others."""


class Stateless:
    """An order that follows from its settings alone."""

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        return None

    def state(self, place: int) -> Any:
        return None

    def restored(self, state: Any, place: int, *, new_weights: bool) -> Self:
        return self

    @property
    def first_end(self) -> int | None:
        return None


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


class InSequence(Stateless):
    """As the samples lie."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def numbers(self, places: Int64s) -> Int64s:
        return places % self._samples


class Shuffled(Stateless):
    """Anywhere from anywhere, by a keyed permutation that is another one in every epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._permutations = _kept(lambda epoch: Permutation(samples, mix(seed, epoch)))

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self._samples, lambda epoch, inside: self._permutations(epoch)(inside))


class BlockShuffled(Stateless):
    """Blocks of neighbouring samples in random order; of the samples of `WINDOW_BLOCKS` blocks, any order.

    So a window reads whole blocks, for media where many small reads are slow. Where blocks begin is another place
    in every epoch. The samples that fill no block are in the last window.
    """

    def __init__(self, samples: int, seed: int, block: int) -> None:
        self._samples, self._seed, self._block = samples, seed, block
        self._blocks = samples // block
        self._in_window = block * WINDOW_BLOCKS
        """Samples of a window."""
        self._block_orders = _kept(lambda epoch: Permutation(self._blocks, mix(seed, epoch, 1)))
        self._window_orders = _kept(self._order_inside)

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self._samples, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Int64s) -> Int64s:
        windows = self._windows()

        def in_window(window: int, inside: Int64s) -> Int64s:
            window, inside = self._join_last(window, inside, windows)
            return self._sample(epoch, window * self._in_window + self._window_orders(epoch * windows + window)(inside))

        return by_group(places, self._in_window, in_window)

    def _windows(self) -> int:
        """How many windows an epoch has; what is too little for one joins the last."""
        return max(1, self._samples // self._in_window)

    def _join_last(self, window: int, inside: Int64s, windows: int) -> tuple[int, Int64s]:
        beyond = window - (windows - 1)
        return (window, inside) if beyond <= 0 else (windows - 1, inside + beyond * self._in_window)

    def _order_inside(self, key: int) -> Permutation:
        epoch, window = divmod(key, self._windows())
        return Permutation(self._window_size(window), mix(self._seed, epoch, 2, window))

    def _window_size(self, window: int) -> int:
        last = window == self._windows() - 1
        return self._samples - window * self._in_window if last else self._in_window

    def _sample(self, epoch: int, slots: Int64s) -> Int64s:
        """The sample in each slot of the shuffled row of blocks."""
        block, inside = np.divmod(slots, self._block)
        in_block = block < self._blocks
        block[in_block] = self._block_orders(epoch)(block[in_block])
        return (block * self._block + inside + self._offset(epoch)) % self._samples

    def _offset(self, epoch: int) -> int:
        return mix(self._seed, epoch, 3) % self._samples

    def stretches(self, place: int) -> tuple[int, Stretches] | None:
        epoch, inside = divmod(place, self._samples)
        window = min(inside // self._in_window, self._windows() - 1)
        first = window * self._in_window
        stop = first + self._window_size(window)
        begins = np.arange(first, stop, self._block)
        counts = np.minimum(begins + self._block, stop) - begins
        # Cut the stretch that goes over the last sample to the first.
        firsts = self._sample(epoch, begins)
        over = np.maximum(firsts + counts - self._samples, 0)
        wrapped = over > 0
        firsts = np.concatenate((firsts, np.zeros(int(wrapped.sum()), np.int64)))
        return epoch * self._samples + stop, Stretches(firsts, np.concatenate((counts - over, over[wrapped])))


def _kept(make: Callable[[int], Permutation]) -> Callable[[int], Permutation]:
    """Keeps the permutations used last: those of this epoch or window and of the one before."""
    return lru_cache(maxsize=2)(make)


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


_GROUPS = 64
_GROUP_SEED = 5
"""Apart from the numbers that other orders mix into their seeds."""


class LengthGrouped(Stateless):
    """An order with samples of like length together, so that batches padded to their longest sample waste little.

    The samples of every `_GROUPS` groups of places are sorted by length and cut into groups of `group`, which come in
    random order (`seed`; None: from short to long). Groups begin at multiples of `group` of all places, over the
    epochs' borders too, so a step of all ranks that divides or is a multiple of a group takes groups whole. What fills
    no group, at an epoch's begin and end, stays as it is. Holds the numbers of four windows.
    """

    def __init__(
        self, order: Order, samples: int, seed: int | None, group: int, lengths: Callable[[Int64s], Int64s]
    ) -> None:
        self._order, self._samples, self._seed, self._group = order, samples, seed, group
        self._lengths = lengths
        self._windows = lru_cache(maxsize=4)(self._sorted)

    def numbers(self, places: Int64s) -> Int64s:
        return by_group(places, self._samples, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Int64s) -> Int64s:
        size = _GROUPS * self._group

        def in_window(window: int, inside: Int64s) -> Int64s:
            first, numbers = self._windows(epoch, window)
            return numbers[inside + window * size - first]

        return by_group(places + epoch * self._samples, size, in_window)

    def _sorted(self, epoch: int, window: int) -> tuple[int, Int64s]:
        """The first place of a window in an epoch, and its numbers."""
        size, group = _GROUPS * self._group, self._group
        first = max(epoch * self._samples, window * size)
        numbers = self._order.numbers(np.arange(first, min((epoch + 1) * self._samples, (window + 1) * size)))
        lead = min(-first % group, len(numbers))
        groups = (len(numbers) - lead) // group
        inside = slice(lead, lead + groups * group)
        table = numbers[inside][self._lengths(numbers[inside]).argsort(kind="stable")].reshape(groups, group)
        if self._seed is not None:
            table = table[Permutation(groups, mix(self._seed, epoch, _GROUP_SEED, window))(np.arange(groups))]
        numbers[inside] = table.reshape(-1)
        return first, numbers


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
    """Windows of neighbouring shards in random order; of the samples of a window, any order: for data that comes
    through a cache.

    Where windows begin differs from epoch to epoch. The few samples that go over the end of a window's last shard come
    last in it, so that one more shard is touched once, and not all the while: an epoch fetches about
    1 + 1 / WINDOW_SHARDS times the data. The order is the same for a store here and at an address, and for any cache.
    Holds two numbers for each shard; about 0.2 ms for each when it is made.
    """

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
