"""What a job would do, shown beforehand, without writing anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.jobs import invoke, write_lines
from tests.kit.preprocess_jobs import config_of, fresh_texts, preprocess, write_config


def plan_of(config: Path) -> dict[str, Any]:
    done = invoke("plan", config, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_plan_makes_nothing(tmp_path: Path) -> None:
    """Text or JSON, and no folder."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(200))
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path))
    planned = invoke("plan", config)
    assert planned.exit_code == 0 and not (tmp_path / "out").exists()
    for word in ("1 unit", "Stages: ", "are free", "Least memory: ", "(new;"):
        assert word in planned.stdout
    as_json = plan_of(config)
    assert as_json["plan"]["units"] == 1 and 0 < as_json["disk"]["store_bytes"] <= as_json["disk"]["most_bytes"]


def test_the_plan_lists_the_stages_of_the_job(tmp_path: Path) -> None:
    """Everything that is on, in order."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(50))
    settings: dict[str, Any] = {
        "dedup": {"near": {}, "index": tmp_path / "index"},
        "splits": {"val_tokens": 10},
        "packing": {"write": True},
        "seq_len": 8,
    }
    sets = [{"path": path, "max_documents": 40}]
    planned = plan_of(write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, **settings)))
    near = ["near", "shingle", "verify", "decide"]
    stages = ["count", "fingerprint", "group", *near, "tokenize", "arrange", "index", "pack", "report"]
    assert planned["plan"]["stages"] == stages
    assert not (tmp_path / "index").exists() and not (tmp_path / "out").exists()


def test_the_plan_knows_what_is_in_the_folder(tmp_path: Path) -> None:
    """Up to date; made from something else: an error, unless it is to be overwritten."""
    path = write_lines(tmp_path / "a.jsonl", ["a", "b"])
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path, dedup="off"))
    preprocess(tmp_path / "out", path, dedup="off")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    assert "up to date" in invoke("plan", config).stdout
    other = invoke("plan", config, "--set", "seed=3")
    assert other.exit_code == 2 and "seed" in other.stderr
    replaced = invoke("plan", config, "--set", "seed=3", "--set", "overwrite=true")
    assert replaced.exit_code == 0, replaced.stderr
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
