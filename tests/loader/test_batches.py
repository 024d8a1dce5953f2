"""Batches: no sample twice and none lost, for any ranks, batch sizes, workers and interruptions; exact states.

Most samples here are windows of one token, which says the number of the sample.
"""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.kit.token_stores import write_store

from milldam.errors import ConfigError, MismatchError
from milldam.loader import order
from milldam.loader.batches import Batches
from milldam.loader.order import Shuffle
from milldam.loader.reading import Way
from milldam.loader.samples import Samples
from milldam.loader.stores import Store

SAMPLES = 97
SHUFFLES: list[Shuffle] = [True, False, "block"]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of 3 samples and windows of 4 blocks, so that an epoch has several."""
    with patch.object(order, "BLOCK_BYTES", 6), patch.object(order, "WINDOW_BLOCKS", 4):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """97 tokens in five shards; the token at place i is i + 1, or 0 at the end of a document."""
    return write_store(tmp_path_factory.mktemp("batches") / "s.milldam", [[30], [9, 11], [1], [40], [6]])


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose token i is i, so that samples of one token are their own numbers."""
    store = write_store(tmp_path_factory.mktemp("batches") / "n.milldam", [[30], [9, 11], [1], [40], [6]])
    begin = 0
    for shard in store.shards:
        np.arange(begin, begin + shard.tokens, dtype="<u2").tofile(store.path / f"{shard.name}.bin")
        begin += shard.tokens
    return store


def samples_of(store: Store, count: int = SAMPLES, read: Way = "map") -> Samples[Any, Any]:
    """`count` samples; sample i is [i]."""
    return store.split(first=count)["first"].windows(1, form="hf", read=read)


def seen(batches: Iterable[Any]) -> list[list[int]]:
    """The numbers of the samples, batch by batch."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def flat(batches: Iterable[Any]) -> list[int]:
    return [number for batch in seen(batches) for number in batch]


def interleaved(ranks: list[list[list[int]]]) -> list[int]:
    """The global sequence from what each rank got: step by step, one sample of each rank in turn."""
    together: list[int] = []
    for step in itertools.zip_longest(*ranks, fillvalue=[]):
        for turn in itertools.zip_longest(*step):
            together += [number for number in turn if number is not None]
    return together


@dataclass(frozen=True)
class Layout:
    """How a job is spread out."""

    world_size: int
    batch_size: int
    prefetch: int


layouts = st.builds(Layout, st.integers(1, 5), st.integers(1, 12), st.sampled_from([0] * 7 + [2]))
shuffles = st.sampled_from(SHUFFLES)
counts = st.integers(1, SAMPLES)


def start(samples: Samples[Any, Any], layout: Layout, **options: Any) -> list[Batches]:
    """The loaders of all ranks."""
    return [
        samples.batches(layout.batch_size, rank=rank, world_size=layout.world_size, prefetch=layout.prefetch, **options)
        for rank in range(layout.world_size)
    ]


@given(counts, layouts, shuffles, st.integers(0, 2**40), st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(
    numbered: Store, count: int, layout: Layout, shuffle: Shuffle, seed: int, epochs: int
) -> None:
    """Over all ranks the samples of any number of epochs are exactly those, and in the order of one rank."""
    samples = samples_of(numbered, count)
    loaders = start(samples, layout, seed=seed, shuffle=shuffle, epochs=epochs)
    ranks = [seen(loader) for loader in loaders]
    assert [len(rank) for rank in ranks] == [len(loader) for loader in loaders]
    together = interleaved(ranks)
    for epoch in range(epochs):
        assert sorted(together[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert together == flat(samples.batches(7, seed=seed, shuffle=shuffle, epochs=epochs))


@given(
    counts, st.lists(st.tuples(layouts, st.integers(0, 9)), min_size=1, max_size=4), shuffles, st.integers(1, 3), counts
)
def test_jobs_that_are_stopped_anywhere_lose_and_repeat_nothing(
    numbered: Store,
    count: int,
    legs: list[tuple[Layout, int]],
    shuffle: Shuffle,
    epochs: int,
    seed: int,
) -> None:
    """Stopped at any step and gone on elsewhere with other ranks, batch sizes and prefetch: one exact sequence."""
    samples = samples_of(numbered, count)
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "epochs": epochs}
    together: list[int] = []
    state: dict[str, Any] | None = None
    for layout, steps in legs:
        loaders = start(samples, layout, **options)
        # A leg that would reach the short end is left to the last one: there ranks may differ by a batch.
        steps = min(steps, (epochs * count - len(together)) // (layout.batch_size * layout.world_size))
        ranks = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            ranks.append(seen(itertools.islice(loader, steps)))
        together += interleaved(ranks)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        state = json.loads(states[0])
        assert state["samples_seen"] == len(together)
    if len(together) < epochs * count:
        last = start(samples, Layout(3, 4, 0), **options)
        for loader in last:
            loader.load_state_dict(state)  # type: ignore[arg-type]
        together += interleaved([seen(loader) for loader in last])
    assert together == flat(samples.batches(5, **options))


@given(counts, st.integers(1, 5), st.integers(1, 12), shuffles, st.integers(1, 3))
def test_drop_last_gives_every_rank_the_same_batches(
    numbered: Store, count: int, world_size: int, batch_size: int, shuffle: Shuffle, epochs: int
) -> None:
    """All full, as many on every rank, none left out but what fills no step; then the next epochs begin whole."""
    assume(epochs * count >= world_size * batch_size)
    samples = samples_of(numbered, count)
    loaders = start(samples, Layout(world_size, batch_size, 0), shuffle=shuffle, epochs=epochs, drop_last=True)
    whole = epochs * count // (world_size * batch_size)
    expected = flat(samples.batches(5, shuffle=shuffle, epochs=2 * epochs))
    for turn in range(2):
        ranks = [seen(loader) for loader in loaders]
        assert {len(rank) for rank in ranks} == {whole}
        assert all(len(loader) == whole for loader in loaders)
        assert all(len(batch) == batch_size for rank in ranks for batch in rank)
        begin = turn * epochs * count
        assert interleaved(ranks) == expected[begin : begin + whole * world_size * batch_size]
        assert all(loader.samples_seen == begin + epochs * count for loader in loaders)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_loop_that_was_left_goes_on(numbered: Store, prefetch: int) -> None:
    """After a break the next loop brings what follows, and what was made ahead is not lost."""
    whole = flat(samples_of(numbered).batches(10))
    loader = samples_of(numbered).batches(10, prefetch=prefetch)
    first = seen(itertools.islice(loader, 3))
    for batch in loader:
        first += seen([batch])
        break
    assert loader.samples_seen == 40
    assert list(itertools.chain(*first)) + flat(loader) == whole


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"shuffle": "block"}, "shuffle was True, is block"),
        ({"seq_len": 6}, "seq_len was 5, is 6"),
        ({"stride": 4}, "stride was 5, is 4"),
        ({"form": "hf"}, "form was xy, is hf"),
    ],
)
def test_a_state_of_another_loader_is_refused(store: Store, changed: dict[str, Any], message: str) -> None:
    """What was changed is said in a sentence, and the loader stays as it was."""

    def make(options: dict[str, Any]) -> Batches:
        order_options = {name: options.pop(name) for name in ("seed", "shuffle") if name in options}
        return store.windows(options.pop("seq_len", 5), **options).batches(4, **order_options)

    before = make({})
    next(before)
    after = make(dict(changed))
    with pytest.raises(MismatchError, match=message) as error:
        after.load_state_dict(before.state_dict())
    assert "Make the loader as it was, or start over" in str(error.value)
    assert after.samples_seen == 0


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "milldam-read-ahead"]


def test_threads_end_with_their_loader(numbered: Store) -> None:
    """No thread stays behind: after the last batch, when a loader is dropped, and when a state is loaded."""
    gc.collect()
    before = len(reading_threads())
    loader = samples_of(numbered).batches(5, prefetch=2)
    next(loader)
    assert len(reading_threads()) == before + 1
    loader.load_state_dict(loader.state_dict())
    assert len(reading_threads()) == before
    list(loader)
    assert len(reading_threads()) == before
    for _ in samples_of(numbered).batches(5, prefetch=2):
        break
    gc.collect()
    assert len(reading_threads()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0; use 1 or more"),
        ({"world_size": 0}, "world_size: 0; use 1 or more"),
        ({"rank": 1}, "rank: 1; the ranks of world_size=1 are 0 to 0"),
        ({"rank": -1, "world_size": 4}, "rank: -1; the ranks of world_size=4 are 0 to 3"),
        ({"epochs": 0}, "epochs: 0; use 1 or more, or None"),
        ({"prefetch": -1}, "prefetch: -1; use 0 or more"),
        ({"world_size": 50, "drop_last": True}, "97 samples give no full batch on every rank"),
        ({"shuffle": "yes"}, "shuffle: 'yes'; use True, \"block\" or False"),
    ],
)
def test_bad_settings_are_refused(numbered: Store, options: dict[str, Any], message: str) -> None:
    """Which setting, what it is, and what can be meant."""
    with pytest.raises(ConfigError, match=message):
        samples_of(numbered).batches(**({"batch_size": 4} | options))
