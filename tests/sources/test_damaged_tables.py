"""Parquet and Arrow files that are damaged, beside sound ones: set aside, counted and named, as any damaged file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.kit.jobs import TOKENIZER, documents, expected_ids, run_here

ROWS = 40


def _page_in_the_middle(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes(200) + data[half + 200 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "footer": lambda data: data[:-20] + bytes(20),
    "truncated": lambda data: data[: len(data) // 2],
    "a page in the middle": _page_in_the_middle,
    "no table": lambda data: b"<html>404</html>" * 20,
    "zero bytes": lambda data: b"\0" * len(data),
    "empty": lambda data: b"",
}


def _texts(name: str) -> list[str]:
    return [f"{name} {number} " + "some words " * 20 for number in range(ROWS)]


def _write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=10, compression="snappy")
    else:
        feather.write_feather(table, str(path), compression="lz4", chunksize=10)


def _folder(tmp_path: Path, ending: str, damage: str) -> Path:
    """Three tables, of which the first is damaged."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        _write(folder / f"{name}.{ending}", pa.table({"text": _texts(name)}))
    broken = folder / f"a.{ending}"
    broken.write_bytes(DAMAGE[damage](broken.read_bytes()))
    return folder


def _rejects(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in out.rglob("rejects*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_in_a_folder_is_set_aside(tmp_path: Path, ending: str, damage: str) -> None:
    """What lies before the damage is read, the other files are read whole; the file is counted and named."""
    folder, out = _folder(tmp_path, ending, damage), tmp_path / "out"
    told = run_here("tokenize", folder, "-o", out, "--tokenizer", TOKENIZER, "--workers", 1).output
    found, sound = documents(out), expected_ids(_texts("b") + _texts("c"))
    assert found[-2 * ROWS :] == sound
    assert found[: -2 * ROWS] == expected_ids(_texts("a"))[: len(found) - 2 * ROWS]
    if damage == "a page in the middle":
        assert 0 < len(found) - 2 * ROWS < ROWS
    (reject,) = {line["file"]: line for line in _rejects(out)}.values()
    assert Path(reject["file"]).name == f"a.{ending}"
    assert "1 input file is damaged" in told
    assert f"a.{ending}" in told
