"""Decontamination in a job: what becomes of documents that hold items, and that nothing else changes it."""

from __future__ import annotations

import json
import logging
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.kit.jobs import run_here, set_aside, store_bytes, write_lines
from tests.kit.preprocess_jobs import (
    config_of,
    drops_by_stage,
    fresh_texts,
    lines_job,
    make_words,
    summary_of,
    texts_in,
    write_config,
    write_saved_data_set,
)
from tests.kit.quick import first_quick

import milldam
from milldam.errors import ConfigError, InputError
from milldam.pipeline import decontaminating

RNG = random.Random(19)
QUESTIONS = [f"Which {make_words(RNG, 14)} is meant?" for _ in range(30)]
REASONS = ("near_duplicate", "contaminated", "too_few_characters")
PLAIN = fresh_texts(60, seed=7, words=(30, 60))


def write_evals(path: Path, questions: list[str] = QUESTIONS, **more: Any) -> Path:
    path.write_text("".join(json.dumps({"question": one, "id": k} | more) + "\n" for k, one in enumerate(questions)))
    return path


def planted(every: int = 5) -> list[str]:
    """Every so many documents hold a question, in capitals and without its mark."""
    texts = list(PLAIN)
    for number in range(0, len(texts), every):
        question = QUESTIONS[number // every].upper().rstrip("?")
        texts[number] = f"{texts[number]}\n\n{question}; {texts[number][::-1]}"
    return texts


def findings(out: Path) -> list[dict[str, Any]]:
    return set_aside(out, "contamination")


def test_documents_that_hold_an_item_are_dropped(tmp_path: Path) -> None:
    """Counted as contaminated, told item by item, and in the report with both texts."""
    evals = write_evals(tmp_path / "evals.jsonl")
    store = lines_job(tmp_path, planted(), decontaminate=[{"path": evals, "columns": ["question"]}])
    assert texts_in(store) == [text for number, text in enumerate(PLAIN) if number % 5]
    assert drops_by_stage(store.path) == {"decontaminate": {"contaminated": 12}}
    told = findings(store.path)
    assert [(one["item"], one["row"], one["share"]) for one in told] == [(k, 5 * k, 1.0) for k in range(12)]
    assert told[0]["passage"] == QUESTIONS[0] and told[0]["document"] == QUESTIONS[0].upper().rstrip("?")
    (found,) = summary_of(store.path)["contamination"]["sets"]
    assert (found["items_found"], found["documents"], found["searched"]["items"]) == (12, 12, 30)
    report = (store.path / "run" / "report.html").read_text(encoding="utf-8")
    assert QUESTIONS[3] in report and QUESTIONS[3].upper().rstrip("?") in report


def test_items_that_repeat_themselves_stay_within_the_budget(tmp_path: Path) -> None:
    """Two hundred times a word, against a document of two million bytes of it."""
    evals = write_evals(tmp_path / "evals.jsonl", ["ha " * 200])
    started = time.monotonic()
    store = lines_job(tmp_path, ["ha " * 700_000, *PLAIN[:3]], decontaminate=[{"path": evals}], memory="400MB")
    assert texts_in(store) == PLAIN[:3]
    assert time.monotonic() - started < 20
    memory = summary_of(store.path)["memory"]
    assert memory["peak"] < memory["budget"]


def test_what_is_everywhere_in_the_corpus_does_not_count(tmp_path: Path) -> None:
    """A notice under every document is no item, though an item has nothing else; a copy of it in few documents is."""
    notice = "This text may be copied and given away by anyone who keeps this notice and sells no part of it"
    evals = write_evals(tmp_path / "evals.jsonl", [notice, QUESTIONS[1]])
    texts = [f"{text} {notice}" for text in fresh_texts(40, seed=3)] + [f"{PLAIN[0]} {QUESTIONS[1]}"]
    store = lines_job(tmp_path, texts, decontaminate=[{"path": evals}])
    assert len(store) == 40
    (found,) = summary_of(store.path)["contamination"]["sets"]
    assert (found["common"], found["items_found"]) == (1, 1)
    few = lines_job(tmp_path / "few", texts[:20], decontaminate=[{"path": evals, "action": "report"}])
    assert len(findings(few.path)) == 20


# ---- with near-dedup ----


def test_no_document_is_dropped_for_one_that_is_removed(tmp_path: Path) -> None:
    """The first of two near-duplicates is contaminated: the second stays. So it is when the item comes later, and when
    the first one is of an earlier run."""
    (text, other), question = fresh_texts(2, words=(150, 200)), QUESTIONS[0]
    first = f"{text} {question}"
    empty = write_evals(tmp_path / "evals.jsonl", QUESTIONS[1:3])
    rules = {"dedup": "near", "decontaminate": [{"path": empty}]}
    assert texts_in(lines_job(tmp_path, [first, text, other], **rules)) == [first, other]
    evals = write_evals(tmp_path / "evals.jsonl")
    store = lines_job(tmp_path, [first, text, other], **rules)
    assert texts_in(store) == [text, other]
    assert drops_by_stage(store.path) == {"decontaminate": {"contaminated": 1}}
    assert store_bytes(lines_job(tmp_path, [first, text, other], "fresh", **rules).path) == store_bytes(store.path)
    index = {"dedup": {"near": {}, "index": str(tmp_path / "index")}, "decontaminate": [{"path": evals}]}
    assert texts_in(lines_job(tmp_path / "earlier", [first, other], **index)) == [other]
    assert texts_in(lines_job(tmp_path / "later", [text, f"{other} more"], **index)) == [text]


@pytest.mark.parametrize("seed", first_quick(range(3)))
def test_every_near_duplicate_is_like_a_document_of_the_store(tmp_path: Path, seed: int) -> None:
    """Versions of texts in any order, some with an item, some too short for a filter; for
    any number of workers."""
    rng = random.Random(seed)
    drop = write_evals(tmp_path / "drop.jsonl", QUESTIONS[:15])
    report = write_evals(tmp_path / "report.jsonl", QUESTIONS[15:])
    texts = []
    for text in fresh_texts(60, seed, words=(90, 150)):
        words, item = text.split(), rng.choice(QUESTIONS)
        at = rng.randrange(len(words))
        texts += [text, f"{text} more", " ".join([*words[:at], item, *words[at:]]), " ".join(words[:-4])]
    rng.shuffle(texts)
    rules: dict[str, Any] = {
        "dedup": "near",
        "decontaminate": [{"path": drop}, {"path": report, "action": "report"}],
        "filters": {"min_characters": 780},
        "write_dropped": True,
        "shard_size": "100KB",
    }
    store = lines_job(tmp_path, texts, **rules)
    dropped = {(one["unit"], one["row"]): one for one in set_aside(store.path, "dropped")}
    reasons = {reason: [one for one in dropped.values() if one["reason"] == reason] for reason in REASONS}
    assert min(map(len, reasons.values())) > 10
    for one in reasons["near_duplicate"]:
        assert (one["duplicate_of"]["unit"], one["duplicate_of"]["row"]) not in dropped
    two = lines_job(tmp_path, texts, "two", **rules | {"workers": 2, "memory": "600MB"})
    assert store_bytes(two.path) == store_bytes(store.path)


def test_a_changed_evaluation_set_costs_what_it_changes(tmp_path: Path) -> None:
    """Only units of which something else is removed are made again; the bytes are those of a fresh run."""
    evals = write_evals(tmp_path / "evals.jsonl", QUESTIONS[:2])
    texts = [f"{text} {number}" for number in range(40) for text in PLAIN]
    texts[-1] += f" {QUESTIONS[5]}"
    path = write_lines(tmp_path / "corpus.jsonl", texts)
    rules = {"decontaminate": [{"path": evals}], "shard_size": "100KB"}
    make = partial(milldam.preprocess, config_of(tmp_path / "out", path, **rules))
    assert len(make()) == len(texts)
    units = summary_of(tmp_path / "out")["units"]
    write_evals(evals, QUESTIONS[:6])
    assert len(make()) == len(texts) - 1
    assert summary_of(tmp_path / "out")["reused"] == units - 1 > 1
    fresh = milldam.preprocess(config_of(tmp_path / "fresh", path, **rules))
    assert store_bytes(fresh.path) == store_bytes(tmp_path / "out")
    with pytest.raises(milldam.MismatchError, match=r"decontaminate.0.min_share"):
        milldam.preprocess(
            config_of(tmp_path / "out", path, **rules | {"decontaminate": [{"path": evals, "min_share": 0.9}]})
        )


def test_evaluation_sets_of_every_kind_are_read(tmp_path: Path) -> None:
    """JSON lines, Parquet, CSV, saved datasets, nested fields; all of them together."""
    table = pa.table({"id": range(5), "qa": [{"question": one, "choices": ["a", "b"]} for one in QUESTIONS[5:10]]})
    pq.write_table(table, tmp_path / "evals.parquet")
    (tmp_path / "evals.csv").write_text("q,a\n" + "".join(f'"{one}",x\n' for one in QUESTIONS[10:15]))
    nested = {"data": [{"paragraphs": [{"qas": [{"question": one} for one in QUESTIONS[20:25]]}]}]}
    (tmp_path / "squad.jsonl").write_text(json.dumps(nested) + "\n")
    sets = [
        {"path": write_evals(tmp_path / "evals.jsonl", QUESTIONS[:5])},
        {"path": tmp_path / "evals.parquet", "columns": "qa.question"},
        {"path": tmp_path / "evals.csv", "columns": ["q"]},
        {"path": write_saved_data_set(tmp_path / "saved", [QUESTIONS[15:18], QUESTIONS[18:20]])},
        {"path": tmp_path / "squad.jsonl", "columns": "data.paragraphs.qas.question"},
    ]
    store = lines_job(tmp_path, [*PLAIN[:3], *(f"so: {one}" for one in QUESTIONS)], decontaminate=sets)
    assert texts_in(store) == [*PLAIN[:3], *(f"so: {one}" for one in QUESTIONS[25:])]
    assert [one["findings"] for one in summary_of(store.path)["contamination"]["sets"]] == [5] * 5


def test_what_can_not_be_meant_is_refused(tmp_path: Path) -> None:
    """A column that is not there, a set without text, a line that is no JSON, a missing file."""
    evals = write_evals(tmp_path / "evals.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"question": "a"}\n{"question": \n')
    (tmp_path / "numbers.jsonl").write_text('{"id": 1}\n')
    refused: dict[str, dict[str, Any]] = {
        r'columns: .*no text in a field "qestion".*Did you mean "question"': {"columns": ["qestion"]},
        r"broken.jsonl:2: bad_json": {"path": tmp_path / "broken.jsonl"},
        r"path: .*no text in its rows": {"path": tmp_path / "numbers.jsonl"},
        r"missing.jsonl": {"path": tmp_path / "missing.jsonl"},
    }
    for said, rules in refused.items():
        with pytest.raises(InputError, match=said):
            lines_job(tmp_path, PLAIN, decontaminate=[{"path": evals} | rules])
    for name, value in {"ngram": 1, "action": "remove", "min_share": 2}.items():
        with pytest.raises(ConfigError, match=name):
            lines_job(tmp_path, PLAIN, decontaminate=[{"path": evals, name: value}])


def test_a_store_is_looked_through_by_any_workers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one process or in forked workers, in one unit or many; a budget that holds no worker is refused."""
    caplog.set_level(logging.INFO, "milldam.run")
    evals = write_evals(tmp_path / "evals.jsonl")
    store = lines_job(tmp_path, [f"{text} {number}" for number in range(4) for text in planted()])
    whole = milldam.contamination(store.path, evals, columns="question", findings=tmp_path / "whole.jsonl")
    monkeypatch.setattr(decontaminating, "UNIT_TOKENS", 2000)
    parts = milldam.contamination(
        store.path, evals, columns="question", findings=tmp_path / "parts.jsonl", workers=2, memory="600MB"
    )
    assert whole["sets"][0]["findings"] == 48 and parts == whole
    assert (tmp_path / "parts.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert "not forked" not in caplog.text
    with pytest.raises(milldam.ResourceError, match="too small"):
        milldam.contamination(store.path, evals, memory="20MB")


def test_a_set_of_which_nothing_is_looked_for_is_told_of(tmp_path: Path) -> None:
    """Once, also by a quiet run: it would pass for a set that is not in the corpus."""
    short = write_evals(tmp_path / "short.jsonl", ["Who knows?", "Why?", "Who knows?"])
    evals = write_evals(tmp_path / "evals.jsonl")
    path = write_lines(tmp_path / "corpus.jsonl", planted())
    config = write_config(tmp_path / "config.yaml", config_of(tmp_path / "clean", path))
    said = run_here("preprocess", config, "-q", "--decontaminate", short, "--decontaminate", evals).stderr
    why = "nothing of this evaluation set is looked for (passages: 2 too short, 1 repeated)."
    assert said == f"Warning: {short}: {why}\n"
    assert run_here("contamination", tmp_path / "clean", "--against", short).stderr == said


def test_the_command_line_has_all_of_it(tmp_path: Path) -> None:
    """`--decontaminate` for preprocess and tokenize; the same is found in a finished store by decoding it."""
    evals = write_evals(tmp_path / "evals.jsonl")
    path = write_lines(tmp_path / "corpus.jsonl", planted())
    config = write_config(tmp_path / "config.yaml", config_of(tmp_path / "clean", path))
    said = run_here("preprocess", config, "--decontaminate", evals).output
    assert "12 of 30 items found in 12 documents, action: drop" in said
    report = f"decontaminate={{path: {evals}, action: report}}"
    run_here("preprocess", config, "-o", tmp_path / "plain", "--set", report)
    assert len(findings(tmp_path / "plain")) == 12
    out = tmp_path / "found.jsonl"
    told = run_here("contamination", tmp_path / "plain", "--against", evals, "--findings", out, "--json", code=1)
    (found,) = json.loads(told.stdout)["sets"]
    assert (found["items_found"], found["documents"]) == (12, 12)
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == list(range(0, 60, 5))
    clean = run_here("contamination", tmp_path / "clean", "--against", evals)
    assert "0 of 30 items found" in clean.output
