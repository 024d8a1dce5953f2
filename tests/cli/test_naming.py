"""What the command line calls things: the text column, settings as options, what a wrong word may have meant."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import DEMO, TOKENIZER, invoke, run_milldam, write_lines
from tests.kit.quick import first_quick

import milldam
from milldam.errors import ConfigError, InputError

RECORDS = [{"prompt": "A short question?", "completion": "An answer that is longer, as most of them are."}] * 3


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_config(path: Path, *data_sets: object, **keys: Any) -> Path:
    config = {"datasets": data_sets, "tokenizer": str(TOKENIZER), "out": str(path.with_name("prepared")), **keys}
    path.write_text(json.dumps(config, default=str))
    return path


# ---- the text column ----


@pytest.mark.parametrize("column", ["completion", "Artikel Inhalt (de)"])
def test_equal_candidates_are_refused_with_what_to_type(tmp_path: Path, column: str) -> None:
    """As an option, as --set, and in Python: typed as it is told, it works."""
    records = [{"prompt": record["prompt"], column: record["completion"]} for record in RECORDS]
    data = write_records(tmp_path / "a.jsonl", records)
    job = ["tokenize", data, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--workers", 1]
    refused = invoke(*job)
    assert refused.exit_code == 3 and not (tmp_path / "s").exists()
    assert f'several fields hold text: "prompt", "{column}"' in refused.stderr
    told = re.search(r"such as: (--text-column .*)\n", refused.stderr)
    assert told is not None and invoke(*job, *shlex.split(told[1])).exit_code == 0
    with pytest.raises(InputError, match=re.escape(f"such as: text_column={column!r}")):
        milldam.tokenize(data, tmp_path / "t", tokenizer=TOKENIZER)
    config = write_config(tmp_path / "c.yaml", write_lines(tmp_path / "b.jsonl", ["b"]), data)
    told = re.search(r"such as: (--set .*)\n", invoke("plan", config).stderr)
    assert told is not None and shlex.split(told[1]) == ["--set", f"datasets.1.text_column={column}"]
    assert invoke("plan", config, *shlex.split(told[1])).exit_code == 0


def test_the_text_column_is_named_at_the_start_at_the_end_and_afterwards(tmp_path: Path) -> None:
    """Whether it was given or found."""
    data = write_records(tmp_path / "a.jsonl", [{"id": 1, "body": "Some words."}])
    job = ["tokenize", data, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--workers", 1]
    made = invoke(*job)
    assert made.exit_code == 0
    assert 'Text:   field "body"\n' in made.stderr and 'Text:   field "body"\n' in made.stdout
    assert 'Text:   field "body"\n' in invoke(*job).stdout
    for again in ([], ["--overwrite"], ["--text-column", "body"]):
        assert json.loads(invoke(*job, *again, "--json").stdout)["facts"]["text_columns"] == {"datasets.0": "body"}
    assert re.search(r"^text_columns:\n  datasets\.0: +body$", invoke("stats", tmp_path / "s").stdout, re.MULTILINE)
    assert json.loads(invoke("stats", tmp_path / "s", "--json").stdout)["text_columns"] == {"datasets.0": "body"}


# ---- settings in messages ----


def test_a_setting_is_an_option_on_the_command_line_and_an_argument_in_python(tmp_path: Path) -> None:
    """The same error."""
    data = write_lines(tmp_path / "a.jsonl", ["a"])
    refused = invoke("tokenize", data, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--limit", 0)
    assert refused.stderr == "milldam: --limit: must be at least 1.\n"
    with pytest.raises(ConfigError, match=r"^limit: must be at least 1\.$"):
        milldam.tokenize(data, tmp_path / "s", tokenizer=TOKENIZER, limit=0)
    config = write_config(tmp_path / "c.yaml", data)
    assert (
        'tokenizer.bos "<no>": the tokenizer has no such token'
        in invoke("plan", config, "--set", "tokenizer.bos=<no>").stderr
    )


# ---- names that may be on the Hub ----


@pytest.mark.slow
@pytest.mark.parametrize("command", first_quick(["tokenize", "map", "plan"], quick=2))
def test_a_mistyped_input_names_its_neighbour_and_the_hub_is_asked_once(tmp_path: Path, command: str) -> None:
    """In two lines, none of them of a retry."""
    (tmp_path / "books").mkdir()
    (tmp_path / "f.py").write_text("def f(rows):\n    return rows\n")
    config = write_config(tmp_path / "c.yaml", "bookz")
    arguments: dict[str, list[object]] = {
        "tokenize": ["bookz", "-o", "s", "--tokenizer", DEMO],
        "map": ["f.py:f", "bookz", "-o", "t"],
        "plan": [config],
    }
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    refused = run_milldam(command, *arguments[command], code=3, cwd=tmp_path, env=environment)
    first, second = refused.stderr.splitlines()
    assert first == 'milldam: bookz: no such file or folder. Did you mean "books"?'
    assert second.startswith("Nor can a dataset of that name be opened on the Hub: the Hub does not answer (")
