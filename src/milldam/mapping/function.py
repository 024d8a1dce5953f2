"""Rows as they come -> batches -> the user's function -> columns.

Batches are greedy and exact: one ends where one row more would be too many or too large; a row larger than
`batch_bytes` is a batch of its own. They depend on the rows alone, not on the pieces in which these come.

The function is called as by `datasets.map`: columns that are not in `remove_columns` stay; those that it returns (as
dicts or HF's BatchEncoding) replace them or are added; an Arrow table, a pandas or polars frame replaces all. If it
returns the batch that it got, the columns in `remove_columns` are removed from that. Columns that pass through keep
their Arrow type and are not copied. Changes to the lists that it gets affect neither the columns that stay nor a second
call.

Holds one batch, what the function gets (Python lists, numpy arrays, or Arrow) and what it returns.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean
from milldam.mapping.settings import MapSettings
from milldam.sources.rows import Rows, column, column_names, joined, row_count, row_sizes, take
from milldam.stores.table.reader import columns_as

ALL = "all"
_FRAMES = 8

Columns = dict[str, Any]
"""Name -> values: a list, a numpy array, a tensor, an Arrow array; of one length."""


class Input(dict[str, Any]):
    """A batch or a row as the function gets it. If it is returned, the columns to remove are removed from it too."""

    def __or__(self, other: Any) -> Input:  # type: ignore[override]
        return Input({**self, **other})


class ResultError(InputError):
    """The function returned something that can't be used; the message says what to return instead."""

    row: int | None = None
    """Which one of the batch, where it was called with a row."""


class FunctionError(ResultError):
    """The function raised (`__cause__`): the traceback of user code, and what may help."""


def batches(rows: Iterable[Rows], batch_size: int, batch_bytes: int) -> Iterator[Rows]:
    """
    >>> list(batches([{"n": [1, 2]}, {"n": [3]}], batch_size=2, batch_bytes=100))
    [{'n': [1, 2]}, {'n': [3]}]
    """
    held: list[Rows] = []
    count = size = 0
    for piece in rows:
        total, start = row_count(piece), 0
        ends = np.cumsum(row_sizes(piece))
        while start < total:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + batch_bytes - size, side="right"))
            stop = min(total, start + batch_size - count, fitting)
            if stop <= start and held:
                yield joined(held)
                held, count, size = [], 0, 0
                continue
            stop = max(stop, start + 1)
            held.append(take(piece, start, stop))
            count, size = count + stop - start, size + int(ends[stop - 1]) - before
            start = stop
    if held:
        yield joined(held)


# ---- calls ----


class Caller:
    """Calls the function on batches of rows."""

    def __init__(self, settings: MapSettings) -> None:
        self._settings, self._function = settings, settings.function
        self.name = str(getattr(self._function, "__name__", type(self._function).__name__))

    def results(self, rows: Rows, first_row: int | None) -> tuple[list[Columns], list[tuple[int, Rows, str]]]:
        """The results for a batch, several if it was called row by row; and if it raises and rows may be set aside,
        those rows: number in the batch, row, what was raised."""
        # The function may leave us in another working directory: from ours lead the paths of input and output.
        with contextlib.chdir("."):
            try:
                return [self(rows, first_row)], []
            except FunctionError:
                if self._settings.on_error != "reject":
                    raise
            results: list[Columns] = []
            failed = []
            for number in range(row_count(rows)):
                row = take(rows, number, number + 1)
                try:
                    results.append(self(row, None if first_row is None else first_row + number))
                except FunctionError as error:
                    failed.append((number, row, f"{type(error.__cause__).__name__}: {error.__cause__}"))
            return results, failed

    def __call__(self, rows: Rows, first_row: int | None = None) -> Columns:
        """The columns of the result."""
        settings, known = self._settings, column_names(rows)
        removed = known if settings.remove_columns == ALL else settings.remove_columns
        missing = next((name for name in removed if name not in known), None)
        if missing is not None:
            there = f': there is no column "{missing}"; there are {", ".join(known)}.{did_you_mean(missing, known)}'
            raise ResultError(Setting("remove_columns"), there)
        kept = [name for name in known if name not in removed]
        return (self._batch if settings.batched else self._rows)(rows, first_row, kept)

    def _batch(self, rows: Rows, first_row: int | None, kept: list[str]) -> Columns:
        count = row_count(rows)
        indices = None if first_row is None else list(range(first_row, first_row + count))
        returned = self._call(_input(rows, self._settings.format), indices, rows, kept)
        if returned is None:
            return {name: column(rows, name) for name in kept}
        table = as_table(returned)
        if table is not None:
            return {name: table.column(name) for name in table.schema.names}
        if not isinstance(returned, Mapping):
            what = (
                f"a value of type {type(returned).__name__} was returned. Return a dict of columns, an Arrow table or "
            )
            raise ResultError(what, "None; for functions of one row there is ", Setting("batched", False), ".")
        for name, values in returned.items():
            if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
                what = f'column "{name}": {type(values).__name__} where a list or an array of values is wanted; '
                raise ResultError(what, "for functions of one row there is ", Setting("batched", False), ".")
        lengths = {str(name): len(values) for name, values in returned.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise ResultError(f"the columns that were returned are not of one length: {listed}.")
        left, length = [name for name in kept if name not in lengths], next(iter(lengths.values()), count)
        if left and length != count:
            raise _stays_beside(left, length, count)
        return {name: column(rows, name) for name in kept} | dict(zip(lengths, returned.values(), strict=True))

    def _rows(self, rows: Rows, first_row: int | None, kept: list[str]) -> Columns:
        """A row at a time."""
        results: list[Mapping[str, Any]] = []
        origins: list[int] = []
        for number, row in enumerate(_input_rows(rows, self._settings.format)):
            try:
                returned = self._call(row, None if first_row is None else first_row + number, rows, kept)
                returned = [{}] if returned is None else [returned] if isinstance(returned, Mapping) else returned
                if not isinstance(returned, list | tuple) or not all(isinstance(one, Mapping) for one in returned):
                    what = f"a value of type {type(returned).__name__} was returned. With "
                    wanted = " return a dict (a row), a list of dicts (any number of rows), or None."
                    raise ResultError(what, Setting("batched", False), wanted)
                left = [name for name in kept if not all(name in one for one in returned)]
                if len(returned) > 1 and left:
                    raise _stays_beside(left, len(returned), 1)
            except ResultError as error:
                error.row = number
                raise
            results += returned
            origins += [number] * len(returned)
        made = dict.fromkeys(name for result in results for name in result)
        columns: Columns = {}
        for name in dict.fromkeys([*kept, *made]):
            values: Any = column(rows, name) if name in column_names(rows) else [None] * row_count(rows)
            if name in made:  # what a row leaves out is what the input has, if anything
                found = (one[name] if name in one else values[at] for one, at in zip(results, origins, strict=True))
                columns[name] = [one.as_py() if isinstance(one, pa.Scalar) else one for one in found]
            else:
                is_list = isinstance(values, list)
                columns[name] = [values[at] for at in origins] if is_list else values.take(pa.array(origins, "int64"))
        return columns

    def _call(self, batch: Any, indices: Any, rows: Rows, kept: list[str]) -> Any:
        """What the function returns, without removed columns of the input that it only passes on."""
        arguments = [batch, indices] if self._settings.with_indices else [batch]
        try:
            returned = self._function(*arguments, **self._settings.fn_kwargs)
        except (Exception, SystemExit) as error:
            raise _raised_error(error, rows, batched=self._settings.batched) from error
        if not isinstance(returned, Input):
            return returned
        removed = set(column_names(rows)) - set(kept)
        return {name: values for name, values in returned.items() if name not in removed}


# ---- what the function gets ----


def _input(rows: Rows, format: str) -> Any:
    if isinstance(rows, dict):
        if format == "python":
            return Input({name: _copied(values) for name, values in rows.items()})
        try:
            rows = pa.RecordBatch.from_pydict(rows)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            what = f"the input has values that Arrow can't hold in one column ({error}). Use "
            raise ResultError(what, Setting("format", "python"), ", or read other columns.") from None
    columns = columns_as(rows, format)
    return Input(columns) if isinstance(columns, dict) else columns


def _copied(value: Any) -> Any:
    """Lists and dicts to the bottom, for the function to change as it likes; texts and numbers are shared."""
    if isinstance(value, list):
        holds_others = any(issubclass(kind, list | dict) for kind in set(map(type, value)))
        return [_copied(one) for one in value] if holds_others else value.copy()
    return {name: _copied(one) for name, one in value.items()} if isinstance(value, dict) else value


def _input_rows(rows: Rows, format: str) -> Iterator[Any]:
    if format == "python" and not isinstance(rows, dict):
        yield from map(Input, rows.to_pylist())
        return
    batch = _input(rows, format)
    if format == "arrow":
        yield from (batch.slice(number, 1) for number in range(batch.num_rows))
        return
    for values in zip(*batch.values(), strict=True):
        yield Input(zip(batch, values, strict=True))


# ---- what it returned, or raised ----


def as_table(returned: Any) -> pa.Table | pa.RecordBatch | None:
    """An Arrow table of what is one, or a frame of pandas or polars; None for anything else."""
    if isinstance(returned, pa.Table | pa.RecordBatch):
        return returned
    home = type(returned).__module__.partition(".")[0]
    if home == "pandas" and hasattr(returned, "columns"):
        return pa.Table.from_pandas(returned, preserve_index=False)
    return returned.to_arrow() if home == "polars" and hasattr(returned, "to_arrow") else None


def _stays_beside(left: list[str], returned: int, passed: int) -> ResultError:
    """More or fewer rows than the function got have no values of the input beside them."""
    what = f"{returned:,} rows were returned for {passed:,}, and columns of the input stay: {', '.join(left)}. "
    return ResultError(what, "Return values for them too, or leave them out: ", Setting("remove_columns", left), ".")


def _raised_error(error: BaseException, rows: Rows, *, batched: bool) -> FunctionError:
    """The traceback of user code, and a hint where a column or a value is not as expected."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    exception, columns = "".join(traceback.format_exception_only(error)).rstrip(), column_names(rows)
    lines = ["".join(traceback.format_list(frames[-_FRAMES:])) + exception]
    if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
        lines.append(f"The input has the columns {', '.join(columns)}.{did_you_mean(str(error.args[0]), columns)}")
    hint: tuple[object, ...] = ()
    met_list = re.search(r"\b(list|ndarray|ChunkedArray)\b", str(error))
    if batched and met_list and isinstance(error, AttributeError | TypeError):
        hint = "\nThe function gets a batch, a dict of lists; to call it with one row: ", Setting("batched", False), "."
    return FunctionError("\n".join(lines), *hint)
