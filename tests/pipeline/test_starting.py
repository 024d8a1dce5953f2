"""The same request again: answered from its receipt without loading what makes a store; every change is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.guards.test_guards import HEAVY, loaded_after
from tests.kit.jobs import TOKENIZER, documents, invoke, write_lines
from tests.kit.preprocess_jobs import config_of, summary_of, write_config
from tests.kit.quick import first_quick

MAIN = "import sys; from milldam.cli import main; main(sys.argv[1:], standalone_mode=False)"
UP_TO_DATE, MISMATCH = "up to date", "other settings"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of input and a tokenizer."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        write_lines(tmp_path / "in" / f"{number}.jsonl", [f"text {number} {line}" for line in range(20)])
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(TOKENIZER, tmp_path / "tokenizer" / "tokenizer.json")
    return tmp_path


def command(place: Path, *options: str) -> list[str]:
    return ["tokenize", str(place / "in"), "-o", str(place / "out"), "--tokenizer", str(place / "tokenizer"), *options]


def configured(place: Path, **settings: Any) -> Path:
    given = {"tokenizer": str(place / "tokenizer"), **settings}
    return write_config(place / "config.yaml", config_of(place / "out", str(place / "in"), **given))


def told(*arguments: str) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_a_store_that_is_up_to_date_needs_nothing_of_what_makes_one(place: Path) -> None:
    """Neither numpy, nor Arrow, nor a tokenizer, nor what checks settings."""
    told(*command(place))
    assert loaded_after(MAIN, *command(place), "-q") & HEAVY == set()
    assert loaded_after(MAIN, *command(place, "--workers", "1"), "-q") & HEAVY != set()
    assert loaded_after(MAIN, *command(place, "--workers", "1"), "-q") & HEAVY == set()


def test_so_does_a_configuration(place: Path) -> None:
    """Which is read, and not checked again."""
    config = configured(place)
    told("preprocess", str(config))
    assert loaded_after(MAIN, "preprocess", config, "-q") & HEAVY == {"yaml"}
    (place / "out" / "run" / "report.html").unlink()
    assert told("preprocess", str(config))["up_to_date"]
    assert (place / "out" / "run" / "report.html").exists()


def test_so_does_one_with_evaluation_sets(place: Path) -> None:
    """As long as their files are what they were."""
    evals = write_lines(place / "evals.jsonl", ["Which of the answers to the second question is the longest one?"])
    config = configured(place, decontaminate=[{"path": str(evals), "columns": "text"}])
    told("preprocess", str(config))
    assert told("preprocess", str(config))["up_to_date"]
    assert loaded_after(MAIN, "preprocess", config, "-q") & HEAVY == {"yaml"}
    append(evals)
    assert not told("preprocess", str(config))["up_to_date"]
    assert summary_of(place / "out")["contamination"]["sets"][0]["searched"]["items"] == 2


@pytest.mark.parametrize("options", [[], ["--limit", "25"]])
def test_the_receipt_tells_what_the_long_way_tells(place: Path, options: list[str]) -> None:
    """To the letter, at another place and from another folder too."""
    told(*command(place, *options))
    answered = told(*command(place, *options))
    (place / "out" / "run" / "receipt.json").unlink()
    assert answered == told(*command(place, *options)) == told(*command(place, *options))
    (place / "out").rename(place / "moved")
    moved = command(place, *options)
    moved[3] = os.path.relpath(place / "moved")
    assert told(*moved) == answered | {"out": moved[3]}


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file grew": lambda place: append(place / "in" / "1.jsonl"),
    "a file was written again": lambda place: touch(place / "in" / "1.jsonl"),
    "a file is new": lambda place: write_lines(place / "in" / "a.jsonl", ["new"]),
    "a file is gone": lambda place: (place / "in" / "1.jsonl").unlink(),
    "a file has another name": lambda place: (place / "in" / "1.jsonl").rename(place / "in" / "10.jsonl"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_is_noticed(place: Path, change: str) -> None:
    """Whatever changed of it: what comes out is what a run from nothing gives."""
    told(*command(place))
    assert told(*command(place))["up_to_date"]
    CHANGES[change](place)
    assert not told(*command(place))["up_to_date"]
    made = documents(place / "out")
    shutil.rmtree(place / "out")
    told(*command(place))
    assert made == documents(place / "out")


def other_tokenizer(place: Path) -> None:
    tokenizer = json.loads(TOKENIZER.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (place / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))


def other_end(place: Path) -> None:
    (place / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "a"}')


@pytest.mark.parametrize("change", [other_tokenizer, other_end])
def test_another_tokenizer_is_noticed(place: Path, change: Callable[[Path], None]) -> None:
    """Also when a file beside it gives its tokens other names."""
    told(*command(place))
    change(place)
    done = invoke(*command(place))
    assert done.exit_code != 0 and MISMATCH in done.stderr


def test_other_settings_are_noticed(place: Path) -> None:
    """Options, and words of a file that YAML takes for the same value."""
    told(*command(place))
    assert MISMATCH in invoke(*command(place, "--eos", "none")).stderr
    shutil.rmtree(place / "out")
    config, text = place / "config.yaml", f"datasets: {place / 'in'}\ntokenizer: {TOKENIZER}\nout: {place / 'out'}\n"
    config.write_text(f"{text}dedup: null\n")
    told("preprocess", str(config))
    config.write_text(f"{text}dedup:\n")
    assert MISMATCH in invoke("preprocess", str(config)).stderr


def test_a_wrong_option_is_refused_though_the_store_is_up_to_date(place: Path) -> None:
    """Nothing is taken for said that was not checked."""
    told(*command(place))
    assert "memory" in invoke(*command(place, "--memory", "banana")).stderr


def test_overwriting_makes_it_again(place: Path) -> None:
    """Every time."""
    for _ in range(3):
        assert not told(*command(place, "--overwrite"))["up_to_date"]


@pytest.mark.parametrize("name", ["milldam.json", "run/plan.json", "run/receipt.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "another"])
def test_a_receipt_is_believed_for_the_store_that_it_was_left_with(place: Path, name: str, damage: str) -> None:
    """Where manifest, plan or receipt is not as it was, the long way decides."""
    told(*command(place))
    path, made = place / "out" / name, documents(place / "out")
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else data.replace(b"1", b"2"))
    done = invoke(*command(place))
    if done.exit_code == 0:
        assert documents(place / "out") == made
    (place / "out" / "run" / "receipt.json").unlink(missing_ok=True)
    assert invoke(*command(place)).exit_code in (0, done.exit_code)


def lose(path: Path) -> None:
    path.unlink()


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


SETTINGS: list[dict[str, Any]] = [
    {"dedup": None},
    {"dedup": "exact"},
    {"dedup": "near", "splits": {"val": 0.2}},
    {"limit": 25},
    {"splits": {"val_tokens": 100}},
]


@pytest.mark.parametrize("with_receipt", [True, False])
@pytest.mark.parametrize("damage", [lose, cut_off])
@pytest.mark.parametrize("settings", first_quick(SETTINGS, 2), ids=str)
def test_what_a_store_has_lost_is_made_again(
    place: Path, damage: Callable[[Path], None], with_receipt: bool, settings: dict[str, Any]
) -> None:
    """A shard that is gone or cut off is noticed, and no store called up to date that can't be read."""
    config = str(configured(place, **settings))
    told("preprocess", config)
    made = {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    for path in sorted((place / "out").glob("*.bin"))[:1]:
        damage(path)
    if not with_receipt:
        (place / "out" / "run" / "receipt.json").unlink()
    assert not told("preprocess", config)["up_to_date"]
    assert made == {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    assert told("preprocess", config)["up_to_date"]
