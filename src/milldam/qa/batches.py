"""Windows of a feature store as batches: plain, or time-step-major, a list over the segments of documents.

    for batch in WindowSamples(store).batches(16, seed=1): ...       a dict of arrays, one row a window
    for steps in DocumentSamples(store).batches(16, seed=1):         16 documents
        for step in steps: ...                                       a dict of arrays, one row a document
    for step in lanes(DocumentSamples(store), 16, seed=1):           rows that take the next document when one ends

Shuffling, ranks, epochs, reading ahead and states are those of every loader (loader/batches.py). A plain batch costs
its own arrays; all windows are read by one call of the store, whatever shards they lie in. A time-step batch is as long
as its longest document: if documents are long, select a stretch of segments, or use lanes.

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

import heapq
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.batches import NEVER, Delivery
from milldam.loader.order import Order, Shuffle, make_order
from milldam.loader.permutation import Int64s, hashed, mix
from milldam.loader.reading import ranges
from milldam.loader.samples import ReadPart, Samples, at_least, counted_number, one_of, widened
from milldam.loader.types import Array, BatchT, State

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

Rows = dict[str, Array]
"""Columns by name, one row a window."""

_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_POSITIONS = ("start_positions", "end_positions", "cls_index")
COLUMNS = (*_OF_TOKENS, *_POSITIONS, "example", "segment_index", "total_segments", "has_answer", "window")
"""The columns of a batch by default."""
_ZERO = ("attention_mask", "has_answer", "context_begin", "context_tokens", "total_segments")
"""Columns that are 0 on padding; others are -1."""


# ---- which segments of a document are read ----

Strategy = Literal["first_n", "answer_centered", "random_continuous"]
_RANDOM_KEY = 0x7365_676D_656E_7473
_WINDOWS_AT_ONCE = 1 << 16
"""Windows to search for answers in one read: this bounds memory, however long the documents are."""
_DOCUMENTS_AT_ONCE = 1024
"""Documents of a rank whose order and windows lanes look up in one call."""


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
        one_of("strategy", self.strategy, Strategy)
        # numpy's integers would end up in states, which are JSON.
        object.__setattr__(self, "max_segments", at_least("max_segments", self.max_segments))
        object.__setattr__(self, "seed", int(self.seed))

    def firsts(self, store: FeatureStore, examples: Int64s, epochs: Int64s, windows: Int64s, room: Int64s) -> Int64s:
        """The first segment of the stretch. `room`: the last segment that a stretch can begin with."""
        if self.strategy == "random_continuous":
            keys = hashed(epochs.astype(np.uint64), mix(self.seed, _RANDOM_KEY))
            hashes = hashed(examples.astype(np.uint64) + keys, 0)
            scaled = (hashes >> np.uint64(32)) * (room + 1).astype(np.uint64) >> np.uint64(32)
            return scaled.astype(np.int64)
        firsts = np.zeros(len(examples), np.int64)
        if self.strategy == "answer_centered" and (room > 0).any():
            longer = np.flatnonzero(room > 0)
            segments = room + self.max_segments
            for part in np.array_split(longer, int(segments[longer].sum()) // _WINDOWS_AT_ONCE + 1):
                answers = _answer_segments(store, windows[part], segments[part])
                firsts[part] = np.clip(answers - (self.max_segments - 1) // 2, 0, room[part])
        return firsts


def _answer_segments(store: FeatureStore, windows: Int64s, segments: Int64s) -> Int64s:
    """The segment with the answer of each document, the middle one if several hold it; 0 if none does."""
    rows = store.rows(ranges(windows, segments), ("start_positions", "cls_index"))
    holding = np.flatnonzero(rows["start_positions"] != rows["cls_index"])
    owner = np.repeat(np.arange(len(segments)), segments)[holding]
    holders = np.bincount(owner, minlength=len(segments))
    answers, some = np.zeros(len(segments), np.int64), holders > 0
    middle = (holders.cumsum() - holders + (holders - 1) // 2)[some]
    answers[some] = holding[middle] - (segments.cumsum() - segments)[some]
    return answers


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

    _kind: str

    def __init__(self, store: FeatureStore, columns: Sequence[str]) -> None:
        if not len(store):
            raise ConfigError("This feature store holds no windows: nothing to make batches of.")
        self.store, self.columns = store, [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
        self.windows(np.empty(0, np.int64), np.int64)  # refuses columns that there are not

    @property
    def identity(self) -> State:
        return {"kind": f"question-answering {self._kind}", "samples": len(self), "store": self.store.fingerprint}

    @property
    def sample_tokens(self) -> int:
        return self.store.form.max_seq_length

    @property
    def token_dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.store.form.token_dtype)
        return dtype

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return make_order(shuffle, len(self), seed, self.sample_tokens * self.token_dtype.itemsize)

    def windows(self, numbers: Int64s, dtype: npt.DTypeLike, out: Rows | None = None) -> Rows:
        """Windows by number. `out`: columns of as many rows or more, which are overwritten."""
        # The mask is made from lengths, in the dtype of the batch and in its place.
        stored_names = ["length" if name == "attention_mask" else name for name in self.columns if name != "window"]
        stored, rows = {"window": numbers, **self.store.rows(numbers, stored_names)}, {}
        for name in self.columns:
            place = out[name] if out else None
            if name == "attention_mask":
                rows[name] = self.store.form.attention_mask(stored["length"], dtype, place)
            else:
                rows[name] = widened(stored[name], _dtype_of(name, dtype), place)
        return rows

    def placed(self, numbers: Int64s, shape: tuple[int, ...], places: tuple[Array, ...], dtype: npt.DTypeLike) -> Rows:
        """Windows at places of an array of rows; elsewhere padding, as a window without tokens would have it.
        `document_mask` says which is which."""
        form = self.store.form
        pads = {"input_ids": form.pad_id, "token_type_ids": form.pad_type} | dict.fromkeys(_ZERO, 0)
        # The CLS of an empty window is on the side where text is, inside the window: a loss can take it as a target.
        pads |= dict.fromkeys(_POSITIONS, form.max_seq_length - 1 if form.pad_left else 0)
        mask = np.zeros(shape, np.bool_)
        mask[places] = True
        rows: Rows = {}
        # As narrow as they are stored: they are widened on the way to their places.
        for name, column in self.windows(numbers, form.token_dtype).items():
            rows[name] = np.full((*shape, *column.shape[1:]), pads.get(name, -1), _dtype_of(name, dtype))
            rows[name][places] = column
        return rows | {"document_mask": mask}


def _dtype_of(name: str, dtype: npt.DTypeLike) -> npt.DTypeLike:
    if name in _OF_TOKENS:
        return dtype
    return {"has_answer": np.bool_, "offset_mapping": np.int32}.get(name, np.int64)


class WindowSamples(FeatureSamples[Rows]):
    """Windows by number: `samples[k]`, `len(samples)`, `samples.batches(16)`.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> next(milldam.qa.WindowSamples(features).batches(16, seed=0))["input_ids"].shape
    (16, 384)
    """

    _kind = "windows"

    def __init__(self, store: FeatureStore, *, columns: Sequence[str] = COLUMNS) -> None:
        super().__init__(store, columns)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, number: int) -> Rows:
        rows = self.read(np.array([counted_number(number, len(self))]))
        return {name: column[0] for name, column in rows.items()}

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: Rows | None = None) -> Rows:
        return self.windows(numbers, dtype, out)

    def __repr__(self) -> str:
        return f"WindowSamples({len(self):,} windows of {self.sample_tokens:,} tokens)"


class DocumentSamples(FeatureSamples[list[Rows]]):
    """Documents by number. In their batches, `steps[t]` has segment t of every document, and row b is the same document
    at every step.

    `document_mask` is False, and the row is padding, where a document has ended: [A(1), B(3), C(2)] gives
    [A, B, C], [pad, B, C], [pad, B, pad]. Steps are views of arrays for the whole batch.

    selection   which segments of each document; None: all

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> documents = milldam.qa.DocumentSamples(features, selection=milldam.qa.Selection(max_segments=1))
    >>> [len(steps) for steps in documents.batches(6, seed=0)]
    [1, 1]
    """

    _kind, _reusable = "documents", False  # every batch has other shapes

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
        return super().identity | {"selection": None if self.selection is None else asdict(self.selection)}

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
        return self.windows(ranges(*self.chosen(np.array([counted_number(number, len(self))]))), np.int64)

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: list[Rows] | None = None) -> list[Rows]:
        """Numbers from `len(self)` on are those of later epochs."""
        return self._steps(numbers, *self.chosen(numbers), dtype)

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[list[Rows]]:
        firsts, counts = self.chosen(numbers)
        return lambda part, _: self._steps(numbers[part], firsts[part], counts[part], dtype)

    def chosen(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """The first window that is read of each document, and how many."""
        epochs, documents = np.divmod(numbers, len(self))
        windows, segments = self.store.windows_of(documents)
        if self.selection is None:
            return windows, segments
        counts = np.minimum(segments, self.selection.max_segments)
        return windows + self.selection.firsts(self.store, documents, epochs, windows, segments - counts), counts

    def _steps(self, numbers: Int64s, firsts: Int64s, counts: Int64s, dtype: npt.DTypeLike) -> list[Rows]:
        shape = (int(counts.max()), len(numbers))
        places = ranges(np.zeros_like(counts), counts), np.repeat(np.arange(len(numbers)), counts)
        columns = self.placed(ranges(firsts, counts), shape, places, dtype)
        return [{name: column[t] for name, column in columns.items()} for t in range(shape[0])]

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return DocumentOrder(super()._order(shuffle, seed), len(self))

    def __repr__(self) -> str:
        return f"DocumentSamples({len(self):,} documents, {len(self.store):,} windows)"


def lanes(
    samples: DocumentSamples,
    batch_size: int,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    epochs: int | None = 1,
    shuffle: Shuffle = True,
    skip: int = 0,
) -> Iterator[Rows]:
    """Steps of rows of which each takes the next document when its last one ends: no step waits for the longest.

    Each step is a dict of arrays, one row a lane; `reset` is True where a document begins. Document i of the global
    order goes to rank i mod world_size, and there to the first free lane. A lane is padding only at the very end; all
    ranks end with the same step. `skip`: the steps that an earlier run took, which are passed over.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> step = next(milldam.qa.lanes(milldam.qa.DocumentSamples(features), 4, seed=0))
    >>> step["input_ids"].shape, step["reset"]
    ((4, 384), array([ True,  True,  True,  True]))
    """
    order = samples._order(shuffle, operator.index(seed))

    def schedule(rank: int) -> Iterator[tuple[int, int, int, int]]:
        """(step in which it begins, lane, first window, windows) of a rank's documents."""
        delivery = Delivery(batch_size, rank, world_size, epochs)
        end = NEVER if epochs is None else epochs * len(samples)
        free = [(0, lane) for lane in range(batch_size)]
        for first in range(0, end, _DOCUMENTS_AT_ONCE * world_size):
            numbers = order.numbers(delivery.mine(first, min(first + _DOCUMENTS_AT_ONCE * world_size, end)))
            for window, count in zip(*(one.tolist() for one in samples.chosen(numbers)), strict=True):
                step, lane = free[0]
                heapq.heapreplace(free, (step + count, lane))
                yield step, lane, window, count

    last = 0
    if world_size > 1 and epochs is not None:
        last = max((start + count for other in range(world_size) for start, _, _, count in schedule(other)), default=0)
    documents = schedule(rank)
    waiting = next(documents, None)
    # (lanes,): the window that comes next, and how many are left of its document
    window, left = np.zeros(batch_size, np.int64), np.zeros(batch_size, np.int64)
    for step in itertools.count():
        reset = np.zeros(batch_size, np.bool_)
        while waiting is not None and waiting[0] == step:
            _, lane, window[lane], left[lane] = waiting
            reset[lane] = True
            waiting = next(documents, None)
        busy = left > 0
        if step >= last and not busy.any():
            return
        if step >= skip:
            yield samples.placed(window[busy], (batch_size,), (busy,), np.int64) | {"reset": reset}
        window += busy
        left -= busy
