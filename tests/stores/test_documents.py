"""Documents of megabytes in a job of preprocess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.kit.jobs import set_aside, write_lines
from tests.kit.preprocess_jobs import (
    assert_flow,
    assert_holds,
    cleaned,
    drops_by_stage,
    fresh_texts,
    giant_text,
    lines_job,
    preprocess,
    short,
    texts_in,
    write_gz,
)

import milldam


@pytest.fixture(scope="module")
def giants() -> list[str]:
    return [giant_text(2_400_000 + 300_000 * seed, seed) for seed in range(3)]


def write_txt(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "txt", "gz"])
@pytest.mark.parametrize(
    ("rules", "kept", "stage"),
    [
        ({"max_characters": 2_500_000}, [0], "filter"),
        ({"min_characters": 2_800_000}, [2], "filter"),
        ({"max_tokens": 100}, [], "encode"),
        ({"min_tokens": 10**7}, [], "encode"),
        ({"min_characters": 100, "max_characters": 10**7, "min_tokens": 20, "max_tokens": 10**7}, [0, 1, 2], ""),
    ],
)
def test_filters_on_length_see_giants_whole(
    tmp_path: Path, giants: list[str], kind: str, rules: dict[str, int], kept: list[int], stage: str
) -> None:
    """A giant that is dropped only at its end leaves no trace in the store; its neighbours stay as they are."""
    if kind != "jsonl" and kept != [0]:
        pytest.skip("the same code: once is enough")
    small = ["one " * 40, "two " * 40]
    texts = [small[0], giants[0], giants[1], small[1], giants[2]]
    path = {
        "jsonl": lambda: write_lines(tmp_path / "a.jsonl", texts),
        "txt": lambda: write_txt(tmp_path / "txt", texts),
        "gz": lambda: write_gz(tmp_path / "a.jsonl.gz", texts),
    }[kind]()
    limits = dict(rules)
    with_small = limits.get("min_characters", 0) <= 160 and limits.get("min_tokens", 0) <= 100
    if stage == "encode" and with_small:
        limits["max_tokens"] = 200
    store = (
        preprocess(tmp_path / "s", path, filters=limits, dedup="off", write_dropped=True)
        if with_small or kept
        else None
    )
    if store is None:
        with pytest.raises(milldam.MilldamError, match=r"encode: \w+ 5"):
            preprocess(tmp_path / "s", path, filters=limits, dedup="off")
        return
    expected = [text for text in texts if (text in small and with_small) or text in [giants[k] for k in kept]]
    assert_holds(store, [cleaned(text) for text in expected])
    assert sum(shard.tokens for shard in store.manifest.shards) == sum(len(document) for document in store)
    assert store.manifest.characters == sum(len(cleaned(text)) for text in expected)
    dropped = drops_by_stage(store.path)
    assert sum(dropped.get(stage, {}).values()) == len(texts) - len(expected)
    if len(expected) < len(texts):
        assert len(set_aside(store.path, "dropped")) == len(texts) - len(expected)


@pytest.mark.slow
def test_a_giant_twice_is_once(tmp_path: Path, giants: list[str]) -> None:
    """In parts and whole, in other white space, from JSON Lines, gzip and text: the first stays."""
    sets = [
        write_lines(tmp_path / "a.jsonl", ["x", f"  {giants[0]}", giants[0]]),
        write_gz(tmp_path / "b.jsonl.gz", [giants[0], giants[1]]),
        write_txt(tmp_path / "txt", [f"{giants[0]}\n", f"{giants[1]}\n\n", giants[2]]),
    ]
    for dedup in ("exact", {"normalize": True}):
        store = preprocess(tmp_path / ("n" if isinstance(dedup, dict) else "e"), sets, dedup=dedup, write_dropped=True)
        assert short(texts_in(store)) == short(["x", giants[0], giants[1], giants[2]])
        assert_flow(store.path, {"dedup": {"duplicate": 4}})
        assert all(
            one["text"][:100] == giants[one["text"][:100] == giants[1][:100]][:100]
            for one in set_aside(store.path, "dropped")
        )


def test_a_giant_through_a_users_cleaning(tmp_path: Path, giants: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The function sees a document in parts as one text; None drops it, and it leaves no trace."""
    monkeypatch.chdir(tmp_path)
    Path("whole.py").write_text(
        "def clean(text):\n    return None if text.startswith('0 ') and text.endswith('END') else text[:50]\n"
    )
    texts = ["a" * 80, f"{giants[0]} END", giants[1], "b"]
    assert giants[0].startswith("0 ")
    store = lines_job(tmp_path, texts, clean={"function": "whole:clean"}, filters={"max_characters": 60})
    assert texts_in(store) == ["a" * 50, giants[1][:50], "b"]
    assert_flow(store.path, {"clean": {"dropped_by_clean": 1}})


def test_a_broken_giant_among_others(tmp_path: Path, giants: list[str]) -> None:
    """A line in parts that can't be read is rejected whole; documents around it, and rows, are not disturbed."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in ["a", giants[0], "b", giants[0], "b", "c"]]
    lines[1] = lines[1][:-1]
    path.write_text("\n".join(lines))
    store = preprocess(tmp_path / "s", path)
    assert short(texts_in(store)) == short(["a", "b", giants[0], "c"])
    assert drops_by_stage(store.path)["dedup"] == {"duplicate": 1}


def test_the_shards_of_a_stream_do_not_depend_on_giants_that_go(tmp_path: Path, giants: list[str]) -> None:
    """A compressed stream is cut by the text that stays."""
    texts = fresh_texts(2000)
    plain = preprocess(tmp_path / "p", write_gz(tmp_path / "a.jsonl.gz", texts), shard_size="100KB", dedup="off")
    path = write_gz(tmp_path / "b.jsonl.gz", [*texts[:500], giants[0], *texts[500:]])
    store = preprocess(tmp_path / "s", path, shard_size="100KB", dedup="off", filters={"max_characters": 10_000})
    assert texts_in(store) == texts_in(plain)
    assert all(shard.documents for shard in store.manifest.shards)
