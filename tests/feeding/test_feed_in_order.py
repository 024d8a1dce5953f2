"""A feed with exact dedup: what came before in the order of the input is dropped, as `milldam preprocess` drops it."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.feed_training import feed_digests, sample_digests
from tests.kit.jobs import TOKENIZER, store_bytes, wait_until, write_lines
from tests.kit.preprocess_jobs import dropped_documents, fresh_texts
from tests.kit.quick import first_quick

import milldam
from milldam import ConfigError


def with_copies(count: int) -> list[str]:
    """Texts of which every third one is a copy of some earlier one, near or far."""
    rng, fresh, found = random.Random(7), fresh_texts(count, 1, words=(40, 80)), list[str]()
    for number, text in enumerate(fresh):
        found.append(rng.choice(found) if number % 3 == 2 else text)
    return found


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "datasets": str(write_lines(tmp_path / "corpus.jsonl", with_copies(3000))),
        "tokenizer": str(TOKENIZER),
        "out": str(tmp_path / "fed"),
        "dedup": "exact",
        "filters": {"min_characters": 200},
        "shard_size": "100KB",
        "memory": "1GB",
        "workers": 1,
    }


digests = partial(feed_digests, split="train", shuffle=False)


def records_of(store: Path) -> bytes:
    return (store / "run/records.jsonl").read_bytes()


@pytest.mark.parametrize("workers", first_quick([2, 1]))
def test_batches_and_bytes_are_those_of_preprocess(config: dict[str, Any], tmp_path: Path, workers: int) -> None:
    """Not begun, half made and finished; once it is finished, in any order. Nothing is made twice."""
    config |= {"splits": {"val": 0.1}, "write_dropped": True}
    made = milldam.preprocess(config, out=tmp_path / "made")
    assert made.manifest.tally.dropped["dedup"] == {"duplicate": 1000} and len(made.manifest.shards) > 8
    expected = digests(milldam.open(tmp_path / "made", units=True), epochs=2)
    with milldam.open(config, kind="feed", workers=workers) as feed:
        assert digests(feed, 20, epochs=2) == expected[: 20 * 8]
    begun = records_of(tmp_path / "fed")
    assert begun
    with milldam.open(config, kind="feed", workers=workers) as feed:
        assert digests(feed, epochs=2) == expected
        wait_until(lambda: feed.finished)
        shuffled = digests(feed, shuffle=True, seed=3)
    assert store_bytes(tmp_path / "fed") == store_bytes(tmp_path / "made")
    assert dropped_documents(tmp_path / "fed") == dropped_documents(tmp_path / "made")
    assert shuffled == digests(milldam.open(tmp_path / "made", units=True), shuffle=True, seed=3)
    lines = records_of(tmp_path / "fed")
    assert lines.startswith(begun) and len(set(lines.splitlines())) == made.manifest.units == lines.count(b"\n")
    with milldam.open(config, kind="feed") as feed:
        assert feed.finished


@pytest.mark.parametrize("datasets", first_quick(["validation", "weights"]))
def test_repetitions_and_validation_sets_are_those_of_preprocess(
    config: dict[str, Any], tmp_path: Path, datasets: str
) -> None:
    """A repetition drops what its data set drops; validation is never dropped, and counts as seen."""
    first, held_out = with_copies(300), with_copies(200)
    path = str(write_lines(tmp_path / "first.jsonl", first))
    if datasets == "weights":
        config["datasets"] = [{"path": path, "weight": 2.5}, config["datasets"], {"path": path, "weight": 0.5}]
    else:
        config["validation"] = str(write_lines(tmp_path / "val.jsonl", held_out))
    milldam.preprocess(config, out=tmp_path / "made")
    with milldam.open(config, kind="feed") as feed:
        assert digests(feed) == digests(milldam.open(tmp_path / "made", units=True))
        wait_until(lambda: feed.finished)
    assert store_bytes(tmp_path / "fed") == store_bytes(tmp_path / "made")
    keys = [line.split(b'"')[3] for line in records_of(tmp_path / "fed").splitlines()]
    assert sorted(keys) == sorted(line.split(b'"')[3] for line in records_of(tmp_path / "made").splitlines())


def test_each_continues_the_other(config: dict[str, Any], tmp_path: Path) -> None:
    """What one has made of a store the other one does not make again, fingerprints among it."""
    made = milldam.preprocess(config, out=tmp_path / "made").path
    expected = digests(milldam.open(made, units=True))
    with milldam.open(config, kind="feed") as feed:
        digests(feed, 5)
    begun, prints = records_of(tmp_path / "fed"), (tmp_path / "fed/run/fingerprints.jsonl").read_bytes()
    milldam.preprocess(config)
    assert records_of(tmp_path / "fed").startswith(begun)
    assert (tmp_path / "fed/run/fingerprints.jsonl").read_bytes().startswith(prints)
    assert store_bytes(tmp_path / "fed") == store_bytes(made)
    (tmp_path / "fed/milldam.json").unlink()
    for name in ("records", "fingerprints"):
        path = tmp_path / f"fed/run/{name}.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    kept = records_of(tmp_path / "fed")
    with milldam.open(config, kind="feed") as feed:
        assert digests(feed) == expected
        wait_until(lambda: feed.finished)
    assert records_of(tmp_path / "fed").startswith(kept) and store_bytes(tmp_path / "fed") == store_bytes(made)


def test_a_maker_that_is_killed_is_replaced(config: dict[str, Any], tmp_path: Path) -> None:
    """Its successor decides on the same units in the same way; a state fits them, from another program too."""
    expected = digests(milldam.open(milldam.preprocess(config, out=tmp_path / "made").path, units=True))
    before = set(psutil.Process().children())
    config["tokenizer"] = {"path": str(TOKENIZER), "encoder": "huggingface"}  # the slow one: nothing is done too soon
    with milldam.open(config, kind="feed", workers=2) as feed:
        batches = feed.windows(32).batches(8, shuffle=False)
        found = sample_digests(next(iter(batches)))
        for _ in range(2):
            for maker in set(psutil.Process().children()) - before:
                maker.kill()
            found += [one for _, batch in zip(range(40), batches, strict=False) for one in sample_digests(batch)]
        state = batches.state_dict()
    with milldam.open(config, kind="feed") as feed:
        batches = feed.windows(32).batches(8, shuffle=False)
        batches.load_state_dict(state)
        found += [one for batch in batches for one in sample_digests(batch)]
        wait_until(lambda: feed.finished)
    assert found == expected


def test_other_orders_are_refused_until_all_is_made(config: dict[str, Any]) -> None:
    """With the reason; then any order goes."""
    with milldam.open(config, kind="feed") as feed:
        with pytest.raises(ConfigError, match="can be read in that order alone"):
            feed.windows(32).batches(8)
        digests(feed)
        wait_until(lambda: feed.finished)
        assert digests(feed, shuffle=True)
