"""Calling the user's function on a batch of rows, and putting what it returns over the columns that it was given.

As `datasets.map` has it: columns that are not in `remove_columns` stay, those that the function returns take their
place or are added. Columns that are passed through keep their Arrow type and are not copied. Holds the batch, what the
function is given (Python lists, numpy arrays, or Arrow) and what it returns. What it does to the lists that it is given
changes neither the columns that stay nor what a second call gets.

Functions may be async: a batch is awaited before the next one is read; the rows of a batch run concurrently, and their
results come in the order of the rows.

Rows as they come -> batches of at most so many rows and bytes.

Greedy and exact: a batch ends where one row more would be too many, or too large. A row larger than `batch_bytes` is a
batch of its own. The result depends on the rows alone, not on the pieces in which they come. Holds one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import Setting, did_you_mean
from milldam.mapping.returned import (
    ALL,
    Columns,
    FunctionError,
    ResultError,
    as_columns,
    as_rows,
    common_length,
    gathered,
    raised_error,
    stays_beside,
)
from milldam.sources.rows import Rows, column, column_names, joined, row_count, row_sizes, take
from milldam.stores.table.reader import columns_as


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
            return self._results(rows, first_row)

    def _results(self, rows: Rows, first_row: int | None) -> Results:
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
        made = as_columns(returned)
        length = common_length(made)
        left = [name for name in kept if name not in made]
        if made and left and length != count:
            raise stays_beside(left, length, count)
        return kept | made

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
        kept = self.kept(rows)
        for number, result in enumerate(self._calls(rows, first_row)):
            try:
                returned = as_rows(self._result(result, rows))
                if len(returned) > 1:
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
        order = dict.fromkeys([*kept, *made])
        return {name: made[name] if name in made else _at(rows, name, origins) for name in order}

    def _calls(self, rows: Rows, first_row: int | None) -> Iterator[Any]:
        """What each row's call came to; an async function works on all of them at a time."""
        numbered = enumerate(_given_rows(rows, self.rules.format))
        calls = (self._call(given, None if first_row is None else first_row + number) for number, given in numbered)
        return iter(_await_all(list(calls))) if _is_async(self.function) else calls


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


# ---- async functions ----


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _await_all(results: list[Any]) -> list[Any]:
    """The results in order, with what has to be awaited run concurrently; what it raises as a `_Raised`."""
    return asyncio.run_coroutine_threadsafe(_all_awaited(results), _event_loop()).result()


async def _all_awaited(results: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*map(_awaited, results)))


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
            return {name: _copied(values) for name, values in rows.items()}
        rows = _as_arrow(rows, format)
    return columns_as(rows, format)


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
        yield from rows.to_pylist()
    else:
        columns = _given(rows, format)
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _at(rows: Rows, name: str, origins: list[int]) -> Any:
    values = column(rows, name)
    if origins == list(range(row_count(rows))):
        return values
    return [values[at] for at in origins] if isinstance(values, list) else values.take(pa.array(origins, "int64"))


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
                yield _taken(held)
        del piece  # not held while the next one is read
    if held:
        yield joined(held)


def _taken(held: list[Rows]) -> Rows:
    """All of them as one; the list keeps none."""
    rows = joined(held)
    held.clear()
    return rows
