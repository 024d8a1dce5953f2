"""Anything that has rows: units that cover each row once, keys that change with what is read, readers of all kinds."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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


def look_up(source: Any, folder: Path, **options: Any) -> Any:
    return source_of(MapSettings(source=source, function=len, **options), folder / "spool")


def read(made: Any) -> Records:
    """All rows, by a reader and units that went through pickle and JSON, as they do on their way to a worker."""
    reader = pickle.loads(pickle.dumps(made.reader))
    units = [RowUnit(**json.loads(json.dumps(unit.as_json()))) for unit in made.units()]
    assert [unit.index for unit in units] == list(range(len(units)))
    return [row for unit in units for rows in reader.read(unit, print, Places()) for row in records_of(rows)]


def keys(source: Any, folder: Path, **options: Any) -> list[str]:
    return [unit.key for unit in look_up(source, folder, **options).units()]


# ---- files ----

ROWS: Records = [{"id": str(k), "text": f"line {k}\nand ünother" + "x" * (k % 50)} for k in range(60)]


def write_rows(folder: Path, kind: str) -> Path:
    """The same rows as a file of any kind."""
    path, schema = folder / f"rows.{kind.partition('-')[0]}", pa.schema([("id", pa.string()), ("text", pa.string())])
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in ROWS))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        new = pa.ipc.new_stream if kind == "arrow-stream" else pa.ipc.new_file
        with new(path, schema) as writer:
            for start in range(0, len(ROWS), 7):
                writer.write_batch(pa.RecordBatch.from_pylist(ROWS[start : start + 7], schema))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow-file", "arrow-stream"])
@FILES_AT_HAND
@given(st.integers(1, 6000))
def test_units_cover_every_row_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shard_size: int
) -> None:
    """Whatever the size of units, those of a file of any format give its rows, with the same keys."""
    folder = tmp_path_factory.mktemp("rows")
    path = write_rows(folder, kind)
    made = look_up(path, folder, shard_size=shard_size)
    assert read(made) == ROWS
    assert [unit.key for unit in made.units()] == keys(path, folder, shard_size=shard_size)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_of_a_split_take_exactly_these_rows(tmp_path: Path, kind: str) -> None:
    """Rows are counted over all units; numbers, where asked for, begin at the slice."""
    path = write_rows(tmp_path, kind)
    for split, wanted in [("train[10:20]", ROWS[10:20]), ("train[-5:]", ROWS[-5:]), ("train[50%:]", ROWS[30:])]:
        made = look_up(path, tmp_path, split=split, shard_size=600, with_indices=True)
        assert read(made) == wanted and next(made.units()).first_row == 0
    assert read(look_up(path, tmp_path, split="train[7:]", shard_size=600)) == ROWS[7:]
    numbered = list(look_up(path, tmp_path, with_indices=True, shard_size=600).units())
    assert numbered[0].first_row == 0 and (numbered[-1].first_row or 0) > 30


# ---- datasets ----


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A dataset in several Arrow files."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(100)), "text": ["x" * k for k in range(100)]})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    return datasets.load_from_disk(str(tmp_path / "saved"))


def test_a_data_set_gives_its_rows_in_its_order(tmp_path: Path, saved: Any) -> None:
    """Chosen, shuffled, filtered and renamed rows are those of the dataset, whatever its format shows; of one in memory
    no row is sent to workers."""
    kinds = [
        saved,
        saved.shuffle(seed=1),
        saved.select([5, 3, 99, 3]),
        saved.filter(lambda row: row["n"] % 7 == 0),
        saved.rename_column("n", "number").select(range(10, 60)),
        saved.with_format("numpy", columns=["n"]),
        type(saved).from_dict(saved[:50]).shuffle(seed=3),
    ]
    found = set()
    for data in kinds:
        for options in ({"shard_size": 1000}, {}):
            made = look_up(data, tmp_path, **options)
            assert read(made) == list(data.with_format(None))
            assert len(pickle.dumps(made.reader)) < 20_000
        found.add(tuple(unit.key for unit in made.units()))
    assert len(found) == len(kinds)
    assert [unit.first_row for unit in look_up(saved, tmp_path, shard_size=1500).units()] == [0, 25, 50, 75]
    assert read(look_up(saved, tmp_path, columns=("text",)))[3] == {"text": "xxx"}
    with pytest.raises(ConfigError, match="transform"):
        look_up(saved.with_transform(lambda rows: rows), tmp_path)
    with pytest.raises(ConfigError, match=r'take dataset\["train"\]'):
        look_up(saved, tmp_path, split="train")


# ---- rows that lie in no file ----


def numbers(count: int = 5000) -> Iterator[dict[str, Any]]:
    for k in range(count):
        yield {"n": k, "text": "x" * (k % 300)}


def test_rows_that_lie_in_no_file_are_written_to_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back in order from units, with numbers where wanted; the same rows give the same keys, however
    they come."""
    monkeypatch.setattr("milldam.mapping.spool.BATCH_BYTES", 50_000)
    made = look_up(numbers, tmp_path, with_indices=True, shard_size=300_000)
    units = list(made.units())
    assert read(made) == list(numbers()) and len(units) == 3 and units[0].first_row == 0
    for source in (numbers, numbers(), list(numbers()), lambda: iter(list(numbers()))):
        assert keys(source, tmp_path, with_indices=True, shard_size=300_000) == [unit.key for unit in units]
    assert read(look_up(pa.Table.from_pylist(list(numbers())), tmp_path)) == list(numbers())


def test_a_changed_row_changes_its_own_unit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not numbered: other ones in front leave the units behind them; with numbers all are others."""
    monkeypatch.setattr("milldam.mapping.spool.BATCH_BYTES", 1000)
    rows = [{"t": f"{k:02} " + "x" * 1000} for k in range(8)]
    other = [{"t": "a " + "y" * 200}, {"t": "b " + "y" * 789}, *rows[1:]]
    before, after = (keys(one, tmp_path, shard_size=2000) for one in (rows, other))
    assert before[0] != after[0] and before[-1] == after[-1] and len(before) > 2
    before, after = (keys(one, tmp_path, shard_size=2000, with_indices=True) for one in (rows, other))
    assert not set(before) & set(after)


def test_rows_of_any_types_are_kept(tmp_path: Path) -> None:
    """Columns that come and go, numbers of two types, arrays of any shape; what can't be stored is named."""
    rows: Records = [{"a": 1}, {"a": 2.5, "b": None}, {"b": b"\0"}, {"c": {"d": 1}}]
    found = read(look_up(rows, tmp_path))
    assert [{name: value for name, value in row.items() if value is not None} for row in found] == [
        {name: value for name, value in row.items() if value is not None} for row in rows
    ]
    (row,) = read(look_up([{"m": np.eye(2), "v": np.arange(2)}], tmp_path))
    assert row == {"m": [[1, 0], [0, 1]], "v": [0, 1]}
    assert read(look_up(iter(["a", "b"]), tmp_path)) == [{"text": "a"}, {"text": "b"}]
    for wrong in ("x", lambda: None):
        with pytest.raises(InputError, match='the list: rows 1 to 2: column "a": its values are not of one type'):
            look_up([{"a": 1}, {"a": wrong}], tmp_path)
    with pytest.raises(InputError, match="row 1 is of type int"):
        look_up(lambda: [{"a": 1}, 2], tmp_path)


def test_what_is_no_source_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A number, a class, a dict; standard input, and a split where there are none."""
    for wrong in (7, dict, {"a": [1]}, None, lambda: {"a": 1}):
        with pytest.raises(ConfigError, match="no input"):
            look_up(wrong, tmp_path)
    with pytest.raises(ConfigError, match="split is for files"):
        look_up([{"a": 1}], tmp_path, split="train")
    with pytest.raises(ConfigError, match="Save it to a file"):
        look_up("-", tmp_path)


@pytest.mark.parametrize("address", ["https://host/a.txt?X-Amz-Signature=secret", "s3://me:secret@host/a.txt"])
def test_rows_and_messages_tell_no_secrets(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address neither its query nor its password leave what is needed to read it."""
    plain = address.replace("?X-Amz-Signature=secret", "").replace("me:secret@", "")
    monkeypatch.setattr("milldam.sources.records.open_bytes", lambda path: io.BytesIO(b"hello\n\xff\n"))
    places, rejects = Places(), list[Reject]()
    (rows,) = FileReader(TextRules("line"), None).rows([Slice(address, "txt", None)], rejects.append, places)
    assert records_of(rows) == [{"text": "hello", "file": plain}]
    assert [reject.file for reject in rejects] == [place.file for place in places.of(0, 1)] == [plain]
