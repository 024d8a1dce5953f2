"""From examples to a feature store: the job, its command, and what survives a kill."""

from __future__ import annotations

import itertools
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.kit.jobs import (
    TOKENIZER,
    invoke,
    kill_group,
    leftovers,
    run_here,
    run_milldam,
    started,
    store_bytes,
    wait_until,
)
from tests.kit.qa_jobs import command, small, write_examples
from tests.kit.quick import first_quick

from milldam.errors import ConfigError, InputError, MismatchError, ResourceError
from milldam.qa import windowing
from milldam.qa.chunks import Scale
from milldam.qa.job import WINDOWS_BYTES, prepare
from milldam.qa.sources import examples_of
from milldam.qa.windows import Windower, load_qa_tokenizer
from milldam.stores.features.reader import FeatureStore
from milldam.stores.verify import verify


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("few") / "few.jsonl", 60)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several chunks."""
    return write_examples(tmp_path_factory.mktemp("many") / "many.jsonl", 3300, length=400)


@pytest.fixture(scope="module")
def reference(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What comes out of it undisturbed."""
    out = tmp_path_factory.mktemp("reference") / "s"
    run_here(*command(many, out, "--workers", 1))
    assert len(FeatureStore(out).manifest.shards) == 4
    return out


# ---- what is made ----


def test_the_store_holds_what_the_windower_makes(few: Path, tmp_path: Path) -> None:
    """Every window of every example, in order, with its texts; and the store is whole."""
    store = small(few, tmp_path / "s")
    examples = list(examples_of(few))
    settings = store.manifest.settings
    rules = _rules(settings)
    made = load_qa_tokenizer(str(TOKENIZER), rules)
    expected = Windower(tokenizers.Tokenizer.from_str(made.json), rules, made.template)(examples)
    rows = store.rows(np.arange(len(store)), ("input_ids", "start_positions", "end_positions", "example"))
    for name in ("input_ids", "start_positions", "end_positions", "example"):
        assert np.array_equal(rows[name], getattr(expected.features, name)), name
    assert [store.example(number)["id"] for number in range(store.examples)] == [one.id for one in examples]
    assert list(verify(tmp_path / "s")) == []
    counts = store.manifest.counts
    assert counts["windows"] == len(store) and counts["examples"] == 60
    assert counts["windows_with_answers"] == int(expected.features.has_answer.sum())
    assert counts["answered"] + counts["unanswerable"] + counts["unrepairable"] == 60


def _rules(settings: dict[str, Any]) -> Any:
    from milldam.qa.settings import QARules

    return QARules(**{name: settings[name] for name in QARules().as_dict()})


def test_questions_without_an_answer_point_at_cls(few: Path, tmp_path: Path) -> None:
    """SQuAD v2's unanswerable questions are windows like others, with start and end at CLS."""
    store = small(few, tmp_path / "s")
    without = [number for number in range(store.examples) if not store.example(number)["answers"]["text"]]
    assert len(without) == store.manifest.counts["unanswerable"] == 20
    for window in store.document(without[0])["start_positions"], store.document(without[0])["end_positions"]:
        assert np.array_equal(window, store.document(without[0])["cls_index"])


def test_the_number_of_workers_changes_no_byte(many: Path, reference: Path, tmp_path: Path) -> None:
    """One process or several: the same store."""
    run_milldam(*command(many, tmp_path / "s", "--workers", 2, "--memory", "700MB"))
    assert store_bytes(tmp_path / "s") == store_bytes(reference)
    assert list(verify(reference)) == []


def test_how_examples_are_gathered_changes_no_window(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One example at a time or all at once: the same store."""
    small(few, tmp_path / "all")
    for limit in ("BATCH_EXAMPLES", "BATCH_CONTEXTS", "BATCH_WINDOWS"):
        monkeypatch.setattr(windowing, limit, 1)
        small(few, tmp_path / limit)
        monkeypatch.undo()
        assert store_bytes(tmp_path / limit) == store_bytes(tmp_path / "all")


def test_the_form_of_the_input_changes_no_window(few: Path, tmp_path: Path) -> None:
    """The same examples as one JSON text give the same shards."""
    records = [json.loads(line) for line in few.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "few.json").write_text(json.dumps(records))
    one, other = small(few, tmp_path / "1"), small(tmp_path / "few.json", tmp_path / "2")
    assert one.fingerprint == other.fingerprint


def test_doc_stride_means_the_overlap(few: Path, tmp_path: Path) -> None:
    """As fast tokenizers and seed 003 mean it; the hop is another thing, and two of them at once are refused."""
    small(few, tmp_path / "overlap", overlap=20)
    small(few, tmp_path / "stride", overlap=None, doc_stride=20)
    small(few, tmp_path / "hop", overlap=None, hop=20)
    assert store_bytes(tmp_path / "stride") == store_bytes(tmp_path / "overlap")
    assert len(FeatureStore(tmp_path / "hop")) != len(FeatureStore(tmp_path / "overlap"))
    for options in ({"doc_stride": 1}, {"hop": 1}):
        with pytest.raises(ConfigError, match="overlap"):
            small(few, tmp_path / "no", **options)
    assert not (tmp_path / "no").exists()


def test_the_default_overlap_is_128(few: Path, tmp_path: Path) -> None:
    """Said or not, it is the same store."""
    small(few, tmp_path / "1", max_seq_length=256, overlap=None)
    small(few, tmp_path / "2", max_seq_length=256, overlap=128)
    assert store_bytes(tmp_path / "1") == store_bytes(tmp_path / "2")


def test_memory_tokens_are_in_the_stored_tokenizer(few: Path, tmp_path: Path) -> None:
    """tokenizer.json has them, every window too, and the manifest says which they are."""
    store = small(few, tmp_path / "s", memory_tokens=3)
    stored = tokenizers.Tokenizer.from_file(str(tmp_path / "s" / "tokenizer.json"))
    read = [stored.token_to_id(f"[MEM_READ_{number}]") for number in range(3)]
    assert None not in read and store.manifest.memory["read"] == read
    ids = store.rows(np.arange(len(store)), ("input_ids",))["input_ids"]
    assert all(set(read) <= set(window.tolist()) for window in ids)
    assert list(verify(tmp_path / "s")) == []


def test_max_examples_and_max_segments_are_exact(few: Path, tmp_path: Path) -> None:
    """So many examples over all inputs; so many windows of each."""
    store = small(few, tmp_path / "s", max_examples=7, max_segments=1)
    assert (store.examples, len(store)) == (7, 7)
    assert prepare([few, few], tmp_path / "2", tokenizer=TOKENIZER, max_examples=70).examples == 70


def test_answers_to_look_at_are_listed(tmp_path: Path) -> None:
    """Repaired, unrepairable and dropped ones: with what the data says and what was found."""
    context = "The tower was built in 1990 by Anna."
    stated = {"ok": ("1990", 23), "moved": ("1990", 20), "gone": ("1850", 23), "long": ("1990", 23)}
    with (tmp_path / "e.jsonl").open("w") as file:
        for name, (text, start) in stated.items():
            question = "why " * 200 if name == "long" else "When?"
            answers = {"text": [text], "answer_start": [start]}
            file.write(json.dumps({"id": name, "context": context, "question": question, "answers": answers}) + "\n")
        file.write("{broken\n")
    store = small(tmp_path / "e.jsonl", tmp_path / "s")
    told = [json.loads(line) for line in (tmp_path / "s" / "answers.jsonl").read_text().splitlines()]
    assert [(one["id"], one["status"]) for one in told] == [
        ("moved", "repaired"),
        ("gone", "unrepairable"),
        ("long", "dropped"),
    ]
    assert told[0]["stated"] == [{"text": "1990", "start": 20}] and told[0]["found"] == {"text": "1990", "start": 23}
    assert told[1]["found"] is None and told[2]["reason"] == "question_too_long"
    counts = store.manifest.counts
    assert (counts["repaired"], counts["unrepairable"]) == (1, 1)
    assert counts["dropped"] == {"question_too_long": 1} and counts["rejected"] == {"bad_json": 1}
    (reject,) = (json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines())
    assert reject["where"] == "line 5" and reject["reason"] == "bad_json"
    assert store.examples == 3


# ---- the same again, and something else ----


def test_a_store_that_is_up_to_date_is_left_alone(few: Path, tmp_path: Path) -> None:
    """The same command again says so and writes nothing."""
    first = invoke(*command(few, tmp_path / "s"))
    assert first.exit_code == 0 and "60 examples" in first.stdout
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").iterdir() if path.is_file()}
    again = invoke(*command(few, tmp_path / "s"))
    assert "is up to date: 60 examples" in again.stdout
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("options", "named"),
    first_quick(
        [
            ({"max_seq_length": 48}, "max_seq_length: 48 (made with 64)"),
            ({"overlap": 8}, "overlap: 8 (made with 16)"),
            ({"overlap": None, "hop": 16}, "hop: 16"),
            ({"memory_tokens": 2}, "memory_tokens: 2 (made with 0)"),
            ({"first": "context"}, 'first: "context" (made with "question")'),
            ({"padding_side": "left"}, 'padding_side: "left" (made with "right")'),
            ({"max_segments": 2}, "max_segments: 2"),
            ({"max_examples": 9}, "max_examples: 9"),
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


def test_another_tokenizer_is_refused(few: Path, tmp_path: Path) -> None:
    """A token more in the vocabulary is something else."""
    path = tmp_path / "e.jsonl"
    path.write_bytes(few.read_bytes())
    small(path, tmp_path / "s")
    other = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    other.add_tokens(["something else"])
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(MismatchError, match="tokenizer: "):
        small(path, tmp_path / "s", tokenizer=tmp_path / "tokenizer.json")


def test_stores_of_two_kinds_do_not_mix(few: Path, tmp_path: Path) -> None:
    """Tokens do not go where features are, nor the other way round, even with --overwrite."""
    small(few, tmp_path / "features")
    tokens = [
        "tokenize",
        few,
        "--tokenizer",
        TOKENIZER,
        "--text-column",
        "context",
        "--workers",
        1,
        "--overwrite",
        "-o",
    ]
    assert "question-answering features" in run_here(*tokens, tmp_path / "features", code=2).stderr
    run_here(*tokens, tmp_path / "tokens")
    assert "a token store" in run_here(*command(few, tmp_path / "tokens", "--overwrite"), code=2).stderr
    assert len(FeatureStore(tmp_path / "features"))


# ---- what can be wrong ----


@pytest.mark.slow
def test_a_budget_that_is_too_small_says_what_would_do(few: Path, tmp_path: Path) -> None:
    """The smallest budget that works is named, and it works."""
    refused = run_milldam(*command(few, tmp_path / "s", "--memory", "20MB"), code=4).stderr
    assert not (tmp_path / "s").exists()
    named = refused.rpartition("--memory ")[2].strip().rstrip(".")
    run_milldam(*command(few, tmp_path / "s", "--memory", named))
    with pytest.raises(ResourceError, match="too small"):
        small(few, tmp_path / "2", memory=1000)


def test_the_budget_holds(many: Path, tmp_path: Path) -> None:
    """Workers are as many as fit, and what the whole process tree takes stays below the limit."""
    run = run_milldam(*command(many, tmp_path / "s", "--memory", "400MB", "--workers", 4, "--json"))
    summary = json.loads(run.stdout)
    assert 1 <= summary["workers"] < 4 and "the budget holds" in run.stderr
    assert summary["memory"]["peak"] < summary["memory"]["budget"] == 400_000_000


@pytest.mark.slow
def test_an_example_that_the_budget_can_not_hold_is_left_out(tmp_path: Path) -> None:
    """A context is encoded whole. A giant one is rejected by name, the rest is made, and what is named suffices."""
    few = [{"id": str(number), "question": "?", "context": "a few words", "answers": None} for number in range(3)]
    large = few[0] | {"id": "large", "context": "word and word " * 60_000}
    giant = few[0] | {"id": "giant", "context": "word and word " * 600_000}
    lines = [json.dumps(record) + "\n" for record in (few[0], large, few[1], giant, few[2])]
    (tmp_path / "e.jsonl").write_text("".join(lines))
    asked = partial(command, tmp_path / "e.jsonl", tmp_path / "s")
    run = json.loads(run_milldam(*asked("--memory", "200MB", "--json")).stdout)
    assert (run["counts"]["examples"], run["rejected"]) == (3, {"too_large": 2})
    assert run["memory"]["peak"] < run["memory"]["budget"]
    told = [json.loads(line) for line in (tmp_path / "s/rejects.jsonl").read_text().splitlines()]
    assert [one["where"] for one in told] == ["line 2", "line 4"]
    assert 'question "large" with its context and answers has 840 KB: too much' in told[0]["detail"]
    assert '"context" of question "giant" has 8.4 MB: too much for a budget of 200 MB' in told[1]["detail"]
    named = told[0]["detail"].partition("With memory ")[2].split()[0]
    run = json.loads(run_milldam(*asked("--memory", named, "--overwrite", "--json")).stdout)
    assert (run["counts"]["examples"], run["rejected"]) == (4, {"too_large": 1})
    assert run["memory"]["peak"] < run["memory"]["budget"]


@pytest.mark.slow
def test_a_giant_example_alone_is_read_again_with_more_memory(tmp_path: Path) -> None:
    """Nothing came of the run before: the same command with the memory that is named makes it."""
    record = {"id": "1", "question": "?", "context": "word and word " * 60_000, "answers": None}
    (tmp_path / "e.jsonl").write_text(json.dumps(record) + "\n")
    asked = partial(command, tmp_path / "e.jsonl", tmp_path / "s")
    assert "No examples left: too_large 1." in run_milldam(*asked("--memory", "200MB"), code=3).stderr
    detail = json.loads((tmp_path / "s/rejects.jsonl").read_text())["detail"]
    run_milldam(*asked("--memory", detail.partition("With memory ")[2].split()[0]))
    assert FeatureStore(tmp_path / "s").examples == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", first_quick(["! ? ", "word and word ", "\u0939\u093f\u0928\u094d\u0926\u0940 ", "\U0001f44d"])
)
def test_examples_weigh_at_least_what_windows_of_them_take(text: str, tmp_path: Path) -> None:
    """What is expected of a long example is no less than what it is measured to take, whatever its text."""
    record = {"id": "1", "question": "?", "context": text * (600_000 // len(text.encode())), "answers": None}
    (tmp_path / "e.jsonl").write_text(json.dumps(record) + "\n")
    run = json.loads(run_milldam(*command(tmp_path / "e.jsonl", tmp_path / "s", "--memory", "2GB", "--json")).stdout)
    rules = _rules(FeatureStore(tmp_path / "s").manifest.settings)
    made = load_qa_tokenizer(str(TOKENIZER), rules)
    row_bytes = sum(column.row_bytes for column in made.form(rules).columns)
    (example,) = examples_of(tmp_path / "e.jsonl")
    expected = Scale(made.json, rules, made.template, row_bytes).weigh(example.size_bytes, example)
    stages = run["memory"]["stages"]
    assert stages["window"]["peak"] - stages["window"]["start"] < expected + WINDOWS_BYTES


def test_input_that_can_not_be_used(few: Path, tmp_path: Path) -> None:
    """Nothing in it, nothing usable in it, a record that is broken while strict."""
    (tmp_path / "none.jsonl").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"id": "1", "question": "?"}\n')
    with pytest.raises(InputError, match="No examples in the input"):
        small(tmp_path / "none.jsonl", tmp_path / "1")
    with pytest.raises(InputError, match=r"No examples left: no_context 1\.\n.*rejects\.jsonl"):
        small(tmp_path / "broken.jsonl", tmp_path / "2")
    with pytest.raises(InputError, match="line 1"):
        small(tmp_path / "broken.jsonl", tmp_path / "3", strict=True)
    # Mended, the same command works: nothing came of the run before.
    (tmp_path / "broken.jsonl").write_bytes(few.read_bytes())
    assert small(tmp_path / "broken.jsonl", tmp_path / "3", strict=True).examples == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_length": "many"}, 'max_seq_length: must be a whole number, not "many"'),
        ({"max_examples": 0}, "max_examples: must be at least 1"),
        ({"split": "../x"}, 'split: "../x"'),
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


def test_a_configuration_file_does_what_the_options_do(few: Path, tmp_path: Path) -> None:
    """The same keys, the same bytes; options go before the file."""
    config = {"inputs": [str(few)], "tokenizer": str(TOKENIZER), "out": str(tmp_path / "file")}
    (tmp_path / "qa.yaml").write_text(json.dumps(config | {"max_seq_length": 64, "overlap": 99}))
    assert invoke("qa", tmp_path / "qa.yaml", "--overlap", 16).exit_code == 0
    small(few, tmp_path / "call")
    prepare(**config | {"max_seq_length": 64, "doc_stride": 16, "out": tmp_path / "dict"})
    assert store_bytes(tmp_path / "file") == store_bytes(tmp_path / "call") == store_bytes(tmp_path / "dict")


def test_a_wrong_key_is_told_with_its_line(tmp_path: Path) -> None:
    """As in the configuration of `preprocess`."""
    (tmp_path / "qa.yaml").write_text("inputs: a.json\ntokenizer: t\nout: o\noverlapp: 3\n")
    told = invoke("qa", tmp_path / "qa.yaml")
    assert told.exit_code == 2 and 'qa.yaml:4: overlapp: no such key. Did you mean "overlap"?' in told.stderr
    (tmp_path / "qa.yaml").write_text("tokenizer: t\n")
    assert "inputs and out are missing" in invoke("qa", tmp_path / "qa.yaml").stderr
    assert "--tokenizer is missing" in invoke("qa", "a.json", "-o", "x").stderr


def test_the_summary_says_what_was_made(few: Path, tmp_path: Path) -> None:
    """Examples, windows, answers, rate and memory; as JSON on request."""
    shown = invoke(*command(few, tmp_path / "1")).stdout
    for word in ("60 examples", "windows", "with the answer", "repaired", "tokens/s", "Memory", "answers.jsonl"):
        assert word in shown, word
    told = json.loads(invoke(*command(few, tmp_path / "2", "--json")).stdout)
    assert told["counts"]["examples"] == 60 and told["counts"]["repaired"] == 1 and told["memory"]["peak"] > 0
    assert invoke(*command(few, tmp_path / "3", "--quiet")).stdout == ""


# ---- killed ----


def recorded(out: Path) -> int:
    """Finished units of a run, and files that were read."""
    records = (out / "run" / name for name in ("read.jsonl", "records.jsonl"))
    return sum(path.read_bytes().count(b"\n") for path in records if path.exists())


def has_progressed(out: Path, before: int) -> bool:
    return recorded(out) > before


@pytest.mark.slow
@pytest.mark.parametrize("most", first_quick([2, 5]))
def test_killed_again_and_again_the_result_is_the_same(many: Path, reference: Path, tmp_path: Path, most: int) -> None:
    """SIGKILL for the whole group at random times; the same command goes on each time and ends with the same bytes."""
    rng = random.Random("kill qa")
    progressed = kills = 0
    for number in itertools.count():
        if kills >= most:
            break
        out = tmp_path / str(number)
        for _ in range(6):
            before = recorded(out)
            with started(*command(many, out, "--workers", 2, "--memory", "1GB")) as process:
                if kills % 2:
                    wait_until(partial(has_progressed, out, before), process)
                    time.sleep(rng.uniform(0, 0.15))
                else:
                    time.sleep(rng.uniform(0.2, 1.2))
                finished = process.poll() is not None
                kill_group(process)
            if finished:
                break
            kills += 1
            progressed += recorded(out) > before
        run_milldam(*command(many, out, "--workers", 2, "--memory", "1GB"))
        assert store_bytes(out) == store_bytes(reference)
        assert leftovers(out) == []
        assert not (out / "run" / "chunks").exists()
    assert progressed > most // 3, "too few kills fell into the work: the test has lost its point"


def test_a_shard_that_is_gone_is_made_again(many: Path, reference: Path, tmp_path: Path) -> None:
    """An unfinished run trusts its records only where the files are there in full."""
    out = tmp_path / "s"
    with started(*command(many, out, "--workers", 1)) as process:
        assert wait_until(lambda: recorded(out) >= 2, process)
        kill_group(process)
    next(out.glob("train-*.offsets.bin")).unlink()
    run_here(*command(many, out, "--workers", 1))
    assert store_bytes(out) == store_bytes(reference)


def test_an_interrupted_run_says_how_to_go_on(many: Path, reference: Path, tmp_path: Path) -> None:
    """SIGTERM ends with 130 and the command that goes on; an unfinished store is not opened."""
    out = tmp_path / "s"
    with started(*command(many, out, "--workers", 1)) as process:
        assert wait_until(lambda: recorded(out) >= 2, process)
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert stderr.rstrip().splitlines()[-1].startswith("  milldam qa ")
    with pytest.raises(Exception, match="unfinished"):
        FeatureStore(out)
    with pytest.raises(MismatchError, match="unfinished"):
        small(many, out, overlap=8)
    run_here(*command(many, out, "--workers", 1))
    assert store_bytes(out) == store_bytes(reference)
