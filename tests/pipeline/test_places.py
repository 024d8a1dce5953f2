"""Where a document is from, in all that is told of it: its own file, and its line there as an editor shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.kit.jobs import set_aside
from tests.kit.preprocess_jobs import fresh_texts, preprocess

COPY = "this very document is in several of the files, word for word " * 5


def _line(text: str) -> str:
    return json.dumps({"text": text})


def _place(told: dict[str, Any]) -> tuple[str, int]:
    return Path(told["file"]).name, told.get("line") or told["record"]


def _run(tmp_path: Path, **keys: Any) -> Path:
    preprocess(tmp_path / "out", tmp_path / "in", write_dropped=True, **keys)
    return tmp_path / "out"


def test_small_files_that_share_a_unit_are_told_apart(tmp_path: Path) -> None:
    """Blank lines, broken ones and those of other files do not move a line."""
    (tmp_path / "in").mkdir()
    some = fresh_texts(12)
    lines = {
        "a.jsonl": [_line(some[0]), "", "{broken", "", _line(COPY), _line(some[1])],
        "b.jsonl": [_line(one) for one in some[2:9]],
        "c.jsonl": ["", "", _line(some[9]), "{broken", _line(COPY), "", _line("")],
    }
    for name, held in lines.items():
        (tmp_path / "in" / name).write_text("\n".join(held) + "\n")
    out = _run(tmp_path, dedup="exact")
    duplicate, empty = sorted(set_aside(out, "dropped"), key=lambda one: str(one["reason"]))
    assert (_place(duplicate), _place(duplicate["duplicate_of"])) == (("c.jsonl", 5), ("a.jsonl", 5))
    assert (empty["reason"], _place(empty)) == ("empty", ("c.jsonl", 7))
    assert [_place(one) for one in set_aside(out)] == [("a.jsonl", 3), ("c.jsonl", 4)]


def test_rows_of_tables_are_counted_from_1(tmp_path: Path) -> None:
    """In what is dropped and in what is rejected alike."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        pq.write_table(pa.table({"text": [f"{name} alone", None, COPY]}), tmp_path / f"in/{name}.parquet")
    out = _run(tmp_path, dedup="exact")
    (duplicate,) = set_aside(out, "dropped")
    assert (_place(duplicate), _place(duplicate["duplicate_of"])) == (("b.parquet", 3), ("a.parquet", 3))
    rejects = [(Path(one["file"]).name, one["row"]) for one in set_aside(out)]
    assert rejects == [("a.parquet", 2), ("b.parquet", 2)]


def test_findings_of_evaluation_sets_name_the_file(tmp_path: Path) -> None:
    """Also where it is not the first of its unit."""
    (tmp_path / "in").mkdir()
    item = fresh_texts(1, 7, words=(30, 31))[0]
    (tmp_path / "held-out.jsonl").write_text(_line(item) + "\n")
    (tmp_path / "in/a.jsonl").write_text("\n".join(map(_line, fresh_texts(5))) + "\n")
    (tmp_path / "in/b.jsonl").write_text("\n" + _line(f"before it {item} behind it") + "\n")
    out = _run(tmp_path, dedup="off", decontaminate=[{"path": str(tmp_path / "held-out.jsonl"), "columns": ["text"]}])
    assert [_place(one) for one in set_aside(out, "contamination")] == [("b.jsonl", 2)]
    assert [_place(one) for one in set_aside(out, "dropped")] == [("b.jsonl", 2)]
