"""Several sources by weight -> samples, in proportions that are exact after every number of samples.

Which source comes at a place follows from the weights (`schedule.py`); which sample of it from its own order, which
goes on for ever: a source is shuffled anew in each of its own epochs, and no sample of it comes twice within one,
whatever the others do. Nothing is drawn by chance, so a mixture can be entered anywhere, on any number of ranks.

Holds the tables of a schedule (6 MB at most) beside what the sources hold. A batch is one read where all sources are
read in the same way (`mixed_reading`), else one for each source in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.loader import permutation
from milldam.loader.feed_samples import FeedSamples
from milldam.loader.feeds import Feed
from milldam.loader.mixed_reading import Sources, groups, open_mixed
from milldam.loader.opening import open_data
from milldam.loader.order import Order, Shuffle, Stretches
from milldam.loader.packed import PackedRows
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader
from milldam.loader.samples import ReadPart, Samples
from milldam.loader.schedule import schedule_of, shares_of
from milldam.loader.stream import TokenStream
from milldam.loader.types import BatchT, Labelled, PackedBatch, PackedRow, SampleT, State, TokenPair
from milldam.loader.views import RowOptions, Trainable, WindowOptions
from milldam.loader.windows import Form, Windows
from milldam.markup import in_notebook
from milldam.memory import available_bytes

Stop = Literal["first_exhausted", "all_exhausted"] | int
Weight = float | Fraction | Decimal
SourceT = TypeVar("SourceT", bound="str | Path | Trainable | Mixture | Feed")

_WEIGHT, _LONGEST_WEIGHT = re.compile(r"[1-9]\d*(/[1-9]\d*)?"), 2000
"""A weight in a state, and how long it may be."""
_SOURCE_SEED = 4
"""Apart from the numbers that orders mix into their seeds."""


@overload
def mix(
    sources: Mapping[Samples[SampleT, BatchT], Weight], *, stop: Stop = "first_exhausted"
) -> MixedSamples[SampleT, BatchT]: ...
@overload
def mix(sources: Mapping[SourceT, Weight], *, stop: Stop = "first_exhausted") -> Mixture: ...
def mix(sources: Mapping[Any, Weight], *, stop: Stop = "first_exhausted") -> Mixture | MixedSamples[Any, Any]:
    """Sources by weight: {source: weight}, where a source is a store, a part or a feed of one, its path, or samples.

    If the sources are samples, the result is samples; otherwise it is a `Mixture`, which `.windows(seq_len)` or
    `.packed(seq_len)` cuts into samples. Weights are any numbers above 0; only their share of the sum matters.

    stop   where an epoch of the mixture ends. first_exhausted: before any source would repeat a sample;
           all_exhausted: when every source has been seen whole; a number: after that many samples.

    >>> books = milldam.tokenize("books/", "books.milldam", tokenizer="tokenizer/")
    >>> x, y = next(milldam.mix({"corpus.milldam": 0.7, books: 0.3}).windows(64).batches(16, seed=0))
    >>> x.shape
    (16, 64)
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError("mix: give it the sources with their weights, such as mix({web: 0.7, code: 0.3}).")
    found: list[Any] = [open_data(source) if isinstance(source, str | Path) else source for source in sources]
    shares = shares_of(list(sources.values()))
    number = isinstance(stop, Integral) and not isinstance(stop, bool) and stop >= 1
    if not number and stop not in ("first_exhausted", "all_exhausted"):
        raise ConfigError(f"stop: {stop!r}; use first_exhausted, all_exhausted, or a number of samples from 1 on.")
    stop = stop if isinstance(stop, str) else int(stop)
    if all(isinstance(source, Samples) for source in found):
        return MixedSamples(found, shares, stop)
    if all(isinstance(source, Trainable | Mixture | Feed) for source in found):
        return Mixture(found, shares, stop)
    kinds = ", ".join(dict.fromkeys(type(source).__name__ for source in found))
    raise ConfigError(
        f"mix: got {kinds}. Use stores, parts of stores and paths, or else samples such as store.windows(1024); "
        "not both, and nothing else."
    )


class Mixture:
    """Sources and their weights, not yet cut into samples.

    >>> parts = store.split(web=0.5, code=...)
    >>> milldam.mix({parts["web"]: 3, parts["code"]: 1})
    Mixture(0.75 Part(...), 0.25 Part(...))
    """

    def __init__(self, sources: Sequence[Trainable | Mixture | Feed], shares: Sequence[Fraction], stop: Stop) -> None:
        self.sources, self.weights, self._stop = tuple(sources), tuple(shares), stop

    @overload
    def windows(
        self, seq_len: int, *, form: Literal["xy"] = "xy", **options: Unpack[WindowOptions]
    ) -> MixedSamples[TokenPair, TokenPair]: ...
    @overload
    def windows(
        self, seq_len: int, *, form: Literal["hf"], **options: Unpack[WindowOptions]
    ) -> MixedSamples[Labelled, Labelled]: ...
    def windows(self, seq_len: int, *, form: Form = "xy", **options: Unpack[WindowOptions]) -> MixedSamples[Any, Any]:
        """Windows of every source; options as for `store.windows`."""
        return self._cut("windows", seq_len, {"form": form, **options})

    def packed(self, seq_len: int, **options: Unpack[RowOptions]) -> MixedSamples[PackedRow, PackedBatch]:
        """Packed rows of every source; options as for `store.packed`."""
        return self._cut("packed", seq_len, {**options})

    def _cut(self, verb: str, seq_len: int, options: dict[str, Any]) -> MixedSamples[Any, Any]:
        sizes = {(stream.name, stream.first): stream.size_bytes for stream in self._streams(options.get("split"))}
        if sum(sizes.values()) > available_bytes()[0] // 2:
            # Each source alone may fit in memory where all of them together do not.
            options = {"read": "pread"} | options
        samples = [getattr(source, verb)(seq_len, **options) for source in self.sources]
        return MixedSamples(samples, self.weights, self._stop)

    def _streams(self, split: str | None) -> Iterator[TokenStream]:
        for source in self.sources:
            if isinstance(source, Mixture):
                yield from source._streams(split)
            elif not isinstance(source, Feed):
                yield (source if split is None else source.named_part(split)).stream()

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixture, (self.sources, self.weights, self._stop)

    _repr_html_ = in_notebook(lambda mixture: ("Mixture", _shares(mixture)))

    def __repr__(self) -> str:
        return f"Mixture({_described(self.sources, self.weights)})"


class MixedSamples(Samples[SampleT, BatchT]):
    """Samples of several sources by weight.

    `len()` is the number of samples per epoch, as set by `stop`, and `mixed[k]` is sample k of the first epoch, in
    sequence. With several epochs the schedule continues: each source goes through its own epochs, and nothing starts
    over. The numbers that `read` takes count through the sources end to end.

    >>> parts = store.split(web=0.5, code=...)
    >>> mixed = milldam.mix({parts["web"].windows(32): 3, parts["code"].windows(32): 1})
    >>> mixed.drawn(100)
    (75, 25)
    """

    def __init__(self, sources: Sequence[Samples[SampleT, BatchT]], shares: Sequence[Fraction], stop: Stop) -> None:
        self.sources, self.weights, self._stop = tuple(sources), tuple(shares), stop
        _refuse_unlike(self.sources)
        _refuse_other_tokenizers(self.sources)
        self.schedule = schedule_of(self.weights)
        """Which source comes when."""
        # begins: (sources + 1,), the number of the first sample of each, and the end
        self._begins = np.array([0, *accumulate(source._numbered for source in self.sources)], np.int64)
        self._rows_each = self.sources[0]._rows_each
        self._epochs = _Epochs(_epoch_sizes(self.sources, stop), self.weights, stop)
        self._signed = any(source._signed for source in sources)
        self._reusable = all(source._reusable for source in sources)

    @property
    def identity(self) -> State:
        """The identity of every source in turn. Not the weights: those may change, if asked for."""
        sources = {f"source {number}": source.identity for number, source in enumerate(self.sources)}
        return {"kind": "mixture", **sources}

    @property
    def sample_tokens(self) -> int:
        return self.sources[0].sample_tokens

    @property
    def tokenizer(self) -> str | None:
        return next((source.tokenizer for source in self.sources if source.tokenizer), None)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        common = np.result_type(*(source.token_dtype for source in self.sources))
        # Of uint64 and int64 numpy makes floats.
        return common if common.kind in "iu" else np.dtype(np.int64)

    @cached_property
    def epoch_samples(self) -> int:
        return self._epochs.end(np.zeros(len(self.sources), np.int64))

    def drawn(self, samples: int) -> tuple[int, ...]:
        """How many samples of each source are among the first samples of the mixture."""
        return tuple(self.schedule.drawn(samples).tolist())

    def epochs_of(self, samples: int) -> tuple[float, ...]:
        """How many epochs of each source are in the first samples of the mixture.

        >>> parts = store.split(web=0.8, code=...)
        >>> web, code = milldam.mix({parts["web"]: 0.5, parts["code"]: 0.5}).windows(32).epochs_of(400)
        >>> web < code
        True
        """
        return tuple(
            count / source.epoch_samples for count, source in zip(self.drawn(samples), self.sources, strict=True)
        )

    def __len__(self) -> int:
        return self.epoch_samples

    @property
    def _numbered(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, number: int) -> SampleT:
        wanted: SampleT = self._all.sample(int(self._order(False, 0).numbers(np.array([self._number(number)]))[0]))
        return wanted

    def __getitems__(self, numbers: Sequence[int]) -> NoReturn:
        """torch's DataLoader asks: it would come back to the same samples in every epoch."""
        raise ConfigError(
            "mix: a sampler of torch would never get beyond the first epoch of a mixture. Use milldam.torch: "
            "DataLoader(BatchDataset(mixed, batch_size), batch_size=None)."
        )

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: BatchT | None = None) -> BatchT:
        return self._look_up(numbers, dtype)(slice(0, len(numbers)), out)

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        return self._all.look_up(numbers, dtype)

    @cached_property
    def _all(self) -> Sources:
        return Sources(list(_leaves(self)), open_mixed)

    def _order(self, shuffle: Shuffle, seed: int) -> MixedOrder:
        # Each source with a seed of its own, else sources of one size would come in one order.
        seeds = [permutation.mix(seed, number, _SOURCE_SEED) for number in range(len(self.sources))]
        orders = [source._order(shuffle, seed) for source, seed in zip(self.sources, seeds, strict=True)]
        return MixedOrder(orders, self._begins[:-1], self.weights, self._epochs.end)

    @property
    def _readers(self) -> tuple[Reader, ...]:
        return self._all.readers

    def _spans(self, stretches: Stretches) -> Iterator[tuple[Reader, Int64s, Int64s]]:
        return self._all.spans(stretches)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedSamples, (self.sources, self.weights, self._stop)

    _repr_html_ = in_notebook(lambda mixed: (f"MixedSamples: {len(mixed):,} an epoch", _shares(mixed)))

    def __repr__(self) -> str:
        return f"MixedSamples({_described(self.sources, self.weights)}: {len(self):,} samples an epoch)"


@dataclass(frozen=True, slots=True)
class _Epochs:
    """Where epochs of a mixture end."""

    whole: tuple[int, ...]
    """Samples of an epoch of each source."""
    weights: tuple[Fraction, ...]
    stop: Stop

    def end(self, drawn: Int64s) -> int:
        """Samples up to the end of an epoch, when so many of each source were drawn before."""
        if isinstance(self.stop, int):
            return self.stop
        left = [samples - count % samples for samples, count in zip(self.whole, drawn.tolist(), strict=True)]
        # Places are known to within three samples without a look: most sources can't be the first or last to end.
        soonest = [(samples - 3) / weight for samples, weight in zip(left, self.weights, strict=True)]
        latest = [(samples + 3) / weight for samples, weight in zip(left, self.weights, strict=True)]
        schedule = schedule_of(self.weights)
        if self.stop == "first_exhausted":
            first = [source for source, place in enumerate(soonest) if place <= min(latest)]
            return min(schedule.place(source, left[source]) for source in first)
        last = [source for source, place in enumerate(latest) if place >= max(soonest)]
        return max(schedule.place(source, left[source] - 1) for source in last) + 1


def _epoch_sizes(sources: Sequence[Samples[Any, Any]], stop: Stop) -> tuple[int, ...]:
    """Samples of an epoch of each source, where anybody asks for them."""
    if isinstance(stop, int):
        return ()
    if not all(source._length_known for source in sources):
        raise ConfigError(
            f"mix: stop={stop} needs the number of samples of every source, and that of a feed is not known before it "
            "is made. Say after how many samples an epoch of the mixture ends: stop=1_000_000."
        )
    return tuple(source.epoch_samples for source in sources)


def _leaves(samples: Samples[SampleT, BatchT]) -> Iterator[Samples[SampleT, BatchT]]:
    """The samples themselves, or the sources that a mixture of mixtures ends in."""
    if isinstance(samples, MixedSamples):
        for source in samples.sources:
            yield from _leaves(source)
    else:
        yield samples


def _shares(mixture: Mixture | MixedSamples[Any, Any]) -> list[tuple[str, str]]:
    """What a notebook shows: each source with its share of the samples."""
    weights = (f"{100 * float(weight):.4g} %" for weight in mixture.weights)
    return [(repr(source), weight) for source, weight in zip(mixture.sources, weights, strict=True)]


def _described(sources: Sequence[object], weights: Sequence[Fraction]) -> str:
    return ", ".join(f"{float(weight):.4g} {source!r}" for source, weight in zip(sources, weights, strict=True))


def _refuse_unlike(sources: Sequence[Samples[object, Any]]) -> None:
    """Samples that can't be rows of one batch."""
    first, *others = sources
    for other in others:
        if next(_leaves(first))._padding is None and other.sample_tokens != first.sample_tokens:
            raise ConfigError(
                f"mix: {first!r} has samples of {first.sample_tokens:,} tokens, {other!r} of "
                f"{other.sample_tokens:,}. Use one length for all."
            )
        if _form(other) != _form(first):
            raise ConfigError(
                f"mix: {first!r} gives {_form(first)}, {other!r} gives {_form(other)}. Cut all sources in the same way."
            )


def _refuse_other_tokenizers(sources: Sequence[Samples[object, Any]]) -> None:
    """The same number would mean another word in each."""
    known = [source for source in sources if source.tokenizer]
    for other in known[1:]:
        if other.tokenizer != known[0].tokenizer:
            raise ConfigError(
                f"mix: {known[0]!r} and {other!r} were made with different tokenizers. Tokenize one of them again."
            )


def _form(samples: Samples[object, Any]) -> str:
    """What a batch is, in words: its arrays, and what the labels are."""
    samples = next(_leaves(samples))
    sample: Any = samples[0]
    arrays = f"a dict of {', '.join(sample)}" if isinstance(sample, dict) else f"a tuple of {len(sample)}"
    kind, rules = _kind_and_rules(samples)
    return f'{arrays} (form="{rules.form}")' if issubclass(kind, Windows | PackedRows) else arrays


def _kind_and_rules(samples: Any) -> tuple[type[Any], Any]:
    if isinstance(samples, FeedSamples):
        return samples.cut.kind, samples.cut.rules
    return type(samples), getattr(samples, "rules", None)


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a schedule began."""

    place: int
    drawn: Int64s
    """(sources,): samples of each that were drawn before."""


class MixedOrder:
    """Places of a mixture to numbers of samples; see `Order`.

    The schedule begins at place 0. It begins again, with other weights, where a state is taken up with `new_weights`;
    then every source goes on exactly where it stood.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        begins: Int64s,
        weights: tuple[Fraction, ...],
        epoch_end: Callable[[Int64s], int],
        begin: _Begin | None = None,
    ) -> None:
        self._orders, self._begins = orders, begins
        self._weights, self._schedule = weights, schedule_of(weights)
        self._epoch_end = epoch_end
        self._begin = begin or _Begin(0, np.zeros(len(orders), np.int64))

    def numbers(self, places: Int64s) -> Int64s:
        begin = self._begin
        sources, indices = self._schedule.find(places - begin.place)
        numbers = np.empty(len(places), np.int64)
        for source, where in groups(sources, len(self._orders)):
            own = self._orders[source].numbers(indices[where] + begin.drawn[source])
            numbers[where] = own + self._begins[source]
        return numbers

    def stretches(self, place: int) -> None:
        """None: what comes next is in many places, whatever the order within a source."""

    def state(self, place: int) -> dict[str, Any]:
        drawn = self._begin.drawn + self._schedule.drawn(place - self._begin.place)
        return {
            "weights": [str(weight) for weight in self._weights],
            "began": self._begin.place,
            "drawn": self._begin.drawn.tolist(),
            "orders": [order.state(count) for order, count in zip(self._orders, drawn.tolist(), strict=True)],
        }

    @property
    def first_end(self) -> int | None:
        begin = self._begin
        return begin.place + self._epoch_end(begin.drawn) if begin.place else None

    def restored(self, state: Any, place: int, *, new_weights: bool) -> MixedOrder:
        weights, begin = _checked_state(state, len(self._orders), place)
        schedule = self._schedule if weights == self._weights else schedule_of(weights)
        drawn = begin.drawn + schedule.drawn(place - begin.place)
        if weights != self._weights:
            if not new_weights:
                raise MismatchError(
                    f"The weights were {_listed(weights)} and are {_listed(self._weights)}. Make the mixture with "
                    "those of before, or take the new ones from here on: load_state_dict(state, new_weights=True)."
                )
            begin = _Begin(place, drawn)
        orders = [
            order.restored(own, count, new_weights=new_weights)
            for order, own, count in zip(self._orders, state["orders"], drawn.tolist(), strict=True)
        ]
        return MixedOrder(orders, self._begins, self._weights, self._epoch_end, begin)


class _State(TypedDict):
    weights: list[str]
    began: int
    drawn: list[int]
    orders: list[Any]


def _checked_state(state: Any, sources: int, place: int) -> tuple[tuple[Fraction, ...], _Begin]:
    """The weights of a mixture's state and where its schedule began, when they can be."""
    name = "The state of a mixture"
    found: _State = checked(_State, state, name)
    if any(len(found[part]) != sources for part in ("weights", "drawn", "orders")) or found["began"] > place:
        raise StoreError(f"{name}: damaged: it is not that of {sources:,} sources at sample {place:,}.")
    if not all(len(weight) < _LONGEST_WEIGHT and _WEIGHT.fullmatch(weight) for weight in found["weights"]):
        raise StoreError(f"{name}: damaged: weights are {', '.join(found['weights'])[:80]}, which are not fractions.")
    return tuple(map(Fraction, found["weights"])), _Begin(found["began"], np.array(found["drawn"], np.int64))


def _listed(weights: Sequence[Fraction]) -> str:
    return ", ".join(str(float(weight)) for weight in weights)
