"""The keyed permutation: every number once, the same in every version, and random by tests that weak ones fail.

A figure z says how many standard deviations a statistic lies from what chance gives; above 4 is no chance.
docs/decisions/0015 cites these tests; `python tests/loader/test_permutation.py` prints the figures.
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

from milldam.loader.permutation import SMALL, Int64s, Permutation, hashed, mix

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


def low_bits(order: Order, n: int) -> float:
    """The last three bits of neighbours together."""
    numbers = order(np.arange(min(n // 10, MOST_PLACES) // 2 * 2)) & 7
    return chi_square(np.bincount(numbers[::2] * 8 + numbers[1::2], minlength=64))


def landing(order: Order, n: int) -> float:
    """Where the first hundredth of all places lands."""
    drawn = min(n // 100, MOST_PLACES)
    return chi_square(np.bincount(cells(order(np.arange(drawn)), n, 64), minlength=64), 1 - drawn / n)


def serial_correlation(order: Order, n: int) -> float:
    numbers = order(np.arange(min(n // 10, MOST_PLACES))).astype(np.float64)
    return float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) * math.sqrt(len(numbers) - 1)


def small_remainders(order: Order, n: int) -> float:
    """Differences of neighbours modulo 2, 3, 5 and 7, all at once: modulo 210.

    Each on its own has so few cells that z is far from normal: a true shuffle was found off by 7 that way.
    """
    difference = np.diff(order(np.arange(min(n // 10, MOST_PLACES))))
    return chi_square(np.bincount(difference % 210, minlength=210))


def far_gaps(order: Order, n: int) -> float:
    """Places a row of the network's rectangle apart: they share one half."""
    return gaps(order, n, -(-n // (math.isqrt(n - 1) + 1)))


STATISTICS: dict[str, Callable[[Order, int], float]] = {
    "gaps": gaps,
    "far gaps": far_gaps,
    "pairs": pairs,
    "low bits": low_bits,
    "landing": landing,
    "serial correlation": serial_correlation,
    "small remainders": small_remainders,
}


def figures(order: Order, n: int) -> dict[str, float]:
    """How far off each statistic is, to either side: too even is no chance either."""
    return {name: abs(statistic(order, n)) for name, statistic in STATISTICS.items()}


# Permutations that look random and are not. All of [0, 2^20).
WEAK_SIZE = 2**20
_HALF = 2**10


def add_constant(places: Int64s) -> Int64s:
    """A random place to begin, as some loaders have it."""
    return (places + 777_777) % WEAK_SIZE


def congruential(places: Int64s) -> Int64s:
    """A step of a linear congruential generator."""
    return (places * 0x5D588B65 + 0x269EC3) % WEAK_SIZE


def feistel_without_mixing(places: Int64s) -> Int64s:
    """Four rounds whose round function multiplies and adds."""
    left, right = np.divmod(places, _HALF)
    for factor in (0x2F1, 0x11D, 0x3A7, 0x06B):
        left, right = right, left ^ ((right * factor + 0x155) % _HALF)
    return left * _HALF + right


def feistel_of_two_rounds(places: Int64s) -> Int64s:
    """A good round function, too few rounds."""
    left, right = np.divmod(places, _HALF)
    for key in (mix(1), mix(2)):
        left, right = right, left ^ (hashed(right.astype(np.uint64), key) % np.uint64(_HALF)).astype(np.int64)
    return left * _HALF + right


WEAK = [add_constant, congruential, feistel_without_mixing, feistel_of_two_rounds]


@given(any_size, st.integers(0, 2**64 - 1))
def test_each_number_comes_once(n: int, key: int) -> None:
    """All places together give every number of [0, n) exactly once."""
    numbers = Permutation(n, key)(np.arange(n))
    assert numbers.dtype == np.int64
    assert (np.sort(numbers) == np.arange(n)).all()


@pytest.mark.parametrize("n", [2**32, 10**12, 10**15])
def test_large_sizes_stay_inside_and_never_repeat(n: int) -> None:
    """Where not all places can be tried, none of many leaves [0, n) and no two meet, also at both ends."""
    places = np.concatenate([np.arange(50_000), np.arange(n - 50_000, n)])
    numbers = Permutation(n, 3)(places)
    assert numbers.min() >= 0
    assert numbers.max() < n
    assert len(np.unique(numbers)) == len(places)


@given(st.sampled_from([10, 1000, SMALL, 100_003, 10**10]), st.lists(st.integers(0, 9), max_size=30))
def test_the_size_of_a_call_does_not_matter(n: int, places: list[int]) -> None:
    """Many places in one call give what a call each gives."""
    permutation = Permutation(n, 5)
    together = permutation(np.array(places, np.int64))
    assert together.tolist() == [int(permutation(np.array([place]))[0]) for place in places]


def test_a_call_leaves_its_places_alone() -> None:
    """The array that is passed in is not written to."""
    for n in (100, 10**6):
        places = np.arange(50)
        Permutation(n, 1)(places)
        assert (places == np.arange(50)).all()


@pytest.mark.parametrize(
    ("n", "key", "numbers"),
    [
        (1, 0, [0]),
        (5, 7, [1, 0, 3, 4, 2]),
        (1_000, 1, [998, 353, 127, 631, 556, 985]),
        (65_535, 2, [56736, 11017, 40170, 49478, 11122, 17236]),
        (65_536, 2, [52176, 55969, 60660, 32687, 42735, 48747]),
        (65_537, 18446744073709551615, [5965, 6130, 30488, 47856, 48547, 33880]),
        (1_000_003, 9, [235433, 373871, 71966, 986593, 652037, 634581]),
        (10**9, mix(0, 0), [88439753, 710189227, 972733293, 232070254, 953250931, 320593240]),
        (
            1_000_000_000_000,
            18036798128018490698,
            [609926272761, 338763356472, 206322459773, 12944404444, 978382689479, 383054666899],
        ),
    ],
)
def test_the_order_never_changes_between_versions(n: int, key: int, numbers: list[int]) -> None:
    """Golden values: a training job that goes on with a new version must get the same order."""
    assert Permutation(n, key)(np.arange(n)[:6] if n < 10 else np.arange(6)).tolist() == numbers


@pytest.mark.parametrize(("n", "checksum"), [(60_000, 3220361731), (70_003, 2777357938)])
def test_no_number_of_an_order_changes_between_versions(n: int, checksum: int) -> None:
    """A checksum over all numbers, of the table and of the network with what goes round again."""
    assert zlib.crc32(Permutation(n, 7)(np.arange(n)).astype("<i8").tobytes()) == checksum


def test_keys_of_seed_and_epoch_never_change_between_versions() -> None:
    """Golden values of the keys, negative and large seeds included."""
    keys = [mix(0), mix(0, 1), mix(1, 0), mix(42, 3), mix(-1, 0), mix(2**63, 7)]
    assert keys == [
        16294208416658607535,
        3069472533636442495,
        6791897765849424158,
        7645025691661814288,
        6755974106381971767,
        4384659894096827455,
    ]


@pytest.mark.parametrize("n", [1000, 100_000, 10**9])
def test_other_keys_give_other_orders(n: int) -> None:
    """Two keys, also keys of neighbouring seeds and epochs, agree at no more places than chance has it."""
    places = np.arange(1000)
    keys = [mix(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = [Permutation(n, key)(places) for key in keys]
    for one in range(len(keys)):
        for other in range(one):
            assert (orders[one] == orders[other]).sum() <= 8


@pytest.mark.parametrize("n", SIZES)
def test_epochs_have_nothing_to_do_with_one_another(n: int) -> None:
    """The difference between one epoch's number and the next one's at the same place is anything alike."""
    places = np.arange(min(n // 10, MOST_PLACES))
    for seed in KEYS:
        this, following = (Permutation(n, mix(seed, epoch))(places) for epoch in (0, 1))
        assert abs(chi_square(np.bincount(cells((following - this) % n, n, 64), minlength=64))) < LIMIT


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("n", SIZES)
def test_the_order_is_random_by_every_statistic(n: int, name: str) -> None:
    """No statistic can tell it from chance, for several keys."""
    for key in KEYS:
        assert abs(STATISTICS[name](Permutation(n, mix(key, 0)), n)) < LIMIT


@pytest.mark.parametrize("name", STATISTICS)
def test_no_statistic_leans_to_one_side_over_many_keys(name: str) -> None:
    """The mean over many keys is nought but for chance, which finds weaknesses too small to show with one key."""
    keys, n = 40, 10**9
    mean = sum(STATISTICS[name](Permutation(n, mix(key, 3)), n) for key in range(keys)) / keys
    assert abs(mean) * math.sqrt(keys) < LIMIT


@pytest.mark.parametrize("n", [5_000, SMALL, 66_049])
def test_fixed_points_are_as_many_as_chance_gives(n: int) -> None:
    """Over many keys, one number a permutation stays at its place on average."""
    keys, places = 64, np.arange(n)
    fixed = sum(int((Permutation(n, mix(key, 1))(places) == places).sum()) for key in range(keys))
    assert abs(fixed - keys) / math.sqrt(keys) < LIMIT


def test_small_permutations_are_all_alike_likely() -> None:
    """Of the 24 orders of four numbers, each comes as often as the others over many keys."""
    counts: dict[tuple[int, ...], int] = {}
    for key in range(4_800):
        order = tuple(Permutation(4, mix(key, 0))(np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert chi_square(np.array(list(counts.values()))) < LIMIT


def test_a_true_shuffle_passes_the_statistics() -> None:
    """The statistics are sound: numpy's own shuffle, an array of all numbers, passes."""
    for seed in KEYS:
        shuffled = np.random.default_rng(seed).permutation(WEAK_SIZE)
        assert max(figures(shuffled.__getitem__, WEAK_SIZE).values()) < LIMIT


@pytest.mark.parametrize("weak", WEAK)
def test_weak_permutations_are_found_out(weak: Order) -> None:
    """The statistics are sharp: permutations that only look random are off by thousands of deviations."""
    assert (np.sort(weak(np.arange(WEAK_SIZE))) == np.arange(WEAK_SIZE)).all()
    assert max(figures(weak, WEAK_SIZE).values()) > 1_000


def print_figures() -> None:
    """One line a permutation, the worst of all keys: the table of docs/decisions/0015."""
    lines = []
    for n in SIZES:
        each = [figures(Permutation(n, mix(key, 0)), n) for key in KEYS]
        lines.append((f"ours, n = {n:,}", {name: max(one[name] for one in each) for name in STATISTICS}))
    lines += [(weak.__name__, figures(weak, WEAK_SIZE)) for weak in WEAK]
    for title, found in lines:
        print(f"{title:28}", *(f"{name} {z:,.1f}" for name, z in found.items()), sep="  ")


if __name__ == "__main__":
    print_figures()
