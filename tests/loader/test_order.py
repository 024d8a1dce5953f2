"""Orders: every epoch of every order is a permutation, entered anywhere; block shuffle keeps to its windows."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from milldam.loader import order
from milldam.loader.order import BlockShuffled, InSequence, Order, Shuffled

sizes = st.integers(1, 400) | st.sampled_from([1, 2, 63, 64, 65, 128, 1000])
seeds = st.integers(-5, 2**63)
blocks = st.integers(1, 40)
windows = st.integers(1, 8)
kinds = st.sampled_from(["shuffled", "block", "sequence"])


def make(kind: str, samples: int, seed: int, block: int, window_blocks: int) -> Order:
    """An order with blocks and windows small enough that there are several."""
    if kind == "shuffled":
        return Shuffled(samples, seed)
    if kind == "sequence":
        return InSequence(samples)
    with patch.object(order, "WINDOW_BLOCKS", window_blocks):
        return BlockShuffled(samples, seed, block)


@given(kinds, sizes, seeds, blocks, windows, st.integers(0, 5))
def test_each_epoch_has_every_sample_once(
    kind: str, samples: int, seed: int, block: int, window_blocks: int, epoch: int
) -> None:
    """The places of an epoch give each sample exactly once, also when it is smaller than a block or a window."""
    made = make(kind, samples, seed, block, window_blocks)
    numbers = made.numbers(np.arange(epoch * samples, (epoch + 1) * samples))
    assert (np.sort(numbers) == np.arange(samples)).all()


@given(kinds, sizes, seeds, blocks, windows, st.data())
def test_an_order_can_be_entered_anywhere(
    kind: str, samples: int, seed: int, block: int, window_blocks: int, data: st.DataObject
) -> None:
    """Any ascending places, over the borders of windows and epochs, give what all places in one call give there."""
    made = make(kind, samples, seed, block, window_blocks)
    everything = made.numbers(np.arange(3 * samples))
    places = sorted(data.draw(st.lists(st.integers(0, 3 * samples - 1), max_size=20, unique=True)))
    fresh = make(kind, samples, seed, block, window_blocks)
    assert fresh.numbers(np.array(places, np.int64)).tolist() == everything[places].tolist()
    for place in places:
        assert made.numbers(np.array([place])).tolist() == [everything[place]]


def test_orders_never_change_between_versions() -> None:
    """Golden values: a job that goes on with a new version must get the same samples."""
    shuffled = [4, 5, 1, 8, 3, 2, 7, 0, 9, 6, 5, 9, 2, 8, 1, 6, 3, 4, 0, 7]
    assert Shuffled(10, 42).numbers(np.arange(20)).tolist() == shuffled
    first = [0, 15, 14, 13, 19, 1, 4, 9, 7, 6, 8, 5, 18, 16, 3, 10, 2, 17, 11, 12]
    second = [5, 4, 13, 3, 14, 12, 10, 17, 15, 16, 9, 11, 19, 6, 18, 1, 0, 7, 8, 2]
    assert make("block", 20, 42, 3, 2).numbers(np.arange(40)).tolist() == first + second


@given(sizes, seeds, blocks, windows, st.integers(0, 3))
def test_a_window_has_the_samples_that_were_announced(
    samples: int, seed: int, block: int, window_blocks: int, epoch: int
) -> None:
    """From window to window, those in the order in which they are stored and those that come are the same."""
    made = make("block", samples, seed, block, window_blocks)
    place, end = epoch * samples, (epoch + 1) * samples
    while place < end:
        window = made.window(place)
        assert window is not None and window[0] == place < window[1] <= end
        assert made.window(window[1] - 1) == window
        places = np.arange(*window)
        assert sorted(made.stored(places).tolist()) == sorted(made.numbers(places).tolist())
        place = window[1]
    assert place == end
