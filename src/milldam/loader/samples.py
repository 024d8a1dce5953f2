"""The seam between the kinds of samples (windows, packed rows, documents, streams, mixtures, feeds) and the way they
come (order, ranks, state, reading ahead: `batches`).

A sample is a number. `StreamSamples._stretches` is the one function that says where it lies: stretches of tokens in a
stream, which `documents.Documents` takes to documents. Reading and announcing both go by it; of mixtures and feeds, an
order gives the source or the group and the number in it. Users see the names without an underscore; the others are for
code that makes batches and mixtures of samples. Pickles as what it was made from, never as data.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, get_args

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.order import WINDOW_SHARDS, Order, ShardShuffled, Shuffle, make_order, require_cache
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way, open_reader
from milldam.loader.stream import TokenStream
from milldam.loader.types import Array, BatchT, SampleT, State

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.views import Trainable

OF_A_WHOLE_BATCH = ("cu_seqlens", "max_seqlen")
"""Arrays of a batch of packed rows that belong to no sample and vary in length."""
ReadPart = Callable[[slice, BatchT | None], BatchT]
"""Reads a part of the samples that were looked up, into a batch that may be overwritten or a new one."""


class NoSamplesError(ConfigError):
    """Data that is too little for a single sample."""


class Samples(ABC, Generic[SampleT, BatchT]):
    """Numbered samples: `samples[k]`, `len(samples)`, `samples.batches(16)`.

    >>> windows = store.windows(128)
    >>> x, y = windows[0]
    >>> x.shape, bool((x[1:] == y[:-1]).all()), len(windows) == (store.tokens - 1) // 128
    ((128,), True, True)
    """

    _signed = False
    """Whether a batch has numbers below zero."""
    _reusable = True
    """Whether `read` overwrites `out`; False: every batch is made of new arrays."""
    _length_known = True
    """Whether the number of samples in an epoch is known at once."""
    _no_sampler: str | None = None
    """Why a sampler of torch can't draw from them."""
    _rows_each = 1
    """Rows of a batch that a sample has; of two, the first ones of all samples stand before the second ones."""
    _padding: Mapping[str, int] | None = None
    """Padding of the arrays of a batch, where samples differ in length."""
    _label_form: str | None = None
    """The form of labels, where there are several."""

    @property
    @abstractmethod
    def identity(self) -> State:
        """All that decides which sample has which number: what a state must agree with. Small, and JSON."""

    @property
    @abstractmethod
    def sample_tokens(self) -> int:
        """Tokens that the model sees of a sample."""

    @property
    @abstractmethod
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype that tokens are stored in: the smallest for a batch."""

    @property
    def tokenizer(self) -> str | None:
        """Names the tokenizer by content, where that is known."""
        return None

    @property
    def too_long(self) -> TooLongDocuments:
        """The documents that are longer than a sample may be; none where that does not matter."""
        return TooLongDocuments()

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> SampleT:
        """One sample, as int64: what torch makes of narrower tokens, no model takes."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[SampleT]:
        """Many samples in one read: what torch's DataLoader asks for when it makes a batch."""
        self.require_sampler()
        batch: Any = self.read(np.array([counted_number(number, len(self)) for number in numbers], np.int64))
        names = [name for name in batch if name not in OF_A_WHOLE_BATCH] if isinstance(batch, Mapping) else []
        columns = [batch[name] for name in names] or batch
        rows: list[Any] = list(zip(*columns, strict=True))
        samples: list[Any] = [dict(zip(names, row, strict=True)) for row in rows] if names else rows
        return samples

    def require_sampler(self) -> None:
        """Refuse samples that a sampler of torch can't draw from."""
        if self._no_sampler is not None:
            raise ConfigError(f"{self._no_sampler} Use DataLoader(BatchDataset(samples, batch_size), batch_size=None).")

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: BatchT | None = None) -> BatchT:
        """A batch in one read. `out`: a batch of as many samples or more that may be overwritten."""
        return self._look_up(numbers, dtype)(slice(0, len(numbers)), out)

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        prefetch: int = 0,
        drop_last: bool = False,
        dtype: npt.DTypeLike = np.int64,
    ) -> Batches[BatchT]:
        """Batches of samples, each sample once per epoch; see `Batches`.

        rank, world_size   sample i of the global order goes to rank i mod world_size
        epochs             passes over the data; None: without end
        prefetch           batches that a thread prepares ahead; worth it if preparing one takes part of a step
        drop_last          leave out the last samples if they do not fill a batch on every rank
        """
        from milldam.loader.batches import Batches, Delivery

        delivery = Delivery(batch_size, rank, world_size, epochs, drop_last)
        return Batches(self, delivery, seed=seed, shuffle=shuffle, prefetch=prefetch, dtype=dtype)

    # ---- for code that makes batches and mixtures of them ----

    @property
    def _numbered(self) -> int:
        """How many numbers `read` takes."""
        return len(self)

    @abstractmethod
    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        """The order in which the samples come."""

    def _stats(self) -> dict[str, float]:
        """Figures about making the samples."""
        return {}

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        """Look up some thousands of samples at once, for batches of them that follow. This or `read` is overridden."""
        return lambda part, out: self.read(numbers[part], dtype, out)

    @property
    def _readers(self) -> tuple[Reader, ...]:
        """The readers of the files, where they are worth announcing."""
        return ()

    def _spans(self, numbers: Int64s) -> Iterator[tuple[Reader, Int64s, Int64s]]:
        """Where samples lie: readers, with begins and lengths in the stream of each."""
        return iter(())


class StreamSamples(Samples[SampleT, BatchT]):
    """Samples of one stream, read by one reader, which is opened when first needed."""

    _kind: str

    def __init__(self, data: Trainable | TokenStream, rules: Any, way: Way = "auto") -> None:
        """`rules.facts`: all settings that decide which sample has which number."""
        one_of("read", way, Way)
        self._made_from = (data, rules, way)
        self._stream, self._way = data if isinstance(data, TokenStream) else data.stream(), way
        self._opened: Reader | None = None
        self._padding, self._label_form = self.padding_with(self._stream.pad_id), getattr(rules, "form", None)

    @property
    def identity(self) -> State:
        own: State = {"kind": self._kind, "samples": len(self)}
        facts: State = self._made_from[1].facts
        return own | facts | self._stream.identity

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_from

    @property
    def _reader(self) -> Reader:
        if self._opened is None:
            self._opened = open_reader(self._stream, self._way)
        return self._opened

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return self._stream.dtype

    @property
    def tokenizer(self) -> str | None:
        return self._stream.tokenizer

    @property
    def _readers(self) -> tuple[Reader, ...]:
        return (self._reader,)

    @classmethod
    def padding_with(cls, pad_id: int) -> Mapping[str, int] | None:
        """As `_padding`, of data with this pad id."""
        return None

    @abstractmethod
    def _stretches(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Where samples lie: begins and lengths of their stretches in the stream, sample after sample, a label that
        lies behind one included; and how many stretches each sample has."""

    def _spans(self, numbers: Int64s) -> Iterator[tuple[Reader, Int64s, Int64s]]:
        yield self._reader, *self._stretches(numbers)[:2]

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        require_cache(self._stream, WINDOW_SHARDS if shuffle == "shard" else 1 if shuffle is False else None)
        if shuffle != "shard":
            return make_order(shuffle, len(self), seed, self.sample_tokens * self._stream.dtype.itemsize)

        def extent(number: int) -> tuple[int, int]:
            begins, lengths, _ = self._stretches(np.array([number]))
            return int(begins[0]), int((begins + lengths).max()) - 1

        return ShardShuffled(self._stream.files, len(self), seed, extent)


@dataclass(frozen=True, slots=True)
class TooLongDocuments:
    """Counts of the documents that are longer than a limit."""

    documents: int = 0
    tokens: int = 0
    """All tokens of them."""
    of_documents: int = 0
    """How many documents there are."""

    @classmethod
    def count(cls, lengths: Iterable[Int64s], most: int) -> TooLongDocuments:
        count, tokens, total = 0, 0, 0
        for some in lengths:
            long = some[some > most]
            count, tokens, total = count + len(long), tokens + int(long.sum()), total + len(some)
        return cls(count, tokens, total)

    def message(self, limit: str, most: int, too_long: str) -> str:
        """A sentence about them, with the ways out. `limit`: the setting that says how long is too long."""
        became = {"drop": "left out", "cut": "cut there", "split": "split"}[too_long]
        return (
            f"{self.documents:,} of {self.of_documents:,} documents are longer than {limit}={most:,} and are {became} "
            f"({self.tokens:,} tokens). Use a larger {limit}, or another too_long."
        )


def one_of(name: str, value: object, choices: Any) -> None:
    """Refuse a setting that is none of the values of a `Literal`."""
    *others, last = get_args(choices)
    if value not in (*others, last):
        raise ConfigError(f'{name}: "{value}"; use {", ".join(others)} or {last}.')


def at_least(name: str, value: int, least: int = 1, rest: str = "") -> int:
    """A setting as a plain int: numpy's integers would end up in states, which are JSON."""
    plain = operator.index(value)
    if plain < least:
        raise ConfigError(f"{name}: {plain}; use {least} or more{rest}.")
    return plain


def counted_number(number: int, count: int, what: str = "sample") -> int:
    """A number as Python has it, counted from the end when below zero, as one of [0, count)."""
    wanted = number + count if number < 0 else number
    if not 0 <= wanted < count:
        raise IndexError(f"{what} {number:,} of {count:,}")
    return wanted


def widened(rows: Array, dtype: npt.DTypeLike, out: Array | None) -> Array:
    """Tokens in the dtype of a batch: in the first rows of an array that may be overwritten, or in a new one."""
    wide = np.empty(rows.shape, dtype) if out is None else out[: len(rows)]
    np.copyto(wide, rows, casting="unsafe")
    return wide
