"""Lanes: rows of which each takes the next document when its last one ends, so that no step waits for the longest.

    for step in Lanes(store, 16, seed=1): ...       a dict of arrays, one row a lane; `reset` where a document begins

Document i of the global order goes to rank i mod world_size, and there to the first free lane. A lane is padding only
at the very end, when there is no document left for it. All ranks end with the same step: those that finish earlier
continue with steps of padding. Holds a step, those made ahead, and the places of the next `DOCUMENTS_AT_ONCE`
documents.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import MismatchError, StoreError
from milldam.loader.batches import Delivery, differences, wide_enough
from milldam.loader.order import Shuffle
from milldam.loader.samples import at_least
from milldam.loader.types import State
from milldam.prefetch import prefetched
from milldam.qa.batches import COLUMNS, DocumentSamples, Rows, Selection

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

DOCUMENTS_AT_ONCE = 1024
"""Documents whose order and windows are looked up in one call."""
STATE_VERSION, _NAME = 1, "The state of lanes"

Document = tuple[int, int, int]
"""Number with its epoch, first window, number of windows."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where lanes stand after a step: all that is needed to continue."""

    begin: int
    """The place in the global order where this loop began."""
    taken: int
    """Documents of this loop that this rank has read or has in its lanes."""
    steps: int
    documents: tuple[int | Literal[-1], ...]
    """By lane: the document's number, with its epoch; -1: none."""
    segments: tuple[int, ...]
    """By lane: how many of its segments are read."""


ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT")
Begin = Callable[[PlaceT], "tuple[Iterator[tuple[ItemT, PlaceT]], Callable[[], PlaceT]]"]
"""From a place on: items, each with the place behind it; and a function that gives the place where they ended."""


class Loop(Generic[PlaceT, ItemT]):
    """The place behind the last item that was handed out, and the items that follow.

    Each call says how to begin a loop, so that this object does not hold its owner.
    """

    def __init__(self, place: PlaceT) -> None:
        self.place = place
        self._running: Iterator[tuple[ItemT, PlaceT]] | None = None
        self._end: Callable[[], PlaceT] = lambda: place
        self._inside = False

    def move(self, place: PlaceT, *, inside: bool = False) -> None:
        """Continue from another place. `inside`: a loop was left there, maybe with its last item in hand."""
        self.place, self._running, self._inside = place, None, inside

    def items(self, begin: Begin[PlaceT, ItemT]) -> Iterator[ItemT]:
        """The rest of a loop; when that is nothing, the next one."""
        left_open = self._running is not None or self._inside
        item = self.next(begin)
        if item is None and left_open:
            # The loop before was left with its last item in hand: it was over.
            item = self.next(begin)
        while item is not None:
            yield item
            item = self.next(begin)

    def next(self, begin: Begin[PlaceT, ItemT]) -> ItemT | None:
        """None: a loop has ended, and the next call begins another."""
        if self._running is None:
            self._running, self._end = begin(self.place)
            self._inside = False
        try:
            for item, place in self._running:
                self.place = place
                return item
        except BaseException:
            # What failed or was interrupted is tried again from here, not taken for the end.
            self._running = None
            raise
        # Also behind the places at the end that gave this rank nothing.
        self.move(self._end())
        return None


def handed_out(item: ItemT | None) -> ItemT:
    """The result of `__next__`."""
    if item is None:
        raise StopIteration
    return item


class LanePlan:
    """What every lane reads next."""

    def __init__(self, samples: DocumentSamples, queue: Iterator[Document], standing: Standing) -> None:
        self._queue, self._begin, self._taken = queue, standing.begin, standing.taken
        self._steps = standing.steps
        self._document = np.array(standing.documents, np.int64)
        self.through = np.array(standing.segments, np.int64)
        """(lanes,): segments of its document that are read."""
        windows, counts = samples.chosen(np.maximum(self._document, 0))
        self.window, self.left = windows + self.through, (counts - self.through) * (self._document >= 0)
        """(lanes,): the window that comes next, and how many are left of its document."""

    def refill(self) -> bool:
        """Give a document to every lane without one; whether any lane has one then."""
        for lane in np.flatnonzero(self.left == 0).tolist():
            document = next(self._queue, None)
            if document is None:
                break
            self._document[lane], self.window[lane], self.left[lane] = document
            self._taken += 1
        return bool(self.left.any())

    def advance(self) -> Standing:
        """Go past a step; where the lanes stand then."""
        busy = self.left > 0
        self._steps += 1
        for column, change in ((self.window, 1), (self.left, -1), (self.through, 1)):
            column[busy] += change
        ended = self.left == 0
        self._document[ended], self.through[ended] = -1, 0
        lanes = tuple(self._document.tolist()), tuple(self.through.tolist())
        return Standing(self._begin, self._taken, self._steps, *lanes)


class Lanes:
    """Iterate to get steps; `state_dict()` says where it stands, `load_state_dict()` continues from there.

    A `for` loop continues where the last one stopped; when all epochs are done, the next loop brings the epochs that
    follow, in another order.

    selection   which segments of each document; None: all
    epochs      passes over the documents; None: without end
    prefetch    steps that a thread makes ahead

    A state fits only the same number of lanes and ranks, and its own rank: each rank keeps its own.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> step = next(milldam.qa.Lanes(features, 4, seed=0))
    >>> step["input_ids"].shape, step["reset"]
    ((4, 384), array([ True,  True,  True,  True]))
    """

    def __init__(
        self,
        store: FeatureStore,
        batch_size: int,
        *,
        selection: Selection | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        shuffle: Shuffle = True,
        columns: Sequence[str] = COLUMNS,
        prefetch: int = 0,
        dtype: npt.DTypeLike = np.int64,
    ) -> None:
        self.samples = DocumentSamples(store, selection=selection, columns=columns)
        self.delivery = Delivery(batch_size, rank, world_size, epochs)
        self._seed, self._shuffle = operator.index(seed), shuffle
        self._prefetch, self._dtype = at_least("prefetch", prefetch, 0, " steps"), wide_enough(dtype, self.samples)
        self._order = self.samples._order(shuffle, self._seed)
        self._loop: Loop[Standing, Rows] = Loop(self._at_begin(0))

    def _at_begin(self, place: int) -> Standing:
        lanes = self.delivery.batch_size
        return Standing(place, 0, 0, (-1,) * lanes, (0,) * lanes)

    def _end(self, begin: int) -> int | None:
        """Where in the global order a loop ends."""
        return None if self.delivery.epochs is None else begin + self.delivery.epochs * len(self.samples)

    # ---- steps ----

    def __iter__(self) -> Iterator[Rows]:
        return self._loop.items(self._begin)

    def __next__(self) -> Rows:
        return handed_out(self._loop.next(self._begin))

    def _begin(self, standing: Standing) -> tuple[Iterator[tuple[Rows, Standing]], Callable[[], Standing]]:
        steps, end = self._steps(standing), self._end(standing.begin)
        steps = prefetched(steps, self._prefetch) if self._prefetch else steps
        return steps, lambda: self._at_begin(end or 0)

    def _steps(self, standing: Standing) -> Iterator[tuple[Rows, Standing]]:
        plan = self._plan(standing)
        while plan.refill():
            rows = self._read(plan)
            standing = plan.advance()
            yield rows, standing
        last = self.count_steps(standing.begin) if self.delivery.world_size > 1 else standing.steps
        while standing.steps < last:
            standing = replace(standing, steps=standing.steps + 1)
            yield self._read(plan), standing

    def _plan(self, standing: Standing) -> LanePlan:
        queue = self._documents(self.delivery.rank, standing.begin, standing.taken)
        return LanePlan(self.samples, queue, standing)

    def _documents(self, rank: int, begin: int, taken: int) -> Iterator[Document]:
        """A rank's documents of one loop, in order, from number `taken` on."""
        delivery, ranks, end = replace(self.delivery, rank=rank), self.delivery.world_size, self._end(begin)
        while True:
            first = begin + taken * ranks
            stop = first + DOCUMENTS_AT_ONCE * ranks
            numbers = self._order.numbers(delivery.mine(first, stop if end is None else min(stop, end)))
            if not len(numbers):
                return
            windows, counts = self.samples.chosen(numbers)
            yield from zip(numbers.tolist(), windows.tolist(), counts.tolist(), strict=True)
            taken += len(numbers)

    def _read(self, plan: LanePlan) -> Rows:
        columns, store, busy = self.samples.columns, self.samples.store, plan.left > 0
        if busy.all():
            rows = columns.read(store, plan.window, self._dtype) | {"document_mask": busy}
        else:
            rows = columns.placed(store, plan.window[busy], busy.shape, (busy,), self._dtype)
        return rows | {"reset": busy & (plan.through == 0)}

    def count_steps(self, begin: int = 0) -> int:
        """Steps of one loop over all epochs, the same for every rank; takes about 1 us a document."""
        if self._end(begin) is None:
            raise TypeError("these lanes have no end (epochs=None)")
        longest = 0
        for rank in range(self.delivery.world_size):
            ends = [0] * self.delivery.batch_size
            for _, _, segments in self._documents(rank, begin, 0):
                heapq.heapreplace(ends, ends[0] + segments)
            longest = max(longest, *ends)
        return longest

    # ---- states ----

    def state_dict(self) -> State:
        """Where it stands, as small JSON: after the last step that was handed out, not those made ahead."""
        place = asdict(self._loop.place)
        place |= {name: list(place[name]) for name in ("documents", "segments")}
        return {"version": STATE_VERSION, "settings": self._settings(), **place}

    def _settings(self) -> State:
        """All that decides which window is in which lane at which step."""
        own: State = {"seed": self._seed, "shuffle": self._shuffle, "lanes": self.delivery.batch_size}
        return own | {"rank": self.delivery.rank, "world_size": self.delivery.world_size} | self.samples.identity

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; one of other data, settings or lanes, or of another rank, is refused."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise MismatchError(f"{_NAME}: not of version {STATE_VERSION}, which this milldam reads.")
        settings = state.get("settings")
        changed = differences(settings if isinstance(settings, dict) else {}, self._settings())
        if changed:
            raise MismatchError(f"This state belongs to other lanes: {changed}. Create the same lanes, or start over.")
        standing: Standing = checked(Standing, state, _NAME)
        documents, through = (np.array(one, np.int64) for one in (standing.documents, standing.segments))
        if len(documents) != self.delivery.batch_size or len(through) != len(documents):
            raise StoreError(f"{_NAME}: damaged: documents and segments do not belong to that many lanes.")
        if (self._plan(standing).left < 0).any():
            raise StoreError(f"{_NAME}: damaged: segments are more than the documents have.")
        self._loop.move(standing, inside=standing.steps > 0)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.delivery
        options: dict[str, Any] = {"selection": self.samples.selection, "columns": self.samples.columns.names}
        options |= {"rank": own.rank, "world_size": own.world_size, "epochs": own.epochs, "shuffle": self._shuffle}
        options |= {"seed": self._seed, "prefetch": self._prefetch, "dtype": self._dtype}
        return _lanes_at, (self.samples.store, own.batch_size, options, self.state_dict())

    def __repr__(self) -> str:
        return f"Lanes({self.delivery.batch_size:,} lanes over {len(self.samples):,} documents)"


def _lanes_at(store: FeatureStore, batch_size: int, options: dict[str, Any], state: State) -> Lanes:
    lanes = Lanes(store, batch_size, **options)
    lanes.load_state_dict(state)
    return lanes
