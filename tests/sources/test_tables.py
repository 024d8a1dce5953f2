"""Parquet and Arrow files: every row once and in order, nulls rejected with their row, damage told in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, plan, read

from milldam.errors import InputError
from milldam.sources import arrays, tables
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column
from milldam.sources.reading import read_unit
from milldam.sources.units import Slice

if not hasattr(pa, "string_view"):
    pytest.skip("needs an Arrow with string views", allow_module_level=True)

ALONE = TextRules(text_column="text", only_file=True)
KINDS = ("parquet", "arrow", "stream")


def zstd(data: bytes) -> bytes:
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return bytes(zstd.compress(data))


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_rows_holds_nothing(tmp_path: Path, kind: str) -> None:
    """And is no error."""
    result = read(write(tmp_path, text_table([]), kind), TEXT)
    assert (result.texts, result.rejects) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One large row group is read in slices; a text larger than a slice stands alone."""
    monkeypatch.setattr(arrays, "BATCH_BYTES", 4000)
    for module in (tables, tables):
        monkeypatch.setattr(module, "BATCH_BYTES", 4000)
    texts = ["word " * 20] * 500 + ["x" * 10_000]
    result = read(write(tmp_path, text_table(texts), kind), TEXT)
    assert result.texts == texts
    assert all(batch.texts.nbytes < 4500 or len(batch.texts) == 1 for batch in result.batches)


# ---- large values ----


def test_many_small_values_take_nothing_besides_batches(tmp_path: Path) -> None:
    """A column may have gigabytes of them; other columns do not count."""
    table = pa.table({"text": [f"text {n} " * 50 for n in range(30_000)], "other": ["y" * 300] * 29_999 + ["z" * 9**7]})
    pq.write_table(table, tmp_path / "a.parquet", data_page_size=100_000, use_dictionary=False)
    assert [unit.slices[0].unpacking for unit in plan(tmp_path, TEXT)] == [0]


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


def test_a_column_with_a_large_dictionary_is_not_read_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch holds many of its small texts."""
    monkeypatch.setattr(arrays, "BATCH_BYTES", 20_000)
    for module in (tables, tables):
        monkeypatch.setattr(module, "BATCH_BYTES", 20_000)
    texts = [f"text {n:05} " * 3 for n in range(2000)]
    result = read(write(tmp_path, text_table(texts, pa.dictionary(pa.int32(), pa.string())), "arrow", rows=2000), TEXT)
    assert result.texts == texts
    assert len(result.batches) < 200


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


@pytest.mark.parametrize("format", KINDS)
def test_bytes_that_are_no_utf8_are_rejected_with_their_row(tmp_path: Path, format: str) -> None:
    """Also in a column that says it is text, which its writer need not have checked."""
    raw = pa.array([b"good", b"caf\xe9", b"also"], pa.binary())
    column = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    result = read(write(tmp_path, pa.table({"text": column}), format), TEXT)
    assert result.texts == ["good", "also"]
    assert [(reject.row, reject.reason, reject.record) for reject in result.rejects] == [(1, "not_utf8", "caf\\xe9")]


def test_invalid_bytes_can_be_replaced(tmp_path: Path) -> None:
    """On request."""
    path = write(tmp_path, pa.table({"text": pa.array([b"a\xff"], pa.binary())}))
    assert read(path, TextRules(text_column="text", invalid_utf8="replace")).texts == ["a\ufffd"]


def test_strict_stops_at_a_null_with_its_row(tmp_path: Path) -> None:
    """With the file and the row."""
    path = write(tmp_path, text_table(["a", None]))
    with pytest.raises(InputError, match=r"a\.parquet:2: no_text: the text is null"):
        read(path, TextRules(text_column="text", strict=True))


def test_strict_names_the_first_row_too(tmp_path: Path) -> None:
    """It is row 1, as an editor counts."""
    path = write(tmp_path, text_table([None, "a"]))
    with pytest.raises(InputError, match=r"a\.parquet:1: no_text"):
        read(path, TextRules(text_column="text", strict=True))


# ---- what is wrong ----


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("column", ["body", "id", "text.inner"])
def test_a_column_that_is_not_text_names_those_that_are(tmp_path: Path, format: str, column: str) -> None:
    """Missing, of another type, or a way into something that has no inside."""
    path = write(tmp_path, text_table(["a"]), format)
    with pytest.raises(InputError, match=rf'no text in a field "{column}"; found text in "text"\. .* text_column'):
        read(path, TextRules(text_column=column))


@pytest.mark.parametrize(("name", "word"), [("a.parquet", "parquet"), ("a.arrow", "Arrow")])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1", b"not a table at all", b"\0" * 100])
def test_what_is_no_such_file_is_an_input_error(tmp_path: Path, name: str, word: str, content: bytes) -> None:
    """A short error with the path, not a traceback."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: not a whole {word} file"):
        read(path, ALONE)


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
def test_a_truncated_file_is_an_input_error(tmp_path: Path, format: str, kept: float) -> None:
    """Also where some batches could be read before the end was missed."""
    path = write(tmp_path, text_table([f"text {n} " * 30 for n in range(200)]), format, rows=20)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(InputError, match=r"not a whole (parquet|Arrow) file"):
        read(path, ALONE)


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


# ---- where it lies ----


@pytest.mark.parametrize("format", KINDS)
def test_a_compressed_table_is_unpacked_on_the_way(tmp_path: Path, format: str) -> None:
    """One unit, since it can't be cut; nothing stays behind."""
    path = write(tmp_path, text_table([f"text {n}" for n in range(50)]), format, rows=10)
    packed = path.with_name(path.name + ".zst")
    packed.write_bytes(zstd(path.read_bytes()))
    path.unlink()
    result = read(packed, TEXT, shard_size=1)
    assert (result.units, result.texts) == (1, [f"text {n}" for n in range(50)])
    assert list(tmp_path.iterdir()) == [packed]


def test_a_truncated_compressed_table_is_an_input_error(tmp_path: Path) -> None:
    """It says that the compression ends too early."""
    path = tmp_path / "a.parquet.zst"
    path.write_bytes(zstd(write(tmp_path, text_table(["text"] * 100)).read_bytes())[:-50])
    with pytest.raises(InputError, match=r"a\.parquet\.zst: it ends in the middle.*Get or make it again"):
        read(path, ALONE)


@pytest.mark.parametrize("format", KINDS)
def test_a_table_at_an_address_is_read(tmp_path: Path, format: str) -> None:
    """Through fsspec, in units."""
    path = write(tmp_path, text_table([f"text {n}" for n in range(50)]), format, rows=10)
    fsspec.filesystem("memory").pipe(f"/tables/{path.name}", path.read_bytes())
    assert read(f"memory://tables/{path.name}", TEXT, shard_size=1).texts == [f"text {n}" for n in range(50)]


# ---- the schema ----


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_the_text_columns_of_a_schema_are_found(tmp_path: Path, format: str) -> None:
    """With dotted names into structs; numbers and lists are no text."""
    columns: dict[str, Any] = {
        "id": [1],
        "title": ["a"],
        "meta": [{"source": "b", "n": 1, "more": {"note": "c"}}],
        "words": [["d"]],
    }
    path = write(tmp_path, pa.table(columns), format)
    schema = tables.open_schema(Slice(str(path), format, None), None)
    assert list(tables.text_columns(schema)) == ["title", "meta.source", "meta.more.note"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_the_text_column_is_found_by_the_schema_alone(tmp_path: Path, format: str) -> None:
    """A table without rows has a text column too."""
    path = write(tmp_path, text_table([]), format)
    assert find_text_column([Slice(str(path), format, None)], None, None) == "text"
