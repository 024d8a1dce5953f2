"""Windows: sample k is the tokens from k * stride on, over the borders of documents and files.

Nothing is made when they are asked for: a window is a place in the stream. `(x, y)`: y is x one token on, so a window
takes seq_len + 1 tokens of the stream. `form="hf"`: `input_ids` and `labels` are the same tokens, as models of HF
transformers want it, which shift by themselves; a window takes seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, TokenArray, Way
from milldam.loader.samples import NoSamplesError, ReadPart, StreamSamples, at_least, shifted, widened
from milldam.loader.types import BatchT, State

if TYPE_CHECKING:
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
        if self.form not in ("xy", "hf"):
            raise ConfigError(f'form: "{self.form}"; use xy or hf.')

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

    def __init__(self, data: Trainable, rules: WindowRules, way: Way = "auto") -> None:
        super().__init__(data.stream(), way)
        self._data, self.rules = data, rules
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
    def identity(self) -> State:
        own: State = {"kind": "windows", "samples": len(self)}
        return own | self.rules.facts | self._stream.identity

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

    def __reduce__(self) -> tuple[Any, ...]:
        return Windows, (self._data, self.rules, self._way)

    def __repr__(self) -> str:
        rules = self.rules
        return f"Windows({self._stream.name}: {len(self):,} of {rules.seq_len:,} tokens, stride {rules.hop:,})"
