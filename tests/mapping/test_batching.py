"""Batches of rows: bounded in rows and bytes, the same however the rows arrive."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from milldam.mapping.function import batches
from milldam.sources.rows import Rows, byte_size, from_records, row_count, row_sizes, take

TEXTS = st.text(max_size=12)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"text": TEXTS, "ids": st.lists(st.integers(0, 9), max_size=5)},
        optional={"tags": st.lists(TEXTS, max_size=3), "n": st.integers(0, 9) | st.none()},
    ),
    max_size=30,
)
TYPES = pa.schema(
    [("text", pa.string()), ("ids", pa.list_(pa.int64())), ("tags", pa.list_(pa.string())), ("n", pa.int64())]
)


def records_of(rows: Rows) -> list[dict[str, Any]]:
    columns = rows if isinstance(rows, dict) else rows.to_pydict()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def as_rows(records: list[dict[str, Any]], *, arrow: bool) -> Rows:
    full = [{name: record.get(name) for name in TYPES.names} for record in records]
    return pa.RecordBatch.from_pylist(full, TYPES) if arrow else from_records(full, TYPES.names)


def pieces(rows: Rows, cuts: list[int]) -> list[Rows]:
    edges = sorted({0, row_count(rows), *(cut for cut in cuts if cut < row_count(rows))})
    return [take(rows, start, stop) for start, stop in pairwise(edges)]


def naive_batches(sizes: list[int], batch_size: int, batch_bytes: int) -> list[int]:
    """Rows in each batch, one row at a time."""
    counts: list[int] = []
    held = size = 0
    for one in sizes:
        if held and (held == batch_size or size + one > batch_bytes):
            counts.append(held)
            held = size = 0
        held, size = held + 1, size + one
    return [*counts, held] if held else counts


@given(RECORDS, st.lists(st.integers(0, 30), max_size=5), st.integers(1, 10), st.integers(1, 300), st.booleans())
def test_batches_are_greedy_and_do_not_depend_on_how_rows_arrive(
    records: list[dict[str, Any]], cuts: list[int], batch_size: int, batch_bytes: int, arrow: bool
) -> None:
    """Whatever the pieces in which rows come, batches are those that a loop over single rows would make."""
    rows = as_rows(records, arrow=arrow)
    made = list(batches(pieces(rows, cuts), batch_size, batch_bytes))
    assert [row_count(batch) for batch in made] == naive_batches(row_sizes(rows).tolist(), batch_size, batch_bytes)
    assert [record for batch in made for record in records_of(batch)] == records_of(rows)
    assert all(byte_size(batch) <= batch_bytes or row_count(batch) == 1 for batch in made)


NESTED = pa.schema(
    [
        ("struct", pa.struct([("a", pa.int32()), ("b", pa.large_string())])),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("fixed", pa.list_(pa.float32(), 2)),
        ("deep", pa.large_list(pa.list_(pa.binary()))),
        ("flag", pa.bool_()),
        ("none", pa.null()),
        ("dictionary", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def nested_record(k: int) -> dict[str, Any]:
    deep = [[b"z" * (k % 4)] * (k % 3)] * (k % 5)
    return {
        "struct": {"a": k, "b": "x" * k} if k % 4 else None,
        "map": [(f"k{j}", j) for j in range(k % 3)],
        "fixed": [0.5, float(k)],
        "deep": deep if k % 7 else None,
        "flag": k % 2 == 0,
        "none": None,
        "dictionary": "word" * (k % 3),
    }


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_size_of_a_row_is_its_own(start: int, stop: int) -> None:
    """In any slice of a batch of nested columns a row has the size that it has in the whole."""
    columns = [pa.array([nested_record(k)[field.name] for k in range(40)], field.type) for field in NESTED]
    rows = pa.record_batch(columns, schema=NESTED)
    start, stop = min(start, stop), max(start, stop)
    assert row_sizes(take(rows, start, stop)).tolist() == row_sizes(rows)[start:stop].tolist()
