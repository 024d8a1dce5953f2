"""What `milldam.map` says when something is wrong: the file and the row, the memory that is kept, what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milldam.errors import ConfigError, InputError
from milldam.mapping import map as map_rows

ROWS = 5


def write_arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path, list[str]], Any]] = {
    "jsonl": lambda path, texts: path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts)),
    "csv": lambda path, texts: path.write_text("text\n" + "".join(f"{text}\n" for text in texts)),
    "parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path, row_group_size=2),
    "arrow": write_arrow,
    "txt": lambda path, texts: path.write_text("".join(f"{text}\n" for text in texts)),
}


def write_files(folder: Path, kind: str, files: int = 3) -> Path:
    folder.mkdir()
    for number in range(files):
        WRITERS[kind](folder / f"{number}.{kind}", [f"{number} {row}" for row in range(ROWS)])
    return folder


def picky(batch: dict[str, Any]) -> Any:
    if "1 3" in batch["text"]:
        raise ValueError("no one three")


def picky_row(row: dict[str, Any]) -> Any:
    picky({"text": [row["text"]]})


def rejects_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", list(WRITERS))
def test_a_row_that_fails_is_named_by_its_file_and_its_number_there(kind: str, tmp_path: Path) -> None:
    """One unit of three files: in the rejects, in the error of a batch, in that of a row."""
    source, out, options = write_files(tmp_path / "in", kind), tmp_path / "out", {"documents": "line"}
    map_rows(source, picky, out, on_error="reject", **options)
    (reject,) = rejects_of(out)
    assert (reject["file"], reject["row"]) == (str(source / f"1.{kind}"), 4)
    with pytest.raises(InputError, match=rf"rows 3 to 5 of \S*1.{kind}; rows 1 to 4 of \S*2.{kind} \(unit 0\)"):
        map_rows(source, lambda batch: picky({"text": batch["text"][1:]}), out, batch_size=7, **options)
    with pytest.raises(InputError, match=rf"picky_row failed on row 4 of \S*1.{kind} "):
        map_rows(source, picky_row, out, batched=False, **options)


def test_rows_are_counted_with_those_that_could_not_be_read(tmp_path: Path) -> None:
    """A broken record before, in between, and in a file cut into pieces."""
    path = tmp_path / "a.jsonl"
    path.write_text('{broken\n{"text": "a"}\n{"text": "b"}\n{broken\n{"text": "1 3"}\n{"text": "c"}\n')
    map_rows(path, picky, tmp_path / "out", on_error="reject")
    assert rejects_of(tmp_path / "out")[-1]["row"] == 5
    (tmp_path / "a.csv").write_text("text,n\na,1\nb\n1 3,2\n")
    map_rows(tmp_path / "a.csv", picky, tmp_path / "out2", on_error="reject")
    assert [one["row"] for one in rejects_of(tmp_path / "out2") if "row" in one] == [3]
    pieces = tmp_path / "b.jsonl"
    pieces.write_text("".join(json.dumps({"text": f"1 {row}"}) + "\n" for row in range(40)))
    map_rows(pieces, picky, tmp_path / "out3", on_error="reject", shard_size=1)
    (reject,) = rejects_of(tmp_path / "out3")
    assert reject["line"] == 4 and "origin" not in reject


# ---- memory ----


KEEPING = """
import sys
from milldam.errors import ResourceError
from milldam.mapping import map as map_rows
from milldam.memory import usage

def keeper(batch):
    vars(sys).setdefault("kept_by_test", []).append(b"x" * 20_000_000)

if __name__ == "__main__":
    before = usage().anonymous
    try:
        options = {"batch_size": 1, "shard_size": "2KB", "memory": "400MB", "workers": int(sys.argv[3])}
        map_rows(sys.argv[1], keeper, sys.argv[2], **options)
    except ResourceError as error:
        print(usage().anonymous - before, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_keeps_memory_stops_the_run(workers: int, tmp_path: Path) -> None:
    """Before it takes much more than the budget; what it holds, and the ways out, are said."""
    path, script = tmp_path / "a.jsonl", tmp_path / "keeping.py"
    path.write_text("".join(json.dumps({"text": "a"}) + "\n" for _ in range(200)))
    script.write_text(KEEPING)
    command = [sys.executable, script, path, tmp_path / "out", str(workers)]
    taken, said = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split(" ", 1)
    assert re.search(r"(?s)keeper keeps memory: .*shard_size.*more memory", said), said
    assert int(taken) < 600e6


def wanderer(batch: dict[str, Any]) -> Any:
    os.chdir("/")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_may_change_the_working_directory(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of input and output still lead to where they led."""
    monkeypatch.chdir(tmp_path)
    write_files(Path("in"), "jsonl")
    made = map_rows("in", wanderer, "out", workers=workers, batch_size=1)
    assert Path.cwd() == tmp_path and len(made) == len(map_rows("in", keep_all, "other"))


def keep_all(batch: dict[str, Any]) -> Any:
    return None


def test_hints_for_what_newcomers_do(tmp_path: Path) -> None:
    """A function of a row given a batch; a schema that lacks a column; a folder of other things; fewer rows."""
    source, out = write_files(tmp_path / "in", "jsonl"), tmp_path / "out"
    with pytest.raises(InputError, match="gets a batch, a dict of lists; to call it with one row: batched=False"):
        map_rows(source, lambda row: {"n": row["text"].upper()}, out)
    with pytest.raises(InputError, match=r"your schema lacks text\. Add .*remove_columns=\['text'\]"):
        map_rows(source, lambda batch: {"n": [1] * len(batch["text"])}, out, schema=pa.schema([("n", pa.int64())]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    with pytest.raises(ConfigError, match=r"not made by milldam; it is left alone\. Choose another folder"):
        map_rows(source, picky, tmp_path / "full")
    table = map_rows(source, lambda batch: {"n": [len(batch["text"])]}, tmp_path / "few", remove_columns="all")
    assert table.report is not None and table.report.counts == {"read": 15, "rows": 1}
