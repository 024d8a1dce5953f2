"""`milldam preprocess` from end to end: what comes out is compared with a plain reference, document by document."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke, set_aside, started, store_bytes, write_lines
from tests.kit.preprocess_jobs import (
    assert_holds,
    cleaned,
    config_of,
    drops_by_stage,
    fresh_texts,
    giant_text,
    kept_of,
    lines_job,
    preprocess,
    summary_of,
    texts_in,
    texts_with_copies,
    write_config,
)
from tests.kit.source_reading import write_texts

import milldam
from milldam.errors import InputError, MismatchError

# ---- exact dedup ----


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    """Several datasets in several formats with copies across them, giants among them; and their texts in order."""
    folder = tmp_path_factory.mktemp("mixture")
    giant = giant_text(5_000_000)
    sets = [texts_with_copies(1500, seed) for seed in range(4)]
    rng = random.Random("across")
    for number in range(1, 4):
        sets[number] += rng.sample(sets[number - 1], 200)
    sets[0][100], sets[0][900] = giant, f" {giant}"
    sets[2].append(giant)
    sets[3] = [" ".join(text.split()) for text in sets[3]]
    paths = [
        write_lines(folder / "a.jsonl", sets[0]),
        write_texts(folder / "b.parquet", sets[1], rows=100),
        write_texts(folder / "c.jsonl.gz", sets[2]),
        {"path": write_texts(folder / "d.txt", sets[3]), "documents": "line"},
    ]
    return paths, [text for texts in sets for text in texts]


@pytest.fixture(scope="module")
def mixture_store(mixture: tuple[list[Any], list[str]], tmp_path_factory: pytest.TempPathFactory) -> milldam.Store:
    return preprocess(tmp_path_factory.mktemp("store") / "s", mixture[0], shard_size="100KB")


def test_exact_dedup_keeps_what_a_set_keeps(mixture: tuple[list[Any], list[str]], mixture_store: milldam.Store) -> None:
    """Across datasets and formats, the first of equal texts stays, in the order of the input."""
    _, texts = mixture
    expected = kept_of(texts)
    assert len(expected) < len(texts) - 1000
    assert_holds(mixture_store, expected)
    blank = sum(not cleaned(text) for text in texts)
    lines = sum(not cleaned(text) for text in texts[-1700:] if not text.strip())
    dropped = drops_by_stage(mixture_store.path)
    assert dropped["dedup"] == {"duplicate": len(texts) - blank - len(expected)}
    # Blank lines of a text file are no documents at all.
    assert dropped["clean"] == {"empty": blank - lines}


def changed(text: str, seed: int = 0) -> str:
    """A near-duplicate: one word is another."""
    words = text.split()
    words[len(words) // 2] = f"changed{seed}"
    return " ".join(words)


@pytest.mark.slow
def test_no_document_is_dropped_for_one_that_a_filter_drops(tmp_path: Path) -> None:
    """The first of two is too short for a filter, the second is not: the second stays; giants are judged as well."""
    for name, text in {"small": fresh_texts(1, words=(150, 200))[0], "giant": giant_text(20_000_000)}.items():
        filters = {"min_characters": len(text) + 1}
        store = lines_job(tmp_path / name, [text, f"{text} longword"], dedup="near", filters=filters)
        assert_holds(store, [f"{text} longword"])


# ---- validation ----


def test_near_duplicates_of_validation_go_from_training(tmp_path: Path) -> None:
    """Validation stays whole, its own near-duplicates too."""
    texts = fresh_texts(20, words=(150, 200))
    validation = [texts[0], changed(texts[0]), changed(texts[1])]
    write_lines(tmp_path / "val.jsonl", validation)
    store = lines_job(tmp_path, texts, validation=tmp_path / "val.jsonl", dedup={"near": {"prefer": "longest"}})
    assert_holds(store, validation, "val")
    assert_holds(store, texts[2:], "train")


def test_validation_is_used_whole_and_training_copies_go(tmp_path: Path) -> None:
    """Neither deduplicated nor filtered, but cleaned; what training has of it is dropped from training."""
    texts = fresh_texts(60)
    validation = [" tiny ", texts[3], texts[3], *fresh_texts(10, 5), ""]
    write_lines(tmp_path / "val.jsonl", validation)
    store = lines_job(
        tmp_path,
        [*texts, texts[1], "tiny"],
        validation=tmp_path / "val.jsonl",
        filters={"min_characters": 30, "max_tokens": 100},
        write_dropped=True,
    )
    assert_holds(store, [cleaned(text) for text in validation if text], "val")
    kept = [text for text in texts if text != texts[3] and len(text) >= 30 and len(text.split()) < 60]
    found = texts_in(store, "train")
    assert found == [text for text in texts if text != texts[3] and text in found]
    assert texts[3] not in found and "tiny" not in found and len(found) >= len(kept) // 2
    assert store.splits == ("train", "val")


# ---- the index that runs share ----


def indexed(folder: Path, out: str, texts: list[str], **settings: Any) -> milldam.Store:
    """A job on its own file, with the index of the folder."""
    path = folder / f"{out}.jsonl"
    if not path.exists():
        write_lines(path, texts)
    dedup = {"index": str(folder / "seen"), **settings.pop("dedup", {})}
    return preprocess(folder / out, path, dedup=dedup, **settings)


def indexed_runs(folder: Path) -> list[dict[str, Any]]:
    done = invoke("dedup-index", folder / "seen", "--json")
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout))


def test_a_repeated_run_never_drops_its_own(tmp_path: Path) -> None:
    """Into another folder, after its store was deleted, and up to date: the same bytes, and one run in the index."""
    texts = texts_with_copies(300, 11)
    first = indexed(tmp_path, "a", texts)
    assert_holds(first, kept_of(texts))
    before = store_bytes(first.path)
    copy = preprocess(tmp_path / "b", tmp_path / "a.jsonl", dedup={"index": str(tmp_path / "seen")})
    assert store_bytes(copy.path) == before
    shutil.rmtree(first.path)
    assert store_bytes(indexed(tmp_path, "a", texts).path) == before
    assert store_bytes(indexed(tmp_path, "a", texts).path) == before
    assert len(indexed_runs(tmp_path)) == 1


def test_new_data_loses_exactly_what_was_seen(tmp_path: Path) -> None:
    """Documents of earlier runs, and its own copies; each with its reason."""
    old, new = texts_with_copies(300, 12), [*fresh_texts(200, 13), *fresh_texts(20, 13)]
    first = indexed(tmp_path, "a", old)
    mixed = [text for pair in zip(old[:200], new[:200], strict=True) for text in pair] + new[200:]
    store = indexed(tmp_path, "c", mixed, write_dropped=True)
    assert_holds(store, kept_of(mixed, seen=kept_of(old)))
    dropped = drops_by_stage(store.path)["dedup"]
    seen = sum(cleaned(text) in set(kept_of(old)) for text in mixed)
    assert dropped == {"seen_before": seen, "duplicate": 20}
    told = [one for one in set_aside(store.path, "dropped") if one["reason"] == "seen_before"]
    (run,) = [one["id"] for one in indexed_runs(tmp_path) if one["out"] == str(first.path.resolve())]
    assert all(run in json.dumps(one["duplicate_of"]) for one in told)


@pytest.mark.slow
def test_near_duplicates_of_earlier_runs_are_dropped(tmp_path: Path) -> None:
    """Of what they kept, not of what they dropped; a repeated run drops none of its own."""
    old = fresh_texts(60, words=(150, 200))
    words = fresh_texts(1, 7, words=(600, 601))[0].split()
    chain = [" ".join(words[35 * k : 35 * k + 400]) for k in range(3)]  # the third is like the second alone
    near: dict[str, Any] = {"near": {}}
    first = indexed(tmp_path, "a", [*old, *chain[:2]], dedup=near)
    assert_holds(first, [*old, chain[0]])
    assert texts_in(preprocess(tmp_path / "b", tmp_path / "a.jsonl", dedup=near | {"index": str(tmp_path / "seen")}))
    new = [*map(changed, old[:30]), old[40], *fresh_texts(5, 8), chain[2]]
    store = indexed(tmp_path, "c", new, dedup=near, write_dropped=True)
    assert_holds(store, [*fresh_texts(5, 8), chain[2]])
    assert drops_by_stage(store.path)["dedup"] == {"seen_before": 31}
    assert summary_of(store.path)["near"]["seen_before"] == 30
    assert_holds(indexed(tmp_path, "d", [changed(chain[2]), changed(old[3], 1), "new"], dedup=near), ["new"])


def test_a_removed_run_is_forgotten(tmp_path: Path) -> None:
    """dedup-index lists and removes; a run that is not there is an error that names those that are."""
    old = fresh_texts(50)
    indexed(tmp_path, "a", old)
    (run,) = indexed_runs(tmp_path)
    assert run["out"] == str((tmp_path / "a").resolve()) and run["hashes"] == 50
    listed = invoke("dedup-index", tmp_path / "seen")
    assert run["id"] in listed.stdout
    wrong = invoke("dedup-index", tmp_path / "seen", "--remove", "0123")
    assert wrong.exit_code == 2 and run["id"] in wrong.stderr
    assert invoke("dedup-index", tmp_path / "seen", "--remove", run["id"]).exit_code == 0
    assert indexed_runs(tmp_path) == []
    assert texts_in(indexed(tmp_path, "b", [*old, "more"])) == [*old, "more"]


@pytest.mark.slow
def test_two_runs_at_the_same_time_share_an_index(tmp_path: Path) -> None:
    """Both finish, neither spoils the index: what either had is seen afterwards."""
    jobs = {name: fresh_texts(400, seed) for name, seed in (("a", 1), ("b", 2))}
    for name, texts in jobs.items():
        write_lines(tmp_path / f"{name}.jsonl", texts)
        config = config_of(tmp_path / name, tmp_path / f"{name}.jsonl", dedup={"index": tmp_path / "seen"})
        write_config(tmp_path / f"{name}.yaml", config)
    with started("preprocess", tmp_path / "a.yaml") as one, started("preprocess", tmp_path / "b.yaml") as two:
        for process in (one, two):
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    assert_holds(milldam.open(tmp_path / "a"), jobs["a"])
    assert_holds(milldam.open(tmp_path / "b"), jobs["b"])
    assert len(indexed_runs(tmp_path)) == 2
    assert texts_in(indexed(tmp_path, "c", [*jobs["a"], *jobs["b"], "new"])) == ["new"]


def test_an_index_that_is_damaged_is_told(tmp_path: Path) -> None:
    """Which file, and what to do."""
    indexed(tmp_path, "a", ["one"])
    (hashes,) = (tmp_path / "seen").glob("*.hashes")
    hashes.write_bytes(hashes.read_bytes()[:-1])
    with pytest.raises(milldam.MilldamError, match=r"dedup-index .* --remove"):
        indexed(tmp_path, "b", ["two"])
    assert not (tmp_path / "b").exists()


# ---- dropped documents ----


def test_every_dropped_document_is_written_with_its_reason(tmp_path: Path) -> None:
    """In plan order, with the text as cleaned and what it duplicates."""
    (tmp_path / "judge_it.py").write_text("def judge(text):\n    return 'has_zz' if 'zz' in text else True\n")
    texts = texts_with_copies(400, 1)
    store = lines_job(
        tmp_path,
        texts,
        write_dropped=True,
        shard_size="100KB",
        filters={"min_characters": 60, "max_tokens": 100, "function": f"{tmp_path}/judge_it.py:judge"},
    )
    first: dict[str, int] = {}
    expected = []
    for row, text in enumerate(map(cleaned, texts)):
        original = first.setdefault(text, row)
        ids = len(store.tokenizer.encode(text, add_special_tokens=False).ids) + 1
        holds = {
            "empty": not text,
            "duplicate": original != row,
            "too_few_characters": len(text) < 60,
            "has_zz": "zz" in text,
            "too_many_tokens": ids > 100,
        }
        reason = next((name for name, is_true in holds.items() if is_true), None)
        if reason is not None:
            expected.append((row, reason, text, original if reason == "duplicate" else None))
    dropped = sorted(set_aside(store.path, "dropped"), key=lambda one: int(one["row"]))
    assert len({one["reason"] for one in dropped}) == 5
    assert [
        (one["row"], one["reason"], one["text"], one.get("duplicate_of", {}).get("row")) for one in dropped
    ] == expected


# ---- cleaning ----


def test_custom_cleaning_comes_before_dedup_and_filters(tmp_path: Path) -> None:
    """NFKC and plain white space make texts equal, and shorter."""
    texts = ["ﬁne  day", "fine day", "x" + " " * 50 + "y", "e\u0301t\u00e9 is summer", "\u00e9t\u00e9 is summer"]
    rules = {"unicode": "NFKC", "whitespace": True}
    store = lines_job(tmp_path, texts, clean=rules, filters={"min_characters": 8})
    assert texts_in(store) == ["fine day", "\u00e9t\u00e9 is summer"]
    dropped = drops_by_stage(store.path)
    assert dropped["dedup"] == {"duplicate": 2} and sum(dropped["filter"].values()) == 1


def test_an_edited_function_is_another_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the old function is refused, not reused; --overwrite makes it by the new one."""
    monkeypatch.chdir(tmp_path)
    Path("edited.py").write_text("def clean(text):\n    return text + ' one'\n")
    settings: dict[str, Any] = {"clean": {"function": "edited:clean"}, "dedup": "off"}
    assert texts_in(lines_job(tmp_path, ["a"], **settings)) == ["a one"]
    Path("edited.py").write_text("def clean(text):\n    return text + ' two and more'\n")
    with pytest.raises(MismatchError, match=r"clean\.function_hash"):
        lines_job(tmp_path, ["a"], **settings)
    assert texts_in(lines_job(tmp_path, ["a"], overwrite=True, **settings)) == ["a two and more"]


# ---- the report and the library ----


def test_tokenizer_path_is_not_the_result(tmp_path: Path) -> None:
    """A tokenizer that lies elsewhere with the same content makes the same store."""
    store = lines_job(tmp_path, ["one"])
    copy = tmp_path / "copy.json"
    copy.write_bytes(TOKENIZER.read_bytes())
    assert lines_job(tmp_path, ["one"], tokenizer=copy).fingerprint == store.fingerprint


# ---- combinations ----


def test_a_run_that_fails_is_not_in_the_index(tmp_path: Path) -> None:
    """What was never stored has not been seen."""
    texts, index = fresh_texts(50), str(tmp_path / "seen")
    with pytest.raises(InputError, match="No documents left"):
        lines_job(tmp_path, texts, "bad", dedup={"index": index}, filters={"min_characters": 10**6})
    assert len(lines_job(tmp_path, texts, "good", dedup={"index": index})) == 50
