"""The same request again: a store that is up to date is left alone, and whatever changed or got lost is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, documents, invoke, write_lines
from tests.kit.preprocess_jobs import config_of, write_config
from tests.kit.quick import first_quick

MISMATCH = "other settings"


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


def told(*arguments: str) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file grew": lambda place: write_lines(place / "in" / "1.jsonl", ["another", "and one more"]),
    "a file was written again": lambda place: os.utime(place / "in" / "1.jsonl", ns=(0, 0)),
    "a file is new": lambda place: write_lines(place / "in" / "a.jsonl", ["new"]),
    "a file is gone": lambda place: (place / "in" / "1.jsonl").unlink(),
    "a file has another name": lambda place: (place / "in" / "1.jsonl").rename(place / "in" / "10.jsonl"),
}


@pytest.mark.parametrize("change", first_quick(CHANGES, 2))
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


def test_other_settings_are_noticed_and_wrong_ones_refused(place: Path) -> None:
    """Though the store is up to date. Overwriting makes it again, every time."""
    told(*command(place))
    assert MISMATCH in invoke(*command(place, "--eos", "none")).stderr
    assert "memory" in invoke(*command(place, "--memory", "banana")).stderr
    for _ in range(2):
        assert not told(*command(place, "--overwrite"))["up_to_date"]


SETTINGS: list[dict[str, Any]] = [
    {"dedup": "near", "splits": {"val": 0.2}},
    {"dedup": None},
    {"limit": 25},
    {"splits": {"val_tokens": 100}},
]


@pytest.mark.parametrize("settings", first_quick(SETTINGS, 1), ids=str)
def test_what_a_store_has_lost_is_made_again(place: Path, settings: dict[str, Any]) -> None:
    """A shard that is gone or cut off is noticed, and no store called up to date that can't be read."""
    given = {"tokenizer": str(place / "tokenizer"), **settings}
    config = str(write_config(place / "config.yaml", config_of(place / "out", str(place / "in"), **given)))
    told("preprocess", config)
    made = {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    shard = next((place / "out").glob("*.bin"))
    for damage in (Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)):
        damage(shard)
        assert not told("preprocess", config)["up_to_date"]
        assert made == {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
        assert told("preprocess", config)["up_to_date"]
