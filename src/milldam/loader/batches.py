"""Samples -> batches: ranks, epochs, state, reading ahead.

The global order is one sequence of places: epoch after epoch, without a seam. Place i goes to rank i mod world_size;
`world_size` times `batch_size` places are one step, the same for all ranks. So where a loader stands is one number,
which means the same for any number of ranks and any batch size. Only the very last batch can be short.

Holds one batch, those made ahead, and some thousands of numbers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError
from milldam.loader.order import Order, Shuffle, Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.recycling import InTurn, Recycled, Spare
from milldam.loader.samples import Batch, Located, Samples
from milldam.prefetch import prefetched

Step = tuple[Located, int]

STATE_VERSION, STATE_NAME = 1, "The state of a loader"
_NUMBERS_AT_ONCE = 4096
"""Places whose samples are computed in one call: the permutation's cost a number falls until about here."""
_ANNOUNCED_SAMPLES = 1024
_ANNOUNCED_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class Delivery:
    """Which places of the global order go where."""

    batch_size: int
    rank: int = 0
    world_size: int = 1
    epochs: int | None = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "rank", "world_size"):
            # numpy's integers would end up in states, which are JSON.
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", operator.index(self.epochs))
        for name in ("batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; use 1 or more.")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs: {self.epochs}; use 1 or more, or None to go on without end.")
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


class Batches:
    """Iterate to get batches; `state_dict()` says where it stands, `load_state_dict()` goes on from there.

    A `for` loop goes on where the last one left off; when all epochs are through, the next loop brings the epochs
    that follow, in another order.
    """

    def __init__(
        self,
        samples: Samples,
        delivery: Delivery,
        *,
        seed: int,
        shuffle: Shuffle,
        prefetch: int,
        copy: bool,
        dtype: npt.DTypeLike,
    ) -> None:
        if prefetch < 0:
            raise ConfigError(f"prefetch: {prefetch}; use 0 or more batches.")
        self.samples, self.delivery = samples, delivery
        seed = operator.index(seed)
        self._seed, self._shuffle = seed, shuffle
        self._prefetch, self._copy = prefetch, copy
        self._dtype = wide_enough(dtype, samples)
        self._order = samples.order(shuffle, seed)
        if delivery.drop_last and delivery.epochs is not None:
            delivery.require_a_step(self._pass_length(delivery.epochs))
        self._place = 0
        self._until: int | None = None
        self._running: Iterator[tuple[Batch, int]] | None = None

    def __len__(self) -> int:
        """Batches of one loop over all epochs."""
        if self.delivery.epochs is None:
            raise TypeError("these batches have no end (epochs=None)")
        return self.delivery.batches(self._pass_length(self.delivery.epochs))

    def _pass_length(self, epochs: int) -> int:
        return epochs * self.samples.epoch_samples

    @property
    def epoch(self) -> int:
        """How many epochs are through; where a mixture took new weights, counted from there."""
        first = self._first_end
        return 0 if self._place < first else 1 + (self._place - first) // self.samples.epoch_samples

    @property
    def _first_end(self) -> int:
        return self._order.first_end or self.samples.epoch_samples

    @property
    def samples_seen(self) -> int:
        """Samples that all ranks together were given, from the very first epoch on."""
        return self._place

    @property
    def dtype(self) -> np.dtype[Any]:
        """What tokens are delivered as; it can be changed on the way."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: npt.DTypeLike) -> None:
        self._dtype, self._running = wide_enough(dtype, self.samples), None

    def __getitem__(self, number: int) -> Batch:
        """torch's DataLoader asks; batches come in their own order."""
        raise ConfigError("These are batches already. Instead of a DataLoader, use milldam.torch.tensors(batches).")

    def __iter__(self) -> Iterator[Batch]:
        left_open = self._running is not None
        batch = next(self, None)
        if batch is None and left_open:
            # The loop before was left with its last batch in hand: it was through.
            batch = next(self, None)
        while batch is not None:
            running = self._running
            yield batch
            if running is not self._running:
                raise RuntimeError("a state was loaded while these batches were iterated; begin a new loop")
            batch = next(self, None)

    def __next__(self) -> Batch:
        running = self._going_on()
        try:
            for batch, self._place in running:
                return batch
        except BaseException:
            # What failed or was interrupted is tried again from where it stands, not taken for the end.
            self._running = None
            raise
        self._finish()
        raise StopIteration

    def _going_on(self) -> Iterator[tuple[Batch, int]]:
        if self._running is None:
            self._until = self.loop_end(self._place)
            self._running = self._made(self._place, self._until)
        return self._running

    def _finish(self) -> None:
        """All epochs are through, also the places at the end that gave this rank no batch."""
        assert self._until is not None
        self._place, self._running = self._until, None

    def loop_end(self, place: int) -> int | None:
        """Where the loop ends that a place belongs to."""
        if self.delivery.epochs is None:
            return None
        length = self._pass_length(self.delivery.epochs)
        first = self._first_end + self._pass_length(self.delivery.epochs - 1)
        return first if place < first else first + ((place - first) // length + 1) * length

    def every(self, turns: int, first: int) -> Iterator[Batch]:
        """Of the batches that follow from here, number `first` and every `turns`-th after it: a worker's share.

        The others are not read, and where this loader stands does not change.
        """
        place = self._place + first * self.delivery.step
        return (batch for batch, _ in self._made(place, self.loop_end(self._place), turns))

    def _made(self, place: int, end: int | None, turns: int = 1) -> Iterator[tuple[Batch, int]]:
        ahead = self._prefetch
        # Enough for those that wait, one that is being made, and one or two that the user holds.
        spare: Spare = Recycled(ahead + 3) if self._copy else InTurn(ahead + 2)
        if not self.samples.reusable:
            spare = Recycled(0)
        work = _Work(self.samples, self._order, self.delivery, self._dtype, spare)
        made = work.batches(place, end, turns)
        return prefetched(made, ahead) if ahead else made

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as small JSON: the samples that were delivered, not those made ahead."""
        return {
            "version": STATE_VERSION,
            "samples_seen": self._place,
            "epoch": self.epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self.samples.identity,
            "order": self._order.state(self._place),
        }

    def load_state_dict(self, state: dict[str, Any], *, new_weights: bool = False) -> None:
        """Go on from a state, on any number of ranks and with any batch size.

        A state of other data, another seed or another length of samples is refused. `new_weights`: take the weights
        of this mixture from here on, though the state was made with others.
        """
        _refuse_other(state, self.state_dict())
        place = state["samples_seen"]
        self._order = self._order.restored(state["order"], place, new_weights=new_weights)
        self._place, self._running = place, None

    def __repr__(self) -> str:
        of = f"{self.delivery.batch_size:,} x {self.samples!r}"
        return f"Batches({of}: {self._place:,} samples seen, epoch {self.epoch:,})"

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"seed": self._seed, "shuffle": self._shuffle, "prefetch": self._prefetch}
        options |= {"copy": self._copy, "dtype": self._dtype}
        return _made_again, (self.samples, self.delivery, options, self.state_dict())


def wide_enough(dtype: npt.DTypeLike, samples: Samples) -> np.dtype[Any]:
    """The dtype, which must hold every token."""
    wanted, stored = np.dtype(dtype), samples.token_dtype
    if wanted.kind not in "iu" or wanted.itemsize < stored.itemsize or np.iinfo(wanted).max < _largest(stored):
        raise ConfigError(f"dtype: {wanted} can't hold every token that is stored as {stored}; use int64.")
    if samples.signed and wanted.kind == "u":
        raise ConfigError(f"dtype: {wanted} can't hold the -100 of labels without a target; use int64.")
    return wanted


def _largest(stored: np.dtype[Any]) -> int:
    """The largest token there can be: no vocabulary needs the upper half of 64 bits."""
    return min(np.iinfo(stored).max, np.iinfo(np.int64).max)


def _made_again(samples: Samples, delivery: Delivery, options: dict[str, Any], state: dict[str, Any]) -> Batches:
    batches = Batches(samples, delivery, **options)
    batches.load_state_dict(state)
    return batches


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
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


def _refuse_other(state: dict[str, Any], own: dict[str, Any]) -> None:
    """A state that would go on with other samples, or in another order."""
    checked(_State, state, STATE_NAME)
    if state["version"] != STATE_VERSION:
        found = state["version"]
        raise MismatchError(f"A loader's state of version {found}; this milldam reads version {STATE_VERSION}.")
    was, now = (one["samples"] | {"seed": one["seed"], "shuffle": one["shuffle"]} for one in (state, own))
    # Of another kind of samples all the rest differs, too.
    kinds = ["kind"] if was.get("kind") != now.get("kind") else was | now
    changed = differences({name: was.get(name) for name in kinds}, {name: now.get(name) for name in kinds})
    if changed:
        raise MismatchError(f"This state is another loader's: {changed}. Make the loader as it was, or start anew.")


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes batches; knows nothing of who takes them, so that a thread can run it."""

    samples: Samples
    order: Order
    delivery: Delivery
    dtype: np.dtype[Any]
    spare: Spare

    def batches(self, place: int, end: int | None, turns: int) -> Iterator[tuple[Batch, int]]:
        """(batch, the place behind it), of every `turns`-th step."""
        steps: Iterator[Step] = itertools.islice(self._steps(place, end), 0, None, turns)
        if self.samples.announces:
            steps = self._announced(steps, place)
        for step, behind in steps:
            yield self._read(step), behind

    def _read(self, step: Located) -> Batch:
        out = self.spare.take()
        batch = self.samples.read_located(step, self.dtype, out)
        if out is None and len(step.numbers) == self.delivery.batch_size:
            self.spare.keep(batch)
        return batch

    def _steps(self, place: int, end: int | None) -> Iterator[Step]:
        """(this rank's samples, the place behind the step)."""
        size, step = self.delivery.batch_size, self.delivery.step
        span = max(1, _NUMBERS_AT_ONCE // size) * step
        last = end - (end - place) % step if end is not None and self.delivery.drop_last else end
        while last is None or place < last:
            stop = place + span if last is None else min(place + span, last)
            located = self.samples.locate(self.order.numbers(self.delivery.mine(place, stop)))
            for first in range(0, len(located.numbers), size):
                place = min(place + step, stop)
                # What is left out at the end counts as seen with the last batch: nothing follows it.
                yield located.part(first, first + size), end if place == last and end is not None else place
            place = stop

    def _announced(self, steps: Iterator[Step], place: int) -> Iterator[Step]:
        """The same steps, each announced some time before it comes."""
        if self.order.stretches(place) is not None:
            announcer = _WindowAnnouncer(self.samples, self.order, place)
            for step, behind in steps:
                yield step, behind
                announcer.advance(behind)
            return
        # Many at a time, since a call costs as much as several samples; few at first, for an early first batch.
        ahead, most = 1, self._steps_ahead()
        announced: list[Step] = []
        while coming := list(itertools.islice(steps, ahead)):
            self.samples.announce(np.concatenate([step.numbers for step, _ in coming]))
            yield from announced
            announced, ahead = coming, min(2 * ahead, most)
        yield from announced

    def _steps_ahead(self) -> int:
        sample_bytes = self.samples.token_dtype.itemsize * self.samples.sample_tokens
        samples = min(_ANNOUNCED_SAMPLES, _ANNOUNCED_BYTES // sample_bytes)
        return max(1, samples // self.delivery.batch_size)


class _WindowAnnouncer:
    """Announces the window that comes next, little by little while this one is read; gives back the one before."""

    def __init__(self, samples: Samples, order: Order, place: int) -> None:
        self._samples, self._order = samples, order
        self._begin = place
        self._end, self._now = self._window(place)
        samples.announce_stretches(self._now)
        self._next_end, self._next = self._window(self._end)
        self._announced = 0

    def _window(self, place: int) -> tuple[int, Stretches]:
        found = self._order.stretches(place)
        assert found is not None
        return found

    def advance(self, place: int) -> None:
        done = min(1.0, (place - self._begin) / max(1, self._end - self._begin))
        due = int(len(self._next.firsts) * done)
        part = slice(self._announced, due)
        self._samples.announce_stretches(Stretches(self._next.firsts[part], self._next.counts[part]))
        self._announced = max(self._announced, due)
        if place >= self._end:
            self._samples.release_stretches(self._now)
            self._begin, self._end, self._now = self._end, self._next_end, self._next
            self._next_end, self._next = self._window(self._end)
            self._announced = 0
