"""Samples of parts that come one after the other: what a feed is cut into.

A sample never goes over the end of a part. The samples of a group of parts (`unit_order`) are read in one gather, as
those of a mixture are (`mixed_reading`). A number says the group and the sample in it, and means something only to the
object that gave it: states hold places.

Holds what the last groups need: their mappings, and what packing looks up.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, ResourceError
from milldam.loader.conversations import WholeDocuments
from milldam.loader.mixed_reading import Sources, groups, open_joint, read_by_source
from milldam.loader.order import LengthGrouped, Order, Shuffle
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Way
from milldam.loader.samples import Loops, NoSamplesError, ReadPart, Rules, Samples, StreamSamples, Until
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.types import BatchT, SampleT, State
from milldam.loader.unit_order import Key, Parts, UnitOrder, epoch_begin
from milldam.loader.views import Trainable

if TYPE_CHECKING:
    from milldam.loader.batches import Batches

log = logging.getLogger("milldam")
_INDEX_BITS, _GROUP_BITS = 36, 20
_OPEN_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How data is cut into samples."""

    kind: type[Any]
    """Of `StreamSamples`."""
    rules: Rules
    way: Way
    """How files are read."""
    sample_tokens: int

    @property
    def facts(self) -> State:
        """All that decides which sample has which number in a part: what a state must agree with."""
        own: State = {"kind": self.kind._kind}
        return own | self.rules.facts

    @property
    def whole_documents(self) -> bool:
        return issubclass(self.kind, WholeDocuments)

    def samples(self, streams: Sequence[TokenStream]) -> list[StreamSamples[Any, Any]]:
        """Those of each stream that has any."""
        found = []
        for stream in streams:
            try:
                found.append(self.kind(_PartData(stream), self.rules, self.way))
            except NoSamplesError:
                continue
        return found


class _PartData(Trainable):
    """A stream by itself."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def stream(self) -> TokenStream:
        return self._stream


class PartGroups:
    """Groups of parts, by the keys of their parts, opened when they are needed; threads may share it."""

    def __init__(self, parts: Parts, split: str, cut: Cut) -> None:
        self.parts, self.split, self.cut = parts, split, cut
        self._lock = threading.RLock()
        self._serials: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._opened: OrderedDict[Key, Sources] = OrderedDict()
        self._told_too_long = False

    @property
    def name(self) -> str:
        return self.parts.facts.name

    @property
    def units(self) -> int:
        return self.parts.facts.units

    @property
    def last_opened(self) -> Sources | None:
        return next(reversed(self._opened.values()), None)

    def numbered(self, serial: int) -> Sources:
        """The group whose numbers begin at its serial."""
        return self._open(self._keys[serial])

    def count_unit(self, unit: int) -> int:
        """Samples of a unit."""
        count, number, last = 0, 0, False
        while not last:
            part = self.parts.part(unit, number)
            count += sum(map(len, self._cut([part.files[self.split]]))) if self.split in part.files else 0
            number, last = number + 1, part.last
        return count

    def count(self, key: Key) -> int:
        """Samples of a group of parts."""
        return int(self._open(key).begins[-1]) if key else 0

    def base(self, key: Key) -> int:
        """The number of the first sample of a group."""
        with self._lock:
            if key not in self._serials:
                if len(self._keys) >> _GROUP_BITS:
                    raise ResourceError(f"{self.name}: more than {len(self._keys):,} groups of units. Open it again.")
                self._serials[key] = len(self._keys)
                self._keys.append(key)
            return self._serials[key] << _INDEX_BITS

    def order_inside(self, order: Order, key: Key, seed: int) -> Order:
        """The order of a group's samples: theirs, unless samples of like length come together."""
        group = self._open(key)
        samples = group.sources[0]
        if not isinstance(samples, WholeDocuments) or samples.rules.length_groups is None:
            return order
        return LengthGrouped(order, int(group.begins[-1]), seed, samples.rules.length_groups, samples._longest_of)

    def _open(self, key: Key) -> Sources:
        with self._lock:
            group = self._opened.get(key)
            if group is None:
                files = [self.parts.part(unit, number).files[self.split] for unit, number in key]
                group = self._opened[key] = Sources(self._cut(files), partial(open_joint, way=self.cut.way))
                self._tell_too_long(group)
                if len(self._opened) > _OPEN_GROUPS:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(key)
            return group

    def _tell_too_long(self, group: Sources) -> None:
        """Once: what becomes of documents that are too long. How many there are in all is not known."""
        sources: Sequence[Any] = group.sources if not self._told_too_long else ()
        for samples in sources:
            rules = samples.rules
            if getattr(rules, "too_long", None) in ("drop", "cut") and samples.too_long.documents:
                log.warning(f"{samples._stream.name}: {samples.told_too_long()} So it is in all other parts.")
                self._told_too_long = True
                return

    def _cut(self, files: Sequence[TokenFile]) -> list[StreamSamples[Any, Any]]:
        # Documents never go over the end of a file: one stream for all.
        several = [tuple(files)] if self.cut.whole_documents else [(file,) for file in files]
        return self.cut.samples([self._stream(some) for some in several])

    def _stream(self, files: tuple[TokenFile, ...]) -> TokenStream:
        facts, place = self.parts.facts, self.parts.finished()
        # The name of a shard says its content.
        names = "+".join(file.path.stem for file in files)
        return TokenStream(
            name=f"{facts.name}/{names}",
            files=files,
            dtype=facts.dtype,
            first=0,
            stop=sum(file.tokens for file in files),
            fingerprint=names,
            cache=facts.rows,
            pad_id=facts.pad_id,
            tokenizer=facts.tokenizer,
            pairs=facts.pairs,
            origin=None if place is None else place.origin,
        )


class FeedSamples(Samples[SampleT, BatchT]):
    """Samples of a feed: `samples.batches(16)`. Their number is known once all units are tokenized.

    >>> samples = milldam.open("corpus.milldam", units=True).windows(128)
    >>> next(samples.batches(16, seed=0))[0].shape
    (16, 128)
    """

    _length_known = False

    def __init__(self, parts: Parts, split: str, cut: Cut) -> None:
        self.parts, self.split, self.cut = parts, split, cut
        self.name, self.units = parts.facts.name, parts.facts.units
        self.groups = PartGroups(parts, split, cut)
        self._signed, self._reusable, self._rows_each = cut.kind._signed, cut.kind._reusable, cut.kind._rows_each
        self._counted: int | None = None

    @property
    def identity(self) -> State:
        return self.cut.facts | {"order": "units", "data": self.parts.facts.identity, "split": self.split}

    @property
    def sample_tokens(self) -> int:
        """If samples differ in length, the mean of the group that was opened last."""
        group = self.groups.last_opened if self.cut.whole_documents else None
        return group.sources[0].sample_tokens if group is not None and group.sources else self.cut.sample_tokens

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return self.parts.facts.dtype

    @property
    def tokenizer(self) -> str | None:
        return self.parts.facts.tokenizer

    @property
    def epoch_samples(self) -> int:
        """Samples per epoch; TypeError while the number is unknown."""
        if self._counted is None:
            if self.parts.finished() is None:
                raise TypeError(
                    f"{self.name}: how many samples an epoch has is known once all of it is made. Train for a number "
                    "of steps, or until the loop ends."
                )
            self._counted = sum(map(self.groups.count_unit, range(self.units)))
        return self._counted

    def __len__(self) -> int:
        return self.epoch_samples

    def __getitem__(self, number: int) -> SampleT:
        """Sample k of the first epoch, in sequence."""
        if number < 0:
            raise IndexError(f"sample {number} of a feed; its end is not known. Count from 0.")
        return self._sample(int(self._order(False, 0).numbers(np.array([number]))[0]))

    def __getitems__(self, numbers: Sequence[int]) -> NoReturn:
        """torch's DataLoader asks: a sampler has to know how many samples there are."""
        raise ConfigError(
            "A sampler of torch can't draw from a feed, whose end is not known. Use milldam.torch: "
            "DataLoader(BatchDataset(samples, batch_size), batch_size=None)."
        )

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: BatchT | None = None) -> BatchT:
        return self._look_up(numbers, dtype)(slice(0, len(numbers)), out)

    def batches(self, batch_size: int, *, shuffle: Shuffle | str = True, **options: Any) -> Batches[BatchT]:
        """Batches in the order of units; options as for `Samples.batches`.

        shuffle   True: units in random order, with the samples of a group of units shuffled together; False: input
                  order; "full": all samples shuffled, as for `milldam.open(store)`; only once the store is finished
        """
        if shuffle == "full":
            return _of_finished(self).batches(batch_size, shuffle=True, **options)
        return super().batches(batch_size, shuffle=cast(Shuffle, shuffle), **options)

    # ---- for those who make batches ----

    def _sample(self, number: int) -> SampleT:
        serial, inside = divmod(number, 1 << _INDEX_BITS)
        return cast(SampleT, self.groups.numbered(serial).sample(inside))

    def _order(self, shuffle: Shuffle, seed: int) -> UnitOrder:
        if not isinstance(shuffle, bool):
            raise ConfigError(
                f'shuffle: {shuffle!r}; a feed has True (over units and groups of parts), False or "full".'
            )
        return UnitOrder(self.groups, seed, shuffled=shuffle)

    def _loops(self, order: Order) -> Loops:
        return _UnitLoops(self, cast(UnitOrder, order))

    def _stats(self) -> dict[str, float]:
        return self.parts.stats()

    @property
    def _numbered(self) -> int:
        return 1 << (_INDEX_BITS + _GROUP_BITS)

    @property
    def _padding(self) -> Mapping[str, int] | None:
        padding: Mapping[str, int] | None = self.cut.kind.padding_with(self.parts.facts.pad_id)
        return padding

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        serials, inside = numbers >> _INDEX_BITS, numbers & ((1 << _INDEX_BITS) - 1)
        there, which = np.unique(serials, return_inverse=True)
        opened = [self.groups.numbered(serial) for serial in there.tolist()]
        if len(opened) == 1:
            return opened[0].look_up(inside, dtype)
        found = [(where, opened[one].look_up(inside[where], dtype)) for one, where in groups(which, len(opened))]
        return lambda part, out: read_by_source(found, part, out, self._padding, self._rows_each)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedSamples, (self.parts, self.split, self.cut)

    def __repr__(self) -> str:
        return f"FeedSamples({self.name}: {self.cut.facts['kind']} of {self.units:,} units)"


def _of_finished(samples: FeedSamples[SampleT, BatchT]) -> Samples[SampleT, BatchT]:
    """The same view of the finished store."""
    from milldam.loader.stores import Store

    place = samples.parts.finished()
    if place is None:
        raise ConfigError(
            f'{samples.name}: shuffle="full" takes samples from anywhere, and not all of it is made. '
            "Use shuffle=True, or finish the store first: `milldam tokenize` with the same input and options."
        )
    whole: Samples[SampleT, BatchT] = samples.cut.kind(
        Store(place, split=samples.split), samples.cut.rules, samples.cut.way
    )
    return whole


@dataclass(frozen=True, slots=True)
class _UnitLoops:
    """Where epochs end shows when they are through."""

    samples: FeedSamples[Any, Any]
    order: UnitOrder

    def epoch_at(self, place: int) -> int:
        return self.order.epoch(place)

    def until(self, place: int, epochs: int) -> Until:
        through = (self.order.epoch_ahead(place) // epochs + 1) * epochs
        return lambda stop: self.order.reach(stop, through)

    def loop_at(self, place: int, epochs: int) -> tuple[int, bool]:
        return self.order.epoch(place) // epochs, self.order.is_begin(place, epochs)

    def epoch_begin(self, epoch: int) -> State:
        if epoch and self.samples.parts.finished() is None:
            raise ConfigError(
                f"{self.samples.name}: the start of epoch {epoch} is unknown until all units are tokenized. Go over "
                "several epochs in one loop (epochs=...), or continue from a state."
            )
        place = epoch * self.samples.epoch_samples if epoch else 0
        return {"samples_seen": place, "order": epoch_begin(epoch, place)}
