"""The order of a feed: units in random order, the samples of some parts at a time in any order.

Epoch e visits the units of the plan in a permutation of its own; the parts of a unit come one after the other. That
sequence of parts is cut into groups, and the samples of a group are permuted among each other. A group has 64 parts; in
the first epoch the first ones have 1, 1, 2, 4, ... 32, so that the first batch needs no more than one part. A part that
has nothing of the split is passed over.

So what comes at a place follows from the plan, the parts and the seed, never from how much is made. How many samples an
epoch has shows when it is through. A state names the parts of its group and how the sequence goes on: whoever resumes
from it needs no earlier part. Holds 16 bytes for each unit, and about a kilobyte for each group that it has passed.

A unit of the plan leaves one part, or several where it is a stream that can't be cut (docs/decisions/0006); a part is
at most one shard for each split. `Parts` decides when a part is there, never which one comes next.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.loader.order import InSequence, LengthGrouped, Order, Shuffled, Until
from milldam.loader.permutation import Int64s, Permutation, mix
from milldam.loader.stores import Store, token_file
from milldam.loader.stream import TokenFile
from milldam.loader.types import State
from milldam.stores.kinds import result_id
from milldam.stores.place import Place
from milldam.stores.tokens.manifest import Shard

if TYPE_CHECKING:
    from milldam.loader.feeds import FeedSamples

GROUP_PARTS = 64
_FIRST_GROUPS = (1, 1, 2, 4, 8, 16, 32)
_WANTED_UNITS = 2 * GROUP_PARTS
"""How many units are asked for ahead: enough for the next group, and for the one after it."""
_UNIT_SEED, _INSIDE_SEED = 6, 7
"""Apart from the numbers that other orders mix into their seeds."""
_NAME = "The state of a feed"
Key = tuple[tuple[int, ...], ...]
"""(unit, part) of the parts of a group."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of parts, and how the sequence goes on behind it: all that a state needs."""

    begin: int
    """The place of its first sample."""
    samples: int
    epoch: int
    groups: int
    """Groups of its epoch up to this one; 0: the begin of the epoch, no group yet."""
    parts: Key
    next_unit: int
    """Place in the epoch's permutation of units."""
    next_part: int

    @property
    def end(self) -> int:
        return self.begin + self.samples

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"parts": [list(part) for part in self.parts]}


class UnitOrder(Order):
    """Places to numbers of samples. Threads may share it."""

    def __init__(self, feed: FeedSamples[Any, Any], seed: int, *, shuffled: bool, begin: _Group | None = None) -> None:
        self._feed, self._seed, self._shuffled = feed, seed, shuffled
        self._groups = [begin or _Group(0, 0, 0, 0, (), 0, 0)]
        self._lock = threading.RLock()
        self._units = lru_cache(maxsize=3)(self._units_of)
        self._inside = lru_cache(maxsize=4)(self._order_inside)

    def numbers(self, places: Int64s) -> Int64s:
        numbers = np.empty_like(places)
        done = 0
        while done < len(places):
            group = self._at(int(places[done]))
            stop = int(places.searchsorted(group.end))
            inside = self._inside(group).numbers(places[done:stop] - group.begin)
            numbers[done:stop] = inside + self._feed.group_base(group.parts)
            done = stop
        return numbers

    # ---- groups ----

    def _at(self, place: int, *, sample: bool = True) -> _Group:
        """The group of the sample at a place; without one, the last that is known to begin there or before, so that
        none is opened that need not be."""
        with self._lock:
            while self._groups[-1].end < place + sample:
                self._extend()
            return self._groups[bisect_right(self._groups, place, key=lambda group: group.begin) - 1]

    def _extend(self) -> None:
        """Add the next group. Waits until its parts are made."""
        last, feed = self._groups[-1], self._feed
        epoch, groups, place, part = last.epoch, last.groups, last.next_unit, last.next_part
        if self._is_last(last):
            first = self._groups[0]
            whole = first.groups == 0 or first.epoch < last.epoch
            if whole and not any(group.samples for group in self._groups if group.epoch == last.epoch):
                # Epoch after epoch would bring nothing.
                raise ConfigError(
                    f"{feed.name}: no part of it has enough for one sample. Use a shorter seq_len, or more data."
                )
            epoch, groups, place, part = epoch + 1, 0, 0, 0
        wanted = _FIRST_GROUPS[groups] if epoch == 0 and groups < len(_FIRST_GROUPS) else GROUP_PARTS
        parts: list[tuple[int, ...]] = []
        while len(parts) < wanted and place < feed.units:
            coming = self._coming(epoch, place)
            feed.parts.want(coming)
            made = feed.parts.part(coming[0], part)
            if feed.split in made.files:
                parts.append((coming[0], part))
            place, part = (place + 1, 0) if made.last else (place, part + 1)
        feed.parts.want(self._coming(epoch, place))
        key = tuple(parts)
        self._groups.append(_Group(last.end, self._samples_in(key), epoch, groups + 1, key, place, part))

    def _is_last(self, group: _Group) -> bool:
        """Whether no unit of the epoch follows."""
        return group.next_unit >= self._feed.units

    def _coming(self, epoch: int, place: int) -> list[int]:
        """Units in the order in which they are needed."""
        here = self._units(epoch)[place : place + _WANTED_UNITS]
        return [*here.tolist(), *self._units(epoch + 1)[: _WANTED_UNITS - len(here)].tolist()]

    def _units_of(self, epoch: int) -> Int64s:
        """The units of an epoch in their order: 8 bytes each."""
        units = np.arange(self._feed.units)
        return Permutation(len(units), mix(self._seed, epoch, _UNIT_SEED))(units) if self._shuffled else units

    def _order_inside(self, group: _Group) -> Order:
        key = mix(self._seed, group.epoch, _INSIDE_SEED, group.groups - 1)
        order = Shuffled(group.samples, key) if self._shuffled else InSequence(group.samples)
        samples = self._feed.open_group(group.parts).sources[0]
        length_groups = getattr(samples.rules, "length_groups", None)
        if length_groups is not None:
            return LengthGrouped(order, group.samples, key, length_groups, samples.longest)
        return order

    def _samples_in(self, parts: Key) -> int:
        return int(self._feed.open_group(parts).begins[-1]) if parts else 0

    # ---- epochs: where they end shows when they are over ----

    def epoch_at(self, place: int) -> int:
        group = self._at(place, sample=False)
        return group.epoch + (place == group.end and self._is_last(group))

    def until(self, place: int, epochs: int | None) -> Until:
        if epochs is not None:
            # What is left of an epoch may have no sample: then the loop is one over the next.
            self._at(place)
        return super().until(place, epochs)

    def up_to(self, stop: int, epoch: int) -> int:
        with self._lock:
            while (last := self._groups[-1]).end < stop and (
                last.epoch < epoch or (last.epoch == epoch and not self._is_last(last))
            ):
                self._extend()
            # Some other loop may be in a later epoch.
            return min(stop, next(group for group in reversed(self._groups) if group.epoch <= epoch).end)

    def is_begin(self, place: int) -> bool:
        group = self._at(place, sample=False)
        return (place == group.begin and group.groups < 2) or (place == group.end and self._is_last(group))

    def epoch_begin(self, epoch: int) -> State:
        if epoch and self._feed.parts.finished() is None:
            raise ConfigError(
                f"{self._feed.name}: the start of epoch {epoch} is unknown until all units are tokenized. Go over "
                "several epochs in one loop (epochs=...), or continue from a state."
            )
        place = epoch * self._feed.epoch_samples if epoch else 0
        return {"samples_seen": place, "order": _Group(place, 0, epoch, 0, (), 0, 0).as_json()}

    # ---- states ----

    def state(self, place: int) -> dict[str, Any]:
        return self._at(place, sample=False).as_json()

    def restored(self, state: Any, place: int) -> UnitOrder:
        begin: _Group = checked(_Group, state, _NAME)
        feed = self._feed
        damaged = any(len(pair) != 2 for pair in begin.parts) or begin.begin > place or begin.next_unit > feed.units
        if damaged:
            raise StoreError(f"{_NAME}: damaged: it is not that of {feed.units:,} units at sample {place:,}.")
        order = UnitOrder(feed, self._seed, shuffled=self._shuffled, begin=begin)
        feed.parts.want([unit for unit, _ in begin.parts] + order._coming(begin.epoch, begin.next_unit))
        if place < begin.end and self._samples_in(begin.parts) != begin.samples:
            raise MismatchError(f"{feed.name}: the parts that this state names are not what they were.")
        return order


# ---- the parts of a plan's units ----


@dataclass(frozen=True, slots=True)
class Part:
    """The files of a part of a unit."""

    files: Mapping[str, TokenFile]
    """Its shard by split; a split that it has nothing of is missing."""
    last: bool
    """No part of this unit follows."""


@dataclass(frozen=True, slots=True)
class FeedFacts:
    """Facts about the data that are known as soon as it is planned."""

    name: str
    """Its name in messages: the path of the store."""
    identity: str
    """`result_id` of settings and input: equal ones mean equal parts."""
    units: int
    """How many units the plan has."""
    splits: tuple[str, ...]
    """Every split that was asked for, train first, whether or not a document went there."""
    dtype: np.dtype[Any]
    vocab_size: int
    """Every token id is less than this."""
    rows: Path
    """Folder for the rows of best-fit packing."""
    pad_id: int = 0
    tokenizer: str | None = None
    """Names the tokenizer by content."""
    chat: bool = False
    """Conversations, which say what is trained on."""
    pairs: bool = False
    """Documents 2k and 2k + 1 of a part are the chosen and the rejected one of a pair."""


class Parts(Protocol):
    """The parts of a plan's units. Used by any number of threads; pickles, and what is unpickled only reads."""

    @property
    def facts(self) -> FeedFacts: ...

    def part(self, unit: int, number: int) -> Part:
        """Part `number` of a unit. Waits until it is made; raises what went wrong, in words.

        Whatever was wanted, this unit is now wanted first: several orders may share these parts. Parts of a unit are
        asked for in order, but not always from the first on: a state may begin in the middle.
        """

    def want(self, units: Sequence[int]) -> None:
        """The units that are needed next, in this order. Replaces what was wanted before."""

    def finished(self) -> Place | None:
        """The store, once all units are made."""

    def stats(self) -> dict[str, float]:
        """Time and memory of tokenizing, and how far ahead it is; empty for a finished store."""

    def close(self) -> None:
        """Stop making. What was made stays."""


def splits_asked(settings: Mapping[str, Any], found: Sequence[str]) -> tuple[str, ...]:
    """The splits of a plan by its settings; of a store that was not made from text, those that it has.

    >>> splits_asked({"datasets": [{}], "splits": {"test_tokens": 1000}, "validation": [{}]}, ["train"])
    ('train', 'test', 'val')
    """
    if "datasets" not in settings:
        return tuple(found)
    named = [name.removesuffix("_tokens") for name in settings["splits"]]
    return tuple(dict.fromkeys(["train", *sorted([*named, *(["val"] if settings["validation"] else [])])]))


class FinishedParts:
    """The parts of a store: nothing is made, so nothing waits. Holds an entry for each part besides the manifest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = store.manifest
        self._shards: dict[tuple[int, int], list[Shard]] = {}
        self._last: dict[int, int] = {}
        """The last part of each unit that left any."""
        for number, shard in enumerate(manifest.shards):
            unit, part = (number, 0) if shard.unit is None else (shard.unit, shard.part or 0)
            self._shards.setdefault((unit, part), []).append(shard)
            self._last[unit] = max(part, self._last.get(unit, 0))
        made_from_text = "datasets" in manifest.settings
        self.facts = FeedFacts(
            name=store.name,
            identity=result_id(manifest.settings, manifest.input) if made_from_text else manifest.fingerprint,
            units=len(manifest.shards) if manifest.units is None else manifest.units,
            splits=splits_asked(manifest.settings, manifest.splits),
            dtype=store.dtype,
            vocab_size=manifest.vocab_size,
            rows=store.place.rows,
            pad_id=manifest.tokenizer.get("eos") or 0,
            tokenizer=manifest.tokenizer.get("xxh3"),
            chat=manifest.chat is not None,
            pairs=manifest.chat is not None and manifest.chat["pairs"],
        )

    def part(self, unit: int, number: int) -> Part:
        shards = self._shards.get((unit, number), ())
        files = {shard.split: token_file(self._store.place, shard) for shard in shards}
        # Parts without a document at the end of a unit left no trace.
        return Part(files, last=number >= self._last.get(unit, 0))

    def want(self, units: Sequence[int]) -> None:
        """All are there."""

    def finished(self) -> Place:
        return self._store.place

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return FinishedParts, (self._store,)
