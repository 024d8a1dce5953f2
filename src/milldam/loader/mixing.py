"""Several sources by weight -> samples, in exact proportions in every block of 4,096 samples.

Which source comes at a place follows from the weights (`mixed_order`); which sample of it from its own order, which
goes on for ever: a source is shuffled anew in each of its own epochs, and no sample of it comes twice within one,
whatever the others do. Nothing is drawn by chance, so a mixture can be entered anywhere, on any number of ranks.

Holds a schedule of some blocks (1 MB) beside what the sources hold. A batch is one read where all sources are
read in the same way (`mixed_reading`), else one for each source in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader import permutation
from milldam.loader.feed_samples import FeedSamples
from milldam.loader.feeds import Feed
from milldam.loader.mixed_order import MixedOrder, Schedule, Stop, shares_of
from milldam.loader.mixed_reading import Sources, open_mixed
from milldam.loader.opening import open_data
from milldam.loader.order import Shuffle, Stretches
from milldam.loader.packed import PackedRows
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader
from milldam.loader.samples import ReadPart, Samples
from milldam.loader.stream import TokenStream
from milldam.loader.types import BatchT, Labelled, PackedBatch, PackedRow, SampleT, State, TokenPair
from milldam.loader.views import RowOptions, Trainable, WindowOptions
from milldam.loader.windows import Form, Windows
from milldam.markup import in_notebook
from milldam.memory import available_bytes

Weight = float | Fraction | Decimal
SourceT = TypeVar("SourceT", bound="str | Path | Trainable | Mixture | Feed")

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
    >>> mixed.drawn(4096)
    (3072, 1024)
    """

    def __init__(self, sources: Sequence[Samples[SampleT, BatchT]], shares: Sequence[Fraction], stop: Stop) -> None:
        self.sources, self.weights, self._stop = tuple(sources), tuple(shares), stop
        _refuse_unlike(self.sources)
        _refuse_other_tokenizers(self.sources)
        self._schedule = Schedule(self.weights)
        # begins: (sources + 1,), the number of the first sample of each, and the end
        self._begins = np.array([0, *accumulate(source._numbered for source in self.sources)], np.int64)
        self._rows_each = self.sources[0]._rows_each
        self._epochs = _epoch_sizes(self.sources, stop)
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
        return self._schedule.epoch_end(np.zeros(len(self.sources), np.int64), self._epochs, self._stop)

    def drawn(self, samples: int) -> tuple[int, ...]:
        """How many samples of each source are among the first samples of the mixture."""
        return tuple(self._schedule.drawn(samples).tolist())

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
        return MixedOrder(orders, self._begins[:-1], self.weights, self._epochs, self._stop)

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


def _epoch_sizes(sources: Sequence[Samples[Any, Any]], stop: Stop) -> Int64s:
    """Samples of an epoch of each source, where anybody asks for them."""
    if isinstance(stop, int):
        return np.zeros(0, np.int64)
    if not all(source._length_known for source in sources):
        raise ConfigError(
            f"mix: stop={stop} needs the number of samples of every source, and that of a feed is not known before it "
            "is made. Say after how many samples an epoch of the mixture ends: stop=1_000_000."
        )
    return np.array([source.epoch_samples for source in sources], np.int64)


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
