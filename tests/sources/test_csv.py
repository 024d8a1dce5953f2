"""CSV and TSV are read as Python's csv module reads them, at any size of shard and block."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, Result, read, small_blocks

from milldam.sources.batch import Reject, TextRules
from milldam.sources.rows import FileReader, Places
from milldam.sources.units import Slice

SIZES = {"shard_size": st.integers(1, 300), "block": st.integers(8, 120)}


def read_csv(folder: Path, data: str | bytes, shard_size: int = 1 << 30, *, name: str = "a.csv") -> Result:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read(path, TEXT, shard_size)


def naive_rows(data: str, delimiter: str = ",") -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(data, newline=""), delimiter=delimiter) if row]


# ---- well-formed ----

fields = st.lists(
    st.sampled_from(["a", "word ", "é", "🙂", ",", '"', '""', "\n", "\r\n", "\t", " ", "x" * 15]), max_size=12
).map("".join)


@given(
    rows=st.lists(st.tuples(fields, fields), max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    format=st.sampled_from(["csv", "tsv"]),
    shard_size=SIZES["shard_size"],
    block=SIZES["block"],
)
def test_rows_that_csv_writes_come_back_once_in_order(
    tmp_path: Path,
    rows: list[tuple[str, str]],
    end: str,
    quoting: int,
    format: str,
    shard_size: int,
    block: int,
) -> None:
    """With quoted delimiters, quotes and line ends, from any shards and blocks."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter="," if format == "csv" else "\t", lineterminator=end, quoting=quoting)
    writer.writerows([("id", "text"), *rows])
    with small_blocks(block):
        result = read_csv(tmp_path, out.getvalue(), shard_size, name=f"a.{format}")
    assert result.texts == [text for _, text in rows]
    assert result.rejects == []


# ---- as people write it ----

loose = st.lists(
    st.sampled_from(["a", "b ", '"', '""', ",", "\n", "\r\n", '"a"', ',"', '",', '"\n', "é"]), max_size=40
).map("".join)


@given(body=loose, shard_size=SIZES["shard_size"], block=SIZES["block"])
@example(body='x"y,"b""\nccccccccccccc"\n', shard_size=1000, block=20)
def test_stray_quotes_are_read_as_by_the_csv_module(tmp_path: Path, body: str, shard_size: int, block: int) -> None:
    """Inside unquoted fields, behind closing quotes, never closed: the same rows, or rejects by the header."""
    data = "id,text\n" + body
    rows = naive_rows(data)[1:]
    with small_blocks(block):
        result = read_csv(tmp_path, data, shard_size)
    assert result.texts == [row[1] for row in rows if len(row) == 2]
    assert result.reasons == ({"bad_row": bad} if (bad := sum(len(row) != 2 for row in rows)) else {})


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ('1,"a ""quoted"" word"\n', ['a "quoted" word']),
        ('1,"a\nb\r\nc"\n', ["a\nb\r\nc"]),
        ('1,5" disk\n2,b\n', ['5" disk', "b"]),
        ('1,"a"b\n', ["ab"]),
        ("1,\n2,x\n", ["", "x"]),
        ('1,""\n2,x\n', ["", "x"]),
        ("1,NULL\n2,nan\n3,1.50\n4,true\n", ["NULL", "nan", "1.50", "true"]),
        ("1, spaced \n", [" spaced "]),
        ("1,last", ["last"]),
        ("\n1,a\n\n2,b\n\n", ["a", "b"]),
    ],
)
def test_fields_are_text_as_they_stand(tmp_path: Path, body: str, texts: list[str]) -> None:
    """Never numbers, truth values or nulls; nothing is trimmed."""
    result = read_csv(tmp_path, "id,text\n" + body)
    assert (result.texts, result.rejects) == (texts, [])


# ---- rejects ----


# ---- rows ----


@given(rows=st.lists(st.tuples(fields, fields, fields), max_size=10), block=SIZES["block"])
def test_rows_have_the_wanted_columns_whole_however_large(
    tmp_path: Path, rows: list[tuple[str, str, str]], block: int
) -> None:
    """A giant record is put together; one with a field too few is rejected with its line and counted in its place."""
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("a", "b", "c"), ("1" * 300, "2"), *rows, ("last", "", "é" * 300)])
    rejects: list[Reject] = []
    reader, places = FileReader(TextRules(), ("c", "a")), Places()
    with small_blocks(block):
        read_back = list(reader.rows([Slice(str(tmp_path / "a.csv"), "csv", None)], rejects.append, places))
    found = [(row["a"], row["c"]) for batch in read_back for row in batch.to_pylist()]
    assert found == [(a, c) for a, b, c in rows] + [("last", "é" * 300)]
    assert [(reject.reason, reject.line) for reject in rejects] == [("bad_row", 2)]
    assert [place.first for place in places.of(len(rows), len(rows) + 1)] == [len(rows) + 1]
