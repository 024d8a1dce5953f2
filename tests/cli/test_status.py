"""`milldam status` of tables: units of the plan and rows, not the stages on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke

import milldam
from milldam.errors import MilldamError

ROWS, UNITS = 4000, 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(ROWS)))
    return path


def mapped(source: Path, out: Path, last: int) -> None:
    """Fails on what comes behind a row."""

    def check(batch: dict[str, Any]) -> dict[str, Any]:
        if max(batch["id"]) > last:
            raise ValueError("too large")
        return {"double": [2 * one for one in batch["id"]]}

    milldam.map(
        source, check, out, shard_size=source.stat().st_size // UNITS + 1, batch_size=100, workers=1, memory="2GB"
    )


def test_a_file_is_called_a_file(tmp_path: Path) -> None:
    """What is no folder has no run in it: said in a sentence, not as a bug."""
    (tmp_path / "x.npy").write_bytes(b"")
    result = invoke("status", tmp_path / "x.npy")
    assert result.exit_code == 3 and "x.npy: a file that no run makes" in result.stderr


def test_an_npy_file_is_known_by_its_name_before_it_appears(tmp_path: Path) -> None:
    """Its run is in a folder beside it; a record that can't be read ends it with `--strict`."""
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": "one"}\n{"text": \n')
    options = ("--tokenizer", TOKENIZER, "--format", "npy", "--strict", "--workers", 1)
    assert invoke("tokenize", lines, "-o", tmp_path / "x.npy", *options).exit_code == 3
    result = invoke("status", tmp_path / "x.npy")
    assert result.exit_code == 0 and "x.npy: ended before it was done (0/1 unit)" in result.output


def test_a_table_counts_units_of_its_plan_and_rows(source: Path, tmp_path: Path) -> None:
    """Ended in the middle, ended in the probe, and finished: never the probe's own unit, nor tokens."""
    out = tmp_path / "out"
    with pytest.raises(MilldamError, match="too large"):
        mapped(source, out, last=-1)
    shown = invoke("status", out).output
    assert f"{out}: ended before it was done (0/4 units)." in shown and "Safe: 0 units, 0 rows." in shown
    with pytest.raises(MilldamError, match="too large"):
        mapped(source, out, last=ROWS // 2 + 100)
    shown = invoke("status", out).output
    found = json.loads(invoke("status", out, "--json").output)
    assert found["units"] == UNITS and 0 < found["safe"]["units_done"] < UNITS
    assert f"({found['safe']['units_done']}/4 units)" in shown and f"{found['safe']['rows']:,} rows." in shown
    assert "Make the same call, or run the same command, again to resume." in shown and "tokens" not in shown
    mapped(source, out, last=ROWS)
    assert invoke("status", out).output == f"{out}: finished; 4 units, 4,000 rows.\n"
