"""Units of input -> numbered documents, and what becomes of those that come in parts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    summary_of,
    texts_in,
    texts_with_copies,
    write_gz,
)

import milldam
from milldam.pipeline.documents import Documents, Reading, SetRules, UnitReader
from milldam.rules import CleanRules
from milldam.sources.batch import TextRules
from milldam.sources.units import Slice, Unit

RULES = SetRules(TextRules(text_column="text", invalid_utf8="drop"))


# ---- one unit ----


def read(reading: Reading) -> list[tuple[int, str, str | None]]:
    """(row, text, reason) of every document, those in parts put together."""
    found: list[tuple[int, str, str | None]] = []
    parts = ""
    for documents in UnitReader(reading):
        if documents.part:
            parts += documents.bytes.decode()
            if documents.last:
                found.append((documents.first_row, parts, documents.verdicts.reason(0) if parts else "empty"))
                parts = ""
        else:
            found += whole_documents(documents)
    assert parts == ""
    return found


def whole_documents(documents: Documents) -> list[tuple[int, str, str | None]]:
    texts = documents.texts.to_pylist()
    reasons = [documents.verdicts.reason(k) for k in range(len(texts))]
    rows = range(documents.first_row, documents.first_row + len(texts))
    return list(zip(rows, texts, reasons, strict=True))


@cache
def unit_of_many_batches() -> tuple[Unit, tuple[str, ...]]:
    """Two files of several batches with giants between, one broken line, and blank texts; and all texts of it."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="milldam-tests-"))
    small = texts_with_copies(12_000, 9)
    giants = [f"  {giant_text(2_200_000, seed)}\n " for seed in range(3)]
    texts = [*small[:5000], giants[0], giants[1], *small[5000:9000], "", giants[2], *small[9000:]]
    first, second = folder / "a.jsonl", folder / "b.jsonl"
    write_lines(first, texts[:5003])
    lines = [json.dumps({"text": text}) for text in texts[5003:]]
    second.write_text("\n".join([*lines[:50], '{"text": 3}', *lines[50:]]))
    slices = tuple(Slice(str(path), "jsonl", None, size=path.stat().st_size) for path in (first, second))
    return Unit(0, slices), tuple(texts)


def test_rows_number_the_readable_documents() -> None:
    """A record that can't be read takes no number; a blank one does, and a giant one."""
    unit, texts = unit_of_many_batches()
    found = read(Reading(unit, RULES, CleanRules()))
    assert [row for row, _, _ in found] == list(range(len(texts)))
    assert short([text for _, text, _ in found]) == short([cleaned(text) for text in texts])
    assert [reason for _, _, reason in found] == [None if cleaned(text) else "empty" for text in texts]


@settings(max_examples=8)
@given(edges=st.tuples(st.integers(0, 12_004), st.integers(0, 12_004)))
def test_a_range_of_rows_is_a_slice_of_all(edges: tuple[int, int]) -> None:
    """With the same numbers, wherever batches end."""
    first, stop = sorted(edges)
    unit, texts = unit_of_many_batches()
    found = read(Reading(unit, RULES, None, rows=(first, stop)))
    assert [row for row, _, _ in found] == list(range(first, stop))
    assert short([text for _, text, _ in found]) == short(list(texts[first:stop]))


def test_resumed_behind_any_batch_the_rest_is_the_same() -> None:
    """As a resumed job does it: batches that are done are passed over, rows and rejects go on."""
    unit, _ = unit_of_many_batches()
    reader = UnitReader(Reading(unit, RULES, CleanRules()))
    seen: list[tuple[int, list[tuple[int, int]], int]] = []
    inside = False
    for documents in reader:
        sizes = [(documents.first_row + k, len(text)) for k, text in enumerate(documents.texts.to_pylist())]
        if not inside and sizes:
            seen.append((reader.batches - 1, sizes, len(documents.rejects)))
        inside = documents.part and not documents.last
    assert len(seen) > 6
    for skipped, sizes, _ in seen[1:]:
        again = iter(UnitReader(Reading(unit, RULES, CleanRules(), skip_batches=skipped)))
        documents = next(one for one in again if len(one.texts))
        assert [(documents.first_row + k, len(text)) for k, text in enumerate(documents.texts.to_pylist())] == sizes


@pytest.mark.parametrize("ahead", [False, True])
def test_reading_ahead_changes_nothing(ahead: bool) -> None:
    """A thread that reads gives the same, in the same order."""
    unit, texts = unit_of_many_batches()
    found = read(Reading(unit, RULES, None, rows=(4990, 5010), ahead=ahead))
    assert short([text for _, text, _ in found]) == short(list(texts[4990:5010]))


def test_rejects_come_once(tmp_path: Path) -> None:
    """In all batches together, each record that can't be read is told once."""
    unit, _ = unit_of_many_batches()
    told = [reject for documents in UnitReader(Reading(unit, RULES, None)) for reject in documents.rejects]
    assert [(reject.reason, reject.line) for reject in told] == [("no_text", 51)]


# ---- giants in a job ----


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


def test_near_dedup_sees_giants_whole(tmp_path: Path, giants: list[str]) -> None:
    """Two giants that differ at their end are near-duplicates."""
    changed = giants[0][:-200] + " and now for something completely different " * 3
    store = lines_job(tmp_path, ["x y z", giants[0], changed, giants[1]], dedup="near")
    found = texts_in(store)
    assert short(found)[:2] == short(["x y z", giants[0]])
    assert summary_of(store.path)["near"]["dropped"] == len(["x", 1, 2, 3]) - len(found) >= 1


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


def test_a_giant_of_white_space_is_empty(tmp_path: Path) -> None:
    """Nothing is left of it, and it is counted."""
    store = lines_job(tmp_path, ["a", " " * 3_000_000, "\n" * 2_500_000, "b"])
    assert texts_in(store) == ["a", "b"]
    assert_flow(store.path, {"clean": {"empty": 2}})


@pytest.mark.slow
def test_a_file_of_giant_lines_only(tmp_path: Path, giants: list[str]) -> None:
    """The text column is found although no record is small."""
    # Escaped: 6 bytes a character.
    texts = [*giants, "é" * 600_000, "è" * 600_000]
    for number, some in enumerate((texts, texts[3:])):
        store = lines_job(tmp_path, some, str(number), dedup="off")
        assert short(texts_in(store)) == short(some)


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


def test_splits_of_giants_are_seen_in_facts(tmp_path: Path, giants: list[str]) -> None:
    """A giant goes to one split as a whole, and its text is counted there."""
    store = lines_job(tmp_path, [*giants, *fresh_texts(20)], splits={"val": 0.5}, dedup="off")
    found = {split: texts_in(store, split) for split in store.splits}
    assert sorted(short([text for texts in found.values() for text in texts])) == sorted(
        short([*giants, *fresh_texts(20)])
    )
    for split, texts in found.items():
        shards: list[Any] = [shard for shard in store.manifest.shards if shard.split == split]
        assert sum(shard.characters for shard in shards) == sum(map(len, texts))
        assert sum(shard.text_bytes for shard in shards) == sum(len(text.encode()) for text in texts)
