"""Parquet and Arrow files: every row once and in order, nulls rejected with their row, damage told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, plan, read

from milldam.errors import InputError
from milldam.sources.batch import TextRules
from milldam.sources.reading import read_unit

if not hasattr(pa, "string_view"):
    pytest.skip("needs an Arrow with string views", allow_module_level=True)

ALONE = TextRules(text_column="text", only_file=True)
KINDS = ("parquet", "arrow", "stream")


def write(folder: Path, table: pa.Table, kind: str = "parquet", rows: int = 1000) -> Path:
    """A table on disk, in row groups or record batches of so many rows."""
    path = folder / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def text_table(texts: list[str | None], kind: pa.DataType | None = None) -> pa.Table:
    column = pa.array(texts, pa.string())
    return pa.table({"id": list(range(len(texts))), "text": column.cast(kind) if kind else column})


# ---- rows and units ----


@settings(max_examples=40)
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=40),
    rows=st.integers(1, 12),
    shard_size=st.integers(1, 2000),
    kind=st.sampled_from(KINDS),
)
def test_rows_of_any_units_are_those_of_the_table(
    tmp_path: Path, texts: list[str | None], rows: int, shard_size: int, kind: str
) -> None:
    """Each text once, in order; each null rejected with its row in the file, however units are cut."""
    result = read(write(tmp_path, text_table(texts), kind, rows), TEXT, shard_size)
    assert result.texts == [text for text in texts if text is not None]
    assert [reject.row for reject in result.rejects] == [n for n, text in enumerate(texts) if text is None]
    assert set(result.reasons) <= {"no_text"}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_row_groups_and_record_batches_are_units(tmp_path: Path, kind: str) -> None:
    """A stream, as HF writes it, has no index: it is read through."""
    texts = [f"text {n} " * 20 for n in range(50)]
    path = write(tmp_path, text_table(texts), kind, rows=10)
    assert len(plan(path, TEXT, shard_size=1)) == 5
    assert read(path, TEXT, shard_size=1).texts == texts


# ---- kinds of columns ----


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", KINDS)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: pa.DataType, format: str) -> None:
    """Plain, large, views, bytes and dictionaries, with nulls rejected in each."""
    texts = ["one", "two", None, "one", "é🙂", ""]
    result = read(write(tmp_path, text_table(texts, kind), format, rows=4), TEXT)
    assert result.texts == ["one", "two", "one", "é🙂", ""]
    assert [reject.row for reject in result.rejects] == [2]


def test_repeated_texts_do_not_fill_the_memory(tmp_path: Path) -> None:
    """What a dictionary page holds once is not unfolded a row group at a time."""
    path = write(tmp_path, text_table(["word " * 40_000] * 200))
    before, most = pa.total_allocated_bytes(), 0
    for unit in plan(path, TEXT):
        for batch in read_unit(unit, TEXT, pytest.fail):
            most = max(most, pa.total_allocated_bytes() - before)
            assert len(batch.texts)
    assert most < 12 << 20


@pytest.mark.parametrize("format", KINDS)
def test_a_dotted_name_leads_into_nested_columns(tmp_path: Path, format: str) -> None:
    """Other fields of the same name are not taken for it; a null on the way is a null."""
    rows = [
        {"n": 1, "inner": {"text": "a"}},
        {"n": 2, "inner": None},
        None,
        {"n": 3, "inner": {"text": None}},
        {"n": 4, "inner": {"text": "b"}},
    ]
    table = pa.table({"text": ["no"] * 5, "outer": pa.array(rows)})
    result = read(write(tmp_path, table, format, rows=2), TextRules(text_column="outer.inner.text"))
    assert result.texts == ["a", "b"]
    assert [reject.row for reject in result.rejects] == [1, 2, 3]


# ---- what is wrong ----


@pytest.mark.parametrize("format", KINDS)
@settings(max_examples=25)
@given(place=st.floats(0, 1), byte=st.integers(0, 255))
def test_damage_anywhere_is_an_input_error_or_harmless(tmp_path: Path, format: str, place: float, byte: int) -> None:
    """One wrong byte never ends in a traceback of Arrow's."""
    path = write(tmp_path, text_table([f"text {n}" for n in range(50)]), format, rows=20)
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(place * len(data)))] = byte
    path.write_bytes(data)
    try:
        read(path, ALONE)
    except InputError as error:
        assert "a." in str(error)


# ---- the schema ----
