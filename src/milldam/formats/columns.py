"""Columns of token ids in Arrow and Parquet files, read as documents. No Python object for any token.

Ids are read by the name of their column, a document a row; other columns are not read, but for one that says what is
trained on: `labels` (the id, or -100), `assistant_masks` or `completion_mask` (1 or 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from milldam.errors import InputError, Setting
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import Int64s, Spans
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

NO_LOSS = -100
_USUAL = ("input_ids", "tokens", "token_ids", "ids")
_MASKS = ("labels", "assistant_masks", "completion_mask")
"""The first of these that there is says what is trained on."""


def read_columns(path: Path, format: str, column: str | None, masks: str | None) -> Iterator[Tokens]:
    """The documents of a Parquet or Arrow file, some megabytes at a time. `column`, `masks`: those that the user names
    (`none`: no masks)."""
    from milldam.sources.compression import DamagedError
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    try:
        slice = Slice(str(path), format, None)
        for _, batch in table_batches(slice, lambda schema: _choose(schema, path, column, masks)):
            yield _documents_of(batch, _choose(batch.schema, path, column, masks), path)
    except DamagedError as error:
        raise InputError(f"{path}: {error}. Get or make it again.") from None


def _choose(schema: pa.Schema, path: Path, column: str | None, masks: str | None) -> list[str]:
    """The column with the ids, and that with the masks, if there is one: as the user says, or of a usual name."""
    import pyarrow as pa

    names = schema.names
    ids = column or next((name for name in _USUAL if name in names), names[0] if len(names) == 1 else None)
    if masks is None:
        # `labels` of another dataset may be classes.
        lists = (name for name in _MASKS if name in names and pa.types.is_nested(schema.field(name).type))
        masks = next(lists, "none")
    for setting, name in (("column", ids), ("masks", None if masks == "none" else masks)):
        if name not in names and (name is not None or setting == "column"):
            problem = "no column of a usual name" if name is None else f'no column "{name}"'
            advice = f"it has {', '.join(names)}. Say which one it is with "
            raise InputError(f"{path}: {problem}; {advice}", Setting(setting), ".")
    return [str(ids)] if masks == "none" else [str(ids), masks]


def _documents_of(batch: pa.RecordBatch, columns: list[str], path: Path) -> Tokens:
    """The rows of a batch, with what is trained on where another column says it."""
    ids, lengths = _values(batch, columns[0], path)
    if len(columns) == 1:
        return Tokens(ids, lengths)
    masks = columns[1]
    values, of_each = _values(batch, masks, path)
    if not np.array_equal(of_each, lengths):
        raise InputError(f'{path}: "{masks}" has not as many values as "{columns[0]}" has tokens in every row.')
    trained: Bools = values.astype(np.bool_)
    # Labels that are all 0 or 1 are the ids 0 and 1.
    if masks == "labels" or not np.array_equal(values, trained):
        trained = values != NO_LOSS
        if not np.array_equal(values[trained], ids[trained]):
            raise InputError(
                f'{path}: the column "{masks}" is neither a mask of zeros and ones nor labels that are {NO_LOSS} or '
                "the token at the same place (as HF has them, which shifts by itself). Name another column, or none, "
                "with ",
                Setting("masks"),
                ".",
            )
    return Tokens(ids, lengths, spans=spans_of(trained, lengths))


def spans_of(mask: Bools, lengths: Int64s) -> Spans:
    """The stretches of documents that lie end to end."""
    ends = lengths.cumsum()
    border = np.zeros(len(mask) + 1, np.bool_)
    border[0] = border[-1] = True
    border[ends] = True
    before = np.concatenate(([False], mask))
    behind = np.concatenate((mask, [False]))
    first = np.flatnonzero(behind & (~before | border))
    stop = np.flatnonzero(before & (~behind | border))
    owners = ends.searchsorted(first, side="right")
    shift = (ends - lengths)[owners]
    return Spans(np.stack((first - shift, stop - shift), axis=1), np.bincount(owners, minlength=len(lengths)))


def _values(batch: pa.RecordBatch, name: str, path: Path) -> tuple[Array, Int64s]:
    """The numbers of a column of lists end to end, and how many each row has."""
    import pyarrow as pa

    column = batch.column(name)
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise InputError(f'{path}: the column "{name}" is {kind}; a list of integers is wanted.')
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f'{path}: the column "{name}" has nulls, which are not tokens. Drop these rows first.')
    flat = values.to_numpy(zero_copy_only=False)
    return flat, np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
