"""Rows on their way from a source to the function: an Arrow record batch, or a dict of lists.

A dict is what JSON lines give, since its values need not fit one Arrow type. The size of a row follows from its values
alone, not from the rows beside it: so batches that are cut by size do not depend on how the rows arrive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


def cut_by_size(rows: Rows, most_bytes: int, sizes: Sizes | None = None) -> Iterator[Rows]:
    """Runs of rows of at most so many bytes; a larger row stands alone. `sizes`: of the rows, where not all counts."""
    reached = np.cumsum(row_sizes(rows) if sizes is None else sizes)
    start, count = 0, len(reached)
    while start < count:
        before = int(reached[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(reached, before + most_bytes, side="right")))
        yield rows if stop - start == count else take(rows, start, stop)
        start = stop
