"""The columns of a table: inferred from the first rows that a function returns, then held to.

Values are whatever functions return: lists, numpy arrays (of more than one dimension: lists of fixed length), torch
tensors, Arrow arrays. What comes later is cast where no value changes (null to anything, integers to integers that
hold them or to floats, short floats to long, lists to lists), and refused otherwise. One batch is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import ConfigError

_NARROW = {
    "input_ids": pa.int32(),
    "attention_mask": pa.int8(),
    "token_type_ids": pa.int8(),
    "special_tokens_mask": pa.int8(),
}
"""Integers under the names that tokenizers use, as HF datasets stores them too: a half to an eighth of the bytes."""
_NO_VALUES = (ValueError, TypeError, OverflowError)
_SHOWN = 80


class ColumnError(Exception):
    """What is wrong with a column, as a sentence, and what to do about it; the caller adds where."""


def given_schema(schema: Any) -> pa.Schema | None:
    """What a user gave as schema: a `pa.Schema`, `datasets.Features`, or a dict of names and Arrow types."""
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    arrow = getattr(schema, "arrow_schema", None)
    if isinstance(arrow, pa.Schema):
        return arrow
    if isinstance(schema, Mapping) and all(isinstance(kind, pa.DataType) for kind in schema.values()):
        return pa.schema(list(schema.items()))
    raise ConfigError(f"map: schema: {type(schema).__name__}; a pyarrow.Schema or datasets.Features is wanted.")


# ---- values to arrays ----


def to_array(name: str, values: Any) -> pa.Array:
    """A column of a type that its values suggest. Raises ColumnError for what is no column."""
    try:
        array = _array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, *_NO_VALUES) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ColumnError(
            f'column "{name}": its values are not of one type that Arrow can hold ({detail}), '
            f"the first is {_shown(values)}. Return values of one type."
        ) from None
    if array is None:
        raise ColumnError(
            f'column "{name}": {type(values).__name__} where a list or an array of values is wanted, one a row.'
        )
    return array


def _array(values: Any) -> pa.Array | None:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _plain(values)
    if isinstance(values, list | tuple):
        nested = _list_of_arrays(values)
        return nested if nested is not None else _plain(_of_values(values))
    values = _numpy(values)
    if values is None or values.ndim == 0:
        return None
    return _plain(_of_numpy(values))


def _of_values(values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values, from_pandas=False)
    except OverflowError:  # an integer of 2**63 or more: a hash, say
        return pa.array(values, pa.uint64())


def _plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, without a dictionary: those of different batches would differ."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            raise ValueError("more than 2 GB in one batch; use a large_string or large_binary schema")
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _numpy(values: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu()
    if hasattr(values, "__array__") and not isinstance(values, str | bytes | np.generic):
        return np.asarray(values)
    return None


def _of_numpy(values: np.ndarray[Any, Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype == object else values, from_pandas=False)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), from_pandas=False)
    for width in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, width)
    return flat


def _list_of_arrays(values: Sequence[Any]) -> pa.Array | None:
    """A list of numpy arrays or tensors as lists, without a Python object an element; None: it is something else."""
    if not values or isinstance(values[0], list | str | int | float | dict | None):
        return None
    arrays = [_numpy(value) for value in values]
    first = arrays[0]
    if first is None or any(one is None or one.ndim != first.ndim or one.dtype != first.dtype for one in arrays):
        return None
    if first.ndim == 0 or first.dtype == object:
        return None
    return _lists([one for one in arrays if one is not None])


def _lists(arrays: list[np.ndarray[Any, Any]]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in arrays], out=offsets[1:])
    if arrays[0].ndim == 1:
        inner = pa.array(np.concatenate(arrays))
    else:
        rows = [row for one in arrays for row in one]
        inner = _lists(rows) if rows else pa.array([], pa.list_(pa.from_numpy_dtype(arrays[0].dtype)))
    return pa.ListArray.from_arrays(pa.array(offsets), inner)


# ---- inferring ----


def infer(columns: Mapping[str, Any]) -> pa.Schema:
    """The schema that some columns suggest."""
    return pa.schema([(name, _narrow(name, to_array(name, values))) for name, values in columns.items()])


def _narrow(name: str, array: pa.Array) -> pa.DataType:
    wanted = _NARROW.get(name)
    if wanted is None:
        return array.type
    narrow = _with_integers(array.type, wanted)
    try:
        array.cast(narrow)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return array.type
    return narrow


def _with_integers(kind: pa.DataType, integers: pa.DataType) -> pa.DataType:
    """The same type with narrower 64-bit integers in its lists."""
    if pa.types.is_int64(kind):
        return integers
    if pa.types.is_list(kind):
        return pa.list_(_with_integers(kind.value_type, integers))
    if pa.types.is_large_list(kind):
        return pa.large_list(_with_integers(kind.value_type, integers))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_with_integers(kind.value_type, integers), kind.list_size)
    return kind


def joined(before: pa.Schema | None, now: pa.Schema) -> pa.Schema:
    """What two batches suggest together: null gives way to any type, a narrow number to a wide one."""
    if before is None:
        return now
    try:
        return pa.unify_schemas([before, now], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ColumnError(f"the first rows do not agree on their columns: {error}") from None


def is_settled(schema: pa.Schema) -> bool:
    """Whether every column has a type; one of nothing but nulls, or of empty lists, has none yet."""
    return not any(_has_null(field.type) for field in schema)


def _has_null(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    return any(_has_null(kind.field(number).type) for number in range(kind.num_fields))


# ---- holding to it ----


def fit(
    columns: Mapping[str, Any], schema: pa.Schema, *, optional: Sequence[str] = (), given: bool = False
) -> pa.RecordBatch:
    """The columns as a batch of exactly this schema. `optional`: columns of the input, null where they are missing;
    `given`: it is the user's, and these are the first rows."""
    missing = [name for name in columns if schema.get_field_index(name) < 0]
    if missing and given:
        raise ColumnError(
            f"your schema lacks {', '.join(missing)}. Add what is missing to schema=; or leave it out of the table: "
            f"remove_columns={missing!r} for columns of the input."
        )
    if missing:
        raise ColumnError(
            f'column "{missing[0]}": not in the table, whose first rows have {", ".join(schema.names)}. '
            f'Return the same columns for every row; or leave it out with remove_columns=["{missing[0]}"], '
            "or say all columns with schema=."
        )
    arrays = {name: to_array(name, values) for name, values in columns.items()}
    length = len(next(iter(arrays.values()))) if arrays else 0
    for field in schema:
        if field.name not in arrays:
            if field.name not in optional:
                raise ColumnError(
                    f'column "{field.name}": missing. Return it for every row; None where it has no value.'
                )
            arrays[field.name] = pa.nulls(length)
    fitted = [_fit(field, arrays[field.name]) for field in schema]
    return pa.RecordBatch.from_arrays(fitted, schema=schema)


def _fit(field: pa.Field, array: pa.Array) -> pa.Array:
    if array.null_count and not field.nullable:
        raise ColumnError(f'column "{field.name}": null where the schema has a value in every row.')
    if array.type.equals(field.type):
        return array
    if fits(array.type, field.type):
        try:
            return _cast(array, field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _refused(field, array, f" ({str(error).splitlines()[0]})") from None
    raise _refused(field, array)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return array.cast(kind, safe=True)
    except pa.ArrowNotImplementedError:
        # What casts of nested types lack: by way of values, whose types are known to fit.
        return pa.array(array.to_pylist(), kind)


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast from one type to the other can leave every value what it is."""
    kinds = pa.types
    if found.equals(wanted) or kinds.is_null(found):
        return True
    if kinds.is_integer(found):
        return bool(kinds.is_integer(wanted) or kinds.is_floating(wanted))
    if kinds.is_floating(found):
        return bool(kinds.is_floating(wanted) and wanted.bit_width >= found.bit_width)
    if _is_list(found) and _is_list(wanted):
        return fits(found.value_type, wanted.value_type)
    if kinds.is_struct(found) and kinds.is_struct(wanted):
        return _struct_fits(found, wanted)
    alike = (_is_text, _is_bytes, kinds.is_decimal)
    return any(is_kind(found) and is_kind(wanted) for is_kind in alike) or _is_same_time(found, wanted)


def _is_same_time(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted):
        return bool(found.tz == wanted.tz)
    return bool(pa.types.is_duration(found) and pa.types.is_duration(wanted))


def _struct_fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    fields = [found.field(number) for number in range(found.num_fields)]
    known = {wanted.field(number).name: wanted.field(number).type for number in range(wanted.num_fields)}
    return all(field.name in known and fits(field.type, known[field.name]) for field in fields)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _refused(field: pa.Field, array: pa.Array, detail: str = "") -> ColumnError:
    if _has_null(field.type):
        return ColumnError(
            f'column "{field.name}": the first rows that were looked at had only nulls or empty lists in it '
            f"({field.type}); found {array.type}. Give its type: schema=, with every column of the table in it."
        )
    shown = next((value for value in array.slice(0, 100) if value.is_valid), None)
    value = f", such as {_shown([shown.as_py()])}" if shown is not None else ""
    return ColumnError(
        f'column "{field.name}": {field.type} was expected, as in the first rows or the schema given; '
        f"found {array.type}{value}{detail}.\n"
        f'Return one type everywhere, or say the type that holds all values: schema=, with ("{field.name}", ...) in it.'
    )


def _shown(values: Any) -> str:
    try:
        first = repr(values[0])
    except Exception:
        return "unknown"
    return first if len(first) <= _SHOWN else first[: _SHOWN - 3] + "..."
