"""Rows on their way from a source to the function: an Arrow record batch, or a dict of lists.

A dict is what JSON lines give, since its values need not fit one Arrow type. The size of a row follows from its values
alone, not from the rows beside it: so batches that are cut by size do not depend on how the rows arrive.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.input_files import without_secrets
from milldam.sources.batch import OnReject, Reading, TextRules
from milldam.sources.reading import TABLES, reader_of
from milldam.sources.units import Slice

Rows: TypeAlias = "pa.RecordBatch | dict[str, list[Any]]"
Sizes = npt.NDArray[np.int64]
_NUMBER, _FLAG = 8, 1
_PLACES_SHOWN = 3
_FLAT = {int, float, bool, type(None)}


def row_count(rows: Rows) -> int:
    if isinstance(rows, dict):
        return len(next(iter(rows.values()), []))
    return int(rows.num_rows)


def column_names(rows: Rows) -> list[str]:
    return list(rows) if isinstance(rows, dict) else list(rows.schema.names)


def column(rows: Rows, name: str) -> Any:
    return rows[name] if isinstance(rows, dict) else rows.column(name)


def take(rows: Rows, start: int, stop: int) -> Rows:
    """Rows from `start` to `stop`; an Arrow batch is not copied."""
    if isinstance(rows, dict):
        return {name: values[start:stop] for name, values in rows.items()}
    return rows.slice(start, stop - start)


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows as one. A column that some lack is None there; Arrow stays Arrow where one type holds all parts."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, dict) for part in parts):
        try:
            tables = [pa.Table.from_batches([part]) for part in parts]
            table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
            return (table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)])[0]
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            pass
    dicts = [part if isinstance(part, dict) else part.to_pydict() for part in parts]
    columns: dict[str, list[Any]] = {name: [] for part in dicts for name in part}
    for part in dicts:
        for name, values in columns.items():
            values += part[name] if name in part else [None] * row_count(part)
    return columns


def from_records(records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Rows as columns: those named, or all there are in the order in which they appear; None where a row has no value.

    >>> from_records([{"a": 1}, {"a": 2, "b": "x"}])
    {'a': [1, 2], 'b': [None, 'x']}
    """
    names = columns if columns is not None else dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


# ---- sizes ----


def byte_size(rows: Rows) -> int:
    """What the values take, about; the sum of `row_sizes`."""
    return int(row_sizes(rows).sum())


def row_sizes(rows: Rows) -> Sizes:
    """Bytes of each row: of the values, with 8 for a number or an offset. Costs no Python object per value in Arrow."""
    count = row_count(rows)
    total = np.zeros(count, dtype=np.int64)
    if isinstance(rows, dict):
        for values in rows.values():
            total += np.fromiter(map(value_size, values), dtype=np.int64, count=count)
        return total
    for column in rows.columns:
        total += _array_sizes(column)
    return total


def value_size(value: Any) -> int:
    """Bytes of one Python value, about what Arrow would take for it."""
    if isinstance(value, str):
        return _NUMBER + (len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass")))
    # Tuples of types: `list | tuple` would be made anew for each value.
    if isinstance(value, dict):
        return _NUMBER + sum(map(value_size, value.values()))
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= _FLAT:
            return _NUMBER + _NUMBER * len(value)
        return _NUMBER + sum(map(value_size, value))
    if value is None:
        return 0  # as where a row lacks the column
    if isinstance(value, (int, float)):
        return _NUMBER
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _NUMBER + len(value)
    nbytes = getattr(value, "nbytes", None)
    return _NUMBER + (nbytes if isinstance(nbytes, int) else sys.getsizeof(value))


def _array_sizes(array: pa.Array) -> Sizes:
    import pyarrow.compute as pc

    kind, types = array.type, pa.types
    if types.is_null(kind):
        return np.zeros(len(array), np.int64)
    if isinstance(array, pa.ExtensionArray):
        return _array_sizes(array.storage)
    if types.is_dictionary(kind):
        # What the numbers stand for, which the array itself does not show.
        sizes = pa.array(_array_sizes(array.dictionary))
        return np.asarray(pc.take(sizes, array.indices).fill_null(_NUMBER), np.int64)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return np.asarray(pc.binary_length(array).fill_null(0), np.int64) + _NUMBER
    if types.is_struct(kind):
        inner = [_array_sizes(array.field(k)) for k in range(kind.num_fields)]
        return np.asarray(sum(inner, np.full(len(array), _FLAG, np.int64)), np.int64)
    if types.is_list(kind) or types.is_large_list(kind):
        # From the offsets and the running sum of what the lists hold.
        offsets = np.asarray(array.offsets, np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        ends = np.concatenate(([0], np.cumsum(_array_sizes(array.values.slice(first, last - first)))))
        return np.asarray(_NUMBER + np.diff(ends[offsets - first]), np.int64)
    try:
        return np.full(len(array), max(_NUMBER, kind.bit_width // 8), np.int64)
    except ValueError:  # views, unions, maps: rare enough to look at each value
        return np.array([array[k : k + 1].nbytes for k in range(len(array))], np.int64)


def cut_by_size(rows: Rows, most_bytes: int, sizes: Sizes | None = None) -> Iterator[Rows]:
    """Runs of rows of at most so many bytes; a larger row stands alone. `sizes`: of the rows, where not all counts."""
    reached = np.cumsum(row_sizes(rows) if sizes is None else sizes)
    start, count = 0, len(reached)
    while start < count:
        before = int(reached[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(reached, before + most_bytes, side="right")))
        yield rows if stop - start == count else take(rows, start, stop)
        start = stop


# ---- rows of files ----


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads the rows of slices; it pickles as a few settings."""

    rules: TextRules
    columns: tuple[str, ...] | None
    names: tuple[tuple[str, str], ...] = ()
    """(path, what it is called instead) of input that was spooled."""

    def rows(self, slices: Iterable[Slice], on_reject: OnReject, places: Places) -> Iterator[Rows]:
        """`places` gets where they come from."""
        reading = Reading(self.rules, on_reject, self.columns, self._name)
        for slice in slices:
            origin = 0 if slice.format in TABLES else slice.start
            for rows, numbers in reader_of(slice.format).read_rows(slice, reading):
                # Before they are handed on: who gets them asks where they are from.
                places.add(self._name(slice.path), origin, numbers)
                yield rows

    def count(self, slices: Iterable[Slice]) -> int:
        """How many rows slices have. Files of lines are read for it, tables only looked at."""
        count = 0
        for slice in slices:
            if slice.format in TABLES:
                count += reader_of(slice.format).count_rows(slice)
            else:
                count += sum(map(row_count, self.rows([slice], lambda reject: None, Places())))
        return count

    def _name(self, path: str) -> str:
        """What a file is called in rows and messages."""
        return without_secrets(dict(self.names).get(path, path))


def rows_between(rows: Iterator[Rows], first: int, stop: int) -> Iterator[Rows]:
    """The rows from number `first` to `stop` of those that come."""
    position = 0
    for piece in rows:
        count = row_count(piece)
        start, end = max(0, first - position), min(count, stop - position)
        position += count
        if start < end:
            yield take(piece, start, end)
        if position >= stop:
            return


# ---- where the rows of a unit come from ----


class Place(NamedTuple):
    """Rows `first` to `last` of one file, from 0; users are told them from 1. What could not be read counts too."""

    file: str
    first: int
    last: int
    origin: int = 0
    """Rows are counted from this byte of the file: a piece of a large file, before which nothing was read."""

    def __str__(self) -> str:
        """
        >>> print(Place("a.jsonl", 3, 3), Place("a.jsonl", 0, 9, 64), sep="; ")
        row 4 of a.jsonl; rows 1 to 10 of a.jsonl, counted from byte 64
        """
        first, last = self.first + 1, self.last + 1
        rows = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        return f"{rows} of {self.file}" + (f", counted from byte {self.origin:,}" if self.origin else "")


class Places:
    """Where the rows of a unit are from, for a job that cuts them anew: kept until they are worked on."""

    def __init__(self) -> None:
        self.before = 0
        """Rows that are read and passed over before the unit begins."""
        self._first, self._parts = 0, deque[tuple[str, int, Sizes]]()

    def add(self, file: str, origin: int, numbers: Sizes) -> None:
        """The next rows are these of a file; their numbers are counted from byte `origin`."""
        self._parts.append((file, origin, numbers))

    def forget(self, begin: int) -> None:
        """No row before this one of the unit will be asked for."""
        while self._parts and self._first + len(self._parts[0][2]) <= begin + self.before:
            self._first += len(self._parts.popleft()[2])

    def of(self, begin: int, end: int) -> list[Place]:
        """Where rows `begin` to `end` of the unit are from, a place for each file; none if they come from no file."""
        places, at = list[Place](), self._first - self.before
        for file, origin, numbers in self._parts:
            some = numbers[max(0, begin - at) : max(0, end - at)]
            at += len(numbers)
            if len(some):
                same = bool(places) and (places[-1].file, places[-1].origin) == (file, origin)
                first = places.pop().first if same else int(some[0])
                places.append(Place(file, first, int(some[-1]), origin))
        return places


def shown(places: list[Place]) -> str:
    """For a message: the rows of the first few files.

    >>> shown([Place("a", 5, 9), Place("b", 0, 3)])
    'rows 6 to 10 of a; rows 1 to 4 of b'
    """
    more = f"; and of further files: {len(places) - _PLACES_SHOWN}" if len(places) > _PLACES_SHOWN else ""
    return "; ".join(map(str, places[:_PLACES_SHOWN])) + more
