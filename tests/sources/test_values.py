"""The number of a field comes with the text of its record, whatever the format, and whatever is lost on the way."""

from __future__ import annotations

import csv
import json
import math
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, plan

from milldam.errors import InputError
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_value_field
from milldam.sources.reading import read_unit
from milldam.sources.units import Slice
from milldam.sources.values import ValueField

SCORE, DAY = ValueField("score"), ValueField("day", "date")
Pairs = list[tuple[str, float | None]]


def read(path: Path, field: ValueField, rules: TextRules = TEXT, shard_size: int = 1 << 30) -> Pairs:
    """(text, value) of every document; None where there is no value. The batches are those without a field."""
    pairs: Pairs = []
    for unit in plan(path, rules, shard_size):
        batches = list(read_unit(unit, rules, lambda _: None, str(path.parent), field))
        plain = list(read_unit(unit, rules, lambda _: None, str(path.parent)))
        assert [one.texts for one in batches] == [one.texts for one in plain]
        assert all(one.values is None for one in plain)
        for batch in batches:
            assert batch.values is not None
            numbers = [None if math.isnan(value) else value for value in batch.values.tolist()]
            pairs += zip(batch.texts.to_pylist(), numbers, strict=True)
    return pairs


# ---- values ----


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (-0.5, -0.5),
        (True, 1.0),
        (" 0.25 ", 0.25),
        ("TRUE", 1.0),
        (Decimal("1.5"), 1.5),
        ("1e3", 1000.0),
        (10**400, None),
        (None, None),
        ("", None),
        ("soon", None),
        ("2024-05-01", None),
        ([1], None),
        ({"a": 1}, None),
        ("1" * 100, None),
    ],
)
def test_what_counts_as_a_number(value: Any, number: float | None) -> None:
    """What a text spells is taken as such; anything else is no value."""
    found = SCORE.of(value)
    assert (None if math.isnan(found) else found) == number


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("2024", datetime(2024, 1, 1)),
        ("2024-05", datetime(2024, 5, 1)),
        ("2024-05-07", datetime(2024, 5, 7)),
        ("2024-05-07T10:00:00.25", datetime(2024, 5, 7, 10, 0, 0, 250_000)),
        ("2024-05-07 10:00:00Z", datetime(2024, 5, 7, 10)),
        ("2024-05-07T12:00:00+02:00", datetime(2024, 5, 7, 10)),
        (date(1969, 12, 31), datetime(1969, 12, 31)),
        ("2024-13-01", None),
        (1715076000, None),
        (None, None),
    ],
)
def test_what_counts_as_a_date(value: Any, meant: datetime | None) -> None:
    """ISO 8601, UTC where no zone is named."""
    found = DAY.of(value)
    assert (None if math.isnan(found) else found) == (meant and meant.replace(tzinfo=UTC).timestamp() * 1e6)


# ---- formats ----

ROWS = [{"text": f"document {number} é", "score": score} for number, score in enumerate([3, None, -1.5, 2e10, 0, 7])]
WANTED: Pairs = [(row["text"], row["score"]) for row in ROWS]  # type: ignore[misc]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writerow(rows[0])
            writer.writerows(row.values() for row in rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_format_gives_the_value_beside_the_text(tmp_path: Path, ending: str) -> None:
    """Numbers, and what is missing."""
    assert read(write_rows(tmp_path / f"a.{ending}", ROWS), SCORE) == WANTED
    assert read(write_rows(tmp_path / f"b.{ending}", ROWS), ValueField("other")) == [(text, None) for text, _ in WANTED]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_nested_fields_are_reached_by_dots(tmp_path: Path, ending: str) -> None:
    """Also within the object that holds the text."""
    rows = [{"doc": {"text": row["text"], "facts": {"score": row["score"]}}, "id": 1} for row in ROWS]
    path = write_rows(tmp_path / f"a.{ending}", rows)
    assert read(path, ValueField("doc.facts.score"), TextRules(text_column="doc.text")) == WANTED
    assert read(path, ValueField("doc.text.score"), TextRules(text_column="doc.text"))[0] == (WANTED[0][0], None)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([5, None, 7], pa.uint8()), "number"),
        (pa.array([True, None, False]), "number"),
        (pa.array([Decimal("5.5"), None, Decimal("7")]), "number"),
        (pa.array(["5", None, "x"]).dictionary_encode(), "number"),
        (pa.array([5.0, None, math.nan], pa.float32()), "number"),
        (pa.array([datetime(2024, 1, 1), None, datetime(1960, 1, 1)], pa.timestamp("ns")), "date"),
        (pa.array([datetime(2024, 1, 1), None, datetime(2025, 1, 1)], pa.timestamp("s", "Europe/Berlin")), "date"),
        (pa.array([date(2024, 1, 1), None, date(2025, 1, 1)]), "date"),
        (pa.array([b"2024-01-01", None, b"\xff"]), "date"),
    ],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_of_every_type_are_read(tmp_path: Path, column: pa.Array, kind: Any, ending: str) -> None:
    """As the values of Python would be; what the field is, its type or its first texts tell."""
    path = tmp_path / f"a.{ending}"
    table = pa.table({"text": ["a", "b", "c"], "of": column})
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    field = find_value_field([Slice(str(path), ending, None)], "of", None, "prefer.field")
    assert field == ValueField("of", kind)
    numbers = [value for _, value in read(path, field)]
    plain = [value.decode("latin-1") if isinstance(value, bytes) else value for value in column.to_pylist()]
    expected = [field.of(value.to_pydatetime() if hasattr(value, "to_pydatetime") else value) for value in plain]
    assert numbers == [None if math.isnan(one) else one for one in expected]
    assert numbers[0] is not None and numbers[1] is None


# ---- records that are lost, and large ones ----

SCORES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["0.5", "x", "2024-01-01", [1]]),
)
TEXTS = st.one_of(st.text(max_size=20), st.none(), st.integers())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TEXTS, SCORES, st.integers(0, 9)), max_size=30))
def test_values_stay_with_their_texts_when_lines_are_lost(
    tmp_path_factory: Any, rows: list[tuple[Any, Any, int]]
) -> None:
    """Broken lines, lines without the text or the field, blank ones: what is read is what json.loads gives."""
    lines, wanted = [], Pairs()
    for text, score, kind in rows:
        record = {"id": 1, "score": score, "text": text} if kind % 2 else {"text": text, "score": score}
        if kind == 8:
            del record["score"]
        line = json.dumps(record)
        lines.append({6: line[:-1], 7: "", 9: "[]"}.get(kind, line))
        if lines[-1] == line and isinstance(text, str) and text.encode("utf-8", "replace").decode() == text:
            value = SCORE.of_record(json.loads(line))
            wanted.append((text, None if math.isnan(value) else value))
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert read(path, SCORE, shard_size=100) == wanted


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
def test_values_stay_with_their_texts_when_rows_are_lost(tmp_path: Path, ending: str) -> None:
    """Rows that are null, no UTF-8, or of another width, at random."""
    rng = random.Random(ending)
    kinds = [rng.choice(["plain", "plain", "lost"]) for _ in range(500)]
    wanted = [(f"text {number}", float(number)) for number, kind in enumerate(kinds) if kind == "plain"]
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        lost = [b"\xff\xfe,%d\n", b"a,b,%d\n", b"%d\n"]
        rows = (
            b"text %d,%d\n" % (number, number) if kind == "plain" else rng.choice(lost) % number
            for number, kind in enumerate(kinds)
        )
        path.write_bytes(b"text,score\n" + b"".join(rows))
    else:
        texts = [
            f"text {n}".encode() if kind == "plain" else rng.choice([None, b"\xff"]) for n, kind in enumerate(kinds)
        ]
        table = pa.table({"text": pa.array(texts, pa.binary()), "score": np.arange(500.0)})
        if ending == "parquet":
            pq.write_table(table, path, row_group_size=77)
        else:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=77)
    assert read(path, SCORE) == wanted


# ---- which field ----


def head(tmp_path: Path, rows: list[dict[str, Any]], ending: str = "jsonl") -> Slice:
    return Slice(str(write_rows(tmp_path / f"h.{ending}", rows)), ending, None)


def test_the_kind_is_told_by_the_first_value_there_is(tmp_path: Path) -> None:
    """Also when the first files have none."""
    empty = head(tmp_path, [{"text": "a", "day": None}])
    dated = Slice(
        str(write_rows(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "b", "day": "2024-05"}])), "jsonl", None
    )
    assert find_value_field([empty, dated], "day", None, "s") == ValueField("day", "date")
    assert find_value_field([empty], "day", None, "s") == ValueField("day", "number")


def test_a_field_that_few_records_have_is_found(tmp_path: Path) -> None:
    """One in a thousand, and not among the first."""
    rows = [{"text": "a"} for _ in range(1000)] + [{"text": "b", "facts": {"score": 1}}]
    assert find_value_field([head(tmp_path, rows)], "facts.score", None, "s") == ValueField("facts.score")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_field_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, ending: str) -> None:
    """By name, with the nearest; so is one of other texts, and plain text."""
    rows = [{"text": "a", "score": 1, "title": "Of Mice"}]
    with pytest.raises(InputError, match=r'no field "scroe" .* found "text", "score", "title". Did you mean "score"?'):
        find_value_field([head(tmp_path, rows, ending)], "scroe", None, "dedup.near.prefer.field")
    with pytest.raises(InputError, match=r'"title" holds neither numbers nor dates, but "Of Mice". Change dedup.near'):
        find_value_field([head(tmp_path, rows, ending)], "title", None, "dedup.near.prefer.field")
    with pytest.raises(InputError, match="Plain text has no fields"):
        find_value_field([Slice("a.txt", "txt", None)], "score", None, "dedup.near.prefer.field")
