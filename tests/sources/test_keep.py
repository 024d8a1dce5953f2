"""Fields kept beside the text come with the text of their record, whatever the format, and whatever is lost."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, plan

from milldam.dedup.preferred import ValueField, value_field
from milldam.errors import InputError
from milldam.sources.batch import TextRules
from milldam.sources.columns import head_values
from milldam.sources.reading import read_unit
from milldam.sources.units import Slice

Rows = list[tuple[Any, ...]]
ROWS = [{"text": f"document {number} é", "score": score} for number, score in enumerate([3, None, -1.5, 2e10, 0, 7])]


def read(path: Path, keep: tuple[str, ...], rules: TextRules = TEXT, shard_size: int = 1 << 30) -> Rows:
    """The text and the kept values of every document. The batches are those without fields."""
    rows: Rows = []
    for unit in plan(path, rules, shard_size):
        batches = list(read_unit(unit, rules, lambda _: None, keep))
        plain = list(read_unit(unit, rules, lambda _: None))
        assert [one.texts for one in batches] == [one.texts for one in plain]
        assert all(one.columns is None for one in plain)
        for batch in batches:
            assert batch.columns is not None and batch.columns.schema.names == list(keep)
            values = [column.to_pylist() for column in batch.columns.columns]
            rows += zip(batch.texts.to_pylist(), *values, strict=True)
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        write_table(path, pa.Table.from_pylist(rows))
    return path


def write_table(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=77)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=77)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt"])
def test_every_format_gives_the_fields_beside_the_text(tmp_path: Path, ending: str) -> None:
    """As the input's types have them; null where a record has none."""
    path, rules = tmp_path / f"a.{ending}", TEXT
    if ending == "txt":
        rules, wanted = TextRules(documents="line"), [(row["text"], None, None) for row in ROWS]
        path.write_text("".join(f"{row['text']}\n" for row in ROWS))
    else:
        write_rows(path, ROWS)
        in_text = ending in ("csv", "tsv")
        scores = ["" if row["score"] is None else str(row["score"]) for row in ROWS] if in_text else None
        found = scores or [row["score"] for row in ROWS]
        wanted = [(row["text"], score, None) for row, score in zip(ROWS, found, strict=True)]  # type: ignore[arg-type]
    assert read(path, ("score", "other"), rules) == wanted


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_nested_fields_are_reached_by_dots(tmp_path: Path, ending: str) -> None:
    """Also within the object that holds the text; and whole objects are kept."""
    rows = [{"doc": {"text": row["text"], "facts": {"score": row["score"]}}, "id": 1} for row in ROWS]
    path, rules = write_rows(tmp_path / f"a.{ending}", rows), TextRules(text_column="doc.text")
    wanted = [(row["text"], row["score"], 1) for row in ROWS]
    assert read(path, ("doc.facts.score", "id"), rules) == wanted
    assert read(path, ("doc.text.score",), rules)[0] == (ROWS[0]["text"], None)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from(["0.5", "x", [1]]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.one_of(st.text(max_size=20), st.none()), VALUES, st.integers(0, 9)), max_size=30))
def test_fields_stay_with_their_texts_when_lines_are_lost(
    tmp_path_factory: Any, rows: list[tuple[Any, Any, int]]
) -> None:
    """Broken lines, lines without the text or the field, blank ones: what is read is what json.loads gives."""
    lines, wanted = [], []
    for number, (text, value, kind) in enumerate(rows):
        record = {"n": number, "of": value, "text": text}
        if kind == 8:
            del record["of"]
        line = json.dumps(record)
        lines.append({6: line[:-1], 7: "", 9: "[]"}.get(kind, line))
        if lines[-1] == line and isinstance(text, str) and text.encode("utf-8", "replace").decode() == text:
            wanted.append((text, number))
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert [(text, number) for text, number, _ in read(path, ("n", "of"), shard_size=100)] == wanted


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
def test_fields_stay_with_their_texts_when_rows_are_lost(tmp_path: Path, ending: str) -> None:
    """Rows that are null, no UTF-8, or of another width, at random; a kept text that is no UTF-8 is mended."""
    rng = random.Random(ending)
    kinds = [rng.choice(["plain", "plain", "lost"]) for _ in range(500)]
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        lost = [b"\xff\xfe,%d\n", b"a,b,%d\n", b"%d\n"]
        lines = (b"text %d,%d\n" % (n, n) if kind == "plain" else rng.choice(lost) % n for n, kind in enumerate(kinds))
        path.write_bytes(b"text,by\n" + b"".join(lines))
        by = "{}"
    else:
        texts = [
            f"text {n}".encode() if kind == "plain" else rng.choice([None, b"\xff"]) for n, kind in enumerate(kinds)
        ]
        names = pa.array([b"\xff%d" % n for n in range(500)], pa.binary()).view(pa.string())
        write_table(path, pa.table({"text": pa.array(texts, pa.binary()), "by": names}))
        by = "\N{REPLACEMENT CHARACTER}{}"
    assert read(path, ("by",)) == [(f"text {n}", by.format(n)) for n, kind in enumerate(kinds) if kind == "plain"]


# ---- numbers and dates of a field ----


def field_of(path: Path, name: str = "of") -> ValueField:
    slices = [Slice(str(path), path.suffix[1:], None)]
    return value_field(name, *head_values(slices, name, "prefer.field"), "prefer.field")


@pytest.mark.parametrize(
    ("values", "kind", "numbers"),
    [
        ([3, -0.5, None, True], "number", [3.0, -0.5, None, 1.0]),
        ([" 0.25 ", "TRUE", "1e3", "", "soon", "1" * 100, "nan"], "number", [0.25, 1.0, 1e3, None, None, None, None]),
        ([[1]], "refused", []),
        (["soon"], "refused", []),
        (["2024", "2024-05"], "date", [1704067200e6, 1714521600e6]),
        (["1970-01-02", "1970-01-01T02:00:00.5+02:00", 7], "date", [86400e6, 5e5, None]),
        (["2024", "x"], "number", [2024.0, None]),
        ([None, None], "number", [None, None]),
    ],
)
def test_what_texts_and_numbers_of_json_count_as(
    tmp_path: Path, values: list[Any], kind: str, numbers: list[Any]
) -> None:
    """What a text spells, numbers or dates, whichever the first one that is unmistakable tells."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a", "of": value} for value in values])
    if kind == "refused":
        with pytest.raises(
            InputError, match=r'field "of" holds neither numbers nor dates, but .*. Change prefer.field'
        ):
            field_of(path)
        return
    assert field_of(path) == ValueField("of", kind)  # type: ignore[arg-type]
    (unit,) = plan(path, TEXT)
    (batch,) = read_unit(unit, TEXT, print, ("of",))
    assert batch.columns is not None
    found = field_of(path).of_column(batch.columns.column(0)).tolist()
    assert [None if one != one else one for one in found] == numbers


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_field_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, ending: str) -> None:
    """By name, with the nearest; so is plain text."""
    path = write_rows(tmp_path / f"h.{ending}", [{"text": "a", "score": 1, "title": "Of Mice"}])
    with pytest.raises(InputError, match=r'no field "scroe" .* found "text", "score", "title". Did you mean "score"?'):
        field_of(path, "scroe")
    with pytest.raises(InputError, match="Plain text has no fields"):
        head_values([Slice("a.txt", "txt", None)], "score", "s")
