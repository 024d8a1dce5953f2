"""Splits by content: shares are disjoint, together whole, seeded, and stable when data is added."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.preprocess_jobs import assert_holds, fresh_texts, lines_job, preprocess, texts_in
from tests.kit.source_reading import write_texts

from milldam.pipeline.judging import SAMPLE, SPLIT, below, content_keys, split_numbers

SHARES = st.lists(st.floats(1e-6, 0.9), min_size=1, max_size=4).filter(lambda shares: sum(shares) < 0.999)


def as_keys(keys: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


# ---- keys and shares ----


MANY = np.random.default_rng(7).integers(0, 2**64, 200_000, dtype=np.uint64)


@settings(max_examples=20)
@given(shares=SHARES)
def test_every_split_gets_its_share(shares: list[float]) -> None:
    """Within what chance allows; what no split takes is train's."""
    numbers = split_numbers(MANY, {f"s{k}": share for k, share in enumerate(shares)})
    found = np.bincount(numbers, minlength=len(shares) + 1) / len(MANY)
    for share, got in zip([1 - sum(shares), *shares], found, strict=True):
        assert abs(got - share) < 6 * (share * (1 - share) / len(MANY)) ** 0.5 + 1e-9


def test_a_split_that_is_added_moves_next_to_nothing_between_the_others() -> None:
    """It takes its share from all of them."""
    before = split_numbers(MANY, {"val": 0.01})
    after = split_numbers(MANY, {"test": 0.01, "val": 0.01})
    stayed = np.count_nonzero(after[before == 1] == 2) / np.count_nonzero(before == 1)
    moved = np.count_nonzero(after[before == 0] == 2) / np.count_nonzero(before == 0)
    assert stayed > 0.98 and moved < 0.001


def test_the_edges_of_a_share_are_exact() -> None:
    """A key at the edge belongs to what comes behind it."""
    keys = as_keys([0, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    assert below(keys, 0.25).tolist() == [True, True, False, False, False, False]
    assert below(keys, 1.0).all() and below(keys, 1.5).all()


@given(texts=st.lists(st.text(max_size=30), max_size=20), seed=st.integers(0, 2**40), head=st.integers(1, 40))
def test_keys_are_hashes_of_the_head_whatever_the_batch(texts: list[str], seed: int, head: int) -> None:
    """Neither the position in an array nor an offset into its buffers matters."""
    array = pa.array(["before", *texts], pa.large_string())[1:]
    whole = content_keys(array, seed, SPLIT, head).tolist()
    assert whole == [content_keys(pa.array([text], pa.large_string()), seed, SPLIT, head)[0] for text in texts]
    heads = {text.encode()[:head].decode(errors="ignore"): key for text, key in zip(texts, whole, strict=True)}
    assert len(set(heads.values())) == len(heads)


def test_samples_and_splits_are_chosen_apart() -> None:
    """A half that is sampled must not be the half that is validation."""
    texts = pa.array(fresh_texts(2000), pa.large_string())
    both = below(content_keys(texts, 0, SAMPLE), 0.5) & below(content_keys(texts, 0, SPLIT), 0.5)
    assert 400 < np.count_nonzero(both) < 600


def test_the_key_does_not_change_between_versions() -> None:
    """Splits of data that grows over years stay: the hash and its seeding are part of the format."""
    key = content_keys(pa.array(["abcdef"], pa.large_string()), 3, SPLIT, 4)[0]
    assert key == xxhash.xxh3_64_intdigest(b"abcd", 3 << 16 ^ 0x591E)


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
