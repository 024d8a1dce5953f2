"""The columns of windows: what is computed, stored and read again. One row a window, in the order of the examples."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Features:
    """Windows of some examples. L is max_seq_length; positions count from the first token, padding included."""

    input_ids: Ints
    """(windows, L), padded with the pad token."""
    token_type_ids: Ints
    """(windows, L) uint8: as the tokenizer's template has them, the pad type on padding."""
    offsets: Ints
    """(windows, L, 2) int32: begin and end, in characters of the context, of each context token; (-1, -1) elsewhere."""
    length: Ints
    """(windows,) int32: tokens without padding."""
    start_positions: Ints
    """(windows,) int32: the first token of the answer; cls_index where the window does not hold the whole answer."""
    end_positions: Ints
    """(windows,) int32: the last token of the answer, itself included."""
    cls_index: Ints
    """(windows,) int32."""
    context_begin: Ints
    """(windows,) int32: where in the window the context's tokens begin."""
    context_tokens: Ints
    """(windows,) int32: how many tokens of the context are in the window."""
    segment: Ints
    """(windows,) int32: the window's number in its example, from 0."""
    segments: Ints
    """(windows,) int32: how many windows its example has."""
    example: Ints
    """(windows,) int64: the example's number in what was given (from 0); in a store, the number in the store."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def has_answer(self) -> npt.NDArray[np.bool_]:
        """(windows,): whether the window holds the whole answer."""
        has: npt.NDArray[np.bool_] = self.start_positions != self.cls_index
        return has


COLUMNS = tuple(field.name for field in fields(Features))
NUMBERS = tuple(name for name in COLUMNS if name not in ("input_ids", "token_type_ids", "offsets", "example"))
"""Those of one number a window, in the order in which they are stored."""
