"""What a loader delivers, measured by `milldam feed`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke, write_corpus
from tests.kit.token_stores import write_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 2,001 tokens: 125 windows of 16."""
    store = write_store(tmp_path_factory.mktemp("feed") / "s", [[100] * 10, [1, 500, 500]])
    return store.path


def figures_of(folder: Path, *arguments: object) -> dict[str, Any]:
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1, "--json", *arguments)
    assert done.exit_code == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"view": "windows", "shuffle": "full", "samples": 125, "batches": 32}),
        (["--shuffle", "block"], {"shuffle": "block", "samples": 125}),
        (["--packed", "wrapped"], {"view": "wrapped", "samples": 125}),
        (["--packed", "best_fit"], {"view": "best_fit"}),
    ],
)
def test_every_view_and_order_can_be_measured(folder: Path, arguments: list[Any], expected: dict[str, Any]) -> None:
    """All that is there is delivered, whatever the view, the order and the way of reading."""
    figures = figures_of(folder, *arguments)
    assert figures | expected == figures
    assert figures["delivered"] == figures["samples"] and figures["ended"] == "epochs"
    assert figures["tokens_per_second"] == pytest.approx(16 * figures["steady"] / figures["steady_seconds"])
    assert figures["first_batch_seconds"] > 0


def test_people_get_lines(folder: Path) -> None:
    """The time to the first batch, rate, share of training, memory, and why it ended; of one batch there is no rate."""
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1).stdout.splitlines()
    assert shown[0] == f"{folder}: windows of 16 tokens, shuffle full, batches of 4"
    assert [line.split(":")[0] for line in shown[1:]] == ["First batch", "Rate", "Memory", "Delivered"]
    assert " tokens/s, " in shown[2] and "ms a batch" in shown[2]
    assert "125 samples in 32 batches" in shown[4] and shown[4].endswith("; ended by epochs")
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 500, "--epochs", 1).stdout
    assert "none: there is one batch only" in shown
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--seconds", 0.1).stdout
    assert shown.endswith("; ended by seconds\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "not in the range x>0"),
        (["--epochs", "0"], "epochs: 0; use 1 or more"),
        (["--split", "val"], "val"),
        (["--memory", "1GB"], "--tokenizer: missing. Text needs one"),
    ],
)
def test_what_can_not_be_meant_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    """With a sentence."""
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, *arguments)
    assert done.exit_code in (2, 3) and message in done.stderr and done.stdout == ""


IMPORTS = """
import sys
from milldam.cli import main
import milldam.cli.feed as module
def noting(make, seconds):
    before = set(sys.modules)
    for _ in zip(range(2), make()):
        pass
    raise SystemExit(", ".join(sorted(set(sys.modules) - before)) or 0)
sys.modules["milldam.cli.feed"]._measure = noting
main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [[], ["--packed", "wrapped"]])
def test_no_imports_are_measured(folder: Path, arguments: list[str]) -> None:
    """Whatever the measured part needs is imported before the clock runs."""
    options = ["feed", str(folder), "--seq-len", "16", "--batch-size", "4", *arguments]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_is_fed_while_its_tokens_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made, and waited for; with a place for its tokens a store is left, else nothing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    corpus = write_corpus(tmp_path / "corpus.jsonl", 100_000).path
    options = ["--tokenizer", TOKENIZER, "--cores", 1, "--seq-len", 32, "--batch-size", 4, "--epochs", 1]
    text = invoke("feed", corpus, *options)
    assert text.exit_code == 0, text.output
    assert "windows of 32 tokens, shuffle in groups of units" in text.output
    assert "Made:" in text.output and "Waited:" in text.output
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    figures = json.loads(invoke("feed", corpus, *options, "--store", tmp_path / "store", "--json").output)
    assert figures["making"]["units_made"] == 1 and figures["samples"] is None
    assert figures_of(tmp_path / "store")["samples"] > 100
