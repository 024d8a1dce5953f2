"""What the user's function returned or raised: columns and rows of whatever kind, or errors that say what to do.

Results may be dicts, HF's BatchEncoding, Arrow tables, pandas or polars frames. Nothing is copied that need not be.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.rows import Rows, column, column_names

ALL = "all"
_FRAMES = 8
_OURS = "mapping/calling.py"

Columns = dict[str, Any]
"""Name -> values: a list, a numpy array, a tensor, an Arrow array; of one length."""


class FunctionError(InputError):
    """The function raised: the traceback of user code, and what may help."""

    row: int | None = None
    """Which one of the batch, where it was called with a row."""

    def __init__(self, said: str, *message: object) -> None:
        super().__init__(*message)
        self.said = said
        """The exception alone, on one line."""


class ResultError(InputError):
    """The function returned something that can't be used; the message says what to return instead."""

    row: int | None = None


# ---- what it returned ----


def stays_beside(left: list[str], returned: int, given: int) -> ResultError:
    """Other rows than were given have no values of the input beside them."""
    return ResultError(
        f"{returned:,} rows were returned for {given:,}, and columns of the input stay: {', '.join(left)}. "
        "Leave those out with ",
        Setting("remove_columns", left),
        " or ",
        Setting("remove_columns", ALL),
        ", or return values for them too.",
    )


def as_columns(returned: Any) -> Columns:
    """A dict of columns from whatever has columns: a dict, HF's BatchEncoding, Arrow, pandas, polars."""
    if isinstance(returned, Mapping):
        return {str(name): values for name, values in returned.items()}
    table = _as_table(returned)
    if table is None:
        raise ResultError(
            f"a value of type {type(returned).__name__} was returned. In batched mode return a dict of columns, such "
            'as {"length": [3, 5]}, an Arrow table, or None to leave the rows as they are',
            *_row_hint(returned),
            ".",
        )
    return {name: table.column(name) for name in table.schema.names}


def _row_hint(returned: Any) -> tuple[object, ...]:
    is_rows = isinstance(returned, list) and bool(returned) and isinstance(returned[0], Mapping)
    return ("; ", Setting("batched", False), " takes dicts and lists of dicts") if is_rows else ()


def _as_table(returned: Any) -> pa.Table | pa.RecordBatch | None:
    if isinstance(returned, pa.Table | pa.RecordBatch):
        return returned
    home = type(returned).__module__.partition(".")[0]
    if home == "pandas" and hasattr(returned, "columns"):
        return pa.Table.from_pandas(returned, preserve_index=False)
    return returned.to_arrow() if home == "polars" and hasattr(returned, "to_arrow") else None


def common_length(columns: Columns) -> int:
    lengths = {}
    for name, values in columns.items():
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise ResultError(
                f'column "{name}": {type(values).__name__} where a list or an array of values is wanted, one a row. '
                "With ",
                Setting("batched", False),
                " the function takes and returns one row.",
            )
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise ResultError(f"the columns that were returned are not of one length: {told}.")
    return next(iter(lengths.values()), 0)


def as_rows(returned: Any) -> Sequence[Mapping[str, Any] | None]:
    if returned is None or isinstance(returned, Mapping):
        return [returned]
    if isinstance(returned, list | tuple) and all(isinstance(one, Mapping) for one in returned):
        return returned
    table = _as_table(returned)
    if table is not None:
        rows: list[Mapping[str, Any] | None] = table.to_pylist()
        return rows
    flag = " To drop a row return [], to keep it None." if isinstance(returned, bool) else ""
    raise ResultError(
        f"a value of type {type(returned).__name__} was returned. With ",
        Setting("batched", False),
        f" return a dict (one row), a list of dicts (any number of rows), or None to leave the row as it is.{flag}",
    )


def gathered(name: str, results: list[Mapping[str, Any] | None], origins: list[int], rows: Rows) -> list[Any]:
    """A column of the rows that were returned; what one of them leaves out is what the input has."""
    known = column_names(rows)
    found = []
    for result, number in zip(results, origins, strict=True):
        if result is not None and name in result:
            found.append(result[name])
        elif name in known:
            value = column(rows, name)[number]
            found.append(value.as_py() if isinstance(value, pa.Scalar) else value)
        else:
            what = "None was returned" if result is None else f"{', '.join(map(str, result)) or 'nothing'} was returned"
            raise ResultError(
                f'column "{name}": returned for some rows and not for others ({what} for row {number} of the batch). '
                "Return the same columns for every row; None where there is no value."
            )
    return found


# ---- what it raised ----


def raised_error(error: BaseException, rows: Rows, *, batched: bool) -> FunctionError:
    """What the function raised, with its lines and hints."""
    said = "".join(traceback.format_exception_only(error)).rstrip()
    lines = "\n".join([*_user_lines(error), said, *_column_hint(error, column_names(rows))])
    return FunctionError(said.splitlines()[-1], lines, *(_list_hint(error) if batched else ()))


def _user_lines(error: BaseException) -> list[str]:
    """The traceback from the user's function on."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(_OURS)]
    lines = []
    for frame in frames[-_FRAMES:]:
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        source = linecache.getline(frame.filename, frame.lineno or 0).strip()
        lines += [f"    {source}"] if source else []
    return lines


def _column_hint(error: BaseException, columns: list[str]) -> list[str]:
    """For a wrong column, those there are."""
    if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
        return [f"The input has the columns {', '.join(columns)}.{did_you_mean(str(error.args[0]), columns)}"]
    return []


def _list_hint(error: BaseException) -> tuple[object, ...]:
    """For a function of one row that met a list."""
    if isinstance(error, AttributeError | TypeError) and re.search(r"\b(list|ndarray|ChunkedArray)\b", str(error)):
        return "\nThe function is given a batch, a dict of lists; for one row a call: ", Setting("batched", False), "."
    return ()
