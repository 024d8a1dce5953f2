"""Streams: rows that go on from batch to batch, B stretches that never overlap, each rank its own for good."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import flat_tokens, write_store

from milldam.errors import ConfigError, MismatchError
from milldam.loader.reading import Way
from milldam.loader.stores import Store
from milldam.loader.windows import Streams

TOKENS = 301


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """301 tokens in four shards."""
    return write_store(tmp_path_factory.mktemp("streams") / "s.milldam", [[10, 91], [100], [1], [49, 50]])


def brute_force(flat: list[int], lanes: int, seq_len: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """(x, y) of each step of all streams, cut from a list."""
    stretch = (len(flat) - 1) // lanes
    steps = []
    for step in range(stretch // seq_len):
        starts = [lane * stretch + step * seq_len for lane in range(lanes)]
        x = [flat[start : start + seq_len] for start in starts]
        y = [flat[start + 1 : start + seq_len + 1] for start in starts]
        steps.append((x, y))
    return steps


def lists(batches: Any) -> list[tuple[list[list[int]], list[list[int]]]]:
    return [(x.tolist(), y.tolist()) for x, y in batches]


@given(st.integers(1, 20), st.integers(1, 40), st.sampled_from(["map", "pread"]))
def test_streams_are_those_cut_from_a_list(store: Store, batch_size: int, seq_len: int, way: Way) -> None:
    """Every batch of every size, or an error when there is less than one."""
    expected = brute_force(flat_tokens(store).tolist(), batch_size, seq_len)
    if not expected:
        with pytest.raises(ConfigError, match=rf"301 tokens are too few .*which take {batch_size * seq_len + 1:,}"):
            store.streams(batch_size, seq_len, read=way)
        return
    streams = store.streams(batch_size, seq_len, read=way)
    assert len(streams) == len(expected)
    assert lists(streams) == expected
    assert lists(streams[step] for step in range(len(streams))) == expected


def test_rows_go_on_from_batch_to_batch(store: Store) -> None:
    """The first token of a row is the last target of the same row in the batch before."""
    batches = list(store.streams(4, 10))
    for (_, before), (after, _) in itertools.pairwise(batches):
        assert (before[:, -1] == after[:, 0]).all()
    rows = [np.concatenate([x[row] for x, _ in batches]) for row in range(4)]
    places = [set(row.tolist()) - {0} for row in rows]
    assert sum(map(len, places)) == len(set.union(*places))


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))
def test_each_rank_has_streams_of_its_own_for_good(store: Store, batch_size: int, ranks: int, seq_len: int) -> None:
    """The ranks together have the streams of one rank with all rows; each always the same rows."""
    lanes = batch_size * ranks
    if lanes * seq_len >= TOKENS:
        return
    streams = store.streams(batch_size, seq_len)
    parts = [lists(streams.batches(rank=rank, world_size=ranks)) for rank in range(ranks)]
    expected = brute_force(flat_tokens(store).tolist(), lanes, seq_len)
    for rank, part in enumerate(parts):
        assert part == [(x[rank::ranks], y[rank::ranks]) for x, y in expected]


@settings(max_examples=30)
@given(st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]), st.sampled_from([(1, 6), (2, 3), (6, 1)]), st.integers(0, 9))
def test_streams_go_on_with_other_ranks(
    store: Store, before: tuple[int, int], after: tuple[int, int], steps: int
) -> None:
    """When batch size times ranks stays the same, a state goes on exactly on another number of ranks."""
    expected = brute_force(flat_tokens(store).tolist(), 6, 5)
    first = store.streams(before[0], 5).batches(world_size=before[1])
    for _ in range(steps):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    for rank in range(after[1]):
        second = store.streams(after[0], 5).batches(rank=rank, world_size=after[1])
        second.load_state_dict(state)
        assert lists(second) == [(x[rank :: after[1]], y[rank :: after[1]]) for x, y in expected[steps:]]


def test_a_state_of_other_streams_is_refused(store: Store) -> None:
    """Another number of streams, another length and windows are said in a sentence."""
    state = store.streams(4, 10).batches().state_dict()
    with pytest.raises(MismatchError, match="streams was 4, is 5"):
        store.streams(5, 10).batches().load_state_dict(state)
    with pytest.raises(MismatchError, match="streams was 4, is 8"):
        store.streams(4, 10).batches(world_size=2).load_state_dict(state)
    with pytest.raises(MismatchError, match="seq_len was 10, is 11"):
        store.streams(4, 11).batches().load_state_dict(state)
    with pytest.raises(MismatchError, match="kind was streams, is windows"):
        store.windows(10).batches(4, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_epochs_begin_again_at_the_front(store: Store, prefetch: int) -> None:
    """Every epoch is the same batches; without end they go on."""
    streams = store.streams(3, 20)
    once = lists(streams)
    assert lists(streams.batches(epochs=3, prefetch=prefetch)) == once * 3
    assert len(streams.batches(epochs=3)) == 3 * len(once)
    endless = streams.batches(epochs=None, prefetch=prefetch)
    assert lists(next(endless) for _ in range(2 * len(once) + 1)) == once * 2 + once[:1]


def test_iterating_twice_gives_the_same(store: Store) -> None:
    """`for x, y in streams` begins at the front each time."""
    streams = store.streams(3, 20)
    assert lists(streams) == lists(streams)


def test_steps_count_from_the_end_too(store: Store) -> None:
    """Negative steps as Python has them; what is beyond is an IndexError."""
    streams = store.streams(3, 20)
    assert lists([streams[-1]]) == lists([streams[len(streams) - 1]])
    for beyond in (len(streams), -len(streams) - 1):
        with pytest.raises(IndexError, match=f"step {beyond} of {len(streams)}"):
            streams[beyond]


def test_streams_pickle_as_what_they_were_made_from(store: Store) -> None:
    """A small pickle, the same batches after it."""
    streams = store.streams(3, 20)
    streams[0]
    pickled = pickle.dumps(streams)
    again = pickle.loads(pickled)
    assert len(pickled) < 2_000
    assert isinstance(again, Streams)
    assert lists(again) == lists(streams)
    assert repr(again) == repr(streams)


def test_streams_of_a_part_and_of_a_split(tmp_path: Path) -> None:
    """A part's streams have its tokens alone."""
    store = write_store(tmp_path / "s.milldam", [[60], [41]], splits=["train", "val"])
    flat = flat_tokens(store).tolist()
    assert lists(store.streams(2, 10, split="val")) == brute_force(flat[60:], 2, 10)
    part = store.split("train").split(first=21, rest=...)["rest"]
    assert lists(part.streams(2, 6)) == brute_force(flat[21:60], 2, 6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 5), {}, "batch_size: 0; use 1 or more"),
        ((3, 0), {}, "seq_len: 0; use 1 or more"),
        ((3, 5), {"world_size": 0}, "world_size: 0; use 1 or more"),
        ((3, 5), {"world_size": 2, "rank": 2}, "the ranks of world_size=2 are 0 to 1"),
        ((3, 5), {"epochs": 0}, "epochs: 0; use 1 or more"),
        ((3, 50), {"world_size": 3}, "301 tokens are too few for 9 streams"),
    ],
)
def test_bad_settings_are_refused(
    store: Store, arguments: tuple[int, int], options: dict[str, int], message: str
) -> None:
    """Which setting, what it is, and what can be meant."""
    with pytest.raises(ConfigError, match=message):
        store.streams(*arguments).batches(**options)  # type: ignore[arg-type]
