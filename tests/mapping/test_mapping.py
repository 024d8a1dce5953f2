"""`milldam.map`: sources to tables, what is reused and what is made again, and what survives a kill."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import leftovers
from tests.kit.qa_jobs import small, write_examples
from tests.kit.quick import first_quick

import milldam.qa
from milldam.errors import ConfigError, InputError, StoreError
from milldam.mapping import map as map_rows
from milldam.mapping.job import run_map
from milldam.mapping.settings import settings_of
from milldam.stores.table.reader import Table
from milldam.stores.verify import verify

FILES, ROWS = 8, 20


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eight files of twenty records."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(FILES):
        write_file(folder, number)
    return folder


def write_file(folder: Path, number: int, rows: int = ROWS, word: str = "word") -> Path:
    # Compressed files are not cut: with a small shard_size each is a unit.
    path = folder / f"{number:02d}.jsonl.gz"
    lines = ({"id": number * 100 + row, "text": f"{word} " * (row + 1)} for row in range(rows))
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


class Log:
    """A function that notes each call in a file, in whatever process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "calls"

    def calls(self) -> list[int]:
        """The first id of every batch since the last time, in order of ids."""
        found = [int(line) for line in self.path.read_text().split()] if self.path.exists() else []
        self.path.unlink(missing_ok=True)
        return sorted(found)


def lengths(batch: dict[str, Any], calls: str = "", add: int = 0) -> dict[str, Any]:
    """What most tests map: the length of the text."""
    if calls:
        with Path(calls).open("a") as file:
            file.write(f"{batch['id'][0]}\n")
    return {"n": [len(text) + add for text in batch["text"]]}


def expected(files: int = FILES) -> list[int]:
    return [5 * (row + 1) for _ in range(files) for row in range(ROWS)]


def shard_hashes(out: Path) -> list[str]:
    return [shard.xxh3 for shard in Table(out).manifest.shards]


def summary_of(source: Any, function: Any, out: Path, **options: Any) -> Any:
    return run_map(settings_of({"source": source, "function": function, "out": out, **options}))


def table_function() -> Callable[..., Any]:
    return lambda batch: {"n": [len(text) for text in batch["text"]]}


# ---- columns ----


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
        made = map_rows(source, lambda batch: {"n": [len(batch["t"])]}, Path(folder) / "out", **options)
        assert made["n"].to_pylist() == [*expected, count]


def test_types_of_units_are_put_together(corpus: Path, tmp_path: Path) -> None:
    """Nothing, integers, then fractions: the column has the type that holds all; every reader gets it."""

    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"n": [None if id < 100 else id / 2 if 305 <= id < 320 else id for id in batch["id"]]}

    out = tmp_path / "out"
    table = map_rows(corpus, mixed, out, shard_size=1, batch_size=5)
    assert table.schema.field("n").type == pa.float64() and table.shards == FILES + 1 and list(verify(out)) == []
    wanted = [None if id < 100 else id / 2 if 305 <= id < 320 else id for id in table["id"].to_pylist()]
    assert table["n"].to_pylist() == [row["n"] for row in table] == table.to_hf()["n"] == wanted
    again = map_rows(table, lambda batch: {"n": batch["n"]}, tmp_path / "again", columns=["n"])
    assert again["n"].to_pylist() == wanted


def test_types_that_nothing_holds_are_refused_with_the_place(corpus: Path, tmp_path: Path) -> None:
    """Of one unit: column, expected, found, file and rows; of two units: both. What was finished is kept, and
    `schema=` helps."""

    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"n": [str(id) if id >= 305 else id for id in batch["id"]]}

    out = tmp_path / "out"
    said = r"(?s)mixed, rows 6 to 10 of .*03\.jsonl\.gz \(unit 3\): .*\"n\": int64.*found string"
    with pytest.raises(InputError, match=said):
        map_rows(corpus, mixed, out, shard_size=1, batch_size=5)
    with pytest.raises(StoreError, match="unfinished"):
        Table(out)
    files = [corpus / "00.jsonl.gz", corpus / "02.jsonl.gz"]
    with pytest.raises(InputError, match="string in unit 0, int64 in unit 1"):
        map_rows(files, lambda batch: {"n": [batch["id"][0] or "a"] * 20}, out, shard_size=1)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.float64())])
    assert map_rows(corpus, lambda batch: {"n": batch["id"]}, out, shard_size=1, schema=schema)[65]["n"] == 305.0


def test_features_of_hf_are_a_schema(tmp_path: Path) -> None:
    """Class names reach `to_hf`."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 0}\n')
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    function = table_of({"label": [1, 0]})
    table = map_rows(tmp_path / "a.jsonl", function, tmp_path / "out", remove_columns="all", schema=features)
    assert table.to_hf().features["label"].names == ["no", "yes"]


def table_of(columns: dict[str, Any]) -> Callable[..., Any]:
    return lambda batch: columns


# ---- what is reused ----


def mapper(add: int) -> Callable[..., Any]:
    """A function that holds a value."""
    return lambda batch, calls: {"n": [value + add for value in lengths(batch, calls)["n"]]}


def other(batch: dict[str, Any], calls: str) -> dict[str, Any]:
    return {"n": [2 * value for value in lengths(batch, calls)["n"]]}


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (mapper(1), {}, "captured value add"),
        (other, {}, "function other"),
        (mapper(0), {"batch_size": 11}, "batch_size: 11 (made with 1000)"),
        (mapper(0), {"columns": ["id", "text"]}, "columns"),
    ],
)
def test_a_change_of_function_or_setting_makes_all_units_again(
    corpus: Path, tmp_path: Path, function: Any, options: dict[str, Any], named: str
) -> None:
    """The body, a captured value, an argument, a parameter: all stale, and the change is named."""
    log, out = Log(tmp_path), tmp_path / "out"
    log_path = {"calls": str(log.path)}
    summary_of(corpus, mapper(0), out, shard_size=1, fn_kwargs=log_path)
    log.calls()
    made = summary_of(corpus, function, out, **{"shard_size": 1, "fn_kwargs": log_path} | options)
    assert made.reused == 0 and len(log.calls()) >= FILES
    assert any(named in line for line in made.changed), made.changed
    assert list(verify(out)) == [] and len(list(out.glob("rows-*"))) == FILES


def test_one_added_and_one_removed_file_leave_the_others(corpus: Path, tmp_path: Path) -> None:
    """What is new is made; what is gone is no longer in the table, nor in the folder."""
    log, out = Log(tmp_path), tmp_path / "out"
    options = {"shard_size": 1, "fn_kwargs": {"calls": str(log.path)}}
    summary_of(corpus, lengths, out, **options)
    log.calls()
    write_file(corpus, 50)
    assert summary_of(corpus, lengths, out, **options).reused == FILES
    assert log.calls() == [5000]
    (corpus / "03.jsonl.gz").unlink()
    assert summary_of(corpus, lengths, out, **options).reused == FILES and log.calls() == []
    assert len(Table(out)) == FILES * ROWS and len(list(out.glob("rows-*"))) == FILES


def test_what_cant_be_hashed_is_said_and_not_reused(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock in a closure: a warning with its name and `key=`; with a key it is reused."""
    import threading

    lock = threading.Lock()

    def guarded(batch: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return lengths(batch)

    for _ in range(2):
        caplog.clear()
        assert summary_of(corpus, guarded, tmp_path / "out", shard_size=1).reused == 0
        assert "lock" in caplog.text and '"key"' in caplog.text
    caplog.clear()
    assert summary_of(corpus, guarded, tmp_path / "out", shard_size=1, key="v1").reused == 0
    assert summary_of(corpus, guarded, tmp_path / "out", shard_size=1, key="v1").up_to_date
    assert summary_of(corpus, guarded, tmp_path / "out", shard_size=1, key="v2").reused == 0
    assert "key=" not in caplog.text


def test_a_source_that_cant_be_identified_is_read_again(tmp_path: Path) -> None:
    """A streamed dataset without a key is read again, and known by its rows."""
    datasets = pytest.importorskip("datasets")
    streamed = datasets.Dataset.from_dict({"text": ["a", "bb"]}).to_iterable_dataset()
    for known in (False, True):
        assert summary_of(streamed, table_function(), tmp_path / "out").up_to_date is known
    streamed = datasets.Dataset.from_dict({"text": ["a", "c"]}).to_iterable_dataset()
    assert summary_of(streamed, table_function(), tmp_path / "out").changed == ("input",)


# ---- errors ----


def test_rejected_rows_are_set_aside_and_counted(corpus: Path, tmp_path: Path) -> None:
    """Those on which the function fails, and records that can't be read; also of units that are cached."""
    with gzip.open(corpus / "02.jsonl.gz", "ab") as file:
        file.write(b"{broken\n")

    def picky(batch: dict[str, Any]) -> Any:
        return {"n": [10 // (number - 305) for number in batch["id"]]}

    out = tmp_path / "out"
    made = summary_of(corpus, picky, out, shard_size=1, on_error="reject")
    assert made.rejected == {"bad_json": 1, "function_failed": 1} and made.counts["rows"] == FILES * ROWS - 1
    write_file(corpus, 7, word="other")
    again = summary_of(corpus, picky, out, shard_size=1, on_error="reject")
    assert again.reused == FILES - 1 and again.rejected == made.rejected
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in rejects] == ["bad_json", "function_failed"]
    assert rejects[0]["line"] == ROWS + 1 and json.loads(rejects[1]["record"])["id"] == 305
    assert "ZeroDivisionError" in rejects[1]["detail"]


def test_input_without_rows_is_told_from_a_function_that_drops_them(tmp_path: Path) -> None:
    """With what was rejected."""
    (tmp_path / "a.jsonl").write_text("{\n[1]\n")
    with pytest.raises(InputError, match=r"No rows in the input \(rejected: bad_json 1, no_object 1\)"):
        map_rows(tmp_path / "a.jsonl", lengths, tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "workers"), first_quick([("jsonl", 1), ("parquet", 2), ("jsonl", 2), ("parquet", 1)], quick=2)
)
def test_a_function_that_leaves_no_rows_makes_an_empty_table(source: str, workers: int, tmp_path: Path) -> None:
    """Its columns are those of `schema`, or of the input, where it has any."""
    pq.write_table(pa.table({"id": pa.array(range(9), pa.int16()), "text": ["a"] * 9}), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "a"}\n' * 9)
    path, columns = tmp_path / f"in.{source}", ["id", "text"] if source == "parquet" else []

    def none(row: dict[str, Any]) -> list[Any]:
        return []

    for out in ("a", "a"):
        table = map_rows(path, none, tmp_path / out, batched=False, workers=workers)
        assert (len(table), table.columns) == (0, columns)
        assert table.report is not None and table.report.counts["read"] == 9 and list(verify(tmp_path / out)) == []
    assert table.report.up_to_date and list(table) == [] and len(table.to_hf()) == 0
    schema = pa.schema([("n", pa.int8())])
    given = map_rows(path, lambda rows: {"n": []}, tmp_path / "c", remove_columns="all", schema=schema)
    assert given.schema.equals(schema) and len(given) == 0


def test_a_source_without_rows_gives_an_empty_table_where_it_has_columns(tmp_path: Path) -> None:
    """An empty Arrow table, dataset or parquet file; empty JSON lines name no columns, and are refused."""
    datasets = pytest.importorskip("datasets")
    empty = pa.schema([("id", pa.int64()), ("text", pa.string())]).empty_table()
    pq.write_table(empty, tmp_path / "empty.parquet")
    for number, source in enumerate((tmp_path / "empty.parquet", empty, datasets.Dataset(empty))):
        table = map_rows(source, lengths, tmp_path / str(number), remove_columns=["text"])
        assert (len(table), table.schema.names, table.schema.field("id").type) == (0, ["id"], pa.int64())
    (tmp_path / "empty.jsonl").write_text("")
    for source in (tmp_path / "empty.jsonl", []):
        with pytest.raises(InputError, match="No rows in the input"):
            map_rows(source, lengths, tmp_path / "out")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"bacthed": True}, 'no such key. Did you mean "batched"'),
        ({"format": "nunpy"}, 'Did you mean "numpy"'),
        ({"batch_size": -1}, "batch_size: must be at least 1"),
        ({"remove_columns": "text"}, None),
        ({"num_workers": 2}, 'Did you mean "workers"'),
        ({"on_error": "ignore"}, "raise or reject"),
        ({"fn_kwargs": [1]}, "fn_kwargs"),
        ({"batch_bytes": "2GB"}, "at most 1.1 GB"),
    ],
)
def test_settings_are_checked(option: dict[str, Any], told: str | None) -> None:
    """Wrong names and values."""
    given = {"source": "x", "function": lengths, "out": "o", **option}
    if told is None:
        assert settings_of(given).remove_columns == ("text",)
        return
    with pytest.raises(ConfigError) as caught:
        settings_of(given)
    assert told in str(caught.value)


# ---- processes and kills ----


def run_script(script: Path, *arguments: object, code: int) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *(str(one) for one in arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.int64())])


def test_functions_of_all_kinds_reach_worker_processes(corpus: Path, tmp_path: Path) -> None:
    """A lambda, a closure, a bound method, a partial."""
    import functools

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

    table = map_rows(corpus, all_kinds, tmp_path / "out", shard_size=1, workers=2, schema=SCHEMA)
    assert [row["n"] for row in table] == [one + 1 for one in expected()]


def test_what_cant_be_sent_to_workers_is_said(corpus: Path, tmp_path: Path) -> None:
    """An open socket in a closure: with workers asked for an error, else one worker in this process."""
    import socket

    with socket.socket() as held:

        def work(batch: dict[str, Any]) -> dict[str, Any]:
            assert held.fileno() >= 0
            return lengths(batch)

        with pytest.raises(ConfigError, match="can't be sent to worker processes"):
            map_rows(corpus, work, tmp_path / "out", workers=2, shard_size=1, key="v1")
        assert len(map_rows(corpus, work, tmp_path / "out", shard_size=1, key="v1")) == FILES * ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "copies", "words"),
    [("words without end " * 650, 850, "[text.split() for text in batch['text']]"), ("x" * 30_000_000, 1, "['']")],
    ids=["ordinary rows to lists of Python objects", "rows of 30 MB each, for four workers"],
)
def test_memory_stays_within_the_budget(row: str, copies: int, words: str, tmp_path: Path) -> None:
    """Hundreds of megabytes, with 600 MB for the whole tree."""
    (tmp_path / "in").mkdir()
    for number in range(16):
        (tmp_path / "in" / f"{number:02d}.jsonl").write_text(f"{json.dumps({'text': f'{number} {row}'})}\n" * copies)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from milldam.mapping.job import run_map
        from milldam.mapping.settings import settings_of

        def work(batch):
            return {{"words": {words}}}

        settings = settings_of({{"source": sys.argv[1], "function": work, "out": sys.argv[2], "memory": "600MB",
                                "batch_bytes": "2MB", "shard_size": "16MB", "remove_columns": "all", "workers": 4}})
        print(run_map(settings).memory["peak"])
        """)
    )
    assert int(run_script(script, tmp_path / "in", tmp_path / "out", code=0)) < 600 * 10**6


# ---- workers run the code that the keys were made of ----


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's that a mapped function calls."""
    path = tmp_path / "users_cleaning.py"
    path.write_text('def clean(text): return "old"\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("users_cleaning", None)


def test_workers_refuse_a_module_that_was_edited_and_not_reloaded(
    corpus: Path, tmp_path: Path, own_module: Path
) -> None:
    """They import it anew: under the key of the old code they would make rows of the new one."""
    import users_cleaning  # type: ignore[import-not-found]

    def cleaned(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": [users_cleaning.clean(text) for text in batch["text"]]}

    own_module.write_text('def clean(text): return "newer"\n')  # of another size, which bytecode is known by
    options: dict[str, Any] = {"shard_size": 1, "remove_columns": "all"}
    with pytest.raises(ConfigError, match="function clean"):
        map_rows(corpus, cleaned, tmp_path / "out", workers=2, **options)
    table = map_rows(corpus, cleaned, tmp_path / "out", workers=1, **options)
    assert set(table["v"].to_pylist()) == {"old"}


# ---- what must not be lost ----


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["table", "dataset", "file of it", "link to it"])
def test_a_table_is_not_mapped_over_itself(how: str, overwrite: bool, corpus: Path, tmp_path: Path) -> None:
    """Its shards would be removed while they are read, or at the end."""
    out = tmp_path / "out"
    table = map_rows(corpus, lengths, out)
    before = leftovers(out)
    shard = next(out.glob("rows-*.arrow"))
    link = tmp_path / "link.arrow"
    link.symlink_to(shard)
    source = {"table": table, "dataset": None, "file of it": f"file://{shard}", "link to it": link}[how]
    with pytest.raises(ConfigError, match="Choose another folder"):
        map_rows(table.to_hf() if how == "dataset" else source, lengths, out, overwrite=overwrite)
    assert leftovers(out) == before
    assert [row["n"] for row in Table(out)] == expected()


def test_a_file_that_changes_while_it_is_mapped_is_not_taken_for_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its units are known by their bytes: put back, they must hold the rows of those bytes."""
    from milldam.mapping import job

    path, make = tmp_path / "a.jsonl", job.MapJob.stages

    def write(word: str) -> None:
        path.write_text("".join(f'{{"t": "{word}{row:04d}"}}\n' for row in range(2000)))

    def rewritten(self: Any, *given: Any) -> Any:
        write("new")
        return make(self, *given)

    def words(batch: dict[str, Any]) -> dict[str, Any]:
        return {"w": [text[:3] for text in batch["t"]]}

    write("old")
    options: dict[str, Any] = {"shard_size": "10KB", "remove_columns": "all", "workers": 1}
    with monkeypatch.context() as patched, pytest.raises(InputError, match=r"a\.jsonl: changed while it was read"):
        patched.setattr(job.MapJob, "stages", rewritten)
        map_rows(path, words, tmp_path / "out", **options)
    write("old")
    assert set(map_rows(path, words, tmp_path / "out", **options)["w"].to_pylist()) == {"old"}


# ---- what is told, and what is left ----


def test_a_table_does_not_take_the_place_of_windows(tmp_path: Path) -> None:
    """What `milldam qa` made is a table of another kind: refused, and left as it is."""
    small(write_examples(tmp_path / "examples.jsonl", 3), tmp_path / "windows")
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match=r"holds windows that `milldam qa` made"):
        map_rows(tmp_path / "in.jsonl", lambda rows: rows, tmp_path / "windows", workers=1)
    assert milldam.qa.FeatureStore(tmp_path / "windows")[0]
