"""The table that `milldam.map` makes: reading, handing on, verifying."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.damage import edit_manifest, write_resealed

from milldam.errors import ConfigError, StoreError
from milldam.stores.table.manifest import NAME, TableManifest, TableSchema
from milldam.stores.table.reader import Table
from milldam.stores.table.writer import BATCH_BYTES, TableShardWriter
from milldam.stores.verify import verify

SCHEMA = pa.schema([("id", pa.int64()), ("ids", pa.list_(pa.int32())), ("text", pa.string())])


def rows_of(begin: int, end: int) -> list[dict[str, Any]]:
    return [
        {"id": one, "ids": [one] * (one % 4), "text": None if one % 5 == 0 else f"row {one}"}
        for one in range(begin, end)
    ]


def make_table(folder: Path, shards: list[list[dict[str, Any]]], schema: pa.Schema = SCHEMA) -> Table:
    """A table of given rows, a shard a list; an empty list is a unit without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for rows in shards:
        with TableShardWriter(folder, schema) as writer:
            for begin in range(0, len(rows), 7):
                writer.append(pa.RecordBatch.from_pylist(rows[begin : begin + 7], schema=schema))
            made.append(writer.commit())
    written = tuple(shard for shard in made if shard is not None)
    TableManifest(TableSchema.of(schema), {}, {}, {}, written).write(folder)
    return Table(folder)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return make_table(tmp_path / "table", [rows_of(0, 20), [], rows_of(20, 21), rows_of(21, 50)])


def test_rows_are_found_by_number_from_both_ends(table: Table) -> None:
    """Across shards, with nulls and empty lists."""
    wanted = rows_of(0, 50)
    assert len(table) == 50 and [table[number] for number in range(50)] == wanted
    assert table[-1] == wanted[-1] and list(table) == wanted
    for outside in (50, -51):
        with pytest.raises(IndexError, match="of a table of 50 rows"):
            table[outside]


def test_lists_of_numbers_are_rows_and_lists_of_names_columns(table: Table, tmp_path: Path) -> None:
    """In the order that was asked for."""
    wanted = rows_of(0, 50)
    assert table[[30, 1, -1, 1]]["id"] == [30, 1, 49, 1] and table[np.array([2, 3])]["id"] == [2, 3]
    assert table[np.int64(3)] == wanted[3] and table[[]] == {"id": [], "ids": [], "text": []}
    assert table[["text", "id"]].column_names == ["text", "id"] and table[["id"]].num_rows == 50
    assert table.column_names == table.columns and table.num_rows == 50
    with pytest.raises(IndexError, match="row 50"):
        table[[1, 50]]
    with pytest.raises(ConfigError, match="numbers of rows, or names"):
        table[[1, "id"]]


@given(st.integers(-60, 60), st.integers(-60, 60), st.integers(1, 60))
def test_slices_and_batches_are_those_of_a_list(tmp_path: Path, begin: int, end: int, size: int) -> None:
    """Any slice, batches of any size."""
    folder = tmp_path / "table"
    table = Table(folder) if folder.exists() else make_table(folder, [rows_of(0, 20), rows_of(20, 50)])
    wanted = rows_of(0, 50)
    assert table[begin:end] == {name: [row[name] for row in wanted[begin:end]] for name in SCHEMA.names}
    batches = [batch["id"] for batch in table.batches(size)]
    assert [one for batch in batches for one in batch] == list(range(50)) and all(
        len(batch) == size for batch in batches[:-1]
    )


def test_to_hf_has_the_same_rows_on_the_same_files(table: Table) -> None:
    """Every file of the dataset is one of the table's."""
    pytest.importorskip("datasets")
    data = table.to_hf()
    assert list(data) == rows_of(0, 50)
    files = {Path(one["filename"]).name for one in data.cache_files}
    assert files == {shard.name for shard in table.manifest.shards}


def test_record_batches_are_of_about_four_megabytes(tmp_path: Path) -> None:
    """Small batches are put together, large ones cut; a giant row stays whole."""
    schema = pa.schema([("x", pa.binary())])
    with TableShardWriter(tmp_path, schema) as writer:
        for size in [1000] * 50 + [3 * BATCH_BYTES] + [BATCH_BYTES] * 8:
            writer.append(pa.RecordBatch.from_pylist([{"x": bytes(size)}], schema=schema))
        writer.append(pa.RecordBatch.from_pylist([{"x": bytes(BATCH_BYTES // 4)}] * 40, schema=schema))
        shard = writer.commit()
    assert shard is not None and shard.rows == 99
    batches = list(pa.ipc.open_stream((tmp_path / shard.name).read_bytes()))
    assert batches[0].num_rows == 50 and batches[1].num_rows == 1
    assert all(batch.num_rows == 1 or batch.nbytes <= 2 * BATCH_BYTES + 1000 for batch in batches)


# ---- what is wrong ----


def test_verify_finds_what_is_wrong_with_a_shard(table: Table) -> None:
    """Missing, of another size, of other bytes, of other rows than the manifest says."""
    assert list(verify(table.path)) == []
    names = [shard.name for shard in table.manifest.shards]
    (table.path / names[0]).unlink()
    with (table.path / names[1]).open("ab") as file:
        file.write(b"x")
    path = table.path / names[2]
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    problems = list(verify(table.path))
    told = ("missing", "bytes where the manifest says", "its bytes have changed")
    assert len(problems) == 3 and all(what in problem for what, problem in zip(told, problems, strict=True))
    fresh = Table(table.path)
    with pytest.raises(StoreError, match="missing"):
        fresh[0]
    with pytest.raises(StoreError, match="not of the size"):
        fresh[20]
    with pytest.raises(StoreError):
        fresh.to_hf()


def test_verify_compares_rows_and_columns(table: Table) -> None:
    """A manifest that was edited."""
    edit_manifest(table.path, lambda value: value["shards"][0].update(rows=19))
    totals, rows = verify(table.path)
    assert "totals: not the sums" in totals and "20 rows where the manifest says 19" in rows
    schema = {"columns": {"a": "int8"}, "ipc": TableSchema.of(pa.schema([("a", pa.int8())])).ipc}
    edit_manifest(table.path, lambda value: value.update(schema=schema))
    assert any("other columns than the manifest says" in problem for problem in verify(table.path))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda value: value | {"format": "other"}, "not the manifest of a table"),
        (lambda value: value | {"format_version": 9}, "format_version is 9"),
        (lambda value: value | {"shards": 5}, "damaged: shards is 5, where a list"),
        (lambda value: (value["shards"][0].update(name="../x"), value)[1], "leaves the folder"),
        (lambda value: (value["shards"][0].update(rows=-1), value)[1], "rows is -1"),
    ],
)
def test_a_damaged_manifest_is_refused(table: Table, damage: Any, told: str) -> None:
    """Wherever it came from."""
    path = table.path / NAME
    write_resealed(path, damage(json.loads(path.read_text())))
    with pytest.raises(StoreError, match=told):
        Table(table.path)
