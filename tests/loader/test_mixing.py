"""Several sources by weight: proportions, epochs of each source, ranks, state."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import write_store

from milldam.errors import ConfigError, MismatchError
from milldam.loader.mixing import MixedSamples, mix
from milldam.loader.order import InSequence, Order, Shuffle, Shuffled
from milldam.loader.samples import Samples

# ---- sources ----


class Rows(Samples[Any, Any]):
    """Samples that say which they are: (source's name, number)."""

    def __init__(self, name: int, count: int, *, tokens: int = 8) -> None:
        self.name, self._count, self._tokens = name, count, tokens

    token_dtype = np.dtype(np.int64)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "rows", "data": self.name, "samples": self._count}

    @property
    def sample_tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Any, dtype: Any = np.int64, out: Any = None) -> Any:
        marks = np.repeat(numbers[:, None] + 10_000 * self.name, self._tokens, axis=1).astype(dtype)
        return marks, marks + 1

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return Shuffled(self._count, seed) if shuffle else InSequence(self._count)


def mixed(counts: list[int], weights: list[float], **options: Any) -> MixedSamples:
    """A mixture of sources of so many samples."""
    sources = {Rows(name, count): weight for name, (count, weight) in enumerate(zip(counts, weights, strict=True))}
    found = mix(sources, **options)
    assert isinstance(found, MixedSamples)
    return found


def marks(batches: Any) -> list[int]:
    """10,000 * source + number of every sample of some batches."""
    return [int(mark) for x, _ in batches for mark in x[:, 0]]


def stored(folder: Path, tokens: list[int]) -> list[Any]:
    """Stores of so many tokens."""
    return [write_store(folder / f"{name}.milldam", [[count]]) for name, count in enumerate(tokens)]


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 20), min_size=2, max_size=12),
    st.lists(st.fractions(Fraction(1, 50), 5, max_denominator=60), min_size=2, max_size=12),
    st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
    # Rare and common ones.
    st.lists(st.integers(0, 24).map(lambda power: 2.0**power), min_size=2, max_size=40),
)
SMALL = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3)

# ---- proportions ----

BLOCK = 4096


def shares(weights: list[Any]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@settings(max_examples=40)
@given(weights=WEIGHTS, block=st.one_of(st.integers(0, 3), st.integers(0, 10**8)))
def test_every_block_brings_every_source_within_one_sample_of_its_share(weights: list[Any], block: int) -> None:
    """Of all samples so far, from the begin and far out; within two, if it comes less than once in a block."""
    samples = mixed([10] * len(weights), weights, stop=100)
    places = (block + 1) * BLOCK
    drawn = samples.drawn(places)
    assert sum(drawn) == places
    assert all(before <= after for before, after in zip(samples.drawn(places - BLOCK), drawn, strict=True))
    for share, count in zip(shares(weights), drawn, strict=True):
        assert abs(count - share * places) < (1 if share * BLOCK >= 1 else 2)


def test_weights_are_taken_as_they_are_written() -> None:
    """0.1 is a tenth, and what counts is the share of the sum."""
    for weights in ([0.1, 0.2], [1, 2], [Decimal("0.5"), Fraction(1)]):
        assert mixed([9, 9], weights).weights == (Fraction(1, 3), Fraction(2, 3))
    assert mixed([9, 9], [np.float32(0.1), np.int64(1)]).weights == (Fraction(1, 11), Fraction(10, 11))


# ---- epochs ----


@settings(max_examples=40)
@given(sources=SMALL, seed=st.integers(0, 2**64), shuffle=st.sampled_from([True, False]))
def test_no_sample_comes_twice_within_a_sources_epoch(
    sources: list[tuple[int, int]], seed: int, shuffle: Shuffle
) -> None:
    """Each source goes through its own epochs, whole, one after another."""
    counts, weights = zip(*sources, strict=True)
    samples = mixed(list(counts), list(weights), stop=1000)
    seen = np.array(marks(samples.batches(64, seed=seed, shuffle=shuffle)))
    for name, count in enumerate(counts):
        own = seen[seen // 10_000 == name] % 10_000
        for first in range(0, len(own) - count + 1, count):
            assert sorted(own[first : first + count]) == list(range(count))
        assert len(set(own[len(own) // count * count :])) == len(own) % count


@settings(max_examples=40)
@given(sources=SMALL)
def test_stop_rules_are_exact(sources: list[tuple[int, int]]) -> None:
    """first_exhausted: one sample more would be a repeat; all_exhausted: one less, and a sample were unseen."""
    counts, weights = (list(column) for column in zip(*sources, strict=True))
    first, last = mixed(counts, weights), mixed(counts, weights, stop="all_exhausted")
    assert all(drawn <= count for drawn, count in zip(first.drawn(first.epoch_samples), counts, strict=True))
    assert any(drawn > count for drawn, count in zip(first.drawn(first.epoch_samples + 1), counts, strict=True))
    assert all(drawn >= count for drawn, count in zip(last.drawn(last.epoch_samples), counts, strict=True))
    assert any(drawn < count for drawn, count in zip(last.drawn(last.epoch_samples - 1), counts, strict=True))
    assert first._numbered == last._numbered == sum(counts)
    assert len(marks(first.batches(7))) == len(set(marks(first.batches(7)))) == first.epoch_samples
    assert len(set(marks(last.batches(7)))) == last._numbered


# ---- ranks and state ----


@settings(max_examples=40)
@given(sources=SMALL, taken=st.integers(0, 30), batch_size=st.integers(1, 5), then=st.integers(1, 9))
def test_resume_anywhere_goes_on_exactly(
    sources: list[tuple[int, int]], taken: int, batch_size: int, then: int
) -> None:
    """Through JSON, with another batch size."""
    counts, weights = (list(column) for column in zip(*sources, strict=True))
    samples = mixed(counts, weights, stop=150)
    whole = marks(samples.batches(150, seed=3))
    first = samples.batches(batch_size, seed=3)
    begun = marks(itertools.islice(first, taken))
    other = mixed(counts, weights, stop=150).batches(then, seed=3)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + (marks(other) if len(begun) < 150 else []) == whole


def test_a_state_of_other_weights_is_refused() -> None:
    """Both are said."""
    state = mixed([9, 9], [1, 2]).batches(2).state_dict()
    with pytest.raises(MismatchError, match=r"weights was \['1/3', '2/3'\], is \['1/4', '3/4'\]"):
        mixed([9, 9], [1, 3]).batches(2).load_state_dict(state)


# ---- reading ----


CUTS: dict[str, Any] = {
    "xy": lambda store, way: store.windows(5, read=way),
    "hf": lambda store, way: store.windows(5, form="hf", stride=3, read=way),
    "wrapped": lambda store, way: store.packed(5, pad_last=True, read=way),
    "best_fit": lambda store, way: store.packed(5, strategy="best_fit", read=way),
    "hf rows": lambda store, way: store.packed(5, form="hf", read=way),
}


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.lists(st.integers(1, 14), max_size=6), min_size=1, max_size=3), min_size=3, max_size=3),
    cuts=st.one_of(
        st.sampled_from([(name,) * 3 for name in CUTS]), st.permutations(["wrapped", "best_fit", "wrapped"])
    ),
    ways=st.sampled_from([("map",) * 3, ("pread",) * 3, ("map", "pread", "map")]),
    dtypes=st.sampled_from([("uint16",) * 3, ("uint16", "int32", "uint16")]),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_a_mixture_has_the_samples_of_its_sources_however_they_are_read(
    tmp_path_factory: Any, shards: list[list[list[int]]], cuts: Any, ways: Any, dtypes: Any, batch_size: int,
    shuffle: bool,
) -> None:  # fmt: skip
    """All mapped and read at once, or source by source: every sample of every batch is what its source gives alone."""
    folder = tmp_path_factory.mktemp("stores")
    sources: list[Any] = []
    for number, (lengths, cut, way, dtype) in enumerate(zip(shards, cuts, ways, dtypes, strict=True)):
        store = write_store(folder / f"{number}.milldam", [[7, 2], *lengths], dtype=dtype)
        sources.append(CUTS[cut](store, way))
    samples = mix({mix({sources[0]: 0.5, sources[1]: 0.3}): 2, sources[2]: 1}, stop="all_exhausted")
    assert isinstance(samples, MixedSamples)
    begins = np.cumsum([0, *(len(source) for source in sources)])
    numbers = samples._order(shuffle, 1).numbers(np.arange(samples.epoch_samples))
    delivered = 0
    for batch in samples.batches(batch_size, seed=1, shuffle=shuffle):
        pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
        arrays = {name: value for name, value in pairs if name not in ("cu_seqlens", "max_seqlen")}
        rows = len(next(iter(arrays.values())))
        for row, number in enumerate(numbers[delivered : delivered + rows].tolist()):
            source = int(begins.searchsorted(number, side="right")) - 1
            single = sources[source][number - begins[source]]
            for name, array in arrays.items():
                assert array[row].tolist() == single[name].tolist()
        if isinstance(batch, dict) and "cu_seqlens" in batch:
            begun = np.flatnonzero(batch["position_ids"].ravel() == 0)
            assert batch["cu_seqlens"].tolist() == [*begun, rows * 5]
        delivered += rows
    assert delivered == samples.epoch_samples


# ---- what is mixed ----


def test_sources_that_can_not_be_mixed_are_refused(tmp_path: Path) -> None:
    """Nothing, samples beside stores, samples of other lengths, batches of another kind."""
    [store] = stored(tmp_path, [400])
    with pytest.raises(ConfigError, match="with their weights"):
        mix({})
    with pytest.raises(ConfigError, match="Store, Windows"):
        mix({store: 1, store.windows(8): 1})
    with pytest.raises(ConfigError, match="int"):
        mix({3: 1})
    with pytest.raises(ConfigError, match=r"of 8 tokens.*of 9 tokens.*Cut them alike"):
        mix({store.windows(8): 1, store.windows(9): 1})
    with pytest.raises(ConfigError, match=r"shifted.*hf.*Cut them alike"):
        mix({store.packed(8): 1, store.packed(8, form="hf"): 1})
    with pytest.raises(ConfigError, match=r"tuples.*input_ids, labels"):
        mix({store.windows(8): 1, store.windows(8, form="hf"): 1})
