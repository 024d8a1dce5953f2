"""Windows of a feature store as batches: plain, or time-step-major, a list over the segments of documents.

    for batch in WindowSamples(store).batches(16, seed=1): ...       a dict of arrays, one row a window
    for steps in DocumentSamples(store).batches(16, seed=1):         16 documents
        for step in steps: ...                                       a dict of arrays, one row a document

Shuffled, ranks, epochs, reading ahead and states are those of every loader (loader/batches.py). A plain batch costs its
own arrays; all windows are read by one call of the store, whatever shards they lie in. A time-step batch is as long as
its longest document: choose segments (selection.py) where documents are long, or let rows take the next document when
one ends (lanes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, did_you_mean
from milldam.loader.order import LengthGrouped, Order, Shuffle, make_order
from milldam.loader.permutation import Int64s
from milldam.loader.reading import ranges
from milldam.loader.samples import ReadPart, Samples, counted_number, widened
from milldam.loader.types import Array, BatchT, Bools, Int32s, State
from milldam.qa.selection import DocumentOrder, Selection, chosen_windows
from milldam.qa.store import Form

if TYPE_CHECKING:
    import torch

    from milldam.qa.store import FeatureStore

GROUPED = 32
"""Documents of about one length that stay together."""
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


_KNOWN = tuple(WindowBatch.__annotations__)
COLUMNS = tuple(name for name in _KNOWN if name not in ("offset_mapping", "context_begin", "context_tokens"))
"""What a batch has unless told otherwise."""
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_POSITIONS = ("start_positions", "end_positions", "cls_index")
_PADS = {"example": -1, "window": -1, "segment_index": -1, "context_begin": 0, "context_tokens": 0, "total_segments": 0}


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
        # The mask is made from lengths, in the dtype of the batch and in its place.
        asked = ["length" if name == "attention_mask" else name for name in self.names if name != "window"]
        stored, found = {"window": numbers, **store.rows(numbers, asked)}, {}
        for name in self.names:
            place = out[name] if out else None
            if name == "attention_mask":
                found[name] = store.form.attention_mask(stored["length"], dtype, place)
            else:
                found[name] = widened(stored[name], _dtype_of(name, dtype), place)
        return found

    def padding(self, form: Form, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Rows:
        """Rows without a window: (*shape, ...) of every column, as a window would be that has no token."""
        return {name: _padding(name, form, shape, dtype) for name in self.names}


def _dtype_of(name: str, dtype: npt.DTypeLike) -> npt.DTypeLike:
    if name in _OF_TOKENS:
        return dtype
    return {"has_answer": np.bool_, "offset_mapping": np.int32}.get(name, np.int64)


def _padding(name: str, form: Form, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    tails = {"offset_mapping": (form.max_seq_length, 2)} | dict.fromkeys(_OF_TOKENS, (form.max_seq_length,))
    # An empty window's CLS: on the side where text is, inside the window, so that a loss can take it as a target.
    cls = form.max_seq_length - 1 if form.pad_left else 0
    pads = {"input_ids": form.pad_id, "attention_mask": 0, "token_type_ids": form.pad_type, "offset_mapping": -1}
    pads |= {"has_answer": False} | _PADS | dict.fromkeys(_POSITIONS, cls)
    return np.full((*shape, *tails.get(name, ())), pads[name], _dtype_of(name, dtype))


class FeatureSamples(Samples[WindowBatch, BatchT]):
    """Samples made of a feature store's windows."""

    def __init__(self, store: FeatureStore, columns: Sequence[str]) -> None:
        if not len(store):
            raise ConfigError("This feature store holds no windows: nothing to make batches of.")
        self.store, self.columns = store, WindowColumns(columns)

    @property
    def sample_tokens(self) -> int:
        return self.store.form.max_seq_length

    @property
    def token_dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.store.form.token_dtype)
        return dtype


class WindowSamples(FeatureSamples[WindowBatch]):
    """Windows by number: `samples[k]`, `len(samples)`, `samples.batches(16)`.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> next(milldam.qa.WindowSamples(features).batches(16, seed=0))["input_ids"].shape
    (16, 384)
    """

    def __init__(self, store: FeatureStore, *, columns: Sequence[str] = COLUMNS) -> None:
        super().__init__(store, columns)

    @property
    def identity(self) -> State:
        return {"kind": "question-answering windows", "samples": len(self), "store": self.store.fingerprint}

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, number: int) -> WindowBatch:
        rows = self.columns.read(self.store, np.array([counted_number(number, len(self))]), np.int64)
        return cast("WindowBatch", {name: column[0] for name, column in rows.items()})

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: WindowBatch | None = None) -> WindowBatch:
        return cast("WindowBatch", self.columns.read(self.store, numbers, dtype, cast("Rows | None", out)))

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return make_order(shuffle, len(self), seed, self.sample_tokens * self.token_dtype.itemsize)

    def __repr__(self) -> str:
        return f"WindowSamples({len(self):,} windows of {self.sample_tokens:,} tokens)"


class TimeSteps(list[StepBatch]):
    """Documents step by step: `steps[t]` has segment t of every document, row b is the same document at every step.

    `document_mask` is False, and the row is padding, where a document has ended: [A(1), B(3), C(2)] gives
    [A, B, C], [pad, B, C], [pad, B, pad]. Steps are views of arrays for the whole batch.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> steps = next(milldam.qa.DocumentSamples(features).batches(8, seed=0))
    >>> [step["input_ids"].shape for step in steps]
    [(8, 384), (8, 384), (8, 384)]
    """

    def __init__(self, steps: Iterable[StepBatch], examples: Int64s) -> None:
        super().__init__(steps)
        self.examples = examples
        """(rows,): the document of each row, by its number in the store."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TimeSteps, (list(self), self.examples)


class DocumentSamples(FeatureSamples[TimeSteps]):
    """Documents by number; their batches are `TimeSteps`.

    selection         which segments of each document; None: all
    group_by_length   documents of about one length come together, 32 of them, which saves padding: see `LengthGrouped`.
                      Best where batch_size times world_size divides 32 or is a multiple of it.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> documents = milldam.qa.DocumentSamples(features, selection=milldam.qa.Selection(max_segments=1))
    >>> [len(steps) for steps in documents.batches(6, seed=0)]
    [1, 1]
    """

    _reusable = False
    """Every batch has other shapes."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        selection: Selection | None = None,
        group_by_length: bool = False,
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        super().__init__(store, columns)
        self.selection, self.group_by_length = selection, bool(group_by_length)

    @property
    def identity(self) -> State:
        own: State = {"kind": "question-answering documents", "samples": len(self), "store": self.store.fingerprint}
        chosen = None if self.selection is None else self.selection.as_dict()
        return own | {"selection": chosen, "group_by_length": self.group_by_length}

    @property
    def sample_tokens(self) -> int:
        """Of a document of mean length."""
        segments = max(1, round(len(self.store) / self.store.examples))
        most = segments if self.selection is None else min(segments, self.selection.max_segments)
        return self.store.form.max_seq_length * most

    def __len__(self) -> int:
        return self.store.examples

    def __getitem__(self, number: int) -> WindowBatch:
        """The windows of one document, as the first epoch has them."""
        firsts, counts = self.chosen(np.array([counted_number(number, len(self))]))
        return cast("WindowBatch", self.columns.read(self.store, ranges(firsts, counts), np.int64))

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: TimeSteps | None = None) -> TimeSteps:
        """Numbers from `len(self)` on are those of later epochs."""
        return self._steps(numbers, *self.chosen(numbers), dtype)

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[TimeSteps]:
        firsts, counts = self.chosen(numbers)
        return lambda part, _: self._steps(numbers[part], firsts[part], counts[part], dtype)

    def chosen(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """The first window that is read of each document, and how many."""
        epochs, documents = np.divmod(numbers, len(self))
        return chosen_windows(self.store, self.selection, documents, epochs)

    def _steps(self, numbers: Int64s, firsts: Int64s, counts: Int64s, dtype: npt.DTypeLike) -> TimeSteps:
        shape = (int(counts.max()), len(numbers))
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = ranges(np.zeros_like(counts), counts), rows
        columns = placed(self.columns, self.store, ranges(firsts, counts), shape, places, dtype)
        steps = ({name: column[t] for name, column in columns.items()} for t in range(shape[0]))
        return TimeSteps((cast("StepBatch", step) for step in steps), numbers % len(self))

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        below = make_order(shuffle, len(self), seed, self.sample_tokens * self.token_dtype.itemsize)
        if self.group_by_length:
            below = LengthGrouped(below, len(self), seed if shuffle else None, GROUPED, self._lengths)
        return DocumentOrder(below, len(self))

    def _lengths(self, documents: Int64s) -> Int64s:
        _, segments = self.store.windows_of(documents)
        return segments if self.selection is None else self.selection.counts(segments)

    def __repr__(self) -> str:
        return f"DocumentSamples({len(self):,} documents, {len(self.store):,} windows)"


def placed(
    columns: WindowColumns,
    store: FeatureStore,
    numbers: Int64s,
    shape: tuple[int, ...],
    places: tuple[Array, ...],
    dtype: npt.DTypeLike,
) -> Rows:
    """Windows at places of an array of rows, padding elsewhere; `document_mask` says which is which."""
    columns_of_all = columns.padding(store.form, shape, dtype)
    # As narrow as they are stored: they are widened on the way to their places.
    for name, column in columns.read(store, numbers, store.form.token_dtype).items():
        columns_of_all[name][places] = column
    mask = np.zeros(shape, np.bool_)
    mask[places] = True
    return columns_of_all | {"document_mask": mask}


@overload
def to_tensors(batch: TimeSteps, device: torch.device | str | None = None) -> list[dict[str, torch.Tensor]]: ...


@overload
def to_tensors(
    batch: WindowBatch | StepBatch | LaneBatch, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]: ...


def to_tensors(batch: Any, device: torch.device | str | None = None) -> Any:
    """The same batch with tensors instead of arrays, on a device if one is named; a list of steps stays a list.

    On the CPU they share the arrays' memory, without a copy. For all batches of a loader: `milldam.torch.tensors`.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> for steps in milldam.qa.DocumentSamples(features).batches(6):
    ...     for step in milldam.qa.to_tensors(steps, "cpu"):
    ...         assert step["input_ids"].shape == (6, 384)
    """
    import torch

    from milldam.torch.tensors import converted

    return converted(batch, lambda array: torch.from_numpy(array).to(device or "cpu"))
