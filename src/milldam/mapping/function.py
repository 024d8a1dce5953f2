"""Rows as they come -> batches -> the user's function -> columns.

Batches are greedy and exact: one ends where one row more would be too many, or too large; a row larger than
`batch_bytes` is a batch of its own. They depend on the rows alone, not on the pieces in which these come.

The function is called as by `datasets.map`: columns that are not in `remove_columns` stay, those that it returns (as
dicts or HF's BatchEncoding) take their place or are added; an Arrow table, a pandas or polars frame takes the place of
all. From a batch that it was given and returns itself, the columns in `remove_columns` go. Columns that are passed
through keep their Arrow type and are not copied. What it does to the lists that it is given changes neither the columns
that stay nor what a second call gets. It may be async: a batch is awaited before the next one is read; the rows of a
batch run concurrently, and their results come in the order of the rows.

Holds one batch, what the function is given (Python lists, numpy arrays, or Arrow) and what it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.rows import Rows, column, column_names, joined, row_count, row_sizes, take
from milldam.stores.table.reader import columns_as

ALL = "all"
_FRAMES = 8
_OURS = "mapping/function.py"


class Given(dict[str, Any]):
    """A batch or a row as the function gets it. Returned itself, it also loses the columns that are to be removed."""

    def __or__(self, other: Any) -> Given:  # type: ignore[override]
        return Given({**self, **other})

    def copy(self) -> Given:
        return Given(self)


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
    table = as_table(returned)
    if table is None:
        are_rows = isinstance(returned, list) and bool(returned) and isinstance(returned[0], Mapping)
        raise ResultError(
            f"a value of type {type(returned).__name__} was returned. In batched mode return a dict of columns, such "
            'as {"length": [3, 5]}, an Arrow table, or None to leave the rows as they are',
            *(("; ", Setting("batched", False), " takes dicts and lists of dicts") if are_rows else ()),
            ".",
        )
    return {name: table.column(name) for name in table.schema.names}


def as_table(returned: Any) -> pa.Table | pa.RecordBatch | None:
    """An Arrow table of what is one, or a frame of pandas or polars; None for anything else."""
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
    table = as_table(returned)
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
    """What the function raised: the traceback of user code, and a hint where a column or a value is not as expected."""
    said, columns = "".join(traceback.format_exception_only(error)).rstrip(), column_names(rows)
    lines = [*_user_lines(error), said]
    if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
        lines.append(f"The input has the columns {', '.join(columns)}.{did_you_mean(str(error.args[0]), columns)}")
    hint: tuple[object, ...] = ()
    met_list = re.search(r"\b(list|ndarray|ChunkedArray)\b", str(error))
    if batched and met_list and isinstance(error, AttributeError | TypeError):
        hint = "\nThe function is given a batch, a dict of lists; for one row a call: ", Setting("batched", False), "."
    return FunctionError(said.splitlines()[-1], "\n".join(lines), *hint)


def _user_lines(error: BaseException) -> Iterator[str]:
    """The traceback from the user's function on."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(_OURS)]
    for frame in frames[-_FRAMES:]:
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        if frame.line:
            yield f"    {frame.line}"


# ---- calls ----


@dataclass(frozen=True, slots=True)
class Results:
    """What the function made of a batch; more than one where it was called row by row."""

    columns: list[Columns]
    failed: list[tuple[int, Rows, str]]
    """(its number in the batch, the row, what the function raised) of rows to set aside."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """How rows become batches, how the function is called, and what becomes of the columns that it was given."""

    batched: bool = True
    batch_size: int = 1000
    batch_bytes: int = 8 * 10**6
    format: str = "python"
    with_indices: bool = False
    input_columns: tuple[str, ...] | None = None
    """Give these as positional arguments, in place of a dict."""
    remove_columns: tuple[str, ...] | str = ()
    """Input columns that the result leaves out; "all": all of them."""
    on_error: str = "raise"
    """ "reject": set the rows aside on which the function raises."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls `function` on batches of rows."""

    function: Callable[..., Any]
    rules: CallRules = CallRules()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, rows: Rows, first_row: int | None = None) -> Columns:
        """The columns of the result: of as many rows as the function made of these."""
        self._check_columns(rows)
        return self._batch(rows, first_row) if self.rules.batched else self._rows(rows, first_row)

    def results(self, rows: Rows, first_row: int | None) -> Results:
        """The same; where the function raises and rows may be set aside, each row is tried by itself."""
        # The function may leave us in another working directory: from ours lead the paths of input and output.
        with contextlib.chdir("."):
            try:
                return Results([self(rows, first_row)], [])
            except FunctionError:
                if self.rules.on_error != "reject":
                    raise
            results = Results([], [])
            for number in range(row_count(rows)):
                row = take(rows, number, number + 1)
                try:
                    results.columns.append(self(row, None if first_row is None else first_row + number))
                except FunctionError as error:
                    results.failed.append((number, row, error.said))
            return results

    @property
    def name(self) -> str:
        """Of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def kept(self, rows: Rows) -> list[str]:
        """The input columns that the result has, unless the function puts others in their place."""
        removed = self.rules.remove_columns
        return [] if removed == ALL else [name for name in column_names(rows) if name not in removed]

    def _check_columns(self, rows: Rows) -> None:
        known = column_names(rows)
        removed = () if isinstance(self.rules.remove_columns, str) else self.rules.remove_columns
        for option, names in (("remove_columns", removed), ("input_columns", self.rules.input_columns or ())):
            for name in names:
                if name not in known:
                    hint = did_you_mean(name, known)
                    there = f': there is no column "{name}"; there are {", ".join(known)}.{hint}'
                    raise ResultError(Setting(option), there)

    # ---- a batch at a time ----

    def _batch(self, rows: Rows, first_row: int | None) -> Columns:
        count = row_count(rows)
        indices = None if first_row is None else list(range(first_row, first_row + count))
        returned = self._result(self._call(_given(rows, self.rules.format), indices), rows)
        kept = {name: column(rows, name) for name in self.kept(rows)}
        if returned is None:
            return kept
        made = as_columns(self._without_removed(returned, rows))
        length = common_length(made)
        if as_table(returned) is not None:
            return made
        left = [name for name in kept if name not in made]
        if made and left and length != count:
            raise stays_beside(left, length, count)
        return kept | made

    def _without_removed(self, returned: Any, rows: Rows) -> Any:
        if not isinstance(returned, Given):
            return returned
        removed = set(column_names(rows)) - set(self.kept(rows))
        return {name: values for name, values in returned.items() if name not in removed}

    def _call(self, given: Any, indices: Any) -> Any:
        """What the function returns, or a `_Raised`; of an async one, what has to be awaited."""
        names = self.rules.input_columns
        arguments = [given] if names is None else [given[name] for name in names]
        if self.rules.with_indices:
            arguments.append(indices)
        try:
            return self.function(*arguments, **self.kwargs)
        except (Exception, SystemExit) as error:
            return _Raised(error)

    def _result(self, returned: Any, rows: Rows) -> Any:
        """What a call came to. Raises FunctionError."""
        if inspect.isawaitable(returned):
            returned = _await_all([returned])[0]
        if not isinstance(returned, _Raised):
            return returned
        raise raised_error(returned.error, rows, batched=self.rules.batched) from returned.error

    # ---- a row at a time ----

    def _rows(self, rows: Rows, first_row: int | None) -> Columns:
        results: list[Mapping[str, Any] | None] = []
        origins: list[int] = []
        kept, tables = self.kept(rows), 0
        for number, result in enumerate(self._calls(rows, first_row)):
            try:
                value = self._without_removed(self._result(result, rows), rows)
                returned, is_table = as_rows(value), as_table(value) is not None
                tables += is_table
                if tables not in (0, number + 1):
                    raise ResultError("a table was returned for some rows and not for others. Return one kind.")
                if len(returned) > 1 and not is_table:
                    left = [name for name in kept if not all(row and name in row for row in returned)]
                    if left:
                        raise stays_beside(left, len(returned), 1)
            except (FunctionError, ResultError) as error:
                error.row = number
                raise
            results += returned
            origins += [number] * len(returned)
        names = list(dict.fromkeys(name for result in results if result is not None for name in result))
        made = {name: gathered(name, results, origins, rows) for name in names}
        order = dict.fromkeys(made if tables else [*kept, *made])
        return {name: made[name] if name in made else _at(rows, name, origins) for name in order}

    def _calls(self, rows: Rows, first_row: int | None) -> Iterator[Any]:
        """What each row's call came to; an async function works on all of them at a time."""
        numbered = enumerate(_given_rows(rows, self.rules.format))
        calls = (self._call(given, None if first_row is None else first_row + number) for number, given in numbered)
        function = self.function
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        return iter(_await_all(list(calls))) if is_async else calls


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


# ---- async functions ----


def _await_all(results: list[Any]) -> list[Any]:
    """The results in order, with what has to be awaited run concurrently; what it raises as a `_Raised`."""

    async def all_awaited() -> list[Any]:
        return await asyncio.gather(*map(_awaited, results))

    return asyncio.run_coroutine_threadsafe(all_awaited(), _event_loop()).result()


async def _awaited(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:
        return _Raised(error)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls in this process, so that clients stay connected; in a thread of its own, since the caller may
    be in a loop already, as every notebook is."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="milldam-async", daemon=True).start()
    return loop


# ---- what the function is given ----


def _given(rows: Rows, format: str) -> Any:
    if isinstance(rows, dict):
        if format == "python":
            return Given({name: _copied(values) for name, values in rows.items()})
        rows = _as_arrow(rows, format)
    given = columns_as(rows, format)
    return Given(given) if isinstance(given, dict) else given


def _copied(value: Any) -> Any:
    """Lists and dicts to the bottom, for the function to change as it likes; texts and numbers are shared."""
    if isinstance(value, list):
        holds_others = any(issubclass(kind, list | dict) for kind in set(map(type, value)))
        return [_copied(one) for one in value] if holds_others else value.copy()
    return {name: _copied(one) for name, one in value.items()} if isinstance(value, dict) else value


def _as_arrow(rows: dict[str, list[Any]], format: str) -> pa.RecordBatch:
    try:
        return pa.RecordBatch.from_pydict(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ResultError(
            f"the input has values that Arrow can't hold in one column ({error}), so that ",
            Setting("format", format),
            " is not possible. Use ",
            Setting("format", "python"),
            ", or read other columns with ",
            Setting("columns", ["..."]),
            ".",
        ) from None


def _given_rows(rows: Rows, format: str) -> Iterator[Any]:
    if format == "arrow":
        table = _given(rows, format)
        yield from (table.slice(number, 1) for number in range(table.num_rows))
    elif format == "python" and not isinstance(rows, dict):
        yield from map(Given, rows.to_pylist())
    else:
        columns = _given(rows, format)
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            yield Given(zip(names, values, strict=True))


def _at(rows: Rows, name: str, origins: list[int]) -> Any:
    values = column(rows, name)
    if origins == list(range(row_count(rows))):
        return values
    return [values[at] for at in origins] if isinstance(values, list) else values.take(pa.array(origins, "int64"))


# ---- batches ----


def batches(rows: Iterable[Rows], batch_size: int, batch_bytes: int) -> Iterator[Rows]:
    """
    >>> list(batches([{"n": [1, 2]}, {"n": [3]}], batch_size=2, batch_bytes=100))
    [{'n': [1, 2]}, {'n': [3]}]
    """
    held: list[Rows] = []
    count = size = 0
    for piece in rows:
        total = row_count(piece)
        if total == 0:
            continue
        ends = np.cumsum(row_sizes(piece))
        start = 0
        while start < total:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + batch_bytes - size, side="right"))
            stop = min(total, start + batch_size - count, fitting)
            if stop <= start and not held:
                stop = start + 1
            if stop > start:
                held.append(take(piece, start, stop))
                count, size = count + stop - start, size + int(ends[stop - 1]) - before
                start = stop
            if start < total or count >= batch_size or size >= batch_bytes:
                if start == total:
                    piece = {}  # not held here while it is worked on
                count = size = 0
                held[:] = [joined(held)]
                yield held.pop()  # not held here either
        del piece  # not held while the next one is read
    if held:
        yield joined(held)
