"""Streams: rows that go on from batch to batch, B stretches that never overlap, each rank its own for good."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import flat_tokens, write_store

from milldam.errors import ConfigError
from milldam.loader.reading import Way
from milldam.loader.stores import Store

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
