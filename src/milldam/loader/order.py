"""The order in which samples come: absolute places (epoch after epoch, without end) to numbers of samples.

Every order is a function of seed, epoch and place, so it can be entered anywhere and holds next to nothing. In every
epoch each sample comes exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, Self

import numpy as np

from milldam.errors import ConfigError
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.reading import ranges

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
        return epoch * self._samples + stop, _unwrap(self._sample(epoch, begins), counts, self._samples)


def _unwrap(firsts: Int64s, counts: Int64s, samples: int) -> Stretches:
    """Cut the stretch that goes over the last sample to the first."""
    over = np.maximum(firsts + counts - samples, 0)
    wrapped = over > 0
    firsts = np.concatenate((firsts, np.zeros(int(wrapped.sum()), np.int64)))
    return Stretches(firsts, np.concatenate((counts - over, over[wrapped])))


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
    return np.concatenate([numbers(group, inside) for group, inside in _groups(places, size, first, last)])


def _groups(places: Int64s, size: int, first: int, last: int) -> Iterator[tuple[int, Int64s]]:
    for group in range(first, last + 1):
        inside = places[(places >= group * size) & (places < (group + 1) * size)]
        if len(inside):
            yield group, inside - group * size
