"""Rows on their way from a source to the function: an Arrow record batch, or a dict of lists.

A dict is what JSON lines give, since its values need not fit one Arrow type. The size of a row follows from its values
alone, not from the rows beside it: so batches that are cut by size do not depend on how the rows arrive.

A row larger than a batch, which comes in parts: put together where there is room for it.

What it takes is weighed as it comes, in Python and in Arrow, before it is held. Rows of usual size are not looked at.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import ResourceError
from milldam.sources.batch import Places

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
