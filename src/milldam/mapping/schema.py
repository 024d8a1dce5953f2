"""The columns of a table: inferred from what a function returns, batch by batch, and put together.

Values are whatever functions return: lists, numpy arrays (of more than one dimension: lists of fixed length), torch
tensors, Arrow arrays. What comes later is cast where no value changes (null to anything, integers to integers that
hold them or to floats, short floats to long, lists to lists), and refused otherwise. A column that some rows lack is
null there. One batch is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import ConfigError, Setting
from milldam.mapping.function import ResultError
from milldam.stores.table.reader import cast_column

_NARROW = {
    "input_ids": pa.int32(),
    "attention_mask": pa.int8(),
    "token_type_ids": pa.int8(),
    "special_tokens_mask": pa.int8(),
}
"""Integers under the names that tokenizers use, as HF datasets stores them too: a half to an eighth of the bytes."""
_HF = b"huggingface"
_PLAIN_FEATURES = {"Value", "Sequence", "List", "LargeList"}
"""What the types of Arrow tell as well."""
_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError)
_SHOWN = 80
_SCHEMA = "schema= of milldam.map"


def given_schema(schema: Any) -> pa.Schema | None:
    """The schema of a user: a `pa.Schema`, `datasets.Features`, or a dict of names and Arrow types."""
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    arrow = getattr(schema, "arrow_schema", None)
    if isinstance(arrow, pa.Schema):
        return arrow
    if isinstance(schema, Mapping) and all(isinstance(kind, pa.DataType) for kind in schema.values()):
        return pa.schema(list(schema.items()))
    wanted = "a pyarrow.Schema, datasets.Features or a dict of names and Arrow types is wanted"
    raise ConfigError(Setting("schema"), f": {type(schema).__name__}; {wanted}.")


# ---- values to arrays ----


def to_array(name: str, values: Any) -> pa.Array:
    """A column of a type that its values suggest. Raises ResultError for what is no column."""
    try:
        array = _array(values)
    except (*_REFUSED, ValueError, TypeError, OverflowError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResultError(
            f'column "{name}": its values are not of one type that Arrow can hold ({detail}), '
            f"the first is {_shown(values)}. A column needs one type."
        ) from None
    if array is None:
        raise ResultError(
            f'column "{name}": {type(values).__name__} where a list or an array of values is wanted, one a row.'
        )
    return array


def _array(values: Any) -> pa.Array | None:
    if isinstance(values, list | tuple):
        if any(map(_is_array, set(map(type, values)))):
            values = [_nested(value) for value in values]
        try:
            values = pa.array(values, from_pandas=False)
        except OverflowError:  # an integer of 2**63 or more: a hash, say
            return pa.array(values, pa.uint64())
    elif not isinstance(values, pa.Array | pa.ChunkedArray):
        numbers = _numpy(values)
        if numbers is None or numbers.ndim == 0:
            return None
        flat = np.ascontiguousarray(numbers).reshape(-1)
        values = pa.array(flat.tolist() if numbers.dtype == object else flat, from_pandas=False)
        for width in reversed(numbers.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, width)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            raise ValueError("more than 2 GB in one batch; use a large_string or large_binary schema")
    # Dictionaries of different batches would differ.
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _is_array(kind: type) -> bool:
    """numpy arrays, torch tensors and what can become one."""
    return hasattr(kind, "__array__") and not issubclass(kind, str | bytes | np.generic)


def _numpy(values: Any) -> np.ndarray[Any, Any] | None:
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu()
    return np.asarray(values) if _is_array(type(values)) else None


def _nested(value: Any) -> Any:
    """A value as pyarrow takes it: an array with more than one dimension as a list of arrays with one."""
    array = _numpy(value)
    if array is None or array.ndim < 2:
        return value if array is None else array
    return [_nested(row) for row in array]


# ---- one schema ----


def inferred(arrays: Mapping[str, pa.Array]) -> pa.Schema:
    """The schema that some columns suggest."""
    return pa.schema([(name, _narrow(name, array)) for name, array in arrays.items()])


def _narrow(name: str, array: pa.Array) -> pa.DataType:
    if name in _NARROW:
        narrow = _with_integers(array.type, _NARROW[name])
        try:
            array.cast(narrow)
        except _REFUSED:
            return array.type
        return narrow
    return array.type


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


def joined(before: pa.Schema | None, arrays: Mapping[str, pa.Array]) -> pa.Schema:
    """The schema of the rows before and of these: null gives way to any type, a narrow number to a wide one."""
    now = inferred(arrays)
    if before is None or now.equals(before):
        return now
    try:
        return unified([before, now])
    except ValueError as error:
        name = str(error)
        raise _refused(before.field(name), arrays[name]) from None


def unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """One schema for all. Raises ValueError with the name of a column whose types have nothing in common."""
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive")
    except _REFUSED:
        names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
        if len(names) == 1:
            raise ValueError(names[0]) from None
        for name in names:
            unified([pa.schema([schema.field(name)]) for schema in schemas if name in schema.names])
        raise


def with_features(schema: pa.Schema, source: pa.Schema | None) -> pa.Schema:
    """The columns with what HF `datasets` knows of those that come from the source: ClassLabel, Translation, Image."""
    metadata = {} if source is None else json.loads((source.metadata or {}).get(_HF, b"{}"))
    known = (metadata.get("info") or {}).get("features") or {}
    kept = {
        name: known[name]
        for name in schema.names
        if name in known
        and set(re.findall(r'"_type": "(\w+)"', json.dumps(known[name]))) - _PLAIN_FEATURES
        and source is not None
        and source.get_field_index(name) >= 0
        and source.field(name).type.equals(schema.field(name).type)
    }
    features = {_HF: json.dumps({"info": {"features": kept}}).encode()} if kept else {}
    return schema.with_metadata({**(schema.metadata or {}), **features}) if features else schema


# ---- holding to it ----


def fit(arrays: Mapping[str, pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """The columns as a batch of exactly this schema; null where one is missing."""
    unknown = [name for name in arrays if schema.get_field_index(name) < 0]
    if unknown:
        raise ResultError(
            f"your schema lacks {', '.join(unknown)}. Add it; or leave it out of the table: ",
            Setting("remove_columns", unknown),
            " for columns of the input.",
        )
    length = len(next(iter(arrays.values()))) if arrays else 0
    columns = [_fit(field, arrays.get(field.name, pa.nulls(length))) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fit(field: pa.Field, array: pa.Array) -> pa.Array:
    if array.null_count and not field.nullable:
        raise ResultError(f'column "{field.name}": null where the schema has a value in every row.')
    if not _fits(array.type, field.type):
        raise _refused(field, array)
    try:
        return cast_column(array, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _refused(field, array, f" ({str(error).splitlines()[0]})") from None


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast from one type to the other can leave every value what it is."""
    kinds = pa.types
    if kind.equals(wanted) or kinds.is_null(kind):
        return True
    if kinds.is_integer(kind):
        return bool(kinds.is_integer(wanted) or kinds.is_floating(wanted))
    if kinds.is_floating(kind):
        return bool(kinds.is_floating(wanted) and wanted.bit_width >= kind.bit_width)
    if kinds.is_timestamp(kind):
        return bool(kinds.is_timestamp(wanted) and kind.tz == wanted.tz)
    if _is_list(kind) and _is_list(wanted):
        return _fits(kind.value_type, wanted.value_type)
    if kinds.is_struct(kind) and kinds.is_struct(wanted):
        known = {field.name: field.type for field in wanted}
        return all(field.name in known and _fits(field.type, known[field.name]) for field in kind)
    return any(is_kind(kind) and is_kind(wanted) for is_kind in _ALIKE)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_ALIKE: tuple[Callable[[pa.DataType], bool], ...] = (
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
    pa.types.is_decimal,
    pa.types.is_duration,
)


def _refused(field: pa.Field, array: pa.Array, detail: str = "") -> ResultError:
    shown = next((value for value in array.slice(0, 100) if value.is_valid), None)
    value = f", such as {_shown([shown.as_py()])}" if shown is not None else ""
    return ResultError(
        f'column "{field.name}": {field.type} was expected, as in earlier rows or in your schema; '
        f"found {array.type}{value}{detail}.\n"
        f'Return one type everywhere, or give the type that holds all values: {_SCHEMA}, with ("{field.name}", ...).'
    )


def _shown(values: Any) -> str:
    try:
        first = repr(values[0])
    except Exception:
        return "unknown"
    return first if len(first) <= _SHOWN else first[: _SHOWN - 3] + "..."
