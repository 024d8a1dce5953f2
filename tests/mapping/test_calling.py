"""What a function is given, what may come back, and the columns that are made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from milldam.mapping.function import Caller, FunctionError, ResultError
from milldam.mapping.schema import fit, to_array
from milldam.mapping.settings import MapSettings

ROWS = {"text": ["a", "bb", "ccc"], "id": [1, 2, 3]}
ARROW = pa.RecordBatch.from_pydict(ROWS, schema=pa.schema([("text", pa.string()), ("id", pa.int16())]))


def call(function: Any, rows: Any = ARROW, first_row: int | None = None, **rules: Any) -> dict[str, Any]:
    return Caller(MapSettings(source=None, function=function, **rules))(rows, first_row)


def values(columns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: to_array(name, column).to_pylist() for name, column in columns.items()}


# ---- a batch at a time ----


@pytest.mark.parametrize("rows", [ROWS, ARROW])
def test_what_is_returned_is_put_over_the_columns_of_the_input(rows: Any) -> None:
    """Columns that stay come first and in order, returned ones take their place or follow."""
    made = call(lambda batch: {"n": [len(text) for text in batch["text"]], "id": [0, 0, 0]}, rows)
    assert values(made) == {"text": ["a", "bb", "ccc"], "id": [0, 0, 0], "n": [1, 2, 3]}
    assert list(made) == ["text", "id", "n"]


def test_columns_that_pass_through_keep_their_arrow_type() -> None:
    """A 16-bit column is not widened on its way past a function, in batches or in rows."""
    assert call(lambda batch: {"n": [1, 2, 3]})["id"].type == pa.int16()
    assert call(lambda row: {"n": 1}, batched=False)["id"].type == pa.int16()
    assert call(lambda row: [{"n": 1}] if row["id"] > 1 else [], batched=False)["id"].type == pa.int16()


def test_other_lengths_need_the_input_columns_removed() -> None:
    """The error names the columns that are in the way, and the option."""
    with pytest.raises(ResultError, match=r"2 rows were returned for 3.*text, id.*remove_columns=\['text', 'id'\]"):
        call(lambda batch: {"n": [1, 2]})
    assert values(call(lambda batch: {"text": ["x"], "id": [9]})) == {"text": ["x"], "id": [9]}


@pytest.mark.parametrize("returned", [5, True, [{"n": 1}], "text", {"n": 5}, {"n": "abc"}])
def test_what_is_no_batch_is_refused_with_what_to_return(returned: Any) -> None:
    """A number, a flag, rows, a text, or a column that is one value."""
    with pytest.raises(ResultError, match="batched"):
        call(lambda batch: returned)


def test_functions_get_numpy_or_arrow_when_asked() -> None:
    """Numbers as arrays without nulls, texts as objects, fixed lists as two dimensions; Arrow as a table."""
    wide = pa.RecordBatch.from_pydict({"ids": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))})
    assert call(lambda batch: {"s": batch["ids"].sum(axis=1)}, wide, format="numpy")["s"].tolist() == [3, 7]
    ragged = pa.RecordBatch.from_pydict({"ids": [[1, 2], [3]]})
    assert call(lambda batch: {"n": [len(one) for one in batch["ids"]]}, ragged, format="numpy")["n"] == [2, 1]
    made = call(lambda table: table.append_column("n", pa.array([7, 8, 9])), format="arrow")
    assert values(made) == ROWS | {"n": [7, 8, 9]}
    made = call(lambda table: table.select(["id"]), ROWS, format="arrow", remove_columns="all")
    assert values(made) == {"id": [1, 2, 3]}


def test_indices_and_arguments_reach_the_function() -> None:
    """Row numbers second, `fn_kwargs` by name."""
    made = call(
        lambda batch, numbers, add: {"n": [one + add for one in numbers]},
        with_indices=True,
        first_row=10,
        fn_kwargs={"add": 5},
    )
    assert made["n"] == [15, 16, 17]
    made = call(lambda row, number: {"n": number}, with_indices=True, first_row=10, batched=False)
    assert made["n"] == [10, 11, 12]


# ---- a row at a time ----


@pytest.mark.parametrize("rows", [ROWS, ARROW])
def test_a_row_may_become_none_one_or_several(rows: Any) -> None:
    """A list of dicts is that many rows."""

    def parts(row: Any) -> Any:
        return [{"id": row["id"], "n": number} for number in range(row["id"] - 1)]

    made = call(parts, rows, batched=False, remove_columns=("text",))
    assert values(made) == {"id": [2, 3, 3], "n": [0, 0, 1]}


@pytest.mark.parametrize("rows", [ROWS, ARROW])
def test_columns_of_the_input_are_not_repeated_beside_several_rows(rows: Any) -> None:
    """As for batches: leave them out, or return values for them. One row for one, and none, keep them."""
    with pytest.raises(
        ResultError, match=r"2 rows were returned for 1, and columns of the input stay: text, id"
    ) as told:
        call(lambda row: [{"n": 0}] * (row["id"] - 1), rows, batched=False)
    assert told.value.row == 2
    made = call(lambda row: [{"n": 0}] * (row["id"] % 2), rows, batched=False)
    assert values(made) == {"text": ["a", "ccc"], "id": [1, 3], "n": [0, 0]}


# ---- what it raises ----


def test_an_exception_is_shown_with_the_users_lines() -> None:
    """The file, the line and the exception, without ours; and the columns there are for one that is missing."""

    def broken(batch: Any) -> Any:
        return batch["txet"]

    with pytest.raises(FunctionError) as caught:
        call(broken)
    told = str(caught.value)
    assert 'return batch["txet"]' in told and "mapping/calling.py" not in told.replace("tests/mapping", "")
    assert told.endswith("""KeyError: 'txet'\nThe input has the columns text, id. Did you mean "text"?""")


# ---- columns ----


@pytest.mark.parametrize(
    ("given_values", "kind", "made"),
    [
        ([1, None], pa.int32(), [1, None]),
        ([1], pa.float64(), [1.0]),
        ([[]], pa.list_(pa.int32()), [[]]),
        (["x"], pa.large_string(), ["x"]),
        (np.float32([0.5]), pa.float64(), [0.5]),
        ([[1, 2]], pa.list_(pa.int8(), 2), [[1, 2]]),
        ([{"x": 1}], pa.struct([("x", pa.int64()), ("y", pa.string())]), [{"x": 1, "y": None}]),
    ],
)
def test_values_are_cast_where_nothing_is_lost(given_values: Any, kind: pa.DataType, made: list[Any]) -> None:
    """Null to anything, integers to integers and floats, lists to lists."""
    assert fit({"a": to_array("a", given_values)}, pa.schema([("a", kind)])).column("a").to_pylist() == made


@pytest.mark.parametrize("wrong", [[1.5], ["x"], [2**40], [[1]], np.array([0.5]), [b"x"], [1, "x"]])
def test_values_that_a_type_does_not_hold_are_refused(wrong: Any) -> None:
    """No fraction is cut off; the error says column, expected and found."""
    with pytest.raises(ResultError, match='column "a"'):
        fit({"a": to_array("a", wrong)}, pa.schema([("a", pa.int32())]))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("as_arrow", [True, False])
def test_what_the_function_does_to_its_lists_stays_with_it(as_arrow: bool, batched: bool) -> None:
    """Columns that stay, and what a second call gets, are as they were read, nested values too."""
    columns = {"n": [[1], [2]], "d": [{"a": [1]}, {"a": [2]}], "t": ["x", "y"]}
    rows: Any = pa.RecordBatch.from_pydict(columns) if as_arrow else columns

    def grow(given: dict[str, Any]) -> dict[str, Any]:
        for value in given["n"] if batched else [given["n"]]:
            value.append(0)
        for value in given["d"] if batched else [given["d"]]:
            value["a"].append(0)
        given["t"] = None
        return {"m": [len(value) for value in given["n"]] if batched else len(given["n"])}

    for _ in range(2):
        made = values(call(grow, rows, batched=batched))
        assert made == {"n": [[1], [2]], "d": [{"a": [1]}, {"a": [2]}], "t": ["x", "y"], "m": [2, 2]}
