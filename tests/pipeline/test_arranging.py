"""Splits and limits that are exact in tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import write_lines
from tests.kit.preprocess_jobs import (
    fresh_texts,
    ids_of,
    lines_job,
    preprocess,
    summary_of,
)

import milldam
from milldam.errors import InputError
from milldam.pipeline import arranging


def tokens_of(store: milldam.Store, split: str) -> int:
    return milldam.open(store.path, split=split).tokens


def assert_parts(store: milldam.Store, texts: list[str], exact: dict[str, int]) -> None:
    """Each split has exactly its tokens and the order of the input; together they are all documents, but for the end of
    one in each exact split, and for the copies of that."""
    assert {split: tokens_of(store, split) for split in exact} == exact
    every = list(map(ids_of, texts))
    left, homes, cut = Counter(every), dict[tuple[int, ...], str](), list[tuple[int, ...]]()
    for split in store.splits:
        documents = [tuple(document.tolist()) for document in milldam.open(store.path, split=split)]
        whole = [ids for ids in documents if ids in left]
        assert all(homes.setdefault(ids, split) == split for ids in whole), "a document in two splits"
        assert len(left) < len(every) or whole == sorted(whole, key=every.index)
        left -= Counter(whole)
        cut += [ids for ids in documents if ids not in homes]
    assert len(cut) <= len(exact)
    for ids in cut:
        left[next(one for one in +left if one[: len(ids)] == ids)] -= 1
    stages = {stage["stage"]: stage["dropped"] for stage in summary_of(store.path)["flow"]}
    assert stages.get("arrange", {}).get("equal_to_cut", 0) == left.total()


@settings(max_examples=8)
@given(
    copies=st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=30, max_size=60),
    shares=st.tuples(st.floats(0.001, 0.4), st.floats(0.001, 0.4)),
    small=st.booleans(),
)
def test_exact_splits_have_their_tokens_each(
    tmp_path_factory: pytest.TempPathFactory, copies: list[int], shares: tuple[float, float], small: bool
) -> None:
    """With equal documents, and however few of them are looked at at once."""
    texts = [text for text, count in zip(fresh_texts(len(copies)), copies, strict=True) for _ in range(count)]
    total = sum(len(ids_of(text)) for text in texts)
    wanted = {name: max(1, int(share * total)) for name, share in zip(("val", "test"), shares, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(arranging, "CHUNK_DOCUMENTS", 3)
            patch.setattr(arranging, "CHUNK_TOKENS", 40)
        splits = {f"{name}_tokens": tokens for name, tokens in wanted.items()}
        store = lines_job(tmp_path_factory.mktemp("job"), texts, splits=splits, dedup="off")
    assert_parts(store, texts, wanted)


def test_too_many_tokens_asked_is_an_error_that_says_how_many_there_are(tmp_path: Path) -> None:
    """Nothing would be left to train."""
    with pytest.raises(InputError, match=r"val_tokens: 100,000 .*[\d,]+ tokens"):
        lines_job(tmp_path, fresh_texts(20), splits={"val_tokens": 100_000}, dedup="off")
    assert not (tmp_path / "out" / "milldam.json").exists()


@pytest.mark.parametrize("room", [0, 1, 7000])
@pytest.mark.parametrize("shard_size", ["100KB", "1MB"])
def test_max_tokens_is_exact_for_each_data_set(tmp_path: Path, shard_size: str, room: int) -> None:
    """The first documents of a dataset until it has its tokens; others stay; a large limit changes nothing."""
    sets = [fresh_texts(1200, seed) for seed in range(3)]
    limits = [room or sum(len(ids_of(text)) for text in sets[0][:600]), None, 10**9]
    given_sets = [
        {"path": write_lines(tmp_path / f"{k}.jsonl", texts)} | ({"max_tokens": limit} if limit else {})
        for k, (texts, limit) in enumerate(zip(sets, limits, strict=True))
    ]
    store = preprocess(tmp_path / "s", given_sets, dedup="off", shard_size=shard_size)
    expected, left = [], int(limits[0] or 0)
    for text in sets[0]:
        if left:
            expected.append(ids_of(text)[:left])
            left -= len(expected[-1])
    expected += [ids_of(text) for texts in sets[1:] for text in texts]
    assert [tuple(document.tolist()) for document in store] == expected
