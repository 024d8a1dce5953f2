"""`~` in a path is the user's home, wherever a path is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, run_here, write_lines

import milldam


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a corpus and a tokenizer; the working directory is another one."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    write_lines(home / "corpus.jsonl", [f"{number} sacks of flour" for number in range(50)])
    write_lines(home / "eval.jsonl", ["a question that no document of the corpus holds, in many words of its own"])
    shutil.copy(TOKENIZER, home / "tokenizer.json")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home


def test_paths_in_the_home_are_found_and_written_there(home: Path) -> None:
    """From Python: files, globs, stores, tables, feeds, evaluation sets; nothing is called `~` anywhere."""
    how: dict[str, Any] = {"tokenizer": "~/tokenizer.json", "workers": 1, "memory": "1GB"}
    for number, inputs in enumerate(("~/corpus.jsonl", "~/corp*.jsonl", ["~/corpus.jsonl"])):
        store = milldam.tokenize(inputs, f"~/store{number}", decontaminate="~/eval.jsonl", **how)
        assert len(store) == 50 and (home / f"store{number}/milldam.json").exists()
    assert len(milldam.tokenize(iter(["one", "two"]), Path("~/two"), **how)) == 2
    config = {"datasets": {"path": "~/corpus.jsonl"}, "out": "~/made", "dedup": "off", **how}
    assert len(milldam.preprocess(config)) == len(milldam.Store("~/made")) == 50
    (home / "config.yaml").write_text(json.dumps({**config, "out": "~/yaml"}))
    assert len(milldam.preprocess("~/config.yaml")) == 50
    table = milldam.map("~/corpus.jsonl", lambda rows: {"n": [1] * len(rows["text"])}, "~/table", workers=1)
    assert len(table) == len(milldam.Table("~/table")) == 50
    assert len(milldam.open("~/store0")) == 50
    with milldam.open("~/corpus.jsonl", store="~/feed", **how) as feed:
        next(iter(feed.windows(8).batches(2)))
    assert (home / "feed").exists()
    assert not list(Path().iterdir())


def test_options_of_commands_find_the_home(home: Path) -> None:
    """Where the shell leaves `~` as it is, as in `--out=~/store`."""
    run_here("tokenize", "~/corpus.jsonl", "--out=~/store", "--tokenizer=~/tokenizer.json", "--workers=1")
    assert (home / "store/milldam.json").exists() and not list(Path().iterdir())
