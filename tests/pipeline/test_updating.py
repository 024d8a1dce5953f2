"""Input that grows, shrinks or changes: only what changed is made again, to the bytes of a run from nothing."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke, store_bytes, write_lines
from tests.kit.preprocess_jobs import config_of, make_words, write_config
from tests.kit.quick import first_quick

FILES = 6
NEAR = {"method": "exact", "near": {}}
JOBS: dict[str, dict[str, Any]] = {
    "exact": {"dedup": "exact", "splits": {"val": 0.2}},
    "packed": {"packing": {"strategy": "best_fit", "write": True}, "seq_len": 64},
    "near": {"dedup": NEAR},
    "plain": {},
    "splits": {"splits": {"val": 0.2}, "clean": "default"},
    "dropped": {"dedup": "exact", "write_dropped": True},
    "tokens": {"splits": {"val_tokens": 300}},
    "limit": {"limit": 400},
}


def texts_of(number: int, copies: int = 0) -> list[str]:
    """Texts of a file of its own, the last ones equal to those of every other."""
    own, shared = random.Random(f"file {number}"), random.Random("shared")
    return [*(make_words(own, 40) for _ in range(120)), *(make_words(shared, 40) for _ in range(copies))]


def make_input(folder: Path, copies: int) -> None:
    folder.mkdir()
    for number in range(FILES):
        write_lines(folder / f"{number}.jsonl", texts_of(number, copies))


def edit(folder: Path) -> None:
    """One file more, in front of others; one less; one that is another one."""
    write_lines(folder / "00.jsonl", texts_of(100, 5))
    (folder / "4.jsonl").unlink()
    write_lines(folder / "2.jsonl", [*texts_of(2, 5), "one more"])


def configured(tmp_path: Path, out: str, settings: dict[str, Any]) -> Path:
    given = {"shard_size": "100KB", "clean": "off", "dedup": "off"} | settings
    return write_config(tmp_path / f"{out}.yaml", config_of(tmp_path / out, str(tmp_path / "in"), **given))


def told(done: Any) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.parametrize("name", first_quick(JOBS, 3))
def test_changed_input_gives_the_bytes_of_a_run_from_nothing(tmp_path: Path, name: str) -> None:
    """With dedup, splits, packing and limits: every byte, and back again when the change is taken back."""
    make_input(tmp_path / "in", copies=5)
    config = configured(tmp_path, "out", JOBS[name])
    first = told(invoke("preprocess", config, "--json"))
    before, kept = store_bytes(tmp_path / "out"), (tmp_path / "in" / "4.jsonl").stat().st_mtime_ns
    edit(tmp_path / "in")
    second = told(invoke("preprocess", config, "--json"))
    told(invoke("preprocess", configured(tmp_path, "fresh", JOBS[name]), "--json"))
    assert store_bytes(tmp_path / "out") == store_bytes(tmp_path / "fresh")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "fresh").iterdir()
    )
    assert invoke("verify", tmp_path / "out").exit_code == 0
    assert first["reused"] == 0 and second["units"] == FILES
    # Of the four files that stayed as they were; what is written of dropped documents names units by number.
    assert second["reused"] == {"tokens": 0, "limit": 0, "dropped": 2}.get(name, 4)
    write_lines(tmp_path / "in" / "4.jsonl", texts_of(4, 5))
    os.utime(tmp_path / "in" / "4.jsonl", ns=(kept, kept))
    told(invoke("preprocess", config, "--json"))
    assert store_bytes(tmp_path / "out") != before and invoke("verify", tmp_path / "out").exit_code == 0


def test_what_changed_is_named(tmp_path: Path) -> None:
    """How many units were reused, and which files are new, changed or gone."""
    make_input(tmp_path / "in", copies=0)
    command = ("tokenize", tmp_path / "in", "-o", tmp_path / "out", "--tokenizer", TOKENIZER, "--shard-size", "100KB")
    invoke(*command)
    write_lines(tmp_path / "in" / "zz.jsonl", texts_of(7))
    done = invoke(*command)
    assert done.exit_code == 0 and "6 of 7 units reused; new: zz.jsonl" in done.stdout
    edit(tmp_path / "in")
    done = invoke(*command)
    assert "new: 00.jsonl, changed: 2.jsonl, gone: 4.jsonl" in done.stdout
