"""`milldam map` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.kit.jobs import MILLDAM, invoke, wait_until

from milldam.stores.table.reader import Table

SCRIPT = """
import time
from pathlib import Path

def lengths(batch, add=0, word=""):
    return {"n": [len(text) + add for text in batch["text"]], "word": [word] * len(batch["text"])}

def row(row):
    return [] if row["id"] % 2 else {"half": row["id"] // 2}

def slow(batch):
    time.sleep(0.2)
    return {"n": [1] * len(batch["text"])}

def broken(batch):
    return 1 / 0
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    lines = (json.dumps({"id": number, "text": "x" * number}) + "\n" for number in range(100))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    return tmp_path


def test_a_function_of_a_script_makes_a_table(work: Path) -> None:
    """Arguments as JSON or text; a second time there is nothing to do, nor after an edit of another function."""
    script, source, out = work / "script.py", work / "in.jsonl", work / "out"
    command = ["map", f"{script}:lengths", source, "-o", out, "--args", "add=5", "--args", "word=a b"]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert "100 rows, " in done.output and "0 of 1 unit reused" in done.output and "peak" in done.output
    assert Table(out)[2] == {"id": 2, "text": "xx", "n": 7, "word": "a b"}
    script.write_text(SCRIPT.replace("sleep(0.2)", "sleep(0.3)") + "\n# a comment\n")
    assert "is up to date: 100 rows." in invoke(*command).output
    script.write_text(SCRIPT.replace("len(text) + add", "len(text) - add"))
    assert "changed: function lengths: code" in invoke(*command).output
    assert Table(out)[2]["n"] == -3


def test_warnings_speak_of_options(work: Path) -> None:
    """What can't be hashed is named by a setting."""
    held = "import threading\nlock = threading.Lock()\n\ndef f(rows):\n    with lock:\n        return None\n"
    (work / "held.py").write_text(held)
    done = invoke("map", f"{work}/held.py:f", work / "in.jsonl", "-o", work / "out")
    assert "can't be hashed" in done.stderr and 'the setting "key"' in done.stderr and "key=" not in done.stderr


def test_rows_columns_and_json(work: Path) -> None:
    """One row at a time, removed columns, a summary for machines, and quiet."""
    options = ["--rows", "--remove-columns", "id,text"]
    done = invoke("map", f"{work}/script.py:row", work / "in.jsonl", "-o", work / "out", *options, "--json")
    told = json.loads(done.stdout)
    assert (told["counts"], told["facts"]) == ({"rows": 50, "read": 100}, {"columns": {"half": "int64"}})
    done = invoke("map", f"{work}/script.py:row", work / "in.jsonl", "-o", work / "out", *options, "--quiet")
    assert done.exit_code == 0 and done.output == ""


@pytest.mark.parametrize(
    ("function", "options", "code", "told"),
    [
        ("lenths", [], 2, 'Did you mean "lengths"'),
        ("lengths", ["--args", "add"], 2, "NAME=VALUE"),
        ("lengths", ["--columns", "txt"], 3, "txt"),
        ("broken", [], 3, "ZeroDivisionError"),
        ("lengths", ["--batch-size", "0"], 2, "--batch-size: must be at least 1"),
        ("broken", [], 3, "--on-error reject"),
        ("row", [], 3, "a dict of lists; to call it with one row: --rows"),
        ("lengths", ["--memory", "10MB"], 4, "--memory"),
    ],
)
def test_what_is_wrong_is_said_with_an_exit_code(
    work: Path, function: str, options: list[str], code: int, told: str
) -> None:
    """A function that is not there, arguments, columns, a function that fails."""
    done = invoke("map", f"{work}/script.py:{function}", work / "in.jsonl", "-o", work / "out", *options)
    assert done.exit_code == code and told in done.output, done.output


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on(work: Path) -> None:
    """Exit code 130, and the command; run again it goes on."""
    command = [MILLDAM, "map", "script.py:slow", "in.jsonl", "-o", "out", "--shard-size", "500"]
    process = subprocess.Popen(command, cwd=work, text=True, stderr=subprocess.PIPE, start_new_session=True)
    records = work / "out/run/records.jsonl"
    wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") >= 2, process)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "To resume, run the same command again" in errors and "map script.py:slow" in errors
    done = subprocess.run([*command, "--json"], cwd=work, text=True, capture_output=True, check=True)
    assert json.loads(done.stdout)["reused"] >= 2 and len(Table(work / "out")) == 100
