"""Which of several sources comes at which place, by weight, and where the epochs of a mixture end.

Places are cut into blocks of 4,096. How many samples of each source come before a block follows from its number alone:
groups of sources are halved, and the samples of each group divided between its halves by their weights (`Schedule`).
So each source is within one sample of its share of all blocks before, or one and a half if it comes less than twice in
a block. Within a block a hash says the order: every rank sees every source near its share.

Weights are exact fractions. Holds the blocks used last; one takes about 0.1 ms, whichever of its places a rank reads.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.loader.order import Order, by_group
from milldam.loader.permutation import Int64s, hashed, mix

Stop = Literal["first_exhausted", "all_exhausted"] | int
BLOCK = 4096
_BLOCKS_KEPT = 16
_STATE_VERSION, _STATE_NAME = 2, "The state of a mixture"
_BLOCK_SEED = 8
"""Apart from the numbers that orders mix into their seeds."""
_SMALLEST_SHARE = Fraction(1, 10**12)
_WEIGHT, _LONGEST_WEIGHT = re.compile(r"[1-9]\d*(/[1-9]\d*)?"), 2000
"""A weight in a state, and how long it may be."""


def shares_of(weights: Sequence[object]) -> tuple[Fraction, ...]:
    """Weights as they are written, scaled to a sum of 1.

    >>> shares_of([0.7, 0.2, 0.1])
    (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))
    """
    exact: list[Fraction] = []
    for weight in weights:
        try:
            # The number as it is written: 0.1 is a tenth, not the float nearest to it.
            is_number = isinstance(weight, Real | Decimal) and not isinstance(weight, bool)
            exact.append(Fraction(str(weight)) if is_number else Fraction(0))
        except ValueError:
            exact.append(Fraction(0))
        if exact[-1] <= 0:
            raise ConfigError(f"A weight of {weight!r}; use a number above 0.")
    shares = tuple(weight / sum(exact) for weight in exact)
    if min(shares) < _SMALLEST_SHARE:
        raise ConfigError("mix: a source would come less than once in 10^12 samples. Leave it out, or weigh it more.")
    return shares


def groups(sources: npt.NDArray[Any], count: int) -> Iterator[tuple[int, Int64s]]:
    """(source, its places, ascending) of each source that comes."""
    places = sources.argsort(kind="stable")
    ends = np.bincount(sources, minlength=count).cumsum()
    for source, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        if first < end:
            yield source, places[first:end]


class Schedule:
    """Places to sources. Threads may share it.

    >>> Schedule(shares_of([2, 1])).drawn(3 * 4096).tolist()
    [8192, 4096]
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._sources, self._whole = len(shares), math.lcm(*(share.denominator for share in shares))
        self._halves: list[tuple[int, int, int, int]] = []
        """Of each group: its halves, which are sources or earlier groups, and their weights."""
        weights = [(int(share * self._whole), source) for source, share in enumerate(shares)]
        # The two lightest become one, again and again; rare sources and the others meet at the very end.
        rare, common = ([one for one in weights if self._is_rare(one[0]) is which] for which in (True, False))
        self._join(self._join(rare) + self._join(common))
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def _is_rare(self, weight: int) -> bool:
        return weight * BLOCK < 2 * self._whole

    def _join(self, weights: list[tuple[int, int]]) -> list[tuple[int, int]]:
        heapq.heapify(weights)
        while len(weights) > 1:
            (light, first), (heavy, second) = heapq.heappop(weights), heapq.heappop(weights)
            heapq.heappush(weights, (light + heavy, self._sources + len(self._halves)))
            self._halves.append((first, second, light, heavy))
        return weights

    def _counts_before(self, block: int) -> Int64s:
        """How many samples of each source come before a block."""
        places, whole = block * BLOCK, self._whole
        counts = [places] * (self._sources + len(self._halves))
        for group in range(len(counts) - 1, self._sources - 1, -1):
            first, second, light, heavy = self._halves[group - self._sources]
            if self._is_rare(light):
                # The nearest to its part of the group, which never falls from block to block.
                counts[first] = (2 * counts[group] * light + light + heavy) // (2 * (light + heavy))
            else:
                # The nearest to its share of all places and half of what the group is off: so no half is one sample
                # off. It does not fall either, since a block has two samples of it.
                counts[first] = ((light - heavy) * places + (counts[group] + 1) * whole) // (2 * whole)
            counts[second] = counts[group] - counts[first]
        return np.array(counts[: self._sources], np.int64)

    def _make_block(self, block: int) -> tuple[Int64s, Int64s]:
        """How many samples of each source come before a block, and (places, 2): the sources of its places, and how many
        samples of the same source come before each."""
        before = self._counts_before(block)
        counts = self._counts_before(block + 1) - before
        # Sorted by 16 bits, which is twenty times as fast as by 64.
        keys = (hashed(np.arange(BLOCK, dtype=np.uint64), mix(block, _BLOCK_SEED)) >> np.uint64(48)).astype(np.uint16)
        in_turn = np.arange(self._sources, dtype=np.min_scalar_type(self._sources)).repeat(counts)
        sources = in_turn[keys.argsort(kind="stable")]
        indices = np.empty(BLOCK, np.int64)
        indices[sources.argsort(kind="stable")] = np.arange(BLOCK) - (counts.cumsum() - counts - before).repeat(counts)
        return before, np.stack((sources, indices), axis=1)

    def find(self, places: Int64s) -> Int64s:
        """(places, 2): the sources of ascending places, and how many samples of the same source come before each."""
        return by_group(places, BLOCK, lambda block, inside: self._block(block)[1][inside])

    def drawn(self, places: int) -> Int64s:
        """How many samples of each source are among the first so many places."""
        block, inside = divmod(places, BLOCK)
        before, of_block = self._block(block)
        drawn: Int64s = before + np.bincount(of_block[:inside, 0], minlength=self._sources)
        return drawn

    def epoch_end(self, drawn: Int64s, epochs: Int64s, stop: Stop) -> int:
        """How many samples an epoch has behind so many of each source, when an epoch of each has so many.

        >>> Schedule(shares_of([1, 1])).epoch_end(np.array([0, 0]), np.array([2048, 4096]), "all_exhausted")
        8191
        """
        if isinstance(stop, int):
            return stop
        left, first = epochs - drawn % epochs, stop == "first_exhausted"

        def passed(drawn: Int64s) -> bool:
            return bool((drawn > left).any() if first else (drawn >= left).all())

        block = bisect_left(range(1 << 50), True, key=lambda block: passed(self._counts_before(block + 1)))
        places = range(block * BLOCK, (block + 1) * BLOCK)
        return places.start + bisect_left(places, True, key=lambda place: passed(self.drawn(place))) - first


class _State(TypedDict):
    weights: list[str]
    began: int
    drawn: list[int]
    orders: list[Any]


class MixedOrder(Order):
    """Places of a mixture to numbers of samples.

    The schedule begins at place 0. It begins again, with other weights, where a state is taken up with `new_weights`;
    then every source continues exactly where it was.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        begins: Int64s,
        weights: tuple[Fraction, ...],
        epochs: Int64s,
        stop: Stop,
        samples: int,
        began: int = 0,
        drawn: Int64s | None = None,
    ) -> None:
        """`epochs`: samples in an epoch of each source; `began`: where the schedule began, behind `drawn` of each."""
        super().__init__(samples)
        self._orders, self._begins, self._epochs, self._stop = orders, begins, epochs, stop
        self._weights, self._schedule = weights, Schedule(weights)
        self._began, self._drawn = began, np.zeros(len(orders), np.int64) if drawn is None else drawn

    def numbers(self, places: Int64s) -> Int64s:
        sources, indices = self._schedule.find(places - self._began).reshape(-1, 2).T
        numbers = np.empty(len(places), np.int64)
        for source, where in groups(sources, len(self._orders)):
            own = self._orders[source].numbers(indices[where] + self._drawn[source])
            numbers[where] = own + self._begins[source]
        return numbers

    @property
    def first_end(self) -> int:
        if not self._began:
            return self.samples
        return self._began + self._schedule.epoch_end(self._drawn, self._epochs, self._stop)

    def state(self, place: int) -> dict[str, Any]:
        drawn = self._drawn + self._schedule.drawn(place - self._began)
        return {
            "version": _STATE_VERSION,
            "weights": [str(weight) for weight in self._weights],
            "began": self._began,
            "drawn": self._drawn.tolist(),
            "orders": [order.state(count) for order, count in zip(self._orders, drawn.tolist(), strict=True)],
        }

    def restored(self, state: Any, place: int, *, new_weights: bool) -> MixedOrder:
        if isinstance(state, dict) and (version := state.get("version", 1)) != _STATE_VERSION:
            raise MismatchError(f"{_STATE_NAME}, of version {version}; this milldam reads version {_STATE_VERSION}.")
        loaded: _State = checked(_State, state, _STATE_NAME)
        lengths = {len(loaded["weights"]), len(loaded["drawn"]), len(loaded["orders"])}
        if lengths != {len(self._orders)} or loaded["began"] > place:
            raise StoreError(
                f"{_STATE_NAME}: damaged: it is not that of {len(self._orders):,} sources at sample {place:,}."
            )
        if not all(len(weight) < _LONGEST_WEIGHT and _WEIGHT.fullmatch(weight) for weight in loaded["weights"]):
            listed = ", ".join(loaded["weights"])[:80]
            raise StoreError(f"{_STATE_NAME}: damaged: weights are {listed}, which are not fractions.")
        weights, began = tuple(map(Fraction, loaded["weights"])), loaded["began"]
        before = np.array(loaded["drawn"], np.int64)
        drawn = before + Schedule(weights).drawn(place - began)
        if weights != self._weights:
            if not new_weights:
                was, now = (", ".join(str(float(one)) for one in some) for some in (weights, self._weights))
                raise MismatchError(
                    f"The weights were {was} and are {now}. Make the mixture with those of before, or take the new "
                    "ones from here on: load_state_dict(state, new_weights=True)."
                )
            began, before = place, drawn
        orders = [
            order.restored(own, count, new_weights=new_weights)
            for order, own, count in zip(self._orders, loaded["orders"], drawn.tolist(), strict=True)
        ]
        return MixedOrder(orders, self._begins, self._weights, self._epochs, self._stop, self.samples, began, before)
