"""Splits by content: shares are disjoint, together whole, seeded, and stable when data is added."""

from __future__ import annotations

from pathlib import Path

from tests.kit.preprocess_jobs import assert_holds, fresh_texts, lines_job, preprocess, texts_in
from tests.kit.source_reading import write_texts

# ---- in a job ----


def test_shares_part_the_documents(tmp_path: Path) -> None:
    """Every document is in exactly one split, in the order of the input, and shares are about what was asked."""
    texts = fresh_texts(1500)
    store = lines_job(tmp_path, texts, splits={"val": 0.1, "test": 0.2}, dedup="off")
    assert store.splits == ("train", "test", "val")
    parts = {split: texts_in(store, split) for split in store.splits}
    of = {text: split for split, some in parts.items() for text in some}
    assert len(of) == len(texts) == sum(map(len, parts.values()))
    for split, some in parts.items():
        assert_holds(store, [text for text in texts if of[text] == split], split)
        assert abs(len(some) / len(texts) - {"train": 0.7, "val": 0.1, "test": 0.2}[split]) < 0.04


def test_a_split_stays_when_data_is_added(tmp_path: Path) -> None:
    """What was validation is validation, whatever comes before, behind or in another format; a seed changes it."""
    texts, more = fresh_texts(300), fresh_texts(300, 7)
    first = set(texts_in(lines_job(tmp_path, texts, splits={"val": 0.2}), "val"))
    path = write_texts(tmp_path / "all.parquet", [*more, *texts], rows=100)
    grown = preprocess(tmp_path / "grown", path, splits={"val": 0.2}, shard_size="100KB")
    assert set(texts_in(grown, "val")) & set(texts) == first
    seeded = lines_job(tmp_path, texts, "seeded", splits={"val": 0.2}, seed=1)
    assert set(texts_in(seeded, "val")) != first


def test_equal_documents_go_together(tmp_path: Path) -> None:
    """Without dedup, copies are never in two splits."""
    texts = fresh_texts(200)
    store = lines_job(tmp_path, texts * 2, splits={"val": 0.5}, dedup="off", shard_size="100KB")
    assert not set(texts_in(store, "val")) & set(texts_in(store, "train"))
