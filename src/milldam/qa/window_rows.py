"""Windows of a feature store -> rows of a batch: the columns that models take, and rows of padding in the same form.

A read is one call of the store for all windows, whatever shards they lie in. Holds the windows asked for, no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, did_you_mean
from milldam.loader.permutation import Int64s
from milldam.loader.samples import widened
from milldam.loader.types import Array, Bools, Int32s
from milldam.stores.features.format import FeatureForm

if TYPE_CHECKING:
    from milldam.stores.features import FeatureStore

Rows = dict[str, Array]
"""Columns by name, one row a window."""


class WindowBatch(TypedDict, total=False):
    """Windows of a batch, one row each: those columns that were asked for."""

    input_ids: Int64s
    attention_mask: Int64s
    token_type_ids: Int64s
    start_positions: Int64s
    end_positions: Int64s
    cls_index: Int64s
    example: Int64s
    """The number of its document in the store; -1 on padding."""
    segment_index: Int64s
    total_segments: Int64s
    has_answer: Bools
    window: Int64s
    """Its number in the store; -1 on padding."""
    offset_mapping: Int32s
    context_begin: Int64s
    context_tokens: Int64s


class StepBatch(WindowBatch):
    """A step of some documents, one row each."""

    document_mask: Bools
    """False: the document has ended, and the row is padding."""


class LaneBatch(StepBatch):
    """A step of some lanes, one row each."""

    reset: Bools
    """True: a document begins."""


COLUMNS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "start_positions",
    "end_positions",
    "cls_index",
    "example",
    "segment_index",
    "total_segments",
    "has_answer",
    "window",
)
"""What a batch has unless told otherwise."""

_MADE_OF: dict[str, tuple[str, ...]] = {
    "attention_mask": ("length",),
    "has_answer": ("start_positions", "cls_index"),
    "segment_index": ("segment",),
    "total_segments": ("segments",),
    "offset_mapping": ("offsets",),
}
"""Columns that are stored under another name, or computed."""
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_POSITIONS = ("start_positions", "end_positions", "cls_index")
_PADS = {"example": -1, "window": -1, "segment_index": -1, "context_begin": 0, "context_tokens": 0, "total_segments": 0}
_KNOWN = (*COLUMNS, "offset_mapping", "context_begin", "context_tokens")


@dataclass(frozen=True, slots=True)
class WindowColumns:
    """The columns of a batch.

    Token columns come in the dtype of the batch, `has_answer` as bool, `offset_mapping` as int32, the others as int64.
    """

    names: Sequence[str] = COLUMNS

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise ConfigError(f'columns: "{self.names}" is one name; give a list of names.')
        object.__setattr__(self, "names", tuple(dict.fromkeys(self.names)))
        for name in self.names:
            if name not in _KNOWN:
                hint = did_you_mean(name, _KNOWN)
                raise ConfigError(f'columns: no column "{name}" in windows; there are {", ".join(_KNOWN)}.{hint}')
        if not self.names:
            raise ConfigError(f"columns: none is named; there are {', '.join(_KNOWN)}.")

    def read(self, store: FeatureStore, numbers: Int64s, dtype: npt.DTypeLike, out: Rows | None = None) -> Rows:
        """Windows by number. `out`: columns of as many rows or more, which are overwritten."""
        names = [name for name in self.names if name != "window"]
        wanted = dict.fromkeys(stored for name in names for stored in _MADE_OF.get(name, (name,)))
        stored = {"window": numbers, **store.rows(numbers, tuple(wanted))}
        return {name: self._column(name, stored, store.form, dtype, out[name] if out else None) for name in self.names}

    def _column(
        self, name: str, stored: Mapping[str, Array], form: FeatureForm, dtype: npt.DTypeLike, out: Array | None
    ) -> Array:
        if name == "attention_mask":
            return form.attention_mask(stored["length"], dtype, out)
        if name == "has_answer":
            return widened(stored["start_positions"] != stored["cls_index"], np.bool_, out)
        return widened(stored[_MADE_OF.get(name, (name,))[0]], _dtype_of(name, dtype), out)

    def padding(self, form: FeatureForm, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Rows:
        """Rows without a window: (*shape, ...) of every column, as a window would be that has no token."""
        return {name: _padding(name, form, shape, dtype) for name in self.names}


def _dtype_of(name: str, dtype: npt.DTypeLike) -> npt.DTypeLike:
    if name in _OF_TOKENS:
        return dtype
    return {"has_answer": np.bool_, "offset_mapping": np.int32}.get(name, np.int64)


def _padding(name: str, form: FeatureForm, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    tails = {"offset_mapping": (form.max_seq_length, 2)} | dict.fromkeys(_OF_TOKENS, (form.max_seq_length,))
    # An empty window's CLS: on the side where text is, inside the window, so that a loss can take it as a target.
    cls = form.max_seq_length - 1 if form.pad_left else 0
    pads = {"input_ids": form.pad_id, "attention_mask": 0, "token_type_ids": form.pad_type, "offset_mapping": -1}
    pads |= {"has_answer": False} | _PADS | dict.fromkeys(_POSITIONS, cls)
    return np.full((*shape, *tails.get(name, ())), pads[name], _dtype_of(name, dtype))
