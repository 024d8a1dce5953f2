"""Logits as they are given (arrays, memory maps, tensors, chunks of these) -> chunks that fit, windows ascending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from milldam.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class LogitRows(Protocol):
    """(windows, L): an array, a memory map or a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any, /) -> Any: ...


class Logits:
    """Logits as they were given -> (numbers of windows, start, end), windows ascending."""

    def __init__(self, start: Any, end: Any, windows: Ints | None, count: int) -> None:
        self._start, self._end, self._windows, self._count = start, end, windows, count
        if hasattr(start, "shape"):
            self._check_arrays()

    def _check_arrays(self) -> None:
        shape = tuple(self._start.shape)
        if not hasattr(self._end, "shape") or tuple(self._end.shape) != shape:
            raise InputError(f"answers: start_logits are {shape}, end_logits {getattr(self._end, 'shape', None)}.")
        if len(shape) != 2 or shape[0] != self._expected:
            raise InputError(
                f"answers: logits of {shape}; there are {self._expected:,} windows, so (windows, L) begins with "
                "that. Give `windows` when the logits are of some windows only."
            )

    @property
    def _expected(self) -> int:
        return self._count if self._windows is None else len(self._windows)

    def chunks(self, size: int) -> Iterator[tuple[Ints, Floats, Floats]]:
        if hasattr(self._start, "shape"):
            return self._of_arrays(size)
        return self._of_chunks(size)

    def _of_arrays(self, size: int) -> Iterator[tuple[Ints, Floats, Floats]]:
        numbers = self._windows
        # Rows in any order may be given, as long as they can be fetched in the order of the store.
        rows = None if numbers is None or _ascending(numbers) else np.argsort(numbers, kind="stable")
        for first in range(0, self._expected, size):
            stop = min(first + size, self._expected)
            part: Any = slice(first, stop) if rows is None else rows[first:stop]
            of = np.arange(first, stop) if numbers is None else numbers[part]
            yield of, _floats(self._start[part]), _floats(self._end[part])

    def _of_chunks(self, size: int) -> Iterator[tuple[Ints, Floats, Floats]]:
        if self._windows is not None and not _ascending(self._windows):
            raise InputError("answers: chunks must come in the order of the store; `windows` is not ascending.")
        row = 0
        for start, end in self._pairs():
            if row + len(start) > self._expected or len(start) != len(end):
                raise InputError(
                    f"answers: a chunk of {len(start):,} start and {len(end):,} end logits from row {row:,} on; "
                    f"there are {self._expected:,} windows."
                )
            for first in range(0, len(start), size):
                stop = min(first + size, len(start))
                of = np.arange(row + first, row + stop)
                numbers = of if self._windows is None else self._windows[of]
                yield numbers, _floats(start[first:stop]), _floats(end[first:stop])
            row += len(start)
        if row != self._expected:
            raise InputError(f"answers: logits of {row:,} windows; there are {self._expected:,}.")

    def _pairs(self) -> Iterable[tuple[Any, Any]]:
        if self._end is None:
            return ((start, end) for start, end in self._start)
        return zip(self._start, self._end, strict=True)


def _ascending(numbers: Ints) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _floats(logits: Any) -> Floats:
    """Of an array, or of a tensor: on any device, with a gradient, in bfloat16, which numpy has not."""
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu().double().numpy()
    return np.asarray(logits, np.float64)
