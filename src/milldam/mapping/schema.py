"""The columns of a table: inferred from what a function returns, batch by batch, and put together.

Values are whatever functions return: lists, numpy arrays (of more than one dimension: lists of fixed length), torch
tensors, Arrow arrays. Types of rows are unified as Arrow does it (null with anything, narrow numbers with wide ones),
and refused where nothing holds both; to a schema of the user's they are cast as long as no value changes. A column
that some rows lack is null there. One batch is held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError)
_SHOWN = 80


def given_schema(schema: Any) -> pa.Schema | None:
    """The schema of a user: a `pa.Schema`, `datasets.Features`, or a dict of names and Arrow types."""
    schema = getattr(schema, "arrow_schema", schema)
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, Mapping) and all(isinstance(kind, pa.DataType) for kind in schema.values()):
        return pa.schema(list(schema.items()))
    wanted = "a pyarrow.Schema, datasets.Features or a dict of names and Arrow types is wanted"
    raise ConfigError(Setting("schema"), f": {type(schema).__name__}; {wanted}.")


# ---- values to arrays ----


def to_array(name: str, values: Any) -> pa.Array:
    """A column of a type that its values suggest. Raises ResultError for what is no column."""
    try:
        return _array(values)
    except (*_REFUSED, ValueError, TypeError, OverflowError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResultError(
            f'column "{name}": its values are not of one type that Arrow can hold ({detail}), '
            f"the first is {_shown(values)}. A column needs one type."
        ) from None


def _array(values: Any) -> pa.Array:
    if isinstance(values, list | tuple):
        if any(map(_is_array, set(map(type, values)))):
            arrays = (_numpy(value) if _is_array(type(value)) else value for value in values)
            values = [one.tolist() if getattr(one, "ndim", 1) > 1 else one for one in arrays]
        try:
            return pa.array(values, from_pandas=False)
        except OverflowError:  # an integer of 2**63 or more: a hash, say
            return pa.array(values, pa.uint64())
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        if not _is_array(type(values)):
            raise TypeError(f"{type(values).__name__} where a list or an array of values is wanted, one a row")
        numbers = np.atleast_1d(_numpy(values))
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


def _numpy(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


# ---- one schema ----


def joined(before: pa.Schema | None, arrays: Mapping[str, pa.Array]) -> pa.Schema:
    """The schema of the rows before and of these: null gives way to any type, a narrow number to a wide one."""
    fields = []
    for name, array in arrays.items():
        kind, narrow = array.type, _NARROW.get(name)
        if narrow is not None and kind in (pa.int64(), pa.list_(pa.int64())):
            narrow = narrow if pa.types.is_int64(kind) else pa.list_(narrow)
            try:
                array.cast(narrow)
                kind = narrow
            except _REFUSED:
                pass
        fields.append((name, kind))
    now = pa.schema(fields)
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
    same = [field.name for field in schema if source is not None and field.name in known and field in source]
    features = {_HF: json.dumps({"info": {"features": {name: known[name] for name in same}}})} if same else {}
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
    columns = []
    for field in schema:
        array = arrays.get(field.name, pa.nulls(length))
        if array.null_count and not field.nullable:
            raise ResultError(f'column "{field.name}": null where the schema has a value in every row.')
        try:
            columns.append(cast_column(array, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _refused(field, array, f" ({str(error).splitlines()[0]})") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _refused(field: pa.Field, array: pa.Array, detail: str = "") -> ResultError:
    shown = next((value for value in array.slice(0, 100) if value.is_valid), None)
    value = f", such as {_shown([shown.as_py()])}" if shown is not None else ""
    return ResultError(
        f'column "{field.name}": {field.type} was expected, as in earlier rows or in your schema; '
        f"found {array.type}{value}{detail}.\n"
        "Return one type everywhere, or give the type that holds all values: schema= of milldam.map, with "
        f'("{field.name}", ...).'
    )


def _shown(values: Any) -> str:
    try:
        first = repr(values[0])
    except Exception:
        return "unknown"
    return first if len(first) <= _SHOWN else first[: _SHOWN - 3] + "..."
