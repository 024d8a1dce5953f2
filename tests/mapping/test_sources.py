"""Anything that has rows: units that cover each row once, keys that change with what is read, readers of all kinds."""

from __future__ import annotations

import csv
import functools
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milldam.errors import ConfigError, InputError
from milldam.mapping.rows import source_of
from milldam.mapping.settings import MapSettings
from milldam.mapping.table_job import RowUnit
from milldam.sources.batch import Reject, TextRules
from milldam.sources.rows import FileReader, Places
from milldam.sources.units import Slice

Records = list[dict[str, Any]]
FILES_AT_HAND = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def records_of(rows: Any) -> Records:
    columns = rows if isinstance(rows, dict) else rows.to_pydict()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def look_up(source: Any, spool: Path, **options: Any) -> Any:
    return source_of(MapSettings(source=source, function=len, **options), spool)


def plan(source: Any, spool: Path, **options: Any) -> Any:
    made = look_up(source, spool, **options)
    made.spool()
    return made


def read(made: Any, rejects: list[Reject] | None = None) -> Records:
    """All rows, by a reader and units that went through pickle and JSON, as they do on their way to a worker."""
    reader = pickle.loads(pickle.dumps(made.reader))
    on_reject = (rejects if rejects is not None else []).append
    units = [RowUnit(**json.loads(json.dumps(unit.as_json()))) for unit in made.units()]
    assert [unit.index for unit in units] == list(range(len(units)))
    return [record for unit in units for rows in reader.read(unit, on_reject, Places()) for record in records_of(rows)]


def keys(source: Any, spool: Path, **options: Any) -> list[str]:
    return [unit.key for unit in plan(source, spool, **options).units()]


def write_jsonl(path: Path, records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---- files ----

ROWS: Records = [{"id": str(k), "text": f"line {k}\nand ünother" + "x" * (k % 50)} for k in range(60)]


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path: Path, *, stream: bool) -> None:
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, schema) as writer:
        for start in range(0, len(ROWS), 7):
            writer.write_batch(pa.RecordBatch.from_pylist(ROWS[start : start + 7], schema))


def write_rows(folder: Path, kind: str) -> Path:
    """The same rows as a file of any kind."""
    path = folder / f"rows.{kind.partition('-')[0]}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind in ("csv", "tsv"):
        write_csv(path, "," if kind == "csv" else "\t")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        write_arrow(path, stream=kind == "arrow-stream")
    return path


KINDS = ["jsonl", "csv", "tsv", "parquet", "arrow-file", "arrow-stream"]


@pytest.mark.parametrize("kind", KINDS)
@FILES_AT_HAND
@given(st.integers(1, 6000), st.none() | st.integers(1, 80))
def test_units_cover_every_row_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shard_size: int, shards: int | None
) -> None:
    """Whatever the size or number of shards, the units of a file of any format give its rows, with the same keys."""
    folder = tmp_path_factory.mktemp("rows")
    path = write_rows(folder, kind)
    made = plan(path, folder / "spool", shard_size=shard_size, shards=shards)
    assert read(made) == ROWS
    assert [unit.key for unit in made.units()] == keys(path, folder / "other", shard_size=shard_size, shards=shards)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_of_a_split_take_exactly_these_rows(tmp_path: Path, kind: str) -> None:
    """Rows are counted over all units; numbers, where asked for, begin at the slice."""
    path = write_rows(tmp_path, kind)
    for split, wanted in [("train[10:20]", ROWS[10:20]), ("train[-5:]", ROWS[-5:]), ("train[50%:]", ROWS[30:])]:
        made = plan(path, tmp_path, split=split, shard_size=600, with_indices=True)
        assert read(made) == wanted
        firsts = [unit.first_row for unit in made.units()]
        assert firsts[0] == 0
    assert read(plan(path, tmp_path, split="train[7:]", shard_size=600)) == ROWS[7:]
    numbered = list(plan(path, tmp_path, with_indices=True, shard_size=600).units())
    assert numbered[0].first_row == 0
    assert numbered[-1].first_row is not None and numbered[-1].first_row > 30


def test_standard_input_is_copied_once_and_read_by_units(tmp_path: Path) -> None:
    """Rows of a pipe are there in full, called "-", and said to be not identifiable."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.mapping.test_sources import plan, read\n"
        "made = plan('-', Path(sys.argv[2]), documents='line', shard_size=20)\n"
        "print(made.unidentified, len(list(made.units())), read(made)[-1])\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2]), str(tmp_path)]
    told = subprocess.run(command, input="".join(f"line {k}\n" for k in range(20)), capture_output=True, text=True)
    assert told.stdout.startswith("standard input can't be read again "), told.stderr
    assert told.stdout.endswith(" {'text': 'line 19', 'file': '-'}\n")


# ---- keys ----


# ---- datasets ----


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A dataset in several Arrow files."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(100)), "text": ["x" * k for k in range(100)]})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    return datasets.load_from_disk(str(tmp_path / "saved"))


def test_a_data_set_gives_its_rows_in_its_order(tmp_path: Path, saved: Any) -> None:
    """Chosen, shuffled, filtered and renamed rows are those of the dataset, whatever its format shows."""
    kinds = [
        saved,
        saved.shuffle(seed=1),
        saved.select([5, 3, 99, 3]),
        saved.filter(lambda row: row["n"] % 7 == 0),
        saved.rename_column("n", "number").select(range(10, 60)),
        saved.with_format("numpy", columns=["n"]),
    ]
    found = set()
    for k, data in enumerate(kinds):
        for options in ({"shard_size": 1000}, {"shards": 7}, {}):
            made = plan(data, tmp_path / str(k), **options)
            assert read(made) == list(data.with_format(None))
            assert len(pickle.dumps(made.reader)) < 20_000
        found.add(tuple(unit.key for unit in made.units()))
    assert len(found) == len(kinds)
    assert [unit.first_row for unit in plan(saved, tmp_path, shards=4).units()] == [0, 25, 50, 75]
    assert read(plan(saved, tmp_path, columns=("text",)))[3] == {"text": "xxx"}


def test_a_dict_of_data_sets_needs_a_split(tmp_path: Path, saved: Any) -> None:
    """Named, sliced, or summed; a dataset without splits refuses one, as it does a transform."""
    import datasets

    both = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
    assert len(read(plan(both, tmp_path, split="test"))) == 3
    assert len(read(plan(both, tmp_path, split="train+test"))) == 103
    assert [row["n"] for row in read(plan(both, tmp_path, split="train[2:4]"))] == [2, 3]
    with pytest.raises(InputError, match=r'which split\? There are "one", "two"'):
        plan(datasets.DatasetDict({"one": saved, "two": saved}), tmp_path)
    with pytest.raises(InputError, match='no split "dev"'):
        plan(both, tmp_path, split="dev")
    with pytest.raises(ConfigError, match="transform"):
        plan(saved.with_transform(lambda rows: rows), tmp_path)


def test_a_large_data_set_in_memory_goes_through_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not sent to each worker: the reader is a path, and the rows are the same, shuffled ones too."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("milldam.mapping.rows.LARGEST_IN_MEMORY", 1000)
    data = datasets.Dataset.from_dict({"text": ["x" * k for k in range(200)]}).shuffle(seed=3)
    made = plan(data, tmp_path, shards=1)
    assert made.rows is not None
    assert len(pickle.dumps(made.reader)) < 1000
    assert read(made) == list(data)


# ---- streams ----


def count_to(limit: int) -> Iterator[dict[str, Any]]:
    for k in range(limit):
        yield {"n": k, "text": "x" * (k % 300)}


@pytest.mark.parametrize("options", [{"shard_size": 300_000}, {"shards": 4}, {}])
def test_a_generator_is_spooled_and_cut(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows come back in order from units that are numbered; the same rows give the same keys."""
    monkeypatch.setattr("milldam.mapping.spool.BATCH_BYTES", 50_000)
    made = plan(functools.partial(count_to, 5000), tmp_path, with_indices=True, **options)
    assert read(made) == list(count_to(5000))
    units = list(made.units())
    assert len(units) == {"shard_size": 3, "shards": 4}.get(next(iter(options), ""), 1)
    assert units[0].first_row == 0
    again = plan(functools.partial(count_to, 5000), tmp_path / "again", with_indices=True, **options)
    assert [unit.key for unit in again.units()] == [unit.key for unit in units]


def test_an_identified_generator_runs_once(tmp_path: Path) -> None:
    """What it left complete is used; another source, or a spool that was not finished, is made again."""
    calls = str(tmp_path / "calls")

    def rows() -> Iterator[dict[str, Any]]:
        with open(calls, "a") as file:
            file.write("x")
        yield {"n": 1}

    spool = tmp_path / "spool"
    for _ in range(2):
        assert read(plan(rows, spool, source_key="v1")) == [{"n": 1}]
    assert Path(calls).read_text() == "x"
    read(plan(rows, spool, source_key="v2"))
    (spool / "complete.json").unlink()
    read(plan(rows, spool, source_key="v2"))
    assert Path(calls).read_text() == "xxx"


def test_rows_of_any_types_survive_the_spool(tmp_path: Path) -> None:
    """Columns that come and go, numbers of two types, arrays of any shape; what can't be stored is named."""
    import numpy as np

    rows: Records = [{"a": 1}, {"a": 2.5, "b": None}, {"b": b"\0"}, {"c": {"d": 1}}]
    found = read(plan(rows, tmp_path / "1"))
    assert [{name: value for name, value in row.items() if value is not None} for row in found] == [
        {name: value for name, value in row.items() if value is not None} for row in rows
    ]
    with pytest.raises(InputError, match='the list: rows 1 to 2: column "a": its values are not of one type'):
        plan([{"a": 1}, {"a": "x"}], tmp_path / "0")
    (row,) = read(plan([{"m": np.eye(2), "v": np.arange(2)}], tmp_path / "2"))
    assert row == {"m": [[1, 0], [0, 1]], "v": [0, 1]}
    assert read(plan(pa.table({"a": [1, 2]}), tmp_path / "3")) == [{"a": 1}, {"a": 2}]
    with pytest.raises(InputError, match='the list: rows 1 to 2: column "a"'):
        plan([{"a": 1}, {"a": lambda: None}], tmp_path / "4")
    with pytest.raises(InputError, match="row 1 is of type str"):
        plan(lambda: [{"a": 1}, "b"], tmp_path / "5", source_key="k")


def test_what_is_no_source_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A generator that was called already, a number, a class, and a split where there are none."""
    with pytest.raises(ConfigError, match="without calling it"):
        plan(count_to(3), tmp_path)
    for wrong in (7, dict, {"a": [1]}, None):
        with pytest.raises(ConfigError, match="no source of rows"):
            plan(wrong, tmp_path)
    with pytest.raises(ConfigError, match="Leave them out"):
        plan([{"a": 1}], tmp_path, split="train")
    with pytest.raises(ConfigError, match="Let it yield rows"):
        plan(lambda: {"a": 1}, tmp_path, source_key="k")


# ---- tables of ours ----


# ---- what names a source ----


def test_a_changed_row_changes_its_own_unit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not numbered: other ones in front leave the units behind them; with numbers all are others."""
    monkeypatch.setattr("milldam.mapping.spool.BATCH_BYTES", 1000)
    rows = [{"t": f"{k:02} " + "x" * 1000} for k in range(8)]
    other = [{"t": "a " + "y" * 200}, {"t": "b " + "y" * 789}, *rows[1:]]
    before, after = keys(rows, tmp_path / "a", shard_size=2000), keys(other, tmp_path / "b", shard_size=2000)
    assert before[0] != after[0] and before[-1] == after[-1] and len(before) > 2
    before, after = (keys(one, tmp_path / "c", shard_size=2000, with_indices=True) for one in (rows, other))
    assert not set(before) & set(after)


@pytest.mark.parametrize("made_of", [list, pa.Table.from_pylist])
def test_a_key_does_not_hide_what_a_source_in_memory_holds(made_of: Any, tmp_path: Path) -> None:
    """A list and a table are known by their content; the key is added to it."""

    def fingerprint(rows: Records, key: str | None) -> str:
        found = look_up(made_of(rows), tmp_path, source_key=key)
        assert found.unidentified is None
        return str(found.identity["fingerprint"])

    one, other = [{"t": "aa"}], [{"t": "bb"}]
    assert fingerprint(one, "v1") == fingerprint([{"t": "aa"}], "v1")
    assert len({fingerprint(one, "v1"), fingerprint(other, "v1"), fingerprint(one, "v2"), fingerprint(one, None)}) == 4


@pytest.mark.parametrize("address", ["https://host/a.txt?X-Amz-Signature=secret", "s3://me:secret@host/a.txt"])
def test_rows_messages_and_the_list_of_inputs_tell_no_secrets(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an address neither its query nor its password leave what is needed to read it."""
    from milldam.mapping.job import _outside as outside
    from milldam.sources.units import InputFile

    plain = address.replace("?X-Amz-Signature=secret", "").replace("me:secret@", "")
    monkeypatch.setattr("milldam.sources.records.open_bytes", lambda path: io.BytesIO(b"hello\n\xff\n"))
    reader, places = FileReader(TextRules("line"), None), Places()
    rejects: list[Reject] = []
    (rows,) = reader.rows([Slice(address, "txt", None)], rejects.append, places)
    assert records_of(rows) == [{"text": "hello", "file": plain}]
    assert [reject.file for reject in rejects] == [place.file for place in places.of(0, 1)] == [plain]
    listed = outside([InputFile(address, "txt", None, 5, "")], tmp_path)
    assert [file.path for file in listed] == [plain]
