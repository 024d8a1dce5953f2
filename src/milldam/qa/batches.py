"""Windows of a feature store as batches: plain, or time-step-major, a list over the segments of documents.

    for batch in WindowSamples(store).batches(16, seed=1): ...       a dict of arrays, one row a window
    for steps in DocumentSamples(store).batches(16, seed=1):         16 documents
        for step in steps: ...                                       a dict of arrays, one row a document

Shuffling, ranks, epochs, reading ahead and states are those of every loader (loader/batches.py). A plain batch costs
its own arrays; all windows are read by one call of the store, whatever shards they lie in. A time-step batch is as long
as its longest document: if documents are long, select a stretch of segments, or let rows take the next document when
one ends (lanes.py).

Segments are selected when loading, from the store, the document's number and the epoch alone: batch sizes, ranks and
workers change nothing. A document's number includes its epoch (epoch * documents + document), so it alone decides the
segments that are chosen at random. Finding answers reads three numbers a window, only of documents that are longer than
the stretch.

The columns of a batch, unless `columns` names others:

    input_ids, attention_mask, token_type_ids           (rows, L)
    start_positions, end_positions, cls_index
    example, segment_index, total_segments, window      the document's number in the store; the window's; -1 on padding
    has_answer                                          bool
    document_mask, reset                                bool, in steps: False on padding; in lanes: a document begins

`offset_mapping` (rows, L, 2), `context_begin` and `context_tokens` can be asked for. Token columns have the dtype of
the batch, `offset_mapping` is int32, the others int64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, did_you_mean
from milldam.loader.order import Order, Shuffle, make_order
from milldam.loader.permutation import Int64s, hashed, mix
from milldam.loader.reading import ranges
from milldam.loader.samples import ReadPart, Samples, counted_number, widened
from milldam.loader.types import Array, BatchT, State
from milldam.qa.store import Form

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

Rows = dict[str, Array]
"""Columns by name, one row a window."""

_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_POSITIONS = ("start_positions", "end_positions", "cls_index")
COLUMNS = (*_OF_TOKENS, *_POSITIONS, "example", "segment_index", "total_segments", "has_answer", "window")
"""The columns of a batch by default."""
_KNOWN = (*COLUMNS, "offset_mapping", "context_begin", "context_tokens")


# ---- columns ----


class WindowColumns:
    """The columns of a batch, read or as padding."""

    def __init__(self, names: Sequence[str] = COLUMNS) -> None:
        if isinstance(names, str):
            raise ConfigError(f'columns: "{names}" is one name; give a list of names.')
        self.names = tuple(dict.fromkeys(names))
        for name in self.names:
            if name not in _KNOWN:
                hint = did_you_mean(name, _KNOWN)
                raise ConfigError(f'columns: no column "{name}" in windows; there are {", ".join(_KNOWN)}.{hint}')
        if not self.names:
            raise ConfigError(f"columns: none is named; there are {', '.join(_KNOWN)}.")

    def read(self, store: FeatureStore, numbers: Int64s, dtype: npt.DTypeLike, out: Rows | None = None) -> Rows:
        """Windows by number. `out`: columns of as many rows or more, which are overwritten."""
        # The mask is made from lengths, in the dtype of the batch and in its place.
        stored_names = ["length" if name == "attention_mask" else name for name in self.names if name != "window"]
        stored, rows = {"window": numbers, **store.rows(numbers, stored_names)}, {}
        for name in self.names:
            place = out[name] if out else None
            if name == "attention_mask":
                rows[name] = store.form.attention_mask(stored["length"], dtype, place)
            else:
                rows[name] = widened(stored[name], _dtype_of(name, dtype), place)
        return rows

    def placed(
        self,
        store: FeatureStore,
        numbers: Int64s,
        shape: tuple[int, ...],
        places: tuple[Array, ...],
        dtype: npt.DTypeLike,
    ) -> Rows:
        """Windows at places of an array of rows, padding elsewhere; `document_mask` says which is which."""
        rows = {
            name: np.full((*shape, *tail), pad, _dtype_of(name, dtype)) for name, tail, pad in self._pads(store.form)
        }
        # As narrow as they are stored: they are widened on the way to their places.
        for name, column in self.read(store, numbers, store.form.token_dtype).items():
            rows[name][places] = column
        mask = np.zeros(shape, np.bool_)
        mask[places] = True
        return rows | {"document_mask": mask}

    def _pads(self, form: Form) -> Iterable[tuple[str, tuple[int, ...], int]]:
        """(name, shape of a row, value) of columns on padding, as a window without tokens would have them."""
        tails = {"offset_mapping": (form.max_seq_length, 2)} | dict.fromkeys(_OF_TOKENS, (form.max_seq_length,))
        pads = {"input_ids": form.pad_id, "attention_mask": 0, "token_type_ids": form.pad_type, "has_answer": 0}
        pads |= {"context_begin": 0, "context_tokens": 0, "total_segments": 0}
        # The CLS of an empty window is on the side where text is, inside the window: a loss can take it as a target.
        pads |= dict.fromkeys(_POSITIONS, form.max_seq_length - 1 if form.pad_left else 0)
        return ((name, tails.get(name, ()), pads.get(name, -1)) for name in self.names)


def _dtype_of(name: str, dtype: npt.DTypeLike) -> npt.DTypeLike:
    if name in _OF_TOKENS:
        return dtype
    return {"has_answer": np.bool_, "offset_mapping": np.int32}.get(name, np.int64)


# ---- which segments of a document are read ----

Strategy = Literal["first_n", "answer_centered", "random_continuous"]
_RANDOM_KEY = 0x7365_676D_656E_7473
_WINDOWS_AT_ONCE = 1 << 16
"""Windows to search for answers in one read: this bounds memory, however long the documents are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A continuous stretch of at most max_segments segments of each document.

    >>> milldam.qa.Selection(strategy="answer_centered", max_segments=4)
    Selection(strategy='answer_centered', max_segments=4, seed=0)
    """

    strategy: Strategy = "first_n"
    """first_n: the first. answer_centered: with the answer as near to the middle as the ends allow; the first where
    there is no answer. random_continuous: any stretch, another one in every epoch."""
    max_segments: int
    seed: int = 0
    """For random_continuous."""

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            hint = did_you_mean(str(self.strategy), get_args(Strategy))
            raise ConfigError(f"strategy: {self.strategy!r}; use one of {', '.join(get_args(Strategy))}.{hint}")
        for name in ("max_segments", "seed"):
            # numpy's integers would end up in states, which are JSON.
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.max_segments < 1:
            raise ConfigError(f"max_segments: {self.max_segments}; use 1 or more.")

    def firsts(
        self, store: FeatureStore, examples: Int64s, epoch: int | Int64s, windows: Int64s, room: Int64s
    ) -> Int64s:
        """The first segment of the stretch. `room`: the last segment that a stretch can begin with."""
        if self.strategy == "random_continuous":
            epochs = np.broadcast_to(np.asarray(epoch, np.uint64), examples.shape)
            hashes = hashed(examples.astype(np.uint64) + hashed(epochs, mix(self.seed, _RANDOM_KEY)), 0)
            scaled = (hashes >> np.uint64(32)) * (room + 1).astype(np.uint64) >> np.uint64(32)
            return scaled.astype(np.int64)
        firsts = np.zeros(len(examples), np.int64)
        longer = np.flatnonzero(room > 0)
        if self.strategy == "first_n" or not len(longer):
            return firsts
        # Documents in portions of about so many windows as are searched at once.
        segments = room[longer] + self.max_segments
        portion = (segments.cumsum() - segments) // _WINDOWS_AT_ONCE
        cuts = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(segments)]
        parts = [slice(begin, stop) for begin, stop in itertools.pairwise(cuts)]
        answers = np.concatenate([_answer_segments(store, windows[longer][part], segments[part]) for part in parts])
        firsts[longer] = np.clip(answers - (self.max_segments - 1) // 2, 0, room[longer])
        return firsts


def _answer_segments(store: FeatureStore, windows: Int64s, segments: Int64s) -> Int64s:
    """The segment with the answer of each document, the middle one if several hold it; 0 if none does."""
    rows = store.rows(ranges(windows, segments), ("start_positions", "cls_index"))
    holding = np.flatnonzero(rows["start_positions"] != rows["cls_index"])
    owner = np.repeat(np.arange(len(segments)), segments)[holding]
    holders = np.bincount(owner, minlength=len(segments))
    begins = segments.cumsum() - segments
    answers = np.zeros(len(segments), np.int64)
    some = holders > 0
    middle = (holders.cumsum() - holders + (holders - 1) // 2)[some]
    answers[some] = holding[middle] - begins[some]
    return answers


def chosen_windows(
    store: FeatureStore, selection: Selection | None, examples: Int64s, epoch: int | Int64s
) -> tuple[Int64s, Int64s]:
    """Of each document: the number of the first window to read, and how many. `epoch`: one for all, or one for each."""
    windows, segments = store.windows_of(examples)
    if selection is None:
        return windows, segments
    counts = np.minimum(segments, selection.max_segments)
    return windows + selection.firsts(store, examples, epoch, windows, segments - counts), counts


class DocumentOrder(Order):
    """An order of documents, as numbers that carry their epoch."""

    def __init__(self, order: Order, documents: int) -> None:
        super().__init__(documents)
        self._order = order

    def numbers(self, places: Int64s) -> Int64s:
        return self._order.numbers(places) + places // self.samples * self.samples


# ---- samples ----


class FeatureSamples(Samples[Rows, BatchT]):
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


class WindowSamples(FeatureSamples[Rows]):
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

    def __getitem__(self, number: int) -> Rows:
        rows = self.columns.read(self.store, np.array([counted_number(number, len(self))]), np.int64)
        return {name: column[0] for name, column in rows.items()}

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: Rows | None = None) -> Rows:
        return self.columns.read(self.store, numbers, dtype, out)

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return make_order(shuffle, len(self), seed, self.sample_tokens * self.token_dtype.itemsize)

    def __repr__(self) -> str:
        return f"WindowSamples({len(self):,} windows of {self.sample_tokens:,} tokens)"


class TimeSteps(list[Rows]):
    """Documents step by step: `steps[t]` has segment t of every document, row b is the same document at every step.

    `document_mask` is False, and the row is padding, where a document has ended: [A(1), B(3), C(2)] gives
    [A, B, C], [pad, B, C], [pad, B, pad]. Steps are views of arrays for the whole batch.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> steps = next(milldam.qa.DocumentSamples(features).batches(8, seed=0))
    >>> [step["input_ids"].shape for step in steps]
    [(8, 384), (8, 384), (8, 384)]
    """

    def __init__(self, steps: Iterable[Rows], examples: Int64s) -> None:
        super().__init__(steps)
        self.examples = examples
        """(rows,): the document of each row, by its number in the store."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TimeSteps, (list(self), self.examples)


class DocumentSamples(FeatureSamples[TimeSteps]):
    """Documents by number; their batches are `TimeSteps`.

    selection   which segments of each document; None: all

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> documents = milldam.qa.DocumentSamples(features, selection=milldam.qa.Selection(max_segments=1))
    >>> [len(steps) for steps in documents.batches(6, seed=0)]
    [1, 1]
    """

    _reusable = False  # every batch has other shapes

    def __init__(
        self,
        store: FeatureStore,
        *,
        selection: Selection | None = None,
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        super().__init__(store, columns)
        self.selection = selection

    @property
    def identity(self) -> State:
        own: State = {"kind": "question-answering documents", "samples": len(self), "store": self.store.fingerprint}
        return own | {"selection": None if self.selection is None else asdict(self.selection)}

    @property
    def sample_tokens(self) -> int:
        """Of a document of mean length."""
        segments = max(1, round(len(self.store) / self.store.examples))
        most = segments if self.selection is None else min(segments, self.selection.max_segments)
        return self.store.form.max_seq_length * most

    def __len__(self) -> int:
        return self.store.examples

    def __getitem__(self, number: int) -> Rows:
        """The windows of one document, as the first epoch has them."""
        firsts, counts = self.chosen(np.array([counted_number(number, len(self))]))
        return self.columns.read(self.store, ranges(firsts, counts), np.int64)

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
        columns = self.columns.placed(self.store, ranges(firsts, counts), shape, places, dtype)
        steps = ({name: column[t] for name, column in columns.items()} for t in range(shape[0]))
        return TimeSteps(steps, numbers % len(self))

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        below = make_order(shuffle, len(self), seed, self.sample_tokens * self.token_dtype.itemsize)
        return DocumentOrder(below, len(self))

    def __repr__(self) -> str:
        return f"DocumentSamples({len(self):,} documents, {len(self.store):,} windows)"
