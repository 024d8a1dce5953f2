"""Rows on their way from a source to the function: an Arrow record batch, or a dict of lists.

A dict is what JSON lines give, since its values need not fit one Arrow type. The size of a row follows from its values
alone, not from the rows beside it: so batches that are cut by size do not depend on how the rows arrive.

A row larger than a batch, which comes in parts: put together where there is room for it.

What it takes is weighed as it comes, in Python and in Arrow, before it is held. Rows of usual size are not looked at.

Where the rows of a unit come from: the file of each, and its number there.

A reader says where a file begins and which records it leaves out; who works on the rows asks for the place of some.
What lies before the rows that are worked on is forgotten: it holds a mark for each file and each gap of about a batch.
"""

from __future__ import annotations

import io
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import ResourceError

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A run of rows of one file."""

    file: str
    first: int
    """Its number in the file, from 0; records that could not be read are counted too."""
    last: int
    origin: int = 0
    """Rows are counted from this byte of the file: a piece of a large file, before which nothing was read."""

    def __str__(self) -> str:
        """
        >>> print(Place("a.jsonl", 3, 3), Place("a.jsonl", 0, 9, 64), sep="; ")
        row 3 of a.jsonl; rows 0 to 9 of a.jsonl, counted from byte 64
        """
        rows = f"row {self.first:,}" if self.first == self.last else f"rows {self.first:,} to {self.last:,}"
        return f"{rows} of {self.file}" + (f", counted from byte {self.origin:,}" if self.origin else "")


@dataclass(frozen=True, slots=True)
class _Mark:
    at: int
    """From this row of the unit on."""
    file: str
    row: int
    origin: int


@dataclass(slots=True)
class Places:
    """Of one unit, while it is read."""

    before: int = 0
    """Rows that are read and passed over before the unit begins."""
    lines: bool = False
    """Blank lines count: numbers of rows are those of lines."""
    _marks: list[_Mark] = field(default_factory=list)
    _read: int = 0

    def begin(self, file: str, row: int = 0, origin: int = 0) -> None:
        """The next row to come is this one of this file. `origin`: the byte from which its rows are counted."""
        mark = _Mark(self._read, file, row, origin)
        if not self._marks or self._next(self._marks[-1]) != mark:
            self._marks.append(mark)

    def skip(self, ahead: int) -> None:
        """A record is left out, behind `ahead` more rows."""
        if self._marks:
            last = self._marks[-1]
            at = self._read + ahead
            self._marks.append(_Mark(at, last.file, last.row + at - last.at + 1, last.origin))

    def count(self, rows: int) -> None:
        """So many rows came."""
        self._read += rows

    @property
    def next(self) -> Place:
        """Of the row that is read now."""
        return self.of(self._read - self.before, self._read - self.before + 1)[0]

    def forget(self, begin: int) -> None:
        """No row before this one of the unit will be asked for."""
        first = bisect_right(self._marks, begin + self.before, key=lambda mark: mark.at) - 1
        del self._marks[: max(0, first)]

    def _next(self, mark: _Mark) -> _Mark:
        return _Mark(self._read, mark.file, mark.row + self._read - mark.at, mark.origin)

    def of(self, begin: int, end: int) -> list[Place]:
        """The places of rows `begin` to `end` of the unit; none where its reader does not say."""
        begin, end = begin + self.before, end + self.before
        found: list[Place] = []
        for number, mark in enumerate(self._marks):
            stop = self._marks[number + 1].at if number + 1 < len(self._marks) else end
            first, last = max(begin, mark.at), min(end, stop)
            if first < last:
                shift = mark.row - mark.at
                found.append(Place(mark.file, first + shift, last - 1 + shift, mark.origin))
        return found


def shown(places: list[Place]) -> str:
    """For a message: rows of one file together, and the first few files.

    >>> shown([Place("a", 5, 6), Place("a", 8, 9), Place("b", 0, 3)])
    'rows 5 to 9 of a; rows 0 to 3 of b'
    """
    joined: list[Place] = []
    for place in places:
        if joined and (joined[-1].file, joined[-1].origin) == (place.file, place.origin):
            joined[-1] = Place(place.file, joined[-1].first, place.last, place.origin)
        else:
            joined.append(place)
    more = f"; and of further files: {len(joined) - _SHOWN}" if len(joined) > _SHOWN else ""
    return "; ".join(map(str, joined[:_SHOWN])) + more


Rows: TypeAlias = "pa.RecordBatch | dict[str, list[Any]]"
Sizes = npt.NDArray[np.int64]
_NUMBER, _FLAG = 8, 1
_FLAT = {int, float, bool, type(None)}


def row_count(rows: Rows) -> int:
    if isinstance(rows, dict):
        return len(next(iter(rows.values()), []))
    return int(rows.num_rows)


def column_names(rows: Rows) -> list[str]:
    return list(rows) if isinstance(rows, dict) else list(rows.schema.names)


def column(rows: Rows, name: str) -> Any:
    return rows[name] if isinstance(rows, dict) else rows.column(name)


def byte_size(rows: Rows) -> int:
    """What the values take, about; the sum of `row_sizes`."""
    return int(row_sizes(rows).sum())


def take(rows: Rows, start: int, stop: int) -> Rows:
    """Rows from `start` to `stop`; an Arrow batch is not copied."""
    if isinstance(rows, dict):
        return {name: values[start:stop] for name, values in rows.items()}
    return rows.slice(start, stop - start)


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows as one. A column that some lack is None there; Arrow stays Arrow where one type holds all parts."""
    if len(parts) == 1:
        return parts[0]
    batches = [part for part in parts if not isinstance(part, dict)]
    if len(batches) == len(parts):
        table = _joined_tables(batches)
        if table is not None:
            return table
    return _joined_dicts([part if isinstance(part, dict) else part.to_pydict() for part in parts])


def _joined_tables(batches: list[pa.RecordBatch]) -> pa.RecordBatch | None:
    schema = batches[0].schema
    if not all(batch.schema.equals(schema) for batch in batches):
        try:
            table = pa.concat_tables([pa.Table.from_batches([one]) for one in batches], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return None
        batches, schema = table.to_batches(), table.schema
    return pa.concat_batches(batches) if len(batches) != 1 else batches[0]


def _joined_dicts(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for part in parts for name in part)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for part in parts:
        for name, column in columns.items():
            column += part[name] if name in part else [None] * row_count(part)
    return columns


def from_records(records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Rows as columns: those named, or all there are in the order in which they appear; None where a row has no value.

    >>> from_records([{"a": 1}, {"a": 2, "b": "x"}])
    {'a': [1, 2], 'b': [None, 'x']}
    """
    names = columns if columns is not None else dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


# ---- sizes ----


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

    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=np.int64)
    if isinstance(array, pa.ExtensionArray):
        return _array_sizes(array.storage)
    if pa.types.is_dictionary(kind):
        # What the numbers stand for, which the array itself does not show.
        sizes = pa.array(_array_sizes(array.dictionary))
        return _as_sizes(pc.take(sizes, array.indices).fill_null(_NUMBER))
    if _has_bytes(kind):
        return _as_sizes(pc.binary_length(array).fill_null(0)) + _NUMBER
    if pa.types.is_struct(kind):
        inner = [_array_sizes(array.field(k)) for k in range(kind.num_fields)]
        return np.asarray(sum(inner, np.full(len(array), _FLAG, dtype=np.int64)), dtype=np.int64)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _list_sizes(array)
    if pa.types.is_fixed_size_list(kind):
        inner_sizes = _array_sizes(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
        return np.asarray(_NUMBER + inner_sizes.reshape(len(array), kind.list_size).sum(axis=1), dtype=np.int64)
    try:
        width = max(_NUMBER, kind.bit_width // 8)
    except ValueError:  # views, unions, run ends: rare enough to look at each value
        return np.array([array[k : k + 1].nbytes for k in range(len(array))], dtype=np.int64)
    return np.full(len(array), width, dtype=np.int64)


def _has_bytes(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _list_sizes(array: Any) -> Sizes:
    """From the offsets and the running sum of what the lists hold."""
    offsets = np.asarray(array.offsets, dtype=np.int64)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if pa.types.is_map(array.type):
        values = _array_sizes(array.keys.slice(first, last - first)) + _array_sizes(
            array.items.slice(first, last - first)
        )
    else:
        values = _array_sizes(array.values.slice(first, last - first))
    ends = np.concatenate(([0], np.cumsum(values)))
    return np.asarray(_NUMBER + np.diff(ends[offsets - first]), dtype=np.int64)


def _as_sizes(array: pa.Array) -> Sizes:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)


def cut_by_size(rows: Rows, most_bytes: int) -> Iterator[Rows]:
    """Runs of rows of at most so many bytes; a larger row stands alone."""
    count = row_count(rows)
    if count == 0:
        return
    ends = list(accumulate(row_sizes(rows).tolist()))
    if ends[-1] <= most_bytes:
        yield rows
        return
    reached = np.array(ends)
    start = 0
    while start < count:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(reached, before + most_bytes, side="right")))
        yield take(rows, start, stop)
        start = stop


NUMBER_OBJECT = 40
"""Bytes of a number in a list of Python: the place in the list, and the object."""
_GROWING = 1.25
"""A string that is put together of pieces, as where escapes are, is larger while it grows."""
_STRUCTURE = np.zeros(256, dtype=np.int64)
_STRUCTURE[[ord(mark) for mark in ",:[{"]] = [NUMBER_OBJECT, 16, 88, 200]
"""What stands for an object in JSON, outside of strings: about its bytes."""
_SURROGATE, _BEYOND_LATIN = re.compile(rb"\\u[dD][89abAB]"), re.compile(rb"\\u(?!00)")


class Room(Protocol):
    """What the budget leaves."""

    @property
    def format(self) -> str:
        """What rows become: "python", "numpy" or "arrow"."""
        ...

    def fits(self, needed: float) -> bool: ...

    def refusal(self, needed: float, size: int, where: str, *, by_column: bool = False) -> ResourceError:
        """Of a row of so many bytes, which takes `needed`. `by_column`: columns are read one by one."""
        ...


class LargeRow:
    """Parts that are put together where there is room for all of them; else only their size is kept."""

    def __init__(self, room: Room | None, places: Places, kind: type[TextWeight]) -> None:
        self._room, self._places = room, places
        self._weight = kind(room.format if room is not None else "python")
        self._held = io.BytesIO()
        self._fits = True

    def add(self, part: bytes | memoryview) -> None:
        if self._room is not None:
            self._weight.add(part)
            self._fits = self._fits and self._room.fits(self._weight.needed - self._held.tell())
        if self._fits:
            self._held.write(part)
        elif self._held.tell():
            self._held = io.BytesIO()

    def whole(self) -> bytes:
        """The bytes of all parts, without a copy. Raises ResourceError when there is no room for them."""
        if not self._fits and self._room is not None:
            raise self._room.refusal(self._weight.needed, self._weight.bytes, str(self._places.next))
        return self._held.getvalue()


class TextWeight:
    """UTF-8 as it comes, in parts: how much memory Python takes for it as text."""

    _BLOCK = 1 << 20

    def __init__(self, format: str = "python") -> None:
        self.bytes = self.characters = self._highest = 0
        self._format = format

    def add(self, part: bytes | memoryview) -> None:
        data = np.frombuffer(part, dtype=np.uint8)
        self.bytes += len(data)
        for start in range(0, len(data), self._BLOCK):
            block = data[start : start + self._BLOCK]
            self._highest = max(self._highest, int(block.max()))
            # All but the bytes 80 to BF, which go on with a character.
            self.characters += len(block) - int(np.count_nonzero((block & 0xC0) == 0x80))

    @property
    def width(self) -> int:
        """Bytes of a character: as many as the highest one takes, in all of the text."""
        return 4 if self._highest >= 0xF0 else 2 if self._highest >= 0xC4 else 1

    @property
    def as_text(self) -> int:
        return self.width * self.characters

    @property
    def needed(self) -> float:
        """Its bytes, and what the function is given of them."""
        return self.bytes + (self.as_text if self._format != "arrow" else 0)


class JsonWeight(TextWeight):
    """A line of JSON as it comes, in parts: how much memory reading it takes."""

    def __init__(self, format: str = "python") -> None:
        super().__init__(format)
        self._escaped = self._objects = self._outside = 0
        self._inside = False
        self._before = b""

    def add(self, part: bytes | memoryview) -> None:
        super().add(part)
        data = self._before + bytes(part)
        self._before = b""
        if b"\\" in data:
            wide = 4 if _SURROGATE.search(data) else 2 if _BEYOND_LATIN.search(data) else 1
            self._escaped = max(self._escaped, wide)
            data = data.replace(b"\\\\", b"")
            self._before = b"\\" if data.endswith(b"\\") else b""
            data = data.replace(b'\\"', b"")
        self._count(np.frombuffer(data, dtype=np.uint8))

    def _count(self, marks: npt.NDArray[np.uint8]) -> None:
        """The values that stand outside of strings."""
        quotes = marks == ord('"')
        if self._inside and not quotes.any():
            return
        outside = (np.cumsum(quotes, dtype=np.int64) + self._inside) % 2 == 0
        self._outside += int(np.count_nonzero(outside))
        self._objects += int(_STRUCTURE[marks[outside]].sum())
        self._inside = bool(len(outside)) and not outside[-1]

    @property
    def needed(self) -> float:
        """Its bytes and its text, then its text and its value; then the value, lists of it that the function may
        change, and what Arrow makes of it."""
        value = max(self.width, self._escaped) * (self.characters - self._outside) + self._objects
        reading = self.as_text + max(self.bytes, value * (_GROWING if self._escaped else 1))
        return max(reading, value + self._objects // 2 + self.bytes)
