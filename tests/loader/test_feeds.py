"""Feeds: the order over units and parts, the same for a store that is finished and for one in the making."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import write_store
from tests.kit.unit_stores import LateParts, Plan, random_plan, unit_store

import milldam
from milldam import ConfigError, Feed, MismatchError, StoreError
from milldam.loader.stores import Store
from milldam.loader.unit_order import FinishedParts

SEQ_LEN = 16
PLAN = random_plan(3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return unit_store(tmp_path_factory.mktemp("feeds") / "a.milldam", PLAN)


@pytest.fixture
def late(store: Store) -> Iterator[Callable[..., Feed]]:
    """Feeds of the same data in the making."""
    made: list[LateParts] = []

    def open_late(plan: Plan = PLAN) -> Feed:
        made.append(LateParts(store, plan))
        return Feed(made[-1])

    yield open_late
    for parts in made:
        parts.close()


def finished(store: Store) -> Feed:
    return milldam.open(store.path, units=True)


def first_tokens(feed: Feed, batch_size: int = 5, *, view: str = "windows", **options: Any) -> list[int]:
    """What the places of the global order bring, from what all ranks were given."""
    options = {"seed": 1} | options
    world_size, places = options.pop("world_size", 1), dict[int, int]()
    for rank in range(world_size):
        samples = getattr(feed, view)(SEQ_LEN, split="train")
        batches = samples.batches(batch_size, rank=rank, world_size=world_size, **options)
        taken = [batch[0] if view == "windows" else batch["input_ids"] for batch in batches]
        for number, row in enumerate(row for x in taken for row in x):
            places[number * world_size + rank] = int(row[0])
    return [places[place] for place in range(len(places))]


# ---- the order ----


def test_every_sample_comes_once_an_epoch_and_each_epoch_has_its_own_order(store: Store) -> None:
    """Two epochs bring the same windows, in two orders."""
    windows = finished(store).windows(SEQ_LEN, split="train")
    seen = first_tokens(finished(store), epochs=2)
    one, two = seen[: len(windows)], seen[len(windows) :]
    assert len(set(one)) == len(one) == len(two)
    assert sorted(one) == sorted(two)
    assert one != two


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_store_in_the_making_brings_the_batches_of_the_finished_one(
    store: Store, late: Callable[..., Feed], world_size: int, shuffle: bool
) -> None:
    """For any number of ranks, over two epochs, whatever comes late."""
    wanted = first_tokens(finished(store), epochs=2, shuffle=shuffle)
    assert first_tokens(late(), 3, epochs=2, shuffle=shuffle, world_size=world_size, prefetch=2) == wanted


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_state_resumes_anywhere(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From the one to the other, with other ranks and batch sizes, at any place: nothing is lost or doubled."""
    plan = random_plan(data.draw(st.integers(0, 50)), units=data.draw(st.integers(2, 24)), most=60)
    store = unit_store(tmp_path_factory.mktemp("any") / "a.milldam", plan)
    late = LateParts(store, plan)
    samples = [Feed(parts).windows(SEQ_LEN, split="train") for parts in (FinishedParts(store), late)]
    count, endless = len(samples[0]), samples[0].batches(1, seed=3, epochs=None)
    batches = data.draw(st.sampled_from(samples)).batches(data.draw(st.integers(1, 9)), seed=3, epochs=2)
    for _ in range(data.draw(st.integers(0, 30))):
        next(batches, None)
    state = json.loads(json.dumps(batches.state_dict()))
    place, world_size, places = state["samples_seen"], data.draw(st.integers(1, 4)), dict[int, int]()
    target, size = data.draw(st.sampled_from(samples)), data.draw(st.integers(1, 9))
    for rank in range(world_size):
        resumed = target.batches(size, seed=3, epochs=2, rank=rank, world_size=world_size)
        resumed.load_state_dict(state)
        rows = (int(row[0]) for x, _ in resumed for row in x)
        places |= {place + number * world_size + rank: token for number, token in enumerate(rows)}
    late.close()
    # What is left of the loop over two epochs that the place lies in.
    flat = [int(next(endless)[0][0, 0]) for _ in range((place // (2 * count) + 1) * 2 * count)]
    assert [places[at] for at in sorted(places)] == flat[place:]


# ---- ends ----


def test_data_without_a_sample_is_refused_not_waited_for(store: Store) -> None:
    """No part has a window of that length: an error instead of epochs without end."""
    with pytest.raises(ConfigError, match="enough for one sample"):
        next(finished(store).windows(100_000, split="train").batches(1))


# ---- views ----


def train_shards(store: Store) -> list[np.ndarray[Any, Any]]:
    return [tokens for tokens, shard in zip(store.shard_tokens(), store.shards, strict=True) if shard.split == "train"]


def test_best_fit_rows_hold_every_token_of_a_part_once(store: Store) -> None:
    """No row has documents of two parts, and nothing is left out."""
    rows = finished(store).packed(SEQ_LEN, split="train", strategy="best_fit")
    part_of = {int(token): k for k, tokens in enumerate(train_shards(store)) for token in tokens}
    seen = Counter[int]()
    for batch in rows.batches(6):
        for ids, documents in zip(batch["input_ids"], batch["document_ids"], strict=True):
            kept = ids[documents >= 0].tolist()
            assert len({part_of[token] for token in kept}) == 1
            seen.update(kept)
    assert seen == Counter(part_of.keys())


def test_streams_go_on_from_batch_to_batch(store: Store, late: Callable[..., Feed]) -> None:
    """Within a part, row b goes on where it ended; parts come as the input has them."""
    plan = [[{"train": [400]}], [{"train": [300, 300]}], [{"train": [9]}]]
    other = unit_store(store.path.parent / "streams.milldam", plan)
    batches = list(finished(other).streams(3, 20))
    assert len(batches) == 399 // 60 + 599 // 60
    (first, _), (second, _) = batches[:2]
    assert (first[:, -1] + 1 == second[:, 0]).all()
    assert {int(x[0, 0]) > 400 for x, _ in batches[399 // 60 :]} == {True}
    by_rank = [finished(other).streams(1, 20).batches(rank=rank, world_size=3) for rank in range(3)]
    for (x, _), rows in zip(batches, zip(*by_rank, strict=True), strict=True):
        assert np.array_equal(x, np.concatenate([row for row, _ in rows]))


def test_a_feed_can_be_mixed(store: Store, late: Callable[..., Feed], tmp_path: Path) -> None:
    """With a store, when it is said where an epoch ends; its own order stays, and the state resumes."""
    plain = write_store(tmp_path / "b.milldam", [[5000]], dtype="int32")
    by_parts = [milldam.mix({feed.windows(SEQ_LEN, split="train"): 0.5, plain.windows(SEQ_LEN): 0.5}, stop=40)
                for feed in (finished(store), late())]  # fmt: skip
    batches = [mixed.batches(4, seed=1) for mixed in by_parts]
    for _ in range(3):
        assert np.array_equal(next(batches[0])[0], next(batches[1])[0])
    resumed = by_parts[0].batches(4, seed=1)
    resumed.load_state_dict(batches[1].state_dict())
    assert [x.tolist() for x, _ in resumed] == [x.tolist() for x, _ in batches[0]]
    with pytest.raises(ConfigError, match="stop=1_000_000"):
        len(milldam.mix({milldam.open(store.path, units=True, split="train"): 1, plain: 1}).windows(SEQ_LEN))


# ---- states and refusals ----


def test_a_state_of_other_data_or_a_damaged_one_is_refused(store: Store, tmp_path: Path) -> None:
    """Another input, another length, parts that have changed: a sentence, never other data."""
    batches = finished(store).windows(SEQ_LEN, split="train").batches(5)
    for _ in range(9):
        next(batches)
    state: Any = json.loads(json.dumps(batches.state_dict()))
    other = unit_store(tmp_path / "b.milldam", random_plan(4))
    with pytest.raises(MismatchError, match="data was"):
        finished(other).windows(SEQ_LEN, split="train").batches(5).load_state_dict(state)
    with pytest.raises(MismatchError, match="seq_len was 16, is 8"):
        finished(store).windows(8, split="train").batches(5).load_state_dict(state)
    for damage in ({"samples": 10_000}, {"parts": [[1]]}, {"next_unit": 99}, {"begin": 10**9}):
        with pytest.raises((MismatchError, StoreError)):
            batches.load_state_dict(state | {"order": state["order"] | damage})
