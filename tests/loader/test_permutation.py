"""The keyed permutation: every number once, the same in every version, and random by tests that weak ones fail.

A figure z says how many standard deviations a statistic lies from what chance gives; above 4 is no chance.
docs/decisions/0015 cites these tests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.loader.permutation import SMALL, Int64s, Permutation, mix

Order = Callable[[Int64s], Int64s]

SIZES = (100_000, 2**20, 10**6 + 3, 10**9, 10**12)
KEYS = (0, 1, 2, 12345)
MOST_PLACES = 100_000
LIMIT = 4.0

# Around where the table gives way to the network; primes, squares, one off from squares, and the smallest ones.
odd_sizes = st.sampled_from(
    [1, 2, 3, 4, 5, 7, 64, 97, 256, 257, SMALL - 1, SMALL, SMALL + 1, 65_537, 66_049, 66_048, 66_050, 70_003, 99_991]
)
any_size = odd_sizes | st.integers(1, 3_000) | st.integers(SMALL - 50, SMALL + 50)


def chi_square(counts: npt.NDArray[np.integer], still_free: float = 1.0) -> float:
    """z of equally likely cells; `still_free`: the share of the population that was not drawn, which narrows it."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2).sum() / expected) / still_free
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def cells(values: Int64s, n: int, count: int) -> Int64s:
    """Which of `count` equal parts of [0, n) each value lies in."""
    return (values.astype(np.float64) * (count / n)).astype(np.int64)


def gaps(order: Order, n: int, distance: int = 1) -> float:
    """How far apart two places' numbers are, when the places are a fixed distance apart."""
    places = np.arange(min(n // 10, MOST_PLACES))
    difference = (order(places + distance) - order(places)) % n
    return chi_square(np.bincount(cells(difference, n, 64), minlength=64))


def pairs(order: Order, n: int) -> float:
    """Where neighbouring places land together, in a histogram of 16 by 16."""
    numbers = order(np.arange(min(n // 10, MOST_PLACES) // 2 * 2))
    both = cells(numbers[::2], n, 16) * 16 + cells(numbers[1::2], n, 16)
    return chi_square(np.bincount(both, minlength=256))


def landing(order: Order, n: int) -> float:
    """Where the first hundredth of all places lands."""
    drawn = min(n // 100, MOST_PLACES)
    return chi_square(np.bincount(cells(order(np.arange(drawn)), n, 64), minlength=64), 1 - drawn / n)


def far_gaps(order: Order, n: int) -> float:
    """Places a row of the network's rectangle apart: they share one half."""
    return gaps(order, n, -(-n // (math.isqrt(n - 1) + 1)))


STATISTICS = (gaps, far_gaps, pairs, landing)


@given(any_size, st.integers(0, 2**64 - 1))
def test_each_number_comes_once(n: int, key: int) -> None:
    """All places together give every number of [0, n) exactly once."""
    numbers = Permutation(n, key)(np.arange(n))
    assert numbers.dtype == np.int64
    assert (np.sort(numbers) == np.arange(n)).all()


@pytest.mark.parametrize(("n", "checksum"), [(60_000, 3220361731), (70_003, 2777357938)])
def test_no_number_of_an_order_changes_between_versions(n: int, checksum: int) -> None:
    """A checksum over all numbers, of the table and of the network with what goes round again: a training job that
    continues with a new version must get the same order."""
    assert zlib.crc32(Permutation(n, 7)(np.arange(n)).astype("<i8").tobytes()) == checksum


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("n", SIZES)
def test_the_order_is_random_by_every_statistic(n: int, statistic: Callable[[Order, int], float]) -> None:
    """None can tell it from chance, for several keys."""
    for key in KEYS:
        assert abs(statistic(Permutation(n, mix(key, 0)), n)) < LIMIT


def test_the_statistics_tell_a_shuffle_from_what_only_looks_like_one() -> None:
    """numpy's own shuffle passes; a step of a linear congruential generator is off by thousands of deviations."""
    n = 2**20
    shuffled = np.random.default_rng(0).permutation(n)
    assert max(abs(statistic(shuffled.__getitem__, n)) for statistic in STATISTICS) < LIMIT
    weak = (np.arange(n) * 0x5D588B65 + 0x269EC3) % n
    assert max(abs(statistic(weak.__getitem__, n)) for statistic in STATISTICS) > 1_000
