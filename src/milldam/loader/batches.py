"""Samples -> batches: ranks, epochs, state, reading ahead.

The global order is one sequence of places: epoch after epoch, without a seam. Place i goes to rank i mod world_size;
`world_size` times `batch_size` places are one step, the same for all ranks. So where a loader stands is one number,
which means the same for any number of ranks and any batch size. Only the very last batch can be short.

Holds one batch, those made ahead, and some thousands of numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, NoReturn, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError
from milldam.loader.order import Shuffle
from milldam.loader.permutation import Int64s
from milldam.loader.samples import Samples, Until, at_least
from milldam.loader.steps import InTurn, Recycled, Work
from milldam.loader.types import BatchT, State
from milldam.markup import in_notebook
from milldam.prefetch import prefetched

STATE_VERSION, STATE_NAME = 1, "The state of a loader"
NEVER = 1 << 62
"""A place that is never reached."""
ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT")


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

    def require_a_step(self, places: int) -> None:
        """Nothing would ever come of fewer places than a step has, when what fills none is left out."""
        if places < self.step:
            raise ConfigError(
                f"drop_last: {places:,} samples give no full batch on every rank: batch_size={self.batch_size:,} times "
                f"world_size={self.world_size:,} is {self.step:,}. Use smaller batches, or drop_last=False."
            )

    def mine(self, first: int, stop: int) -> Int64s:
        """This rank's places in [first, stop); `first` is where a step begins."""
        return np.arange(first + self.rank, stop, self.world_size)

    def batches(self, places: int) -> int:
        """How many batches this rank makes of so many places."""
        full, rest = divmod(places, self.step)
        return full + (not self.drop_last and rest > self.rank)


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
        copy: bool,
        dtype: npt.DTypeLike,
    ) -> None:
        self.samples, self.delivery = samples, delivery
        self._seed, self._shuffle = operator.index(seed), shuffle
        self._prefetch, self._copy = at_least("prefetch", prefetch, 0, " batches"), copy
        self._dtype = wide_enough(dtype, samples)
        self._order = samples._order(shuffle, self._seed)
        if delivery.drop_last and delivery.epochs is not None and samples._length_known:
            delivery.require_a_step(delivery.epochs * samples.epoch_samples)
        self._loop: Loop[int, BatchT] = Loop(0)
        self._began: tuple[int, float] | None = None
        """Where and when the first loop began."""

    def __len__(self) -> int:
        """Batches of one loop over all epochs."""
        if self.delivery.epochs is None:
            raise TypeError("these batches have no end (epochs=None)")
        # Raises TypeError too where the number of samples is not known yet.
        return self.delivery.batches(self.delivery.epochs * self.samples.epoch_samples)

    @property
    def epoch(self) -> int:
        """Number of finished epochs; after a mixture took new weights, counted from there."""
        return self.samples._loops(self._order).epoch_at(self.samples_seen)

    @property
    def samples_seen(self) -> int:
        """Samples delivered to all ranks together since the very first epoch."""
        return self._loop.place

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the delivered tokens; it can be changed at any time."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: npt.DTypeLike) -> None:
        self._dtype = wide_enough(dtype, self.samples)
        self._loop.move(self.samples_seen)

    def __getitem__(self, number: int) -> NoReturn:
        """torch's DataLoader asks; batches come in their own order."""
        raise ConfigError("These are batches already. Instead of a DataLoader, use milldam.torch.tensors(batches).")

    def __iter__(self) -> Iterator[BatchT]:
        return self._loop.items(self._begin)

    def __next__(self) -> BatchT:
        return handed_out(self._loop.next(self._begin))

    def _begin(self, place: int) -> tuple[Iterator[tuple[BatchT, int]], Callable[[], int]]:
        self._began = self._began or (place, perf_counter())
        until = self._until(place)
        return self._made(place, until), lambda: until(NEVER)

    def _until(self, place: int) -> Until:
        """How far the loop goes that a place belongs to."""
        epochs = self.delivery.epochs
        return _without_end if epochs is None else self.samples._loops(self._order).until(place, epochs)

    def _loop_at(self) -> tuple[int, bool]:
        """How many loops over all epochs are through, and whether one begins here."""
        return self.samples._loops(self._order).loop_at(self.samples_seen, self.delivery.epochs or 1)

    def _loop_begin(self, number: int) -> State:
        """What a state says differently that stands at the begin of a loop."""
        return self.samples._loops(self._order).epoch_begin(number * (self.delivery.epochs or 1))

    def _every(self, turns: int, first: int) -> Iterator[BatchT]:
        """Of the batches that follow from here, number `first` and every `turns`-th after it: a worker's share.

        The others are not read, and where this loader stands does not change.
        """
        place = self.samples_seen + first * self.delivery.step
        return (batch for batch, _ in self._made(place, self._until(self.samples_seen), turns))

    def _made(self, place: int, until: Until, turns: int = 1) -> Iterator[tuple[BatchT, int]]:
        ahead = self._prefetch
        # Enough for those that wait, one that is being made, and one or two that the user holds.
        spare: Recycled[BatchT] | InTurn[BatchT] = Recycled(ahead + 3) if self._copy else InTurn(ahead + 2)
        if not self.samples._reusable:
            spare = Recycled(0)
        work = Work(self.samples, self._order, self.delivery, self._dtype, spare)
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

    def load_state_dict(self, state: State, *, new_weights: bool = False) -> None:
        """Continue from a state, on any number of ranks and with any batch size.

        A state of other data, another seed or another sample length is refused. `new_weights`: use the weights of this
        mixture from here on, even if the state was made with others.
        """
        found = _checked_state(state, self.state_dict())
        self._order = self._order.restored(found["order"], found["samples_seen"], new_weights=new_weights)
        self._loop.move(found["samples_seen"])
        self._began = None

    def stats(self) -> dict[str, float]:
        """What was delivered to all ranks together since the first batch; for a feed, also what tokenizing took.

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

    _repr_html_ = in_notebook(lambda batches: ("Batches", _facts(batches)))

    def __reduce__(self) -> tuple[object, ...]:
        options: dict[str, Any] = {"seed": self._seed, "shuffle": self._shuffle, "prefetch": self._prefetch}
        options |= {"copy": self._copy, "dtype": self._dtype}
        return _made_again, (self.samples, self.delivery, options, self.state_dict())


def _facts(batches: Batches[Any]) -> list[tuple[str, str]]:
    """What a notebook shows."""
    delivery = batches.delivery
    return [
        ("samples", repr(batches.samples)),
        ("batch size", f"{delivery.batch_size:,}"),
        ("tokens a batch", f"{delivery.batch_size * batches.samples.sample_tokens:,}"),
        ("rank", f"{delivery.rank} of {delivery.world_size}"),
        ("samples seen", f"{batches.samples_seen:,}"),
        ("epoch", f"{batches.epoch:,}"),
    ]


def wide_enough(dtype: npt.DTypeLike, samples: Samples[object, BatchT]) -> np.dtype[Any]:
    """The dtype, which must hold every token."""
    wanted, stored = np.dtype(dtype), samples.token_dtype
    if wanted.kind not in "iu" or wanted.itemsize < stored.itemsize or np.iinfo(wanted).max < _largest(stored):
        raise ConfigError(f"dtype: {wanted} can't hold every token that is stored as {stored}; use int64.")
    if samples._signed and wanted.kind == "u":
        raise ConfigError(f"dtype: {wanted} can't hold the -100 of labels without a target; use int64.")
    return wanted


def _largest(stored: np.dtype[Any]) -> int:
    """The largest token there can be: no vocabulary needs the upper half of 64 bits."""
    return min(np.iinfo(stored).max, np.iinfo(np.int64).max)


def _made_again(
    samples: Samples[object, BatchT], delivery: Delivery, options: dict[str, Any], state: State
) -> Batches[BatchT]:
    batches = Batches(samples, delivery, **options)
    batches.load_state_dict(state)
    return batches


def differences(was: State, now: State) -> str:
    """What differs between the settings of a state and one's own, in words; empty when nothing does.

    >>> differences({"seed": 0, "seq_len": 8}, {"seed": 1, "seq_len": 8})
    'seed was 0, is 1'
    """
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
    """A state, unless it would go on with other samples, or in another order."""
    found: _State = checked(_State, state, STATE_NAME)
    if found["version"] != STATE_VERSION:
        raise MismatchError(
            f"A loader's state of version {found['version']}; this milldam reads version {STATE_VERSION}."
        )
    mine: _State = checked(_State, own, STATE_NAME)
    was, now = (one["samples"] | {"seed": one["seed"], "shuffle": one["shuffle"]} for one in (found, mine))
    # Of another kind of samples all the rest differs, too.
    kinds = ["kind"] if was.get("kind") != now.get("kind") else was | now
    changed = differences({name: was.get(name) for name in kinds}, {name: now.get(name) for name in kinds})
    if changed:
        raise MismatchError(f"This state is another loader's: {changed}. Make the loader as it was, or start over.")
    return found


def _without_end(stop: int) -> int:
    return stop


Begin = Callable[[PlaceT], "tuple[Iterator[tuple[ItemT, PlaceT]], Callable[[], PlaceT]]"]
"""From a place on: what follows, each item with the place behind it; and what gives the place where that ended."""


class Loop(Generic[PlaceT, ItemT]):
    """The place behind the last item that was handed out, and what follows.

    Who has a loop says with each call how to begin one, so that the loop does not hold its owner.
    """

    def __init__(self, place: PlaceT) -> None:
        self.place = place
        self._running: Iterator[tuple[ItemT, PlaceT]] | None = None
        self._end: Callable[[], PlaceT] = lambda: place
        self._inside = False

    def move(self, place: PlaceT, *, inside: bool = False) -> None:
        """Go on from another place. `inside`: a loop was left there, maybe with its last item in hand."""
        self.place, self._running, self._inside = place, None, inside

    def items(self, begin: Begin[PlaceT, ItemT]) -> Iterator[ItemT]:
        """What is left of a loop; when that is nothing, the next one."""
        left_open = self._running is not None or self._inside
        item = self.next(begin)
        if item is None and left_open:
            # The loop before was left with its last item in hand: it was through.
            item = self.next(begin)
        while item is not None:
            running = self._running
            yield item
            if running is not self._running:
                raise RuntimeError("a state was loaded while this was iterated; begin a new loop")
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
            # What failed or was interrupted is tried again from where it stands, not taken for the end.
            self._running = None
            raise
        # Also behind the places at the end that gave this rank nothing.
        self.move(self._end())
        return None


def handed_out(item: ItemT | None) -> ItemT:
    """What `__next__` gives."""
    if item is None:
        raise StopIteration
    return item
