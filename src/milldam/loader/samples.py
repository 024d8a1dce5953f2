"""What all views of a stream have in common: samples by number, batches of them, one at a time.

`Samples` is the seam between what a sample is (windows, packed rows, streams, mixtures) and how samples come (order,
ranks, state, prefetch: `batches.py`). Pickles as what it was made from, never as data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.loader.order import Order, Shuffle, Stretches, make_order
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way, open_reader, require_way
from milldam.loader.stream import TokenStream

if TYPE_CHECKING:
    from milldam.loader.batches import Batches

Array = npt.NDArray[Any]
Batch = Any
"""A tuple or dict of arrays with one row a sample, as the view says."""
OF_A_WHOLE_BATCH = ("cu_seqlens", "max_seqlen")
"""What packed rows have once a batch, of varying length: no part of a sample that is to be put in a batch."""


@dataclass(frozen=True, slots=True)
class Located:
    """Samples by number, and where they lie, if that could be told for all of them at once."""

    numbers: Int64s
    places: Int64s | None = None

    def part(self, first: int, stop: int) -> Located:
        return Located(self.numbers[first:stop], None if self.places is None else self.places[first:stop])


class Samples(ABC):
    """Numbered samples."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides which sample has which number: what a state must agree with. Small, and JSON."""

    @property
    @abstractmethod
    def sample_tokens(self) -> int:
        """Tokens that the model sees of a sample."""

    @property
    @abstractmethod
    def token_dtype(self) -> np.dtype[Any]:
        """What tokens are stored as: the smallest dtype for a batch."""

    @property
    def tokenizer(self) -> str | None:
        """Names the tokenizer by content, where that is known."""
        return None

    @property
    def signed(self) -> bool:
        """Whether a batch has numbers below zero."""
        return False

    @property
    def reusable(self) -> bool:
        """Whether `read` overwrites `out`; False: every batch is made of new arrays."""
        return True

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return len(self)

    @property
    def numbered(self) -> int:
        """How many numbers `read` takes."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        """One sample, as int64: what torch makes of narrower tokens, no model takes."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Many samples in one read: what torch's DataLoader asks for when it makes a batch."""
        return samples_of(self.read(np.array([self._number(number) for number in numbers], np.int64)))

    @abstractmethod
    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: Batch | None = None) -> Batch:
        """A batch in one read. `out`: a batch of as many samples or more that may be overwritten."""

    def locate(self, numbers: Int64s) -> Located:
        """Look up some thousands of samples at once, for batches of them that follow."""
        return Located(numbers)

    def read_located(self, located: Located, dtype: npt.DTypeLike, out: Batch | None) -> Batch:
        """`read`, with what `locate` found."""
        return self.read(located.numbers, dtype, out)

    @abstractmethod
    def order(self, shuffle: Shuffle, seed: int) -> Order:
        """The order in which the samples come."""

    @property
    @abstractmethod
    def announces(self) -> bool:
        """Whether it is any use to tell what comes next."""

    @abstractmethod
    def announce(self, numbers: Int64s) -> None:
        """These samples are read soon."""

    @abstractmethod
    def announce_stretches(self, stretches: Stretches) -> None:
        """These samples, which lie side by side, are read soon."""

    @abstractmethod
    def release_stretches(self, stretches: Stretches) -> None:
        """These samples are not read again soon."""

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
        copy: bool = True,
        dtype: npt.DTypeLike = np.int64,
    ) -> Batches:
        """Batches of samples, each sample once an epoch; see `Batches`.

        rank, world_size   sample i of the global order goes to rank i mod world_size
        epochs             how many times over the data; None: without end
        prefetch           batches that a thread makes ahead; worth it where making one takes a part of a step
        drop_last          leave out the samples at the very end that give no full batch on every rank
        copy               False: arrays are used again, and a batch is valid until the next one is asked for
        """
        from milldam.loader.batches import Batches, Delivery

        delivery = Delivery(batch_size, rank, world_size, epochs, drop_last)
        return Batches(self, delivery, seed=seed, shuffle=shuffle, prefetch=prefetch, copy=copy, dtype=dtype)

    def _number(self, number: int) -> int:
        """A sample's number from one as Python has it, counted from the end when below zero."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"sample {number:,} of {len(self):,}")
        return wanted


class StreamSamples(Samples):
    """Samples of one stream, read by one reader, which is opened when first needed."""

    def __init__(self, stream: TokenStream, way: Way = "auto") -> None:
        require_way(way)
        self._stream = stream
        self._way = way
        self._opened: Reader | None = None

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
    def announces(self) -> bool:
        return self._reader.announces

    @abstractmethod
    def _spans(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """What samples are made of: begins and lengths in the stream."""

    def _stretch_spans(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        """The same for samples side by side: from the first one's begin to the last one's end."""
        starts, _ = self._spans(stretches.firsts)
        last_starts, last_lengths = self._spans(stretches.firsts + stretches.counts - 1)
        return starts, last_starts + last_lengths - starts

    def _extent(self, number: int) -> tuple[int, int]:
        """Where a sample begins, and where the last token that it needs lies."""
        starts, lengths = self._spans(np.array([number]))
        return int(starts[0]), int((starts + lengths).max()) - 1

    def announce(self, numbers: Int64s) -> None:
        self._reader.announce(*self._spans(numbers))

    def announce_stretches(self, stretches: Stretches) -> None:
        self._reader.announce(*self._stretch_spans(stretches))

    def release_stretches(self, stretches: Stretches) -> None:
        self._reader.release(*self._stretch_spans(stretches))

    def order(self, shuffle: Shuffle, seed: int) -> Order:
        if shuffle == "shard" or self._stream.origin is not None:
            # Only those who need it pay for the module.
            from milldam.loader.shard_order import ShardShuffled, require_cache

            require_cache(self._stream, shuffle)
            if shuffle == "shard":
                return ShardShuffled(self._stream.files, len(self), seed, self._extent)
        return make_order(shuffle, len(self), seed, self.sample_tokens * self._stream.dtype.itemsize)


def samples_of(batch: Batch) -> list[Any]:
    """A batch as a list of samples."""
    if not isinstance(batch, dict):
        return list(zip(*batch, strict=True))
    names = [name for name in batch if name not in OF_A_WHOLE_BATCH]
    return [dict(zip(names, row, strict=True)) for row in zip(*(batch[name] for name in names), strict=True)]


def widened(rows: Array, dtype: npt.DTypeLike, out: Array | None) -> Array:
    """Tokens in the dtype of a batch: in the first rows of an array that may be overwritten, or in a new one."""
    wide = np.empty(rows.shape, dtype) if out is None else out[: len(rows)]
    np.copyto(wide, rows, casting="unsafe")
    return wide


def shifted(rows: Array, dtype: npt.DTypeLike, out: Batch | None) -> Batch:
    """(x, y) of rows of one token more: y is x one token on."""
    x, y = (None, None) if out is None else out
    return widened(rows[:, :-1], dtype, x), widened(rows[:, 1:], dtype, y)
