"""Exact match and F1 as the official SQuAD scripts define them; the numbers here are worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.kit.qa_jobs import flat, lines, squad

from milldam.errors import ConfigError, InputError
from milldam.qa.answering import answers
from milldam.qa.evaluation import evaluate, f1, normalized
from milldam.qa.examples import Answer, Example
from milldam.qa.job import prepare
from milldam.qa.store import FeatureStore

QUESTIONS = [
    ("n", ["1,990"]),
    ("s", ["the Eiffel Tower", "Eiffel Tower in Paris"]),
    ("l", ["in the 10th and 11th centuries"]),
    ("u1", []),
    ("u2", []),
]
PREDICTIONS = {"n": "1990", "s": "Tower", "l": "10th centuries", "u1": "", "u2": "something"}


def asked(questions: list[tuple[str, list[str]]] = QUESTIONS) -> list[Example]:
    """Questions with these answers."""
    return [
        Example(id, "What?", " ".join(gold) or "Nothing.", tuple(Answer(text, 0) for text in gold))
        for id, gold in questions
    ]


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


# ---- one answer against another ----


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("theatre", "theatre"),
        ("It's\tan\u00a0apple", "its apple"),
        ("\u00abParis\u00bb", "\u00abparis\u00bb"),
    ],
)
def test_normalisation_is_the_official_one(text: str, left: str) -> None:
    """Lower case, no ASCII punctuation, no articles, single spaces; other punctuation stays."""
    assert normalized(text) == left


def test_f1_counts_words_with_repeats() -> None:
    """Precision and recall are over bags of words."""
    assert f1("new york new york", "new york") == pytest.approx(2 / 3)
    assert f1("york", "boston") == 0
    assert (f1("", ""), f1("", "x"), f1("the", "")) == (1, 0, 1)
    assert f1("", "", "1.1") == 0, "the script of v1.1 knows no empty answers"


# ---- many ----


@pytest.mark.parametrize("form", ["records", "flat.jsonl", "squad.json"])
def test_scores_by_hand(tmp_path: Path, form: str) -> None:
    """Exact match and F1, of all questions and with and without an answer, from every form of references."""
    (tmp_path / "flat.jsonl").write_text(lines(flat(asked())), encoding="utf-8")
    written(tmp_path / "squad.json", squad(asked()))
    scores = evaluate(flat(asked()) if form == "records" else tmp_path / form, PREDICTIONS)
    long_f1 = 2 * 1.0 * 0.4 / 1.4  # of "in 10th and 11th centuries"
    f1s = {"n": 1.0, "s": 2 / 3, "l": long_f1, "u1": 1.0, "u2": 0.0}
    assert (scores.version, scores.total, scores.exact) == ("2.0", 5, 40.0)
    assert scores.f1 == pytest.approx(100 * sum(f1s.values()) / 5)
    official = scores.as_dict()
    assert (official["HasAns_total"], official["HasAns_exact"]) == (3, pytest.approx(100 / 3))
    assert (official["NoAns_total"], official["NoAns_exact"], official["NoAns_f1"]) == (2, 50.0, 50.0)
    # What is missing counts 0, so that a file cut short does not score better.
    cut = evaluate(flat(asked()), {"n": "1990", "u1": "", "other": "x"})
    assert (cut.exact, cut.missing, cut.unknown) == (40.0, ("s", "l", "u2"), 1)


def test_version_follows_from_the_questions() -> None:
    """Where every question has an answer, the script of v1.1 counts; it differs on answers that come to nothing."""
    scores = evaluate(flat(asked([("q", ["the", "dog"])])), {"q": "a"})
    assert (scores.version, scores.exact) == ("1.1", 100)
    with_another = evaluate(flat(asked([("q", ["the", "dog"]), ("u", [])])), {"q": "a"})
    assert (with_another.version, with_another.exact) == ("2.0", 0), "v2 leaves out gold answers of nothing"


def test_thresholds_on_null_odds() -> None:
    """Best scores over all thresholds, and the scores at a given one; a high threshold changes nothing."""
    odds = {"n": -5.0, "s": -1.0, "l": 0.5, "u1": 3.0, "u2": 1.5}
    scores = evaluate(flat(asked()), PREDICTIONS, odds, threshold=None)
    # All empty: 2 of 5. Letting n through adds 1; s, l add 0 in exact; u2 takes 1; u1 is empty anyway.
    best = scores.as_dict()
    assert (best["best_exact"], best["best_exact_thresh"], best["best_f1_thresh"]) == (60.0, -5.0, 0.5)
    assert best["best_f1"] == pytest.approx(100 * (2 + 1 + 2 / 3 + 0.8 / 1.4) / 5)
    assert scores.exact == 40.0, "as the predictions have it"
    at = evaluate(flat(asked()), PREDICTIONS, odds, threshold=0.5)
    assert (at.exact, at.f1) == (60.0, pytest.approx(best["best_f1"]))
    assert evaluate(flat(asked()), PREDICTIONS, odds).exact == 60.0, "above 1.0, as v2's script has it"
    assert evaluate(flat(asked()), PREDICTIONS, odds | {"u2": 1.0}).exact == 40.0
    assert evaluate(flat(asked()), PREDICTIONS, odds, threshold=math.inf).exact == 40.0


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    """Files that are not there, not JSON or of another form; a threshold without odds; odds that are missing."""
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "lines.jsonl").write_text(json.dumps(flat(asked())[0]) + "\n" + '{"id": "x"}\n')
    for references, predictions, message in (
        (flat(asked()), tmp_path / "none.json", r"none\.json: can't be read"),
        (flat(asked()), tmp_path / "broken.json", r"broken\.json: can't be read as JSON"),
        (flat(asked()), written(tmp_path / "list.json", ["x"]), "a JSON object {question id: answer text} is needed"),
        (flat(asked()), {"n": None}, 'and "n" has none'),
        ([], PREDICTIONS, "no questions"),
        ([{"id": "x"}], PREDICTIONS, "answers that can be used"),
        ([{"id": "x", "answers": {"text": "not in a list"}}], PREDICTIONS, "answers that can be used"),
        (tmp_path / "lines.jsonl", PREDICTIONS, r"jsonl:2: .*References must be complete"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(references, predictions)
    with pytest.raises(ConfigError, match="give null_odds"):
        evaluate(flat(asked()), PREDICTIONS, threshold=0.5)
    with pytest.raises(InputError, match='no null odds for 4 of 5 predictions, such as "s"'):
        evaluate(flat(asked()), PREDICTIONS, {"n": 0.0})


def store_of(folder: Path, records: list[dict[str, Any]], wordpiece_json: str) -> tuple[Path, FeatureStore]:
    """The file of these examples, and their store."""
    tokenizer = tokenizers.Tokenizer.from_str(str(wordpiece_json))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "questions.jsonl"
    path.write_text(lines(records), encoding="utf-8")
    rules: dict[str, Any] = {"max_seq_length": 48, "overlap": 16, "workers": 1}
    return path, prepare(path, folder / "s", tokenizer=folder / "tokenizer.json", **rules)


def test_right_logits_score_100(tmp_path: Path, wordpiece_json: str) -> None:
    """From examples over windows, logits at the stated positions and answers back: everything is right."""
    text = "In 1990 the price was $500 (in Paris), and many people came from far away to see it. "
    wanted = [("a", "500"), ("b", "Paris"), ("c", "1990"), ("d", ""), ("e", "many people came")]
    records = [
        one | {"context": text * 4} for one in flat(asked([(id, [gold] if gold else []) for id, gold in wanted]))
    ]
    for record, (_, gold) in zip(records, wanted, strict=True):
        record["answers"]["answer_start"] = [len(text) * 2 + text.index(gold)] if gold else []
    path, store = store_of(tmp_path, records, wordpiece_json)
    rows = store.rows(np.arange(len(store)), ("start_positions", "end_positions"))
    start, end = np.random.default_rng(0).normal(size=(2, len(store), 48)).astype(np.float32)
    for logits, positions in ((start, rows["start_positions"]), (end, rows["end_positions"])):
        logits[np.arange(len(store)), positions] += 20
    answers(store, start, end).write_predictions(tmp_path / "p.json", null_odds=tmp_path / "odds.json")
    for references in (path, tmp_path / "s", store):
        scores = evaluate(references, tmp_path / "p.json", tmp_path / "odds.json")
        assert (scores.total, scores.exact, scores.f1, scores.missing) == (5, 100.0, 100.0, ())
    found = list(answers(store, start, end))
    assert [one.text for one in found] == [gold for _, gold in wanted]
    assert found[0].span == (len(text) * 2 + text.index("500"), len(text) * 2 + text.index("500") + 3)
    assert evaluate(path, answers(store, start, end)).exact == 100.0


def test_examples_that_a_store_left_out_are_said(tmp_path: Path, wordpiece_json: str) -> None:
    """A store scores examples with windows; how many others there were is said, and not where there were none."""
    records = flat(asked())
    records[0]["context"] = ""  # rejected
    path, store = store_of(tmp_path, records, wordpiece_json)
    scores = evaluate(store.path, PREDICTIONS)
    assert (scores.total, scores.left_out, scores.as_dict()["left_out"]) == (4, 1, 1)
    assert (evaluate(path, PREDICTIONS).total, evaluate(path, PREDICTIONS).left_out) == (5, 0)
