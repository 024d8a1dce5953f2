"""Samples -> batches: ranks, epochs, state, reading ahead.

The global order is one sequence of places: epoch after epoch, without a seam. Place i goes to rank i mod world_size;
`world_size` times `batch_size` places are one step, the same for all ranks. So the position of a loader is one number,
which means the same for any number of ranks and any batch size. Only the very last batch can be short.

Samples are looked up some thousands at a time, announced some time before they are needed, and read a batch at a time
into arrays of earlier batches: memory that was just used costs nothing, new memory a fault for every page. Holds one
batch, those made ahead, and some thousands of numbers.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError
from milldam.loader.order import Order, Shuffle, Until
from milldam.loader.permutation import Int64s
from milldam.loader.samples import ReadPart, Samples, at_least
from milldam.loader.types import BatchT, State
from milldam.prefetch import prefetched

STATE_VERSION, STATE_NAME = 1, "The state of a loader"
NEVER = 1 << 62
"""A place that is never reached."""
_NUMBERS_AT_ONCE = 4096
"""Places whose samples are computed in one call: the permutation's cost a number falls until about here."""
_ANNOUNCED_SAMPLES, _ANNOUNCED_BYTES = 1024, 1 << 25
_WINDOW_PARTS, _PLACES_AT_ONCE = 64, 1 << 16
"""A window is announced in so many parts while the one before it is read, and no more places than so many at once."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Which places of the global order go where."""

    batch_size: int
    rank: int = 0
    world_size: int = 1
    epochs: int | None = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size"):
            object.__setattr__(self, name, at_least(name, getattr(self, name)))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", at_least("epochs", self.epochs, 1, ", or None to continue without end"))
        object.__setattr__(self, "rank", operator.index(self.rank))
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank: {self.rank}; the ranks of world_size={self.world_size} are 0 to {self.world_size - 1}."
            )

    @property
    def step(self) -> int:
        """Places that all ranks together take for one batch each."""
        return self.batch_size * self.world_size

    def mine(self, first: int, stop: int) -> Int64s:
        """This rank's places in [first, stop); `first` is where a step begins."""
        return np.arange(first + self.rank, stop, self.world_size)


class Batches(Generic[BatchT]):
    """Iterate to get batches; `state_dict()` saves the position, `load_state_dict()` continues from it.

    A `for` loop continues where the last one stopped; after all epochs, the next loop gives the following epochs, in
    another order.

    >>> batches = store.windows(128).batches(16, seed=0)
    >>> x, y = next(batches)
    >>> x.shape, batches.samples_seen
    ((16, 128), 16)
    >>> saved = batches.state_dict()
    >>> later = store.windows(128).batches(16, seed=0)
    >>> later.load_state_dict(saved)
    >>> bool((next(later)[0] == next(batches)[0]).all())
    True
    """

    def __init__(
        self,
        samples: Samples[object, BatchT],
        delivery: Delivery,
        *,
        seed: int,
        shuffle: Shuffle,
        prefetch: int,
        dtype: npt.DTypeLike,
    ) -> None:
        self.samples, self.delivery = samples, delivery
        self._seed, self._shuffle = operator.index(seed), shuffle
        self._prefetch = at_least("prefetch", prefetch, 0, " batches")
        self.dtype = wide_enough(dtype, samples)
        """Type of the delivered tokens."""
        self._order = samples._order(shuffle, self._seed)
        if delivery.drop_last and delivery.epochs is not None and samples._length_known:
            places = delivery.epochs * samples.epoch_samples
            if places < delivery.step:
                raise ConfigError(f"drop_last: {places:,} samples give no full batch on every rank.")
        self.samples_seen = 0
        """Samples delivered to all ranks together since the very first epoch."""
        self._running: Iterator[tuple[BatchT, int]] | None = None
        self._until: Until = int
        self._began: tuple[int, float] | None = None
        """Where and when the first loop began."""

    def __len__(self) -> int:
        """Batches of one loop over all epochs."""
        if self.delivery.epochs is None:
            raise TypeError("these batches have no end (epochs=None)")
        # Raises TypeError too where the number of samples is not known yet.
        full, rest = divmod(self.delivery.epochs * self.samples.epoch_samples, self.delivery.step)
        return full + (not self.delivery.drop_last and rest > self.delivery.rank)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._order.epoch_at(self.samples_seen)

    def __iter__(self) -> Iterator[BatchT]:
        left_open = self._running is not None
        batch = self._next()
        if batch is None and left_open:
            # The loop before was left with its last batch in hand: it was over.
            batch = self._next()
        while batch is not None:
            yield batch
            batch = self._next()

    def __next__(self) -> BatchT:
        batch = self._next()
        if batch is None:
            raise StopIteration
        return batch

    def _next(self) -> BatchT | None:
        """None: a loop has ended, and the next call begins another."""
        if self._running is None:
            self._began = self._began or (self.samples_seen, perf_counter())
            self._until = self._order.until(self.samples_seen, self.delivery.epochs)
            self._running = self._made(self.samples_seen, self._until)
        try:
            for batch, place in self._running:
                self.samples_seen = place
                return batch
        except BaseException:
            # What failed or was interrupted is tried again from here, not taken for the end.
            self._running = None
            raise
        # Also behind the places at the end that gave this rank nothing.
        self.samples_seen, self._running = self._until(NEVER), None
        return None

    def _every(self, turns: int, first: int) -> Iterator[BatchT]:
        """Of the batches that follow from here, number `first` and every `turns`-th after it: a worker's share.

        The others are not read, and the position of this loader does not change.
        """
        place = self.samples_seen + first * self.delivery.step
        until = self._order.until(self.samples_seen, self.delivery.epochs)
        return (batch for batch, _ in self._made(place, until, turns))

    def _made(self, place: int, until: Until, turns: int = 1) -> Iterator[tuple[BatchT, int]]:
        ahead = self._prefetch
        # Enough for those that wait, one that is being made, and two that the user holds.
        spare: Spare[BatchT] = Spare(ahead + 3 if self.samples._reusable else 0)
        # Knows nothing of this object, so that a thread that runs it does not keep it alive.
        work = Work(self.samples, self._order, self.delivery, self.dtype, spare)
        made = work.batches(place, until, turns)
        return prefetched(made, ahead) if ahead else made

    def state_dict(self) -> State:
        """The position, as small JSON: the samples that were delivered, not those prepared ahead."""
        return {
            "version": STATE_VERSION,
            "samples_seen": self.samples_seen,
            "epoch": self.epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self.samples.identity,
            "order": self._order.state(self.samples_seen),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, on any number of ranks and with any batch size.

        A state of other data, another seed or another sample length is refused.
        """
        loaded = _checked_state(state, self.state_dict())
        self._order = self._order.restored(loaded["order"], loaded["samples_seen"])
        self.samples_seen, self._running, self._began = loaded["samples_seen"], None, None

    def stats(self) -> dict[str, float]:
        """Samples and tokens delivered to all ranks since the first batch; for a feed, also the cost of tokenizing.

        >>> batches = store.windows(128).batches(16, seed=0)
        >>> x, y = next(batches)
        >>> batches.stats()
        {'samples': 16, 'tokens': 2048, 'seconds': ..., 'tokens_per_second': ...}
        """
        place, begun = self._began or (self.samples_seen, perf_counter())
        samples, seconds = self.samples_seen - place, perf_counter() - begun
        tokens = samples * self.samples.sample_tokens
        delivered = {"samples": samples, "tokens": tokens, "seconds": seconds}
        return delivered | {"tokens_per_second": tokens / max(seconds, 1e-9)} | self.samples._stats()

    def __repr__(self) -> str:
        of = f"{self.delivery.batch_size:,} x {self.samples!r}"
        return f"Batches({of}: {self.samples_seen:,} samples seen, epoch {self.epoch:,})"


def wide_enough(dtype: npt.DTypeLike, samples: Samples[object, BatchT]) -> np.dtype[Any]:
    """The dtype, which must hold every token."""
    wanted, stored = np.dtype(dtype), samples.token_dtype
    # No vocabulary needs the upper half of 64 bits.
    largest = min(np.iinfo(stored).max, np.iinfo(np.int64).max)
    if wanted.kind not in "iu" or wanted.itemsize < stored.itemsize or np.iinfo(wanted).max < largest:
        raise ConfigError(f"dtype: {wanted} can't hold every token that is stored as {stored}; use int64.")
    if samples._signed and wanted.kind == "u":
        raise ConfigError(f"dtype: {wanted} can't hold the -100 of labels without a target; use int64.")
    return wanted


def differences(was: State, now: State) -> str:
    """The settings in which a state differs from one's own, in words; empty when there are none."""
    names = [name for name in was | now if was.get(name) != now.get(name)]
    return "; ".join(f"{name} was {was.get(name)}, is {now.get(name)}" for name in names)


class _State(TypedDict):
    version: int
    samples_seen: int
    epoch: int
    seed: Any
    shuffle: Any
    samples: dict[str, Any]
    order: Any


def _checked_state(state: State, own: State) -> _State:
    """A state, unless it would continue with other samples, or in another order."""
    loaded: _State = checked(_State, state, STATE_NAME)
    if loaded["version"] != STATE_VERSION:
        raise MismatchError(
            f"A loader's state of version {loaded['version']}; this milldam reads version {STATE_VERSION}."
        )
    mine: _State = checked(_State, own, STATE_NAME)
    was, now = (one["samples"] | {"seed": one["seed"], "shuffle": one["shuffle"]} for one in (loaded, mine))
    if changed := differences(was, now):
        raise MismatchError(f"This state is another loader's: {changed}. Make the loader as it was, or start over.")
    return loaded


# ---- making batches ----


class _Step(NamedTuple):
    """This rank's samples of one step: a part of those that were looked up together."""

    numbers: Int64s
    read: ReadPart[Any]
    part: slice
    behind: int
    """The place behind the step."""


@dataclass(frozen=True, slots=True)
class Work(Generic[BatchT]):
    """Makes batches."""

    samples: Samples[object, BatchT]
    order: Order
    delivery: Delivery
    dtype: np.dtype[Any]
    spare: Spare[BatchT]

    def batches(self, place: int, until: Until, turns: int) -> Iterator[tuple[BatchT, int]]:
        """(batch, the place behind it), of every `turns`-th step."""
        steps: Iterator[_Step] = itertools.islice(self._steps(place, until), 0, None, turns)
        if any(reader.announces for reader in self.samples._readers):
            window = self.order.window(place)
            steps = self._announced_windows(steps, window) if window[0] < window[1] else self._announced(steps)
        for step in steps:
            # Nothing here may hold a batch while its user has it: its arrays could not be used again.
            yield self._read(step), step.behind

    def _read(self, step: _Step) -> BatchT:
        out = self.spare.take()
        batch: BatchT = step.read(step.part, out)
        if out is None and step.part.stop <= len(step.numbers):
            self.spare.keep(batch)
        return batch

    def _steps(self, place: int, until: Until) -> Iterator[_Step]:
        size, step = self.delivery.batch_size, self.delivery.step
        # Few at first, for an early first batch.
        steps, most = 1, max(1, _NUMBERS_AT_ONCE // size)
        # Whether a full step is the last one shows only when one looks beyond it.
        beyond = step if self.delivery.drop_last else 0
        ended = False
        while not ended:
            wanted = place + steps * step + beyond
            end = until(wanted)
            ended = end < wanted
            stop = wanted - beyond if not ended else end - ((end - place) % step if beyond else 0)
            if stop == place:
                return
            steps = min(2 * steps, most)
            numbers = self.order.numbers(self.delivery.mine(place, stop))
            read = self.samples._look_up(numbers, self.dtype)
            for first in range(0, len(numbers), size):
                place = min(place + step, stop)
                # What is left out at the end counts as seen with the last batch: nothing follows it.
                behind = end if ended and place == stop else place
                yield _Step(numbers, read, slice(first, first + size), behind)
            place = stop

    def _announced(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """The same steps, each announced some time before it comes."""
        # Many at a time, since a call costs as much as several samples; few at first, for an early first batch.
        sample_bytes = self.samples.token_dtype.itemsize * self.samples.sample_tokens
        samples = min(_ANNOUNCED_SAMPLES, _ANNOUNCED_BYTES // sample_bytes)
        ahead, most = 1, max(1, samples // self.delivery.batch_size)
        announced: list[_Step] = []
        while coming := list(itertools.islice(steps, ahead)):
            numbers = np.concatenate([step.numbers[step.part] for step in coming])
            for reader, starts, lengths in self.samples._spans(numbers):
                reader.announce(starts, lengths)
            yield from announced
            announced, ahead = coming, min(2 * ahead, most)
        yield from announced

    def _announced_windows(self, steps: Iterator[_Step], window: tuple[int, int]) -> Iterator[_Step]:
        """The same steps. The window that comes next is announced part by part while one is read, and the one before it
        given back."""

        def tell(name: str, first: int, stop: int) -> None:
            for place in range(first, stop, _PLACES_AT_ONCE):
                numbers = self.order.stored(np.arange(place, min(place + _PLACES_AT_ONCE, stop)))
                for reader, starts, lengths in self.samples._spans(numbers):
                    getattr(reader, name)(starts, lengths)

        (begin, end), announced = window, window[1]
        next_end = self.order.window(end)[1]
        tell("announce", begin, end)
        for step in steps:
            yield step
            due = min(next_end, end + (next_end - end) * (step.behind - begin) // (end - begin))
            if due == next_end or due - announced >= (next_end - end) // _WINDOW_PARTS:
                tell("announce", announced, due)
                announced = due
            if step.behind >= end:
                tell("release", begin, end)
                begin, end, next_end = end, next_end, self.order.window(next_end)[1]


class Spare(Generic[BatchT]):
    """Up to `most` batches whose arrays are used again when nothing refers to them or to views of them, so a batch
    stays what it is for as long as it is kept."""

    def __init__(self, most: int) -> None:
        # Where references are not counted exactly, nothing is known to be free.
        counted = hasattr(sys, "getrefcount") and getattr(sys, "_is_gil_enabled", lambda: True)()
        self._most = most if counted else 0
        self._kept: list[tuple[Any, list[Any], list[int]]] = []
        """Batches, with their arrays and how many references to each of these are our own."""

    def take(self) -> BatchT | None:
        """A batch to overwrite; None: there is none."""
        for batch, arrays, own in self._kept:
            # By number: a loop over the arrays would hold them too.
            if all(sys.getrefcount(arrays[at]) <= count for at, count in enumerate(own)):
                free: BatchT = batch
                return free
        return None

    def keep(self, batch: Any) -> None:
        """A full batch of new arrays, which may serve again."""
        if len(self._kept) == self._most:
            return
        # Another tuple or dict than the one that is handed out: who holds that one holds the arrays.
        own_batch: Any = dict(batch) if isinstance(batch, dict) else [*batch]
        values = own_batch.values() if isinstance(batch, dict) else own_batch
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        # Views of a view refer to the array that owns the memory: both are looked at.
        owners = [array.base for array in arrays if array.base is not None]
        watched = [*arrays, *{id(owner): owner for owner in owners}.values()]
        # This list and the call that asks; our batch where the array is in it; our arrays where they are views of it.
        own = [2 + sum(one is other for other in (*arrays, *owners)) for one in watched]
        self._kept.append((own_batch, watched, own))
