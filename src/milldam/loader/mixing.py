"""Several sources by weight -> samples, in exact proportions in every block of 4,096 samples.

Which source comes at a place follows from the weights (`Schedule`); which sample of it from its own order, which goes
on for ever: a source is shuffled anew in each of its own epochs, and no sample of it comes twice within one, whatever
the others do. Nothing is drawn by chance, so a mixture can be entered anywhere, on any number of ranks.

Places are cut into blocks of 4,096. How many samples of each source come before a block follows from its number alone
(`Schedule`): less than one more or less than its share, or than two for a source that comes less than once in a block.
Within a block a hash says the order: every rank sees every source near its share. Weights are exact fractions. Holds
the blocks used last (1 MB); one takes about 0.1 ms, whichever of its places a rank reads.

The files of all sources are read as one stream, so that a batch is one gather, as that of one source is. Where sources
differ in kind, dtype, way of reading or place, a batch is one read for each source in it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError
from milldam.loader.documents import Losses
from milldam.loader.opening import open_data
from milldam.loader.order import Order, Shuffle, by_group
from milldam.loader.packed import PADDING, PackedRows, RowPieces, RowReading
from milldam.loader.permutation import Int64s, hashed
from milldam.loader.permutation import mix as key_of
from milldam.loader.reading import OPEN_FILES, Reader, open_reader, ranges
from milldam.loader.samples import OF_A_WHOLE_BATCH, ReadPart, Samples
from milldam.loader.stream import TokenFile
from milldam.loader.types import Array, BatchT, Labelled, PackedBatch, PackedRow, SampleT, State, TokenPair
from milldam.loader.views import Cuttable
from milldam.loader.windows import Windows, read_windows

Weight = float | Fraction | Decimal
SourceT = TypeVar("SourceT", bound="str | Path | Cuttable | Mixture")
Stop = Literal["first_exhausted", "all_exhausted"] | int
BLOCK = 4096
_BLOCKS_KEPT = 16
_SOURCE_SEED, _BLOCK_SEED = 4, 8
"""Apart from the numbers that orders mix into their seeds."""
_SCHEDULE = 3
"""Another number for every change that gives another order."""
_SMALLEST_SHARE = Fraction(1, 10**12)


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
    opened: list[Any] = [open_data(source) if isinstance(source, str | Path) else source for source in sources]
    shares = shares_of(list(sources.values()))
    number = isinstance(stop, Integral) and not isinstance(stop, bool) and stop >= 1
    if not number and stop not in ("first_exhausted", "all_exhausted"):
        raise ConfigError(f"stop: {stop!r}; use first_exhausted, all_exhausted, or a number of samples from 1 on.")
    stop = stop if isinstance(stop, str) else int(stop)
    if all(isinstance(source, Samples) for source in opened):
        return MixedSamples(opened, shares, stop)
    if all(isinstance(source, Cuttable | Mixture) for source in opened):
        return Mixture(opened, shares, stop)
    kinds = ", ".join(dict.fromkeys(type(source).__name__ for source in opened))
    raise ConfigError(f"mix: got {kinds}. Use stores, parts and paths, or else samples such as store.windows(1024).")


class Mixture:
    """Sources and their weights, not yet cut into samples.

    >>> parts = store.split(web=0.5, code=...)
    >>> milldam.mix({parts["web"]: 3, parts["code"]: 1})
    Mixture(0.75 Part(...), 0.25 Part(...))
    """

    def __init__(self, sources: Sequence[Cuttable | Mixture], shares: Sequence[Fraction], stop: Stop) -> None:
        self.sources, self.weights, self._stop = tuple(sources), tuple(shares), stop

    @overload
    def windows(
        self, seq_len: int, *, form: Literal["xy"] = "xy", **options: Any
    ) -> MixedSamples[TokenPair, TokenPair]: ...
    @overload
    def windows(self, seq_len: int, *, form: Literal["hf"], **options: Any) -> MixedSamples[Labelled, Labelled]: ...
    def windows(self, seq_len: int, **options: Any) -> MixedSamples[Any, Any]:
        """Windows of every source; options as for `store.windows`."""
        samples = [source.windows(seq_len, **options) for source in self.sources]
        return MixedSamples(samples, self.weights, self._stop)

    def packed(self, seq_len: int, **options: Any) -> MixedSamples[PackedRow, PackedBatch]:
        """Packed rows of every source; options as for `store.packed`."""
        samples = [source.packed(seq_len, **options) for source in self.sources]
        return MixedSamples(samples, self.weights, self._stop)

    def __repr__(self) -> str:
        return f"Mixture({_described(self.sources, self.weights)})"


def _described(sources: Sequence[object], weights: Sequence[Fraction]) -> str:
    return ", ".join(f"{float(weight):.4g} {source!r}" for source, weight in zip(sources, weights, strict=True))


# ---- reading ----


class Sources:
    """Samples of several sources by number, counted through all of them end to end: a part of `Samples`."""

    def __init__(self, sources: Sequence[Samples[Any, Any]]) -> None:
        self.sources: Sequence[Any] = tuple(sources)
        # begins: (sources + 1,), the number of the first sample of each, and the end
        self.begins: Int64s = np.array([0, *accumulate(source._numbered for source in sources)], np.int64)
        self._shifts: Sequence[int] = ()
        """Where the stream of each source begins among all."""

    @cached_property
    def _reader(self) -> Reader | None:
        """The reader of all sources at once; None where they are not of one kind, dtype and way of reading."""
        sources, first = self.sources, self.sources[0] if self.sources else None
        if not isinstance(first, Windows | PackedRows):
            return None
        if len({(type(one), one.token_dtype, one._way, id(one._stream.origin)) for one in sources}) > 1:
            return None
        # Parts of one store have the same files.
        begins: dict[tuple[TokenFile, ...], int] = {}
        tokens, shifts = 0, []
        for source in sources:
            files = source._stream.files
            if files not in begins:
                begins[files], tokens = tokens, tokens + sum(file.tokens for file in files)
            shifts.append(begins[files])
        # At once: another thread may be doing the same.
        self._shifts = shifts
        stream = replace(first._stream, files=tuple(itertools.chain(*begins)), first=0, stop=tokens)
        return open_reader(stream, first._way, OPEN_FILES * len(begins))

    @property
    def _readers(self) -> tuple[Reader, ...]:
        if self._reader is not None:
            return (self._reader,)
        return tuple(reader for source in self.sources for reader in source._readers)

    @property
    def _numbered(self) -> int:
        return int(self.begins[-1])

    def _of_each(self, numbers: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """(source, its places among the numbers, ascending, numbers in the source) of each source that comes."""
        sources = self.begins.searchsorted(numbers, side="right") - 1
        for source, where in groups(sources, len(self.sources)):
            yield source, where, numbers[where] - self.begins[source]

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[Any]:
        """Look up samples: all together, or each source by itself."""
        first = self.sources[0]
        if self._reader is None:
            parts = [(where, self.sources[one]._look_up(local, dtype)) for one, where, local in self._of_each(numbers)]
            return lambda part, out: read_by_source(parts, part, out, first._padding, first._rows_each)
        if isinstance(first, Windows):
            starts = np.empty_like(numbers)
            for number, where, local in self._of_each(numbers):
                starts[where] = self.sources[number]._stretches(local)[0] + self._shifts[number]
            return read_windows(self._reader, starts, first.rules, dtype)
        rows_at_once = min(source.rows_at_once for source in self.sources)
        return RowReading(self._pieces, rows_at_once, self._reader, numbers, first.rules, dtype)

    def _pieces(self, numbers: Int64s) -> RowPieces:
        """Pieces of packed rows of all sources, with positions in the stream of all of them."""
        parts: list[RowPieces] = []
        placed: list[Int64s] = []
        for number, where, local in self._of_each(numbers):
            own = self.sources[number].pieces(local)
            begins = own.table[:, 0]
            begins[begins >= 0] += self._shifts[number]
            parts.append(own)
            placed.append(where)
        order = np.concatenate(placed).argsort()
        pieces, counts = _in_order(np.concatenate([part.counts for part in parts]), order)
        table = np.concatenate([part.table for part in parts])[pieces]
        if all(part.losses is None for part in parts):
            return RowPieces(table, counts)
        shifted = self.sources[0].rules.form == "shifted"
        # Text is trained on as a whole.
        losses = []
        for part in parts:
            _, lengths, documents, goes_on = part.table.T
            reach = np.where(documents == PADDING, 0, lengths - (shifted & (goes_on == 0)))
            losses.append(part.losses or Losses.everywhere(reach, shifted=shifted))
        which, loss_counts = _in_order(np.concatenate([one.counts for one in losses]), pieces)
        begins, ends = (np.concatenate([getattr(one, name) for one in losses]) for name in ("begins", "ends"))
        return RowPieces(table, counts, Losses(loss_counts, begins[which], ends[which]))

    def _spans(self, numbers: Int64s) -> Iterator[tuple[Reader, Int64s, Int64s]]:
        for number, _, local in self._of_each(numbers):
            for reader, starts, lengths in self.sources[number]._spans(local):
                if self._reader is None:
                    yield reader, starts, lengths
                else:
                    yield self._reader, starts + self._shifts[number], lengths


def _in_order(counts: Int64s, order: Int64s) -> tuple[Int64s, Int64s]:
    """The numbers of what rows have, row after row in an order, and how many each row has then."""
    firsts = counts.cumsum() - counts
    return ranges(firsts[order], counts[order]), counts[order]


def read_by_source(
    sources: list[tuple[Int64s, ReadPart[Any]]],
    part: slice,
    out: Any,
    padding: Mapping[str, int] | None,
    rows_each: int = 1,
) -> Any:
    """Read a part of the samples that were looked up. `sources`: the places of each one's, with what reads them."""
    parts: list[tuple[ReadPart[Any], slice, Int64s]] = []
    for where, read in sources:
        first, stop = where.searchsorted((part.start, part.stop)).tolist()
        if first < stop:
            parts.append((read, slice(first, stop), where[first:stop] - part.start))
    if len(parts) == 1:
        (read, own, _) = parts[0]
        return read(own, out)
    count = sum(len(rows) for _, _, rows in parts)
    # order: of the rows that the parts give, end to end
    order = np.concatenate([rows + half * count for _, _, rows in parts for half in range(rows_each)]).argsort()
    batches = [read(own, None) for read, own, _ in parts]

    def joined(name: Any) -> Array:
        """An array of the batch, as wide as the widest."""
        arrays = [batch[name] for batch in batches]
        if padding and name in padding:
            widest = max(array.shape[1] for array in arrays)
            missing = [((0, 0), (0, widest - array.shape[1])) for array in arrays]
            arrays = [np.pad(*each, constant_values=padding[name]) for each in zip(arrays, missing, strict=True)]
        return np.concatenate(arrays)[order]

    if isinstance(batches[0], tuple):
        return tuple(map(joined, range(len(batches[0]))))
    batch: dict[str, Any] = {name: joined(name) for name in batches[0] if name not in OF_A_WHOLE_BATCH}
    if "cu_seqlens" in batches[0]:
        positions = batch["position_ids"].reshape(-1)
        batch["cu_seqlens"] = np.append(np.flatnonzero(positions == 0), len(positions)).astype(np.int32)
        batch["max_seqlen"] = max(one["max_seqlen"] for one in batches)
    return batch


# ---- by weight ----


class MixedSamples(Sources, Samples[SampleT, BatchT]):
    """Samples of several sources by weight.

    `len()` is the number of samples per epoch, as set by `stop`. With several epochs the schedule continues: each
    source goes through its own epochs, and nothing starts over. The numbers that `read` takes count through the sources
    end to end.

    >>> parts = store.split(web=0.5, code=...)
    >>> mixed = milldam.mix({parts["web"].windows(32): 3, parts["code"].windows(32): 1})
    >>> mixed.drawn(4096)
    (3072, 1024)
    """

    _no_sampler = "A sampler of torch would never get beyond the first epoch of a mixture."

    def __init__(self, sources: Sequence[Samples[SampleT, BatchT]], shares: Sequence[Fraction], stop: Stop) -> None:
        super().__init__(sources)
        self.weights, self._stop, self._schedule = tuple(shares), stop, Schedule(shares)
        _refuse_unlike(self.sources)
        first = self.sources[0]
        self._rows_each, self._padding, self._label_form = first._rows_each, first._padding, first._label_form
        self._signed = any(source._signed for source in sources)
        self._reusable = all(source._reusable for source in sources)

    @property
    def identity(self) -> State:
        sources = {f"source {number}": source.identity for number, source in enumerate(self.sources)}
        return {"kind": "mixture", "schedule": _SCHEDULE, "weights": [str(one) for one in self.weights], **sources}

    @property
    def sample_tokens(self) -> int:
        return int(self.sources[0].sample_tokens)

    @property
    def tokenizer(self) -> str | None:
        return next((source.tokenizer for source in self.sources if source.tokenizer), None)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return np.result_type(*(source.token_dtype for source in self.sources))

    @cached_property
    def epoch_samples(self) -> int:
        if isinstance(self._stop, int):
            return self._stop
        if not all(source._length_known for source in self.sources):
            raise ConfigError(
                f"mix: stop={self._stop} needs the number of samples of every source, and that of a feed is not known "
                "before it is made. Say after how many samples an epoch of the mixture ends: stop=1_000_000."
            )
        return self._schedule.epoch_end(np.array([source.epoch_samples for source in self.sources]), self._stop)

    def drawn(self, samples: int) -> tuple[int, ...]:
        """How many samples of each source are among the first samples of the mixture."""
        return tuple(self._schedule.drawn(samples).tolist())

    def __len__(self) -> int:
        return self.epoch_samples

    def _order(self, shuffle: Shuffle, seed: int) -> MixedOrder:
        # Each source with a seed of its own, else sources of one size would come in one order.
        seeds = [key_of(seed, number, _SOURCE_SEED) for number in range(len(self.sources))]
        orders = [source._order(shuffle, seed) for source, seed in zip(self.sources, seeds, strict=True)]
        return MixedOrder(orders, self.begins[:-1], self._schedule, self.epoch_samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedSamples, (self.sources, self.weights, self._stop)

    def __repr__(self) -> str:
        return f"MixedSamples({_described(self.sources, self.weights)}: {len(self):,} samples an epoch)"


def _refuse_unlike(sources: Sequence[Samples[object, Any]]) -> None:
    """Refuse samples that can't be rows of one batch, or in which the same number means different words."""

    def arrays(samples: Samples[object, Any]) -> str:
        batch: Any = samples.read(samples._order(False, 0).numbers(np.zeros(1, np.int64)))
        tokens = "" if samples._padding else f" of {samples.sample_tokens:,} tokens"
        form = "" if samples._label_form is None else f' (form="{samples._label_form}")'
        return f"{', '.join(batch) if isinstance(batch, dict) else 'tuples'}{tokens}{form}"

    first, *others = sources
    known = next((source for source in sources if source.tokenizer), first)
    for other in others:
        if arrays(other) != arrays(first):
            raise ConfigError(f"mix: {first!r} gives {arrays(first)}, {other!r} gives {arrays(other)}. Cut them alike.")
        if other.tokenizer and other.tokenizer != known.tokenizer:
            raise ConfigError(
                f"mix: {known!r} and {other!r} were made with different tokenizers. Tokenize one of them again."
            )


# ---- which source comes at which place ----


def shares_of(weights: Sequence[object]) -> tuple[Fraction, ...]:
    """Weights as they are written, scaled to a sum of 1.

    >>> shares_of([0.7, 0.2, 0.1])
    (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))
    """
    exact: list[Fraction] = []
    for weight in weights:
        if not isinstance(weight, Real | Decimal) or isinstance(weight, bool) or not 0 < float(weight) < math.inf:
            raise ConfigError(f"A weight of {weight!r}; use a number above 0.")
        # The number as it is written: 0.1 is a tenth, not the float nearest to it.
        exact.append(Fraction(str(weight)))
    shares = tuple(weight / sum(exact) for weight in exact)
    if min(shares) < _SMALLEST_SHARE:
        raise ConfigError("mix: a source would come less than once in 10^12 samples. Leave it out, or weigh it more.")
    return shares


def groups(sources: npt.NDArray[Any], count: int) -> Iterator[tuple[int, Int64s]]:
    """(source, its places, ascending) of each source that comes."""
    places = sources.argsort(kind="stable")
    ends = np.bincount(sources, minlength=count).cumsum()
    for source, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        if first < end:
            yield source, places[first:end]


def _nearest(count: int, part: int, whole: int) -> int:
    return (2 * count * part + whole) // (2 * whole)


def _divided(count: int, weights: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(source, its samples) of rare sources that have so many together; see `Schedule`."""
    if len(weights) < 2:
        yield from ((source, count) for _, source in weights)
        return
    *sums, whole = accumulate(weight for weight, _ in weights)
    cut = min(range(len(sums)), key=lambda at: abs(2 * sums[at] - whole))
    first = _nearest(count, sums[cut], whole)
    yield from _divided(first, weights[: cut + 1])
    yield from _divided(count - first, weights[cut + 1 :])


class Schedule:
    """Places to sources. Threads may share it.

    The sources lie end to end, the lightest first, and what comes before a block is cut between them: each border is
    the nearest to the share of all sources below it. A source gets what lies between two borders, so its share rounded
    up or down: less than one sample off. If it comes once in a block or more, its share grows by one or more from block
    to block, so its count never falls. The first part, that of all rarer sources together, never falls either, since
    its border does not. They are divided into two parts as equal as can be, again and again; the first gets the nearest
    to its part of the count of both, so neither falls. A part of several sources has at most two thirds of the one it
    was cut from, so it is less than 1.5 samples off (two thirds of 1.5, and the rounding), and a source less than two.

    >>> Schedule(shares_of([2, 1])).drawn(3 * 4096).tolist()
    [8192, 4096]
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._sources, self._whole = len(shares), math.lcm(*(share.denominator for share in shares))
        self._weights = sorted((int(share * self._whole), source) for source, share in enumerate(shares))
        self._rare = sum(weight * BLOCK < self._whole for weight, _ in self._weights)
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def _counts_before(self, block: int) -> Int64s:
        """How many samples of each source come before a block."""
        rare, common = self._weights[: self._rare], self._weights[self._rare :]
        below = sum(weight for weight, _ in rare)
        counts, border = np.zeros(self._sources, np.int64), _nearest(block * BLOCK, below, self._whole)
        for source, count in _divided(border, rare):
            counts[source] = count
        for weight, source in common:
            below, before = below + weight, border
            border = _nearest(block * BLOCK, below, self._whole)
            counts[source] = border - before
        return counts

    def _make_block(self, block: int) -> tuple[Int64s, Int64s]:
        """How many samples of each source come before a block, and (places, 2): the sources of its places, and how many
        samples of the same source come before each."""
        before = self._counts_before(block)
        counts = self._counts_before(block + 1) - before
        # Sorted by 16 bits, which is twenty times as fast as by 64.
        hashes = hashed(np.arange(BLOCK, dtype=np.uint64), key_of(block, _BLOCK_SEED))
        keys = (hashes >> np.uint64(48)).astype(np.uint16)
        in_turn = np.arange(self._sources, dtype=np.min_scalar_type(self._sources)).repeat(counts)
        sources = in_turn[keys.argsort(kind="stable")]
        indices = np.empty(BLOCK, np.int64)
        indices[sources.argsort(kind="stable")] = np.arange(BLOCK) - (counts.cumsum() - counts - before).repeat(counts)
        return before, np.stack((sources, indices), axis=1)

    def find(self, places: Int64s) -> Int64s:
        """(places, 2): the sources of ascending places, and how many samples of the same source come before each."""
        return by_group(places, BLOCK, lambda block, inside: self._block(block)[1][inside])

    def drawn(self, places: int) -> Int64s:
        """How many samples of each source are among the first so many places."""
        block, inside = divmod(places, BLOCK)
        before, of_block = self._block(block)
        drawn: Int64s = before + np.bincount(of_block[:inside, 0], minlength=self._sources)
        return drawn

    def epoch_end(self, samples: Int64s, stop: str) -> int:
        """How many samples an epoch has, when the sources have so many.

        >>> Schedule(shares_of([1, 1])).epoch_end(np.array([2048, 4096]), "all_exhausted")
        8191
        """
        first = stop == "first_exhausted"

        def passed(drawn: Int64s) -> bool:
            return bool((drawn > samples).any() if first else (drawn >= samples).all())

        block = bisect_left(range(1 << 50), True, key=lambda block: passed(self._counts_before(block + 1)))
        places = range(block * BLOCK, (block + 1) * BLOCK)
        return places.start + bisect_left(places, True, key=lambda place: passed(self.drawn(place))) - first


class MixedOrder(Order):
    """Places of a mixture to numbers of samples."""

    def __init__(self, orders: Sequence[Order], begins: Int64s, schedule: Schedule, samples: int) -> None:
        super().__init__(samples)
        self._orders, self._begins, self._schedule = orders, begins, schedule

    def numbers(self, places: Int64s) -> Int64s:
        sources, indices = self._schedule.find(places).reshape(-1, 2).T
        numbers = np.empty(len(places), np.int64)
        for source, where in groups(sources, len(self._orders)):
            numbers[where] = self._orders[source].numbers(indices[where]) + self._begins[source]
        return numbers

    def state(self, place: int) -> list[Any]:
        """The states of the orders of all sources."""
        drawn = self._schedule.drawn(place).tolist()
        return [order.state(count) for order, count in zip(self._orders, drawn, strict=True)]

    def restored(self, state: Any, place: int) -> MixedOrder:
        if not isinstance(state, list) or len(state) != len(self._orders):
            raise StoreError(f"The state of a mixture: damaged: it is not that of {len(self._orders):,} sources.")
        each = zip(self._orders, state, self._schedule.drawn(place).tolist(), strict=True)
        orders = [order.restored(own, count) for order, own, count in each]
        return MixedOrder(orders, self._begins, self._schedule, self.samples)
