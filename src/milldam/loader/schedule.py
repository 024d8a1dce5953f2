"""Which of several sources comes at which place, by weight.

After every number of places each source's count is less than 1 away from its share of them. Such a schedule exists
for any weights (Tijdeman; Steiner and Yeomans): element k of a source that has c of T slots goes to one of the slots
floor(k * T / c) to ceil((k + 1) * T / c) - 1, which says exactly that, and the earliest deadline first finds a slot
for every element. The result is too regular: with weights 1 : 1 and two ranks each rank would see one source only. So
neighbours are exchanged at random, many times over, wherever both stay within their slots.

A schedule follows from the weights alone. It is a table of one cycle, at most 65,536 slots (650 KB), which repeats
for ever; made in 20 to 70 ms, and read at about 12 ns a place. The proportions are exact for all ranks together. One
of 2, 4 or 8 ranks sees a source to within some percent of its share, or a fifth of it where it has one slot in 8 to
100; much rarer sources may keep to some ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Real

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.permutation import Int64s, hashed

Int32s = npt.NDArray[np.int32]

MOST_SLOTS = 1 << 16
ROUNDED_SLOTS = 65_521
"""Slots of weights that have no common period within MOST_SLOTS. A prime: no number of ranks has a divisor in common
with it, so that each rank sees every slot of the table in the course of time."""
LOOSE_SLOTS = 1 << 15
"""Short periods are repeated until about so many slots, so that there is something to exchange at random."""
_EXCHANGES = 1 << 22
"""How often a slot is looked at in all: 64 to 128 times over the cycle, which moves what is free by about 10 slots."""
_COIN_KEY = 0x6D69_6C6C_6461_6D21


def shares_of(weights: Sequence[object]) -> tuple[Fraction, ...]:
    """Weights as they are written, scaled to a sum of 1.

    >>> shares_of([0.7, 0.2, 0.1])
    (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))
    """
    exact = [_exact(weight) for weight in weights]
    total = sum(exact)
    return tuple(weight / total for weight in exact)


def _exact(weight: object) -> Fraction:
    if isinstance(weight, Real | Decimal) and not isinstance(weight, bool):
        try:
            # The number as it is written: 0.1 is a tenth, not the float nearest to it.
            exact = Fraction(str(weight))
        except ValueError:
            exact = Fraction(0)
        if exact > 0:
            return exact
    raise ConfigError(f"A weight of {weight!r}; use a number above 0.")


def slots_of(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Slots of a period for each share: exact when the common period is short enough, else rounded.

    >>> slots_of([Fraction(7, 10), Fraction(3, 10)])
    (7, 3)
    """
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_SLOTS:
        return tuple(int(share * period) for share in shares)
    rounded = [int(share * ROUNDED_SLOTS) for share in shares]
    left_over = sorted(range(len(shares)), key=lambda k: rounded[k] - shares[k] * ROUNDED_SLOTS)
    for k in left_over[: ROUNDED_SLOTS - sum(rounded)]:
        rounded[k] += 1
    if 0 in rounded:
        share = float(shares[rounded.index(0)])
        raise ConfigError(
            f"A weight of {share:.3g} of the whole is too little: the least is 1 of {ROUNDED_SLOTS:,} samples. "
            "Leave the source out, or give it more weight."
        )
    return tuple(rounded)


@lru_cache(maxsize=4)
def schedule_of(shares: tuple[Fraction, ...]) -> Schedule:
    """The schedule of these shares; those used last are kept."""
    return Schedule(shares)


class Schedule:
    """Places to (source, index within that source's own endless sequence), and back."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        period = slots_of(shares)
        # An odd number of periods: the number of ranks is often a power of two, and a cycle that it divides would show
        # each rank the same slots for ever.
        periods = LOOSE_SLOTS // sum(period) // 2 * 2 + 1
        self._sources = _loosened(period, periods)
        self._counts = np.array(period, np.int64) * periods
        """Slots of each source in a cycle."""
        by_source = self._sources.argsort(kind="stable")
        self._slots_by_source = by_source.astype(np.int32)
        self._firsts = np.cumsum(self._counts) - self._counts
        """Where the slots of each source begin in _slots_by_source."""
        self._ranks = np.empty(self.cycle, np.int32)
        self._ranks[by_source] = np.arange(self.cycle) - np.repeat(self._firsts, self._counts)

    @property
    def cycle(self) -> int:
        """Places after which the schedule repeats."""
        return len(self._sources)

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """What each source gets, exactly: the weights, or what they were rounded to."""
        return tuple(Fraction(count, self.cycle) for count in self._counts.tolist())

    def find(self, places: Int64s) -> tuple[npt.NDArray[np.uint16], Int64s]:
        """The source of each place, and how many of that source come before it."""
        cycles, slots = np.divmod(places, self.cycle)
        sources = self._sources[slots]
        cycles *= self._counts[sources]
        cycles += self._ranks[slots]
        return sources, cycles

    def drawn(self, places: int) -> Int64s:
        """How many of each source are among the first so many places."""
        cycles, slots = divmod(places, self.cycle)
        return cycles * self._counts + np.bincount(self._sources[:slots], minlength=len(self._counts))

    def place(self, source: int, index: int) -> int:
        """Where a source comes for the time that `index` others of it come before."""
        cycles, rank = divmod(index, int(self._counts[source]))
        return cycles * self.cycle + int(self._slots_by_source[self._firsts[source] + rank])


def _loosened(period: Sequence[int], periods: int) -> npt.NDArray[np.uint16]:
    """The source of every slot of so many periods: in random order as far as the bound allows it."""
    source, first, last = _earliest_deadline_first(period)
    slots = np.arange(len(source) * periods, dtype=np.int32)
    begins = slots // len(source) * len(source)
    sources, firsts, lasts = np.tile(source, periods), np.tile(first, periods) + begins, np.tile(last, periods) + begins
    for turn in range(_EXCHANGES // len(slots)):
        left, right = slice(turn % 2, -1, 2), slice(turn % 2 + 1, None, 2)
        # Two of one source are never exchanged: the slots of the one end where those of the other begin.
        free = (firsts[right] <= slots[left]) & (lasts[left] > slots[left]) & _coins(turn, len(slots[left]))
        for column in (sources, firsts, lasts):
            # Exchanged by what they differ in: two thirds of the time that indices take.
            difference = (column[left] ^ column[right]) * free
            column[left] ^= difference
            column[right] ^= difference
    return sources.astype(np.uint16)


def _coins(turn: int, count: int) -> npt.NDArray[np.bool_]:
    words = np.arange(turn * MOST_SLOTS, turn * MOST_SLOTS + count // 64 + 1, dtype=np.uint64)
    return np.unpackbits(hashed(words, _COIN_KEY).astype("<u8").view(np.uint8))[:count].view(np.bool_)


def _earliest_deadline_first(period: Sequence[int]) -> tuple[Int32s, Int32s, Int32s]:
    """Of every slot of a period: the source, and the first and the last slot that this element could go to."""
    total = sum(period)
    source = np.repeat(np.arange(len(period)), period)
    slots = np.array(period)[source]
    rank = np.arange(total) - np.repeat(np.cumsum(period) - period, period)
    first = rank * total // slots
    last = -(-(rank + 1) * total // slots) - 1
    order = _placed(first, last)
    return source[order].astype(np.int32), first[order].astype(np.int32), last[order].astype(np.int32)


def _placed(first: Int64s, last: Int64s) -> Int64s:
    """The element of every slot, each between its first and its last."""
    total = len(first)
    arriving = np.argsort(first, kind="stable")
    firsts = first[arriving].tolist()
    keys = (last * total + np.arange(total))[arriving].tolist()
    ready: list[int] = []
    placed: list[int] = []
    arrived = 0
    for slot in range(total):
        while arrived < total and firsts[arrived] <= slot:
            heapq.heappush(ready, keys[arrived])
            arrived += 1
        placed.append(heapq.heappop(ready))
    order: Int64s = np.array(placed) % total
    return order
