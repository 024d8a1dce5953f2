"""What is trained on, as columns beside `input_ids`: read as a store's stretches, and written from them.

labels             the id where a token is trained on, else -100
assistant_masks    1 where it is, else 0; completion_mask, as TRL makes it of prompt and completion, is read alike
position_ids       of packed rows: from 0 on in every conversation
seq_lengths        of packed rows: tokens of each piece, padding as a piece of its own; what TRL's collator takes
label              a label a document, where the store has some (KTO)
prompt_ids, chosen_ids, rejected_ids      of a store of pairs, instead of all of these: what TRL's DPOTrainer makes

Packed rows are those of `store.packed(seq_len, form="hf")`: whole conversations, padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.errors import InputError, Setting
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.loader.packed import PackedRows
    from milldam.loader.stores import Store

NO_LOSS = -100
MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask")
"""The first of these that there is says what is trained on."""
_ROWS_AT_ONCE = 1 << 16

# ---- read ----


def choose_masks(schema: pa.Schema, asked: str | None, path: Path) -> str | None:
    """The column that says what is trained on; None: none does, or none is to."""
    import pyarrow as pa

    if asked == "none":
        return None
    if asked is not None:
        if asked not in schema.names:
            told = f'{path}: no column "{asked}"; it has {", ".join(schema.names)}. Say which one with '
            raise InputError(told, Setting("masks"), ".")
        return asked
    # `labels` of another data set may be classes.
    lists = (name for name in MASK_COLUMNS if name in schema.names and pa.types.is_nested(schema.field(name).type))
    return next(lists, None)


def trained_of(ids: Array, values: Array, name: str, path: Path) -> Bools:
    """Which tokens are trained on, from a column of labels or of zeros and ones."""
    ones = values.astype(np.bool_)
    # Labels that are all 0 or 1 are the ids 0 and 1.
    if name != "labels" and np.array_equal(values, ones):
        return ones
    trained: Bools = values != NO_LOSS
    if np.array_equal(values[trained], ids[trained]):
        return trained
    told = (
        f'{path}: the column "{name}" is neither a mask of zeros and ones nor labels that are {NO_LOSS} or the token '
        "at the same place (as HF has them, which shifts by itself). Name another column, or none, with "
    )
    raise InputError(told, Setting("masks"), ".")


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


# ---- write ----


class MaskedRows:
    """The rows of a store with stretches, as columns of arrays: (values, tokens of each row), or values a row."""

    def __init__(self, store: Store, seq_len: int | None, dtype: np.dtype[Any]) -> None:
        self._store, self._seq_len, self._dtype = store, seq_len, dtype
        signed = dtype if dtype.kind == "i" else np.dtype(np.int32 if dtype.itemsize < 4 else np.int64)
        self.types: dict[str, tuple[np.dtype[Any], bool]] = _types(store, seq_len, dtype, signed)
        """Each column's dtype, and whether it holds lists."""

    @cached_property
    def packed(self) -> PackedRows:
        assert self._seq_len is not None
        return self._store.packed(self._seq_len, form="hf", read="pread")

    def row_lengths(self) -> Iterator[Int64s]:
        """Tokens of each row in order, many at a time."""
        if self._seq_len is not None:
            yield np.full(len(self.packed), self._seq_len, np.int64)
            return
        for first in range(0, len(self._whole), _ROWS_AT_ONCE):
            numbers = np.arange(first, min(first + _ROWS_AT_ONCE, len(self._whole)))
            yield self._whole.lengths(numbers).sum(axis=1)

    def blocks(self, first: int, rows: int, lengths: Int64s) -> Iterator[dict[str, tuple[Array, Int64s | None]]]:
        """The rows from `first` on, about a million tokens at a time, or one row that has more."""
        from milldam.stores.tokens.reader import cut_blocks

        for begin, stop in cut_blocks(lengths[:rows]):
            numbers = np.arange(first + begin, first + stop)
            made = self._packed(numbers) if self._seq_len is not None else self._documents(numbers)
            yield {name: (values.astype(self.types[name][0]), counts) for name, (values, counts) in made.items()}

    def _packed(self, numbers: Int64s) -> dict[str, tuple[Array, Int64s | None]]:
        batch = self.packed.read(numbers)
        assert self._seq_len is not None
        lengths = np.full(len(numbers), self._seq_len)
        borders = batch["cu_seqlens"].astype(np.int64)
        # A piece never goes over the end of its row.
        pieces = np.bincount(borders[:-1] // self._seq_len, minlength=len(numbers))
        trained = batch["labels"] != NO_LOSS
        columns: dict[str, npt.NDArray[Any]] = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        columns |= {"assistant_masks": trained, "position_ids": batch["position_ids"]}
        made: dict[str, tuple[Array, Int64s | None]] = {
            name: (values.reshape(-1), lengths) for name, values in columns.items()
        }
        return made | {"seq_lengths": (np.diff(borders), pieces)}

    @cached_property
    def _whole(self) -> Any:
        store = self._store
        return store.pairs(read="pread") if store.stream().pairs else store.conversations(read="pread")

    def _documents(self, numbers: Int64s) -> dict[str, tuple[Array, Int64s | None]]:
        if self._store.stream().pairs:
            pairs = self._whole.__getitems__(numbers.tolist())
            return {
                name: _joined([pair[name] for pair in pairs]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
            }
        ids, trained, lengths = self._whole.flat(numbers)
        labels = ids.astype(np.int64)
        labels[~trained] = NO_LOSS
        made: dict[str, tuple[Array, Int64s | None]] = {"input_ids": (ids, lengths), "labels": (labels, lengths)}
        made["assistant_masks"] = (trained, lengths)
        if "label" in self.types:
            made["label"] = (self._whole.labels_of(numbers), None)
        return made


def _types(
    store: Store, seq_len: int | None, dtype: np.dtype[Any], signed: np.dtype[Any]
) -> dict[str, tuple[np.dtype[Any], bool]]:
    stream, whole = store.stream(), seq_len is None
    if stream.pairs and whole:
        return dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), (dtype, True))
    types: dict[str, tuple[np.dtype[Any], bool]] = {"input_ids": (dtype, True), "labels": (signed, True)}
    types["assistant_masks"] = (np.dtype(np.int8), True)
    if not whole:
        types |= {name: (np.dtype(np.int32), True) for name in ("position_ids", "seq_lengths")}
    elif stream.has_labels:
        types["label"] = (np.dtype(np.bool_), False)
    return types


def _joined(arrays: list[Array]) -> tuple[Array, Int64s]:
    return np.concatenate(arrays), np.array([len(array) for array in arrays], np.int64)
