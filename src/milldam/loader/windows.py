"""Windows and streams. Window k is the tokens from k * stride on, over the borders of documents and files.

Nothing is made when they are asked for: a window is a place in the stream. `(x, y)`: y is x one token on, so a window
takes seq_len + 1 tokens of the stream. `form="hf"`: `input_ids` and `labels` are the same tokens, as models of HF
transformers want it, which shift by themselves; a window takes seq_len tokens.

Streams, for models that carry state: B contiguous stretches of tokens, read side by side. Row b of every batch goes on
where row b of the batch before ended: batch t is tokens [t * T, (t + 1) * T) of each of the B stretches that the data
is cut into. With several ranks there are B times world_size stretches, and each rank has B of them for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from milldam.loader.order import InSequence, Order, Shuffle, require_cache
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way
from milldam.loader.samples import (
    NoSamplesError,
    ReadPart,
    Samples,
    StreamSamples,
    at_least,
    one_of,
    widened,
)
from milldam.loader.stream import TokenStream
from milldam.loader.types import BatchT, State, TokenPair

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.views import Cuttable, Trainable

Form = Literal["xy", "hf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """Window k begins at token k * hop."""

    seq_len: int
    stride: int | None = None
    """Tokens from one window's begin to the next one's; None: seq_len."""
    form: Form = "xy"
    tail: bool = False
    """One more window, which ends with the last token, when the stride leaves some over."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "stride"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name)))
        one_of("form", self.form, Form)

    @property
    def facts(self) -> State:
        """All that decides which window has which number, and where the last ones lie."""
        return {"seq_len": self.seq_len, "stride": self.hop, "form": self.form, "tail": self.tail}

    @property
    def hop(self) -> int:
        return self.stride or self.seq_len

    @property
    def span(self) -> int:
        """Tokens that a window takes of the stream."""
        return self.seq_len + (self.form == "xy")

    def count(self, stream: TokenStream) -> int:
        room = stream.tokens - self.span
        if room < 0:
            raise NoSamplesError(
                f"{stream.name}: {stream.tokens:,} tokens are too few for one window of seq_len={self.seq_len:,}, "
                f"which takes {self.span:,}. Use a shorter seq_len, or more data."
            )
        # The last window begins where a whole one still fits.
        return room // self.hop + 1 + (self.tail and room % self.hop > 0)

    def begins(self, numbers: Int64s, stream: TokenStream) -> Int64s:
        begins = numbers * self.hop
        return (np.minimum(begins, stream.tokens - self.span) if self.tail else begins) + stream.first


@dataclass(frozen=True, slots=True)
class StepRules:
    """Data cut into `lanes` stretches: window t * lanes + b is step t of stretch b."""

    lanes: int
    seq_len: int
    form = "xy"

    @property
    def facts(self) -> State:
        return {"streams": self.lanes, "seq_len": self.seq_len}

    @property
    def span(self) -> int:
        return self.seq_len + 1

    def count(self, stream: TokenStream) -> int:
        # One token at the very end is nothing but a target.
        steps = (stream.tokens - 1) // self.lanes // self.seq_len
        if steps < 1:
            raise NoSamplesError(
                f"{stream.name}: {stream.tokens:,} tokens are too few for {self.lanes:,} streams of "
                f"seq_len={self.seq_len:,}, which take {self.lanes * self.seq_len + 1:,}."
            )
        return steps * self.lanes

    def begins(self, numbers: Int64s, stream: TokenStream) -> Int64s:
        step, lane = np.divmod(numbers, self.lanes)
        begins: Int64s = lane * ((stream.tokens - 1) // self.lanes) + step * self.seq_len + stream.first
        return begins


def read_windows(reader: Reader, begins: Int64s, rules: WindowRules | StepRules, dtype: npt.DTypeLike) -> ReadPart[Any]:
    """Look up windows by where they begin, for batches of them that follow."""
    rows = reader.look_up(begins, rules.span)

    def read(part: slice, out: Any) -> Any:
        windows = rows(part)
        if rules.form == "hf":
            # Two arrays, since people mask labels in place.
            names = ("input_ids", "labels")
            return {name: widened(windows, dtype, None if out is None else out[name]) for name in names}
        x, y = (None, None) if out is None else out
        return widened(windows[:, :-1], dtype, x), widened(windows[:, 1:], dtype, y)

    return read


class Windows(StreamSamples[BatchT, BatchT]):
    """Windows of a stream."""

    _kind = "windows"

    def __init__(self, data: Trainable | TokenStream, rules: WindowRules | StepRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules, self._count = rules, rules.count(self._stream)

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return self._count

    def _stretches(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        begins = self.rules.begins(numbers, self._stream)
        return begins, np.full_like(numbers, self.rules.span), np.ones_like(numbers)

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        return read_windows(self._reader, self._stretches(numbers)[0], self.rules, dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stream.name}: {len(self):,} of {self.rules.seq_len:,} tokens)"


class Steps(Windows[TokenPair]):
    """Windows of streams, in their order."""

    _kind = "streams"
    rules: StepRules

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        require_cache(self._stream, self.rules.lanes)
        return InSequence(len(self))


class Streams:
    """`for x, y in store.streams(batch_size, seq_len)`: (x, y) of shape (batch_size, seq_len).

    >>> (x, y), (later, _), *_ = store.streams(4, 32)
    >>> x.shape, bool((y[:, -1] == later[:, 0]).all())
    ((4, 32), True)
    """

    def __init__(self, data: Cuttable, batch_size: int, seq_len: int, split: str | None, way: Way) -> None:
        self.batch_size, self.seq_len = at_least("batch_size", batch_size), at_least("seq_len", seq_len)
        self._data, self._split, self._way = data, split, way
        self._steps = self._steps_of(self.batch_size)

    def _steps_of(self, lanes: int) -> Samples[TokenPair, TokenPair]:
        """The samples of so many stretches, step by step."""
        rules = StepRules(lanes, self.seq_len)
        steps: Samples[TokenPair, TokenPair] = self._data._cut(Steps, rules, self._split, self._way)
        return steps

    def batches(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        prefetch: int = 0,
        dtype: npt.DTypeLike = np.int64,
    ) -> Batches[TokenPair]:
        """The batches in order, with a state that can be saved; options as for `Samples.batches`."""
        from milldam.loader.batches import Batches, Delivery

        delivery = Delivery(self.batch_size, rank, world_size, epochs)
        steps = self._steps_of(delivery.step)
        return Batches(steps, delivery, seed=0, shuffle=False, prefetch=prefetch, dtype=dtype)

    def __iter__(self) -> Iterator[TokenPair]:
        return iter(self.batches())

    def __len__(self) -> int:
        """Batches in the data, for one rank."""
        return len(self._steps) // self.batch_size

    def __repr__(self) -> str:
        return f"Streams({self._data!r}: {self.batch_size:,} x {self.seq_len:,} tokens)"
