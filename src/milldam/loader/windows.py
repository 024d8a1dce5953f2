"""Windows and streams. Window k is the tokens from k * stride on, over the borders of documents and files.

Nothing is made when they are asked for: a window is a place in the stream. `(x, y)`: y is x one token on, so a window
takes seq_len + 1 tokens of the stream. `form="hf"`: `input_ids` and `labels` are the same tokens, as models of HF
transformers want it, which shift by themselves; a window takes seq_len tokens.

Streams, for models that carry state: B contiguous stretches of tokens, read side by side. Row b of every batch goes on
where row b of the batch before ended: batch t is tokens [t * T, (t + 1) * T) of each of the B stretches that the data
is cut into. With several ranks there are B times world_size stretches, and each rank has B of them for good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.order import InSequence, Order, Shuffle, Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, TokenArray, Way
from milldam.loader.samples import (
    NoSamplesError,
    ReadPart,
    Samples,
    StreamSamples,
    at_least,
    counted_number,
    one_of,
    shifted,
    widened,
)
from milldam.loader.types import BatchT, State, TokenPair

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.views import Trainable

Form = Literal["xy", "hf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    seq_len: int
    stride: int | None = None
    """Tokens from one window's begin to the next one's; None: seq_len."""
    form: Form = "xy"
    tokens: int | None = None
    """Use so many tokens; None: all there are."""
    repeat: bool = False
    """Go round when there are fewer tokens than asked for."""
    tail: bool = False
    """One more window, which ends with the last token, when the stride leaves some over."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "stride", "tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name)))
        one_of("form", self.form, Form)

    @property
    def facts(self) -> State:
        """What decides which window has which number, and where the last ones lie."""
        own: State = {"seq_len": self.seq_len, "stride": self.hop, "form": self.form}
        return own | {"tokens": self.tokens, "tail": self.tail}

    @property
    def hop(self) -> int:
        return self.stride or self.seq_len

    @property
    def span(self) -> int:
        """Tokens that a window takes of the stream."""
        return self.seq_len + (self.form == "xy")

    def count(self, tokens: int) -> int:
        """Windows in so many tokens: the last begins where a whole one still fits."""
        room = tokens - self.span
        return room // self.hop + 1 + (self.tail and room % self.hop > 0)


def read_windows(reader: Reader, starts: Int64s, rules: WindowRules, dtype: npt.DTypeLike) -> ReadPart[Any]:
    """Look up windows by where they begin, for batches of them that follow."""
    rows = reader.look_up(starts, rules.span)
    return lambda part, out: _batch(rows(part), rules.form, dtype, out)


def _batch(rows: TokenArray, form: Form, dtype: npt.DTypeLike, out: Any) -> Any:
    if form == "hf":
        # Two arrays, since people mask labels in place.
        return {name: widened(rows, dtype, None if out is None else out[name]) for name in ("input_ids", "labels")}
    return shifted(rows, dtype, out)


class Windows(StreamSamples[BatchT, BatchT]):
    """Windows of a stream: `windows[k]`, `len(windows)`, `windows.batches(16)`.

    >>> windows = store.windows(128)
    >>> x, y = windows[0]
    >>> x.shape, bool((x[1:] == y[:-1]).all()), len(windows) == (store.tokens - 1) // 128
    ((128,), True, True)
    """

    _kind = "windows"

    def __init__(self, data: Trainable, rules: WindowRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules = rules
        there, wanted = self._stream.tokens, rules.tokens
        if wanted is not None and wanted > there and not rules.repeat:
            raise ConfigError(
                f"{self._stream.name}: {wanted:,} tokens are asked for, and there are {there:,}. "
                "Ask for fewer, or for repeat=True to go over them again."
            )
        self._used = there if wanted is None else min(wanted, there)
        if self._used < rules.span:
            raise NoSamplesError(
                f"{self._stream.name}: {self._used:,} tokens are too few for one window of seq_len={rules.seq_len:,}, "
                f"which takes {rules.span:,}. Use a shorter seq_len, or more data."
            )
        self._own = rules.count(self._used)
        self._count = self._own if rules.tokens is None else rules.count(rules.tokens)

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: BatchT | None = None) -> BatchT:
        batch: BatchT = _batch(self._reader.rows(self._starts(numbers), self.rules.span), self.rules.form, dtype, out)
        return batch

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        return read_windows(self._reader, self._starts(numbers), self.rules, dtype)

    def _starts(self, numbers: Int64s) -> Int64s:
        rules = self.rules
        if self._count > self._own:
            numbers = numbers % self._own
        starts = numbers * rules.hop
        if rules.tail:
            starts = np.minimum(starts, self._used - rules.span)
        return starts + self._stream.first

    def _lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        if self._count > self._own:
            # Windows side by side do not lie so where the data goes round.
            stretches = Stretches.single(stretches.numbers)
        starts = self._starts(stretches.firsts)
        return starts, self._starts(stretches.firsts + stretches.counts - 1) + self.rules.span - starts

    def __repr__(self) -> str:
        rules = self.rules
        return f"Windows({self._stream.name}: {len(self):,} of {rules.seq_len:,} tokens, stride {rules.hop:,})"


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
        return Steps(self._data, StepRules(lanes, self.seq_len), self._way)

    def __len__(self) -> int:
        """Batches in the data, for one rank."""
        return self._steps.steps

    def __getitem__(self, step: int) -> TokenPair:
        """The batch of one step."""
        wanted, lanes = counted_number(step, len(self), "step"), self.batch_size
        return self._steps.read(np.arange(wanted * lanes, (wanted + 1) * lanes))

    def __getitems__(self, steps: Sequence[int]) -> NoReturn:
        """torch's DataLoader would make batches of batches."""
        raise ConfigError("Streams are batches already, in their order. Use DataLoader(streams, batch_size=None).")

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, (self._data, self.batch_size, self.seq_len, self._way)

    def __repr__(self) -> str:
        size = f"{self.batch_size:,} x {self.seq_len:,}"
        return f"Streams({self._steps._stream.name}: {len(self):,} batches of {size} tokens)"


@dataclass(frozen=True, slots=True)
class StepRules:
    """Data cut into `lanes` stretches, of which a step has `seq_len` tokens each."""

    lanes: int
    seq_len: int

    @property
    def facts(self) -> State:
        return {"streams": self.lanes, "seq_len": self.seq_len}


class Steps(StreamSamples[TokenPair, TokenPair]):
    """Sample t * lanes + b: step t of stretch b."""

    _kind = "streams"

    def __init__(self, data: Trainable, rules: StepRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules, lanes, seq_len = rules, rules.lanes, rules.seq_len
        # One token at the very end is nothing but a target.
        self._stretch = (self._stream.tokens - 1) // lanes
        self.steps = self._stretch // seq_len
        if self.steps < 1:
            raise NoSamplesError(
                f"{self._stream.name}: {self._stream.tokens:,} tokens are too few for {lanes:,} streams of "
                f"seq_len={seq_len:,}, which take {lanes * seq_len + 1:,}."
            )

    @property
    def identity(self) -> State:
        own: State = {"kind": self._kind}
        return own | self.rules.facts | self._stream.identity

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return self.steps * self.rules.lanes

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        return InSequence(len(self))

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: TokenPair | None = None) -> TokenPair:
        return shifted(self._reader.rows(self._starts(numbers), self.rules.seq_len + 1), dtype, out)

    def _starts(self, numbers: Int64s) -> Int64s:
        step, lane = np.divmod(numbers, self.rules.lanes)
        starts: Int64s = lane * self._stretch + step * self.rules.seq_len + self._stream.first
        return starts

    def _lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        # Samples side by side are of different stretches of the data.
        starts = self._starts(stretches.numbers)
        return starts, np.full(len(starts), self.rules.seq_len + 1)
