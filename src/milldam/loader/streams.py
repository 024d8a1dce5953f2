"""Streams for models that carry state: B contiguous stretches of tokens, read side by side.

Row b of every batch goes on where row b of the batch before ended: batch t is tokens [t * T, (t + 1) * T) of each of
the B stretches that the data is cut into. Straight from the mapping; nothing is copied but the batch.

With several ranks there are B times world_size stretches, and each rank has B of them for good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.order import InSequence, Order, Shuffle, Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Way
from milldam.loader.samples import NoSamplesError, Samples, StreamSamples, at_least, counted_number, shifted
from milldam.loader.types import State, TokenPair

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.views import Trainable


class StreamBatches(ABC):
    """What streams of a store and of a feed have in common."""

    def __init__(self, batch_size: int, seq_len: int) -> None:
        self.batch_size, self.seq_len = at_least("batch_size", batch_size), at_least("seq_len", seq_len)

    @abstractmethod
    def _steps_of(self, lanes: int) -> Samples[TokenPair, TokenPair]:
        """Step by step, of so many stretches."""

    def __iter__(self) -> Iterator[TokenPair]:
        return iter(self.batches())

    def batches(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        prefetch: int = 0,
        copy: bool = True,
        dtype: npt.DTypeLike = np.int64,
    ) -> Batches[TokenPair]:
        """The batches in order, with a state that can be saved; options as for `Samples.batches`."""
        from milldam.loader.batches import Batches, Delivery

        delivery = Delivery(self.batch_size, rank, world_size, epochs)
        steps = self._steps_of(delivery.step)
        return Batches(steps, delivery, seed=0, shuffle=False, prefetch=prefetch, copy=copy, dtype=dtype)


class Streams(StreamBatches):
    """`for x, y in store.streams(batch_size, seq_len)`: (x, y) of shape (batch_size, seq_len).

    >>> streams = store.streams(4, 32)
    >>> (x, y), (later, _) = streams[0], streams[1]
    >>> x.shape, bool((y[:, -1] == later[:, 0]).all())
    ((4, 32), True)
    """

    def __init__(self, data: Trainable, batch_size: int, seq_len: int, way: Way = "auto") -> None:
        super().__init__(batch_size, seq_len)
        self._data, self._way = data, way
        self._steps = self._steps_of(self.batch_size)

    def _steps_of(self, lanes: int) -> Steps:
        return Steps(self._data, lanes, self.seq_len, self._way)

    def __len__(self) -> int:
        """Batches in the data, for one rank."""
        return self._steps.steps

    def __getitem__(self, step: int) -> TokenPair:
        """The batch of one step."""
        wanted, lanes = counted_number(step, len(self), "step"), self._steps.lanes
        return self._steps.read(np.arange(wanted * lanes, (wanted + 1) * lanes))

    def __getitems__(self, steps: Sequence[int]) -> NoReturn:
        """torch's DataLoader would make batches of batches."""
        raise ConfigError("Streams are batches already, in their order. Use DataLoader(streams, batch_size=None).")

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, (self._data, self.batch_size, self.seq_len, self._way)

    def __repr__(self) -> str:
        steps = self._steps
        return f"Streams({steps.name}: {len(self):,} batches of {steps.lanes:,} x {steps.sample_tokens:,} tokens)"


class Steps(StreamSamples[TokenPair, TokenPair]):
    """Sample t * lanes + b: step t of stretch b."""

    def __init__(self, data: Trainable, lanes: int, seq_len: int, way: Way) -> None:
        super().__init__(data.stream(), way)
        self._data, self.lanes, self._seq_len = data, lanes, seq_len
        # One token at the very end is nothing but a target.
        self._stretch = (self._stream.tokens - 1) // lanes
        self.steps = self._stretch // seq_len
        if self.steps < 1:
            raise NoSamplesError(
                f"{self.name}: {self._stream.tokens:,} tokens are too few for {lanes:,} streams of "
                f"seq_len={seq_len:,}, which take {lanes * seq_len + 1:,}."
            )

    @property
    def name(self) -> str:
        return self._stream.name

    @property
    def identity(self) -> State:
        own: State = {"kind": "streams", "streams": self.lanes, "seq_len": self._seq_len}
        return own | self._stream.identity

    @property
    def sample_tokens(self) -> int:
        return self._seq_len

    def __len__(self) -> int:
        return self.steps * self.lanes

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return InSequence(len(self))

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: TokenPair | None = None) -> TokenPair:
        return shifted(self._reader.rows(self._starts(numbers), self._seq_len + 1), dtype, out)

    def _starts(self, numbers: Int64s) -> Int64s:
        step, lane = np.divmod(numbers, self.lanes)
        starts: Int64s = lane * self._stretch + step * self._seq_len + self._stream.first
        return starts

    def _lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        # Samples side by side are of different stretches of the data.
        starts = self._starts(stretches.numbers)
        return starts, np.full(len(starts), self._seq_len + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, (self._data, self.lanes, self._seq_len, self._way)
