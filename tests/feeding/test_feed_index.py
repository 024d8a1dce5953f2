"""A feed that drops what a dedup index holds: the batches and the store of `milldam preprocess`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit.feed_training import feed_digests
from tests.kit.jobs import TOKENIZER, store_bytes, wait_until, write_lines
from tests.kit.preprocess_jobs import fresh_texts
from tests.kit.quick import first_quick

import milldam

OLD = fresh_texts(300, 0, words=(40, 80))
NEW = fresh_texts(3000, 1, words=(40, 80))


def index_run(folder: Path, name: str, texts: list[str]) -> None:
    """A finished run in the index of the folder."""
    data = write_lines(folder / f"{name}.jsonl", texts)
    settings = {"datasets": str(data), "tokenizer": str(TOKENIZER), "out": str(folder / name), "workers": 1}
    milldam.preprocess(settings | {"dedup": {"index": str(folder / "seen")}})


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A corpus of some units of which a part is in an index."""
    index_run(tmp_path, "old", OLD)
    texts = [text for number, text in enumerate(NEW) for text in (text, *OLD[number : number + 1])]
    return {
        "datasets": str(write_lines(tmp_path / "corpus.jsonl", texts)),
        "tokenizer": str(TOKENIZER),
        "out": str(tmp_path / "fed"),
        "dedup": {"method": "index", "index": str(tmp_path / "seen")},
        "filters": {"min_characters": 200},
        "splits": {"val": 0.1},
        "shard_size": "100KB",
        "memory": "1GB",
        "workers": 1,
    }


digests = partial(feed_digests, split="train")


@pytest.mark.parametrize("workers", first_quick([2, 1]))
def test_batches_and_bytes_are_those_of_preprocess(config: dict[str, Any], tmp_path: Path, workers: int) -> None:
    """Not begun, half made and finished; what the index holds is in none of them, and is counted."""
    made = milldam.preprocess(config, out=tmp_path / "made")
    tally = made.manifest.tally
    assert tally.dropped["dedup"] == {"seen_before": len(OLD)} and len(made.manifest.shards) > 8
    expected = digests(milldam.open(tmp_path / "made", units=True), epochs=2)
    with milldam.open(config, workers=workers) as feed:
        assert digests(feed, 20, epochs=2) == expected[: 20 * 8]
    with milldam.open(config, workers=workers) as feed:
        assert digests(feed, epochs=2) == expected
        wait_until(lambda: feed.finished)
    assert store_bytes(tmp_path / "fed") == store_bytes(tmp_path / "made")
    with milldam.open(config) as feed:
        assert feed.finished and digests(feed, shuffle=False)
