"""From examples to a table of windows: the job, its command, and what changed input costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.kit.jobs import TOKENIZER, invoke, leftovers, run_here, store_bytes
from tests.kit.qa_jobs import command, examples_of, small, write_examples
from tests.kit.qa_recipe import COLUMNS, windower_of
from tests.kit.quick import first_quick

from milldam.errors import ConfigError, InputError, MismatchError
from milldam.qa import job, prepare
from milldam.stores.verify import verify


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("few") / "few.jsonl", 60)


# ---- what is made ----


def test_the_store_holds_what_the_windower_makes(few: Path, tmp_path: Path) -> None:
    """Every window of every example, in order, with its texts; and the store is whole."""
    store = small(few, tmp_path / "s")
    examples = list(examples_of(few))
    made = windower_of(tokenizers.Tokenizer.from_file(str(TOKENIZER)), max_seq_length=64, overlap=16)(examples)
    for name, column in store.rows(np.arange(len(store)), COLUMNS).items():
        assert np.array_equal(column, getattr(made.features, name)), name
    assert [store.example(number)["id"] for number in range(store.examples)] == [one.id for one in examples]
    assert list(verify(tmp_path / "s")) == []
    counts = store.manifest.counts
    assert counts["windows"] == len(store) and counts["read"] == 60
    assert counts["windows_with_answers"] == int(made.features.has_answer.sum())
    assert (counts["answered"] + counts["unrepairable"], counts["unanswerable"]) == (40, 20)


def test_max_examples_and_max_segments_are_exact(few: Path, tmp_path: Path) -> None:
    """So many examples over all inputs, as they are now; so many windows of each."""
    assert repr(small(few, tmp_path / "s", max_examples=7, max_segments=1)).count("7 windows of 64, 7 examples")
    assert prepare([few, few], tmp_path / "2", tokenizer=TOKENIZER, max_examples=70).examples == 70
    write_examples(tmp_path / "a.jsonl", 50, seed=7)
    assert small([tmp_path / "a.jsonl", few], tmp_path / "s", max_examples=7, max_segments=1).examples == 7
    small([tmp_path / "a.jsonl", few], tmp_path / "fresh", max_examples=7, max_segments=1)
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")


def test_what_is_wrong_with_examples_is_counted(tmp_path: Path) -> None:
    """Repaired, unrepairable, dropped and rejected ones; the first two by their status in the store."""
    context = "The tower was built in 1990 by Anna."
    stated = {"ok": ("1990", 23), "moved": ("1990", 20), "gone": ("1850", 23), "long": ("1990", 23)}
    with (tmp_path / "e.jsonl").open("w") as file:
        for name, (text, start) in stated.items():
            question = "why " * 200 if name == "long" else "When?"
            answers = {"text": [text], "answer_start": [start]}
            file.write(json.dumps({"id": name, "context": context, "question": question, "answers": answers}) + "\n")
        file.write("{broken\n")
    store = small(tmp_path / "e.jsonl", tmp_path / "s")
    found = {one["id"]: (one["status"], one["chosen_answer_char_span"]) for one in map(store.example, range(3))}
    assert found == {"ok": ("ok", (23, 27)), "moved": ("repaired", (23, 27)), "gone": ("unrepairable", None)}
    counts = store.manifest.counts
    assert (counts["repaired"], counts["unrepairable"]) == (1, 1)
    assert counts["dropped"] == {"question_too_long": 1} and counts["rejected"] == {"bad_json": 1}
    (reject,) = (json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines())
    assert (reject["line"], reject["reason"]) == (5, "bad_json")


@pytest.mark.parametrize("text", first_quick(["word and word ", "\u65e5\u672c\u8a9e", "! ?\n"], 2))
def test_a_long_context_has_the_windows_that_it_has_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It is encoded in pieces, each cut proven, and nobody can tell; one with too many windows is dropped by name."""
    record = {"id": "1", "question": "what?", "context": text * (30_000 // len(text)), "answers": None}
    (tmp_path / "e.jsonl").write_text(json.dumps(record) + "\n")
    whole = small(tmp_path / "e.jsonl", tmp_path / "whole")
    monkeypatch.setattr("milldam.qa.windows.PIECE", 9000)
    cut = small(tmp_path / "e.jsonl", tmp_path / "cut")
    assert cut.fingerprint == whole.fingerprint and len(cut) > 50
    monkeypatch.setattr("milldam.qa.windows.MOST_WINDOW_BYTES", 20_000)
    write_examples(tmp_path / "few.jsonl", 3)
    counts = small([tmp_path / "e.jsonl", tmp_path / "few.jsonl"], tmp_path / "s").manifest.counts
    assert counts["dropped"] == {"too_large": 1}


# ---- the same again, and something else ----


@pytest.mark.parametrize(("changed", "reused"), first_quick([("2.jsonl", 3), ("9.jsonl", 4)]))
def test_only_what_changed_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, reused: int) -> None:
    """Without --overwrite, and with the bytes of a run from nothing."""
    monkeypatch.setattr(job, "PIECE_BYTES", 1)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        write_examples(folder / f"{number}.jsonl", 40, seed=number)
    small(folder, tmp_path / "s")
    write_examples(folder / changed, 35, seed=8)
    told = json.loads(run_here(*command(folder, tmp_path / "s", "--json", "--workers", 1)).stdout)
    assert (told["reused"], told["up_to_date"]) == (reused, False)
    assert told["counts"]["examples"] > 100 and told["memory"]["peak"] > 0
    small(folder, tmp_path / "fresh")
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")
    assert list(verify(tmp_path / "s")) == [] and leftovers(tmp_path / "s") == []
    with pytest.raises(MismatchError, match="overlap: 8"):
        small(folder, tmp_path / "s", overlap=8)


@pytest.mark.parametrize(
    ("options", "named"),
    first_quick(
        [
            ({"max_seq_length": 48}, "max_seq_length: 48 (made with 64)"),
            ({"overlap": None, "hop": 16}, "hop: 16"),
            ({"memory_tokens": 2}, "memory_tokens: 2 (made with 0)"),
            ({"padding_side": "left"}, 'padding_side: "left" (made with "right")'),
            ({"split": "dev"}, 'split: "dev" (made with "train")'),
        ],
        3,
    ),
)
def test_other_settings_never_return_old_features(
    few: Path, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    """They are refused with what changed; --overwrite makes the store anew, as if nothing had been there."""
    small(few, tmp_path / "s")
    before = store_bytes(tmp_path / "s")
    with pytest.raises(MismatchError) as refused:
        small(few, tmp_path / "s", **options)
    assert named in str(refused.value) and "overwrite=True" in str(refused.value)
    assert store_bytes(tmp_path / "s") == before
    small(few, tmp_path / "s", overwrite=True, **options)
    small(few, tmp_path / "fresh", **options)
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")


# ---- what can be wrong ----


def test_input_that_can_not_be_used(few: Path, tmp_path: Path) -> None:
    """Nothing in it, nothing usable in it, a record that is broken while strict."""
    (tmp_path / "none.jsonl").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"id": "1", "question": "?"}\n')
    with pytest.raises(InputError, match="No examples in the input"):
        small(tmp_path / "none.jsonl", tmp_path / "1")
    with pytest.raises(InputError, match=r"No examples left: no_context 1\.\n.*rejects\.jsonl"):
        small(tmp_path / "broken.jsonl", tmp_path / "2")
    with pytest.raises(InputError, match=r"broken\.jsonl:1: no_context"):
        small(tmp_path / "broken.jsonl", tmp_path / "3", strict=True)
    # Mended, the same command works: nothing came of the run before.
    (tmp_path / "broken.jsonl").write_bytes(few.read_bytes())
    assert small(tmp_path / "broken.jsonl", tmp_path / "3", strict=True).examples == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_length": "many"}, 'max_seq_length: must be a whole number, not "many"'),
        ({"split": "../x"}, 'split "../x"'),
        ({"first": "answer"}, 'first: must be auto, question or context, not "answer"'),
        ({"overlap": 200}, "overlap: 200"),
    ],
)
def test_settings_that_can_not_be_meant(few: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """They are told before anything is made."""
    with pytest.raises(ConfigError) as refused:
        small(few, tmp_path / "s", **options)
    assert message in str(refused.value)
    assert not (tmp_path / "s").exists()


# ---- the command ----


def test_the_command_does_what_the_function_does(few: Path, tmp_path: Path) -> None:
    """The same settings, the same bytes."""
    options = ("-o", tmp_path / "command", "--tokenizer", TOKENIZER, "--max-seq-length", 64, "--overlap", 16)
    assert invoke("qa", few, *options).exit_code == 0
    small(few, tmp_path / "call")
    assert store_bytes(tmp_path / "command") == store_bytes(tmp_path / "call")
