"""Which segments of a document are read: all, or a continuous stretch of at most `max_segments`; and in which order
documents come.

Chosen when loading, from the store, the document's number and the epoch alone: batch sizes, ranks and workers change
nothing. Finding answers reads three numbers a window, and only of documents that are longer than the stretch.

A document's number includes its epoch: number = epoch * documents + document. So the number alone decides the segments
that are chosen at random, whatever the place, the rank or the batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from milldam.errors import ConfigError, did_you_mean
from milldam.loader.order import Order
from milldam.loader.permutation import Int64s, hashed, mix
from milldam.loader.reading import ranges

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

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
