"""Which of several sources comes at which place, by weight.

After every number of places each source's count is less than 1 away from its share of them. Such a schedule exists
for any weights (Tijdeman; Steiner and Yeomans): element k of a source with share w goes to one of the places
floor(k / w) to ceil((k + 1) / w) - 1, which says exactly that, and the earliest deadline first finds a place for every
element. The result is too regular: with weights 1 : 1 and two ranks each rank would see one source only. So
neighbours are exchanged at random, many times over, wherever both stay within their places.

Weights with a common period of up to 131,072 places are a table of it, which repeats for ever. Others are made a
block of so many places at a time, each from its number alone: `_counts_at` says how many of each source come before
it, in such a way that the blocks on either side can be filled. Sources that come less than once in a block are taken
together as one, and have a schedule of their own for its places: when there are several, each is less than 2.1 off.

A schedule follows from the weights alone, as exact fractions. It holds one table, or the four blocks used last, of 0.8
to 1.6 MB each. A table is made in 20 to 90 ms and read at about 12 ns a place; a block takes 0.1 to 0.2 us for each of
its places, whichever of them a rank reads.

The proportions are exact for all ranks together. One of 2, 4 or 8 ranks sees a source to within some percent of its
share, or a fifth of it where it has one place in 8 to 100, or a third where all but equal weights have no short period;
much rarer sources may keep to some ranks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.permutation import Int64s, hashed, mix

Sources = npt.NDArray[np.uint16]

MOST_SLOTS = 1 << 17
"""Places of the longest table, and of a block."""
LOOSE_SLOTS = 1 << 15
"""Short periods are repeated until about so many slots, so that there is something to exchange at random."""
_EXCHANGES = 1 << 22
"""How often a slot of a table is looked at in all: 32 to 128 times, which moves what is free by about 10 slots."""
_BLOCK_TURNS = 16
_NEAR = 512
"""So many slots on either side of an element that is out of place are filled anew."""
_BLOCKS_KEPT = 4
_COIN_KEY = 0x6D69_6C6C_6461_6D21
_COINS_A_TURN = 1 << 16
# An element of a table: (first << 34) | (last << 16) | source
_FIRST_BIT, _LAST_BIT = 34, 16
_LAST_MASK = (1 << (_FIRST_BIT - _LAST_BIT)) - 1


_SMALLEST_SHARE = Fraction(1, 10**12)


def shares_of(weights: Sequence[object]) -> tuple[Fraction, ...]:
    """Weights as they are written, scaled to a sum of 1.

    >>> shares_of([0.7, 0.2, 0.1])
    (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))
    """
    exact = [_exact(weight) for weight in weights]
    total = sum(exact)
    shares = tuple(weight / total for weight in exact)
    if min(shares) < _SMALLEST_SHARE:
        raise ConfigError("mix: a source would come less than once in 10^12 samples. Leave it out, or weigh it more.")
    return shares


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


class Schedule(Protocol):
    """Places to (source, index within that source's own endless sequence), and back."""

    def find(self, places: Int64s) -> tuple[Sources, Int64s]:
        """The source of each place, and how many of that source come before it."""

    def drawn(self, places: int) -> Int64s:
        """How many of each source are among the first so many places."""

    def place(self, source: int, index: int) -> int:
        """Where a source comes for the time that `index` others of it come before."""


@lru_cache(maxsize=4)
def schedule_of(shares: tuple[Fraction, ...]) -> Schedule:
    """The schedule of these shares; those used last are kept."""
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_SLOTS:
        return _Repeated(shares, period)
    rare = [source for source, share in enumerate(shares) if share * MOST_SLOTS < 1]
    return _Grouped(shares, rare) if len(rare) > 1 else _Endless(shares)


@dataclass(frozen=True, slots=True)
class _Table:
    """The sources of some places side by side."""

    sources: Sources
    ranks: npt.NDArray[np.int32]
    """How many of a slot's source are in the slots before it."""

    def drawn(self, slots: int, sources: int) -> Int64s:
        counts: Int64s = np.bincount(self.sources[:slots], minlength=sources)
        return counts

    def slots_of(self, source: int) -> Int64s:
        slots: Int64s = (self.sources == source).nonzero()[0]
        return slots


class _Repeated:
    """One table for ever: the schedule of shares that have a short common period."""

    def __init__(self, shares: Sequence[Fraction], period: int) -> None:
        # An odd number of periods: the number of ranks is often a power of two, and a cycle that it divides would show
        # each rank the same slots for ever.
        periods = LOOSE_SLOTS // period // 2 * 2 + 1
        elements = _elements(shares, 0, period)
        begins = np.repeat(np.arange(periods) * period, period)
        _mend(elements, 0, period)
        elements = np.tile(elements, periods)
        elements += (begins << _FIRST_BIT) + (begins << _LAST_BIT)
        _exchange(elements, _EXCHANGES // len(elements), _COIN_KEY)
        self._table = _table_of(elements)
        self._cycle = len(elements)
        self._counts = self._table.drawn(self._cycle, len(shares))
        """Slots of each source in a cycle."""

    def find(self, places: Int64s) -> tuple[Sources, Int64s]:
        cycles, slots = np.divmod(places, self._cycle)
        sources = self._table.sources[slots]
        cycles *= self._counts[sources]
        cycles += self._table.ranks[slots]
        return sources, cycles

    def drawn(self, places: int) -> Int64s:
        cycles, slots = divmod(places, self._cycle)
        return cycles * self._counts + self._table.drawn(slots, len(self._counts))

    def place(self, source: int, index: int) -> int:
        cycles, rank = divmod(index, int(self._counts[source]))
        return cycles * self._cycle + int(self._table.slots_of(source)[rank])


class _Endless:
    """A new table for every block: the schedule of shares of which all but one have a place in every block."""

    def __init__(self, shares: tuple[Fraction, ...]) -> None:
        self._shares = shares
        least, second = sorted(shares)[:2]
        # A rare source must be much rarer than the others; else there is one of it in every block of twice the length.
        self._length = MOST_SLOTS if least * MOST_SLOTS >= 1 or 2 * least <= second else 2 * MOST_SLOTS
        self._rare = shares.index(least) if least * self._length < 1 else None
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def _make_block(self, number: int) -> tuple[Int64s, _Table]:
        """How many of each source come before a block, and what is in it."""
        begin, key = number * self._length, mix(_COIN_KEY, number)
        elements = _elements(self._shares, begin, self._length, self._rare)
        # By the middle of where each may go: a fifth of the time, and hardly any is out of place after some exchanges.
        elements = elements[(_first(elements) + _last(elements)).argsort(kind="stable")]
        _exchange(elements, _BLOCK_TURNS, key)
        for slot in _misplaced(elements).nonzero()[0].tolist():
            _mend(elements, max(0, slot - _NEAR), slot + _NEAR)
        if _misplaced(elements).any():
            _mend(elements, 0, self._length)
            _exchange(elements, _BLOCK_TURNS, key)
        return np.array(_counts_at(self._shares, begin, self._rare), np.int64), _table_of(elements)

    def find(self, places: Int64s) -> tuple[Sources, Int64s]:
        numbers, slots = np.divmod(places, self._length)
        sources, indices = np.empty(len(places), np.uint16), np.empty(len(places), np.int64)
        for number in np.unique(numbers).tolist():
            here = (numbers == number).nonzero()[0]
            begin, table = self._block(number)
            sources[here] = own = table.sources[slots[here]]
            indices[here] = begin[own] + table.ranks[slots[here]]
        return sources, indices

    def drawn(self, places: int) -> Int64s:
        number, slots = divmod(places, self._length)
        begin, table = self._block(number)
        return begin + table.drawn(slots, len(begin))

    def place(self, source: int, index: int) -> int:
        share = self._shares[source]
        # Where the element may come first; a rare one is in the block in which it is half due.
        first = int(index / share) if source != self._rare else math.ceil((index + Fraction(1, 2)) / share) - 1
        number = first // self._length
        begin, table = self._block(number)
        slots = table.slots_of(source)
        rank = index - int(begin[source])
        if rank == len(slots):
            number, rank = number + 1, 0
            slots = self._block(number)[1].slots_of(source)
        return number * self._length + int(slots[rank])


class _Grouped:
    """The rare sources are one source of a schedule, and have a schedule of its places."""

    def __init__(self, shares: Sequence[Fraction], rare: list[int]) -> None:
        self._rare = rare
        self._common = [source for source in range(len(shares)) if source not in rare]
        together = sum((shares[source] for source in rare), Fraction(0))
        self._outer = schedule_of((*(shares[source] for source in self._common), together))
        self._inner = schedule_of(tuple(shares[source] / together for source in rare))

    def find(self, places: Int64s) -> tuple[Sources, Int64s]:
        outer, indices = self._outer.find(places)
        sources = np.array([*self._common, 0], np.uint16)[outer]
        rare = (outer == len(self._common)).nonzero()[0]
        inner, indices[rare] = self._inner.find(indices[rare])
        sources[rare] = np.array(self._rare, np.uint16)[inner]
        return sources, indices

    def drawn(self, places: int) -> Int64s:
        *common, rare = self._outer.drawn(places).tolist()
        drawn = np.empty(len(common) + len(self._rare), np.int64)
        drawn[self._common], drawn[self._rare] = common, self._inner.drawn(rare)
        return drawn

    def place(self, source: int, index: int) -> int:
        if source in self._rare:
            return self._outer.place(len(self._common), self._inner.place(self._rare.index(source), index))
        return self._outer.place(self._common.index(source), index)


def _counts_at(shares: Sequence[Fraction], places: int, rare: int | None) -> list[int]:
    """How many of each source are among the first so many places, from their number alone.

    Each share of the places, rounded down or up: an element that is rounded up comes before, one rounded down behind,
    and on both sides all must find places. They do when, of the elements that could come last, not too many come
    before, and of those that could come first, not too many behind: of all that could come from some place on, and of
    all that could come up to some place, as many as their fractions add up to, rounded down or up. Such counts exist,
    since rounding by two orders at once is totally unimodular. Those with most time are rounded down, as far as the
    others that could come first allow it. What comes less than once in a block, and therefore could come first or last
    of all, can be rounded in either way: to the nearest, so that from block to block it never comes back.
    """
    period = math.lcm(*(share.denominator for share in shares))
    slots = [int(share * period) for share in shares]
    counts, fractions = (list(column) for column in zip(*(divmod(places * own, period) for own in slots), strict=True))
    # Only what has a fraction can be rounded; the earlier its first place, the more slots have passed since.
    by_first = [source for source, fraction in enumerate(fractions) if fraction]
    by_first.sort(key=lambda source: fractions[source] // -slots[source])
    rank = {source: number for number, source in enumerate(by_first)}
    rests = itertools.accumulate(period - fractions[source] for source in by_first)
    # room: how many of the first to come, up to each in turn, can still be rounded down
    room = np.array([-(-rest // period) for rest in rests], np.int64)
    for source in sorted(rank, key=lambda source: (source != rare, (fractions[source] - period) // slots[source])):
        later = room[rank[source] :]
        if 2 * fractions[source] < period if source == rare else later.min() > 0:
            later -= 1
        else:
            counts[source] += 1
    return counts


def _elements(shares: Sequence[Fraction], begin: int, length: int, rare: int | None = None) -> Int64s:
    """All elements of some places, by source: the source, and the first and last slot that each may go to."""
    if len(shares) > 1 << _LAST_BIT:
        raise ConfigError(f"mix: {len(shares):,} sources; use at most {1 << _LAST_BIT:,}.")
    parts: list[Int64s] = []
    counts = zip(*(_counts_at(shares, place, rare) for place in (begin, begin + length)), strict=True)
    for source, (share, (before, until)) in enumerate(zip(shares, counts, strict=True)):
        slots, total = share.numerator, share.denominator
        offset = before * total - begin * slots
        rank = np.arange(until - before)
        first = np.maximum(_floors(rank, total, offset, slots), 0)
        # ceil(x) is -floor(-x)
        last = np.minimum(-_floors(rank + 1, -total, -offset, slots), length) - 1
        parts.append((first << _FIRST_BIT) | (last << _LAST_BIT) | source)
    return np.concatenate(parts)


def _floors(numbers: Int64s, factor: int, offset: int, divisor: int) -> Int64s:
    """floor((numbers * factor + offset) / divisor), exact whatever the size of the three."""
    largest = max(int(numbers.max(initial=1)) * abs(factor) + abs(offset), divisor)
    if largest < 1 << 62:
        small: Int64s = (numbers * factor + offset) // divisor
        return small
    about = numbers * (factor / divisor) + offset / divisor
    floors: Int64s = np.floor(about).astype(np.int64)
    error = max(1.0, float(np.abs(about).max(initial=0))) * 2.0**-48
    for number in (np.abs(about - np.rint(about)) < error).nonzero()[0].tolist():
        floors[number] = (int(numbers[number]) * factor + offset) // divisor
    return floors


def _first(elements: Int64s) -> Int64s:
    return elements >> _FIRST_BIT


def _last(elements: Int64s) -> Int64s:
    return elements >> _LAST_BIT & _LAST_MASK


def _misplaced(elements: Int64s, begin: int = 0) -> npt.NDArray[np.bool_]:
    """Which are not between their first and their last slot, when these are the slots from `begin` on."""
    slots = np.arange(begin, begin + len(elements))
    return (_first(elements) > slots) | (_last(elements) < slots)


def _exchange(elements: Int64s, turns: int, key: int) -> None:
    """Exchange neighbours that may be, at random; those out of place always."""
    slots = np.arange(len(elements))
    for turn in range(turns):
        left, right, slot = elements[turn % 2 : -1 : 2], elements[turn % 2 + 1 :: 2], slots[turn % 2 : -1 : 2]
        # Two of one source are never exchanged: the slots of the one end where those of the other begin.
        right_first, left_last = _first(right), _last(left)
        free = (right_first <= slot) & (left_last > slot)
        free &= _coins(turn, len(slot), key) | (_first(left) > slot) | (_last(right) <= slot)
        # Exchanged by what they differ in: two thirds of the time that indices take.
        difference = (left ^ right) * free
        left ^= difference
        right ^= difference


def _coins(turn: int, count: int, key: int) -> npt.NDArray[np.bool_]:
    words = np.arange(turn * _COINS_A_TURN, turn * _COINS_A_TURN + count // 64 + 1, dtype=np.uint64)
    return np.unpackbits(hashed(words, key).astype("<u8").view(np.uint8))[:count].view(np.bool_)


def _table_of(elements: Int64s) -> _Table:
    sources = elements.astype(np.uint16)
    by_source = sources.argsort(kind="stable")
    counts = np.bincount(sources)
    ranks = np.empty(len(sources), np.int32)
    ranks[by_source] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Table(sources, ranks)


def _mend(elements: Int64s, begin: int, end: int) -> None:
    """Put what is in these slots in place, unless it is, or can't be: earliest deadline first."""
    part = elements[begin:end]
    if not _misplaced(part, begin).any():
        return
    first, last, total = _first(part), _last(part), len(part)
    arriving = np.argsort(first, kind="stable")
    firsts = first[arriving].tolist()
    keys = (last * total + np.arange(total))[arriving].tolist()
    ready: list[int] = []
    placed: list[int] = []
    arrived = 0
    for slot in range(begin, begin + total):
        while arrived < total and (firsts[arrived] <= slot or not ready):
            heapq.heappush(ready, keys[arrived])
            arrived += 1
        placed.append(heapq.heappop(ready))
    part[:] = part[np.array(placed) % total]
