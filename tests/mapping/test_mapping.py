"""`milldam.map`: sources to tables, what is reused and made again, tables in the cache, what must not be lost."""

from __future__ import annotations

import functools
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import leftovers
from tests.kit.qa_jobs import small, write_examples

import milldam
from milldam.errors import ConfigError, InputError, StoreError
from milldam.mapping import cache
from milldam.stores.table.reader import Table
from milldam.stores.verify import verify

FILES, ROWS = 8, 20
COUNT = FILES * ROWS
EACH: dict[str, Any] = {"shard_size": 1}
"""Compressed files are not cut: each is a unit."""


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight files of twenty records; the cache in a folder of the test."""
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        write_file(tmp_path / "in", number)
    return tmp_path / "in"


def write_file(folder: Path, number: int, word: str = "word") -> None:
    lines = ({"id": number * 100 + row, "text": f"{word} " * (row + 1)} for row in range(ROWS))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{number:02d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def map_rows(source: Any, function: Callable[..., Any], out: Path | None = None, **options: Any) -> Any:
    """The table and its report."""
    table = milldam.map(source, function, out, **options)
    assert table.report is not None
    return table, table.report


def lengths(batch: dict[str, Any], add: int = 0) -> dict[str, Any]:
    return {"n": [len(text) + add for text in batch["text"]]}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"n": [2 * len(text) for text in batch["text"]]}


def mapper(add: int) -> Callable[..., Any]:
    """A function that holds a value."""
    return lambda batch: lengths(batch, add)


# ---- batches and columns ----


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), rows=st.integers(1, 10), most=st.integers(60, 300))
@settings(max_examples=15, deadline=None)
def test_batches_are_as_large_as_may_be(sizes: list[int], rows: int, most: int) -> None:
    """A batch ends where one row more would be too many or too large; a larger row comes alone."""
    expected: list[int] = []
    count = size = 0
    for one in (8 + size for size in sizes):
        if count and (count == rows or size + one > most):
            expected.append(count)
            count = size = 0
        count, size = count + 1, size + one
    source = [{"t": "x" * size} for size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"batch_size": rows, "batch_bytes": most, "workers": 1, "remove_columns": "all"}
        made = milldam.map(source, lambda batch: {"n": [len(batch["t"])]}, Path(folder) / "out", **options)
        assert made["n"].to_pylist() == [*expected, count]


def test_types_of_units_are_put_together(corpus: Path, tmp_path: Path) -> None:
    """Nothing, integers, then fractions: the column has the type that holds all; every reader gets it."""

    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"n": [None if id < 100 else id / 2 if 305 <= id < 320 else id for id in batch["id"]]}

    table, _ = map_rows(corpus, mixed, tmp_path / "out", batch_size=5, **EACH)
    assert table.schema.field("n").type == pa.float64() and table.shards == FILES + 1 and list(verify(table.path)) == []
    wanted = [None if id < 100 else id / 2 if 305 <= id < 320 else id for id in table["id"].to_pylist()]
    assert table["n"].to_pylist() == [row["n"] for row in table] == table.to_hf()["n"] == wanted
    again, _ = map_rows(table, lambda batch: {"n": batch["n"]}, tmp_path / "again", columns=["n"])
    assert again["n"].to_pylist() == wanted


def test_types_that_nothing_holds_are_refused_with_the_place(corpus: Path, tmp_path: Path) -> None:
    """Of one unit: column, expected, found, file and rows; of two units: both. What was finished is kept, and
    `schema=` helps."""

    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"n": [str(id) if id >= 305 else id for id in batch["id"]]}

    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"(?s)mixed, rows 6 to 10 of .*03\.jsonl\.gz \(unit 3\).*int64.*found string"):
        map_rows(corpus, mixed, out, batch_size=5, **EACH)
    with pytest.raises(StoreError, match="unfinished"):
        Table(out)
    with pytest.raises(InputError, match="string in unit 0, int64 in unit 1"):
        map_rows(corpus, lambda batch: {"n": [batch["id"][0] or "a"] * 20}, out, **EACH)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.float64())])
    assert map_rows(corpus, lambda batch: {"n": batch["id"]}, out, schema=schema, **EACH)[0][65]["n"] == 305.0


def test_features_of_hf_are_a_schema(tmp_path: Path) -> None:
    """Class names reach `to_hf`."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    options: Any = {"remove_columns": "all", "schema": features}
    table, _ = map_rows([{"x": 1}, {"x": 0}], lambda batch: {"label": batch["x"]}, tmp_path / "out", **options)
    assert table.to_hf().features["label"].names == ["no", "yes"]


@pytest.mark.parametrize(("source", "columns"), [("jsonl", []), ("parquet", ["id", "text"])])
def test_no_rows_make_an_empty_table(source: str, columns: list[str], tmp_path: Path) -> None:
    """Its columns are those of `schema`, or of the input, where it has any; but that nothing could be read is an
    error."""
    pq.write_table(pa.table({"id": range(9), "text": ["a"] * 9}), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "a"}\n' * 9)
    path = tmp_path / f"in.{source}"
    for _ in range(2):
        table, report = map_rows(path, lambda row: [], tmp_path / "a", batched=False)
        assert (len(table), table.columns, report.counts["read"], list(verify(table.path))) == (0, columns, 9, [])
    assert report.up_to_date and list(table) == [] and len(table.to_hf()) == 0
    schema = pa.schema([("n", pa.int8())])
    assert map_rows(path, lambda rows: {"n": []}, remove_columns="all", schema=schema)[0].schema.equals(schema)
    empty = pa.schema([("id", pa.int64()), ("text", pa.string())]).empty_table()
    assert map_rows(empty, lengths, remove_columns=["text"])[0].columns == ["id"]
    path.write_bytes(b"{\n[1]\n")
    for nothing, said in ((tmp_path / "in.jsonl", r" \(rejected: bad_json 1, no_object 1\)"), ([], ": there is no")):
        if source == "jsonl":
            with pytest.raises(InputError, match=f"No rows in the input{said}"):
                map_rows(nothing, lengths, tmp_path / "out")


# ---- what is reused ----


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (mapper(1), {}, "captured value add"),
        (doubled, {}, "function doubled"),
        (mapper(0), {"batch_size": 11}, "batch_size: 11 (made with 1000)"),
        (mapper(0), {"columns": ["id", "text"]}, "columns"),
    ],
)
def test_a_change_of_function_or_setting_makes_all_units_again(
    corpus: Path, tmp_path: Path, function: Any, options: dict[str, Any], named: str
) -> None:
    """The body, a captured value, a parameter: all stale, and the change is named."""
    map_rows(corpus, mapper(0), tmp_path / "out", **EACH)
    table, report = map_rows(corpus, function, tmp_path / "out", **EACH, **options)
    assert report.reused == 0 and any(named in line for line in report.changed), report.changed
    assert list(verify(table.path)) == [] and len(list(table.path.glob("rows-*"))) == FILES


def test_one_added_and_one_removed_file_leave_the_others(corpus: Path, tmp_path: Path) -> None:
    """What is new is made; what is gone is no longer in the table, nor in the folder."""
    out = tmp_path / "out"
    map_rows(corpus, lengths, out, **EACH)
    write_file(corpus, 50)
    report = map_rows(corpus, lengths, out, **EACH)[1]
    assert (report.reused, report.units) == (FILES, FILES + 1)
    (corpus / "03.jsonl.gz").unlink()
    table, report = map_rows(corpus, lengths, out, **EACH)
    assert report.reused == report.units == FILES and len(table) == COUNT and len(list(out.glob("rows-*"))) == FILES


def test_what_cant_be_hashed_needs_a_name(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lock in a closure: a warning with its name and `key`, and nothing is reused; without a folder an error."""
    lock = threading.Lock()

    def guarded(batch: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return lengths(batch)

    for _ in range(2):
        caplog.clear()
        assert map_rows(corpus, guarded, tmp_path / "out")[1].reused == 0
        assert "lock" in caplog.text and '"key"' in caplog.text
    for key, is_known in (("v1", False), ("v1", True), ("v2", False)):
        assert map_rows(corpus, guarded, tmp_path / "out", key=key)[1].up_to_date is is_known
    with pytest.raises(ConfigError, match=r"captured value lock.*by key; .*a folder for the table"):
        map_rows(corpus, guarded)


def test_a_stream_is_known_by_its_rows(tmp_path: Path) -> None:
    """It is read again; equal rows are up to date."""
    datasets = pytest.importorskip("datasets")
    for texts, is_known in ((["a", "bb"], False), (["a", "bb"], True), (["a", "c"], False)):
        streamed = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
        assert map_rows(streamed, lengths, tmp_path / "out")[1].up_to_date is is_known


# ---- rejects and settings ----


def test_rejected_rows_are_set_aside_and_counted(corpus: Path, tmp_path: Path) -> None:
    """Those on which the function fails, and records that can't be read; also of units that are cached."""
    with gzip.open(corpus / "02.jsonl.gz", "ab") as file:
        file.write(b"{broken\n")

    def picky(batch: dict[str, Any]) -> Any:
        return {"n": [10 // (number - 305) for number in batch["id"]]}

    out = tmp_path / "out"
    _, made = map_rows(corpus, picky, out, on_error="reject", **EACH)
    assert made.rejected == {"bad_json": 1, "function_failed": 1} and made.counts["rows"] == COUNT - 1
    write_file(corpus, 7, word="other")
    _, again = map_rows(corpus, picky, out, on_error="reject", **EACH)
    assert again.reused == FILES - 1 and again.rejected == made.rejected
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in rejects] == ["bad_json", "function_failed"]
    assert rejects[0]["line"] == ROWS + 1 and json.loads(rejects[1]["record"])["id"] == 305
    assert "ZeroDivisionError" in rejects[1]["detail"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"format": "nunpy"}, 'Did you mean "numpy"'),
        ({"on_error": "ignore"}, "raise or reject"),
        ({"batch_bytes": "2GB"}, "at most 1.1 GB"),
    ],
)
def test_settings_are_checked(corpus: Path, option: dict[str, Any], told: str) -> None:
    """Wrong values."""
    with pytest.raises(ConfigError) as caught:
        map_rows(corpus, lengths, **option)
    assert told in str(caught.value)


# ---- workers ----


def test_functions_of_all_kinds_reach_worker_processes(corpus: Path, tmp_path: Path) -> None:
    """A lambda, a closure, a bound method, a partial."""

    class Adder:
        def __init__(self, add: int) -> None:
            self.add = add

        def work(self, batch: dict[str, Any]) -> dict[str, Any]:
            return lengths(batch, add=self.add)

    kinds = [lambda batch: lengths(batch, add=1), Adder(1).work, functools.partial(lengths, add=1)]

    def all_kinds(batch: dict[str, Any]) -> dict[str, Any]:
        results = [function(batch)["n"] for function in kinds]
        assert results[0] == results[1] == results[2]
        return {"n": results[0]}

    table, _ = map_rows(corpus, all_kinds, tmp_path / "out", workers=2, **EACH)
    assert table["n"].to_pylist() == [5 * (row + 1) + 1 for _ in range(FILES) for row in range(ROWS)]


def test_what_cant_be_sent_to_workers_is_said(corpus: Path, tmp_path: Path) -> None:
    """An open socket in a closure: with workers asked for an error, else one worker in this process."""
    with socket.socket() as held:

        def work(batch: dict[str, Any]) -> dict[str, Any]:
            assert held.fileno() >= 0
            return lengths(batch)

        with pytest.raises(ConfigError, match="can't be sent to worker processes"):
            map_rows(corpus, work, tmp_path / "out", workers=2, key="v1", **EACH)
        assert len(map_rows(corpus, work, tmp_path / "out", key="v1", **EACH)[0]) == COUNT


def test_workers_refuse_a_module_that_was_edited_and_not_reloaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They import it anew: under the key of the old code they would make rows of the new one."""
    module = tmp_path / "users_cleaning.py"
    module.write_text('def clean(text): return "old"\n')
    monkeypatch.syspath_prepend(tmp_path)
    import users_cleaning  # type: ignore[import-not-found]

    def cleaned(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": [users_cleaning.clean(text) for text in batch["text"]]}

    module.write_text('def clean(text): return "newer"\n')  # of another size, which bytecode is known by
    with pytest.raises(ConfigError, match="function clean"):
        map_rows(corpus, cleaned, tmp_path / "out", workers=2, **EACH)
    table, _ = map_rows(corpus, cleaned, tmp_path / "out", workers=1, **EACH)
    assert set(table["v"].to_pylist()) == {"old"}
    monkeypatch.delitem(sys.modules, "users_cleaning")


BUDGETED = """
    import sys
    import milldam

    def work(batch):
        return {"words": WORDS}

    options = {"memory": "600MB", "batch_bytes": "2MB", "shard_size": "16MB", "remove_columns": "all", "workers": 4}
    print(milldam.map(sys.argv[1], work, sys.argv[2], **options).report.memory["peak"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "copies", "words"),
    [("words without end " * 650, 850, "[text.split() for text in batch['text']]"), ("x" * 30_000_000, 1, "['']")],
    ids=["ordinary rows to lists of Python objects", "rows of 30 MB each, for four workers"],
)
def test_memory_stays_within_the_budget(row: str, copies: int, words: str, tmp_path: Path) -> None:
    """Hundreds of megabytes, with 600 MB for the whole tree."""
    (tmp_path / "large").mkdir()
    for number in range(16):
        (tmp_path / f"large/{number:02d}.jsonl").write_text(f"{json.dumps({'text': f'{number} {row}'})}\n" * copies)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(BUDGETED).replace("WORDS", words))
    command = [sys.executable, script, tmp_path / "large", tmp_path / "out"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 600 * 10**6


# ---- the cache ----


def keys() -> set[str]:
    return {table.key for table in cache.cached_tables()}


def test_the_same_call_finds_its_table_again(corpus: Path) -> None:
    """By function, settings and input; another of these is another table, and the first stays."""
    first, report = map_rows(corpus, lengths)
    assert first.path.parent == cache.cache_folder() and not report.up_to_date
    others = [
        map_rows(corpus, doubled),
        map_rows(corpus, lengths, columns=["text"]),
        map_rows([{"text": "a"}], lengths),
    ]
    assert len({first.path, *(table.path for table, _ in others)}) == 4 == len(keys())
    assert map_rows(str(corpus), lengths)[1].up_to_date and map_rows(iter([{"text": "a"}]), lengths)[1].up_to_date
    assert {path.name for path in cache.cache_folder().iterdir()} == keys() and len(keys()) == 4


def test_an_edited_file_brings_its_table_up_to_date(corpus: Path) -> None:
    """Its own unit is made again; who reads the old table keeps it."""
    first, _ = map_rows(corpus, lengths, **EACH)
    write_file(corpus, 5, "longer")
    second, report = map_rows(corpus, lengths, **EACH)
    assert (report.reused, report.units) == (FILES - 1, FILES) and any("05.jsonl" in line for line in report.changed)
    assert first.path == second.path and first[101]["n"] == 10 and second[101]["n"] == 14
    assert list(verify(second.path)) == []


def test_tables_that_were_not_used_for_longest_go_first(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the others fit; never one in use, nor the one that was just made."""
    paths = [map_rows(corpus / f"0{number}.jsonl.gz", lengths)[0].path for number in range(4)]
    held = Table(paths[3])
    for age, path in enumerate(paths):
        os.utime(path / "in-use", (1000 - age, 1000 - age))  # the last is the oldest
    size = max(table.bytes for table in cache.cached_tables())
    monkeypatch.setenv("MILLDAM_MAP_CACHE_SIZE", str(3 * size + size // 2))
    made = map_rows(corpus / "05.jsonl.gz", lengths)[0].path
    assert keys() == {made.name, paths[3].name, paths[0].name}
    del held
    monkeypatch.setenv("MILLDAM_MAP_CACHE_SIZE", "1")
    map_rows(corpus / "06.jsonl.gz", lengths)
    assert len(keys()) == 1


# ---- what must not be lost ----


@pytest.mark.parametrize("how", ["table", "dataset", "file of it", "link to it"])
def test_a_table_is_not_mapped_over_itself(how: str, corpus: Path, tmp_path: Path) -> None:
    """Its shards would be removed while they are read, or at the end."""
    out = tmp_path / "out"
    table, _ = map_rows(corpus, lengths, out)
    before, shard = leftovers(out), next(out.glob("rows-*.arrow"))
    link = tmp_path / "link.arrow"
    link.symlink_to(shard)
    source = {"table": table, "dataset": table.to_hf(), "file of it": f"file://{shard}", "link to it": link}[how]
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="Choose another folder"):
            map_rows(source, lengths, out, overwrite=overwrite)
    assert leftovers(out) == before and len(Table(out)) == COUNT


def test_a_file_that_changes_while_it_is_mapped_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    """Its units are known by their bytes: put back, they must hold the rows of those bytes."""
    path, rewriting = tmp_path / "a.jsonl", tmp_path / "rewriting"

    def write(word: str) -> None:
        path.write_text("".join(f'{{"t": "{word}{row:04d}"}}\n' for row in range(2000)))

    def words(batch: dict[str, Any]) -> dict[str, Any]:
        if rewriting.exists():
            write("new")
        return {"w": [text[:3] for text in batch["t"]]}

    options: dict[str, Any] = {"shard_size": "10KB", "remove_columns": "all", "workers": 1}
    write("old")
    rewriting.touch()
    with pytest.raises(InputError, match=r"a\.jsonl: changed while it was read"):
        map_rows(path, words, tmp_path / "out", **options)
    rewriting.unlink()
    write("old")
    assert set(map_rows(path, words, tmp_path / "out", **options)[0]["w"].to_pylist()) == {"old"}


def test_a_table_does_not_take_the_place_of_windows(tmp_path: Path) -> None:
    """What `milldam qa` made is a table of another kind: refused, and left as it is."""
    small(write_examples(tmp_path / "examples.jsonl", 3), tmp_path / "windows")
    with pytest.raises(ConfigError, match=r"holds windows that `milldam qa` made"):
        map_rows([{"text": "one"}], lambda rows: rows, tmp_path / "windows", workers=1)
    assert milldam.qa.FeatureStore(tmp_path / "windows")[0]
