"""Rows of Arrow in the form that a caller wants: Python lists, numpy arrays, or Arrow itself.

Numbers without nulls become numpy arrays without a copy; lists of equal fixed length a 2-D array; lists of any length
an array of arrays; texts an array of `str` objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

FORMATS = ("python", "numpy", "arrow")


def columns_as(rows: pa.RecordBatch | pa.Table, format: str) -> Any:
    """A dict of columns as lists or numpy arrays, or a `pa.Table`."""
    import pyarrow as pa

    if format == "arrow":
        return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if format == "python":
        return rows.to_pydict()
    return {name: as_numpy(rows.column(name)) for name in rows.schema.names}


def as_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as a numpy array; what numpy has no type for, as an array of objects."""
    import numpy as np
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too large for one array of its type
        return np.concatenate([as_numpy(chunk) for chunk in array.chunks])
    kind = array.type
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        return as_numpy(array.flatten()).reshape(len(array), kind.list_size, *_inner_shape(kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        found = np.empty(len(array), dtype=object)
        for number, one in enumerate(array):
            found[number] = as_numpy(one.values) if one.is_valid else None
        return found
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return values


def _inner_shape(kind: pa.DataType) -> tuple[int, ...]:
    import pyarrow as pa

    return (kind.list_size, *_inner_shape(kind.value_type)) if pa.types.is_fixed_size_list(kind) else ()
