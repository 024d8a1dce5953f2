"""Conversations -> tokens, with the stretches of tokens that are trained on. A record comes out whole or not at all.

Runs in a worker. Holds one batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.chat.reading import ChatRecipe, Sides
from milldam.chat.token_spans import TokenSpans
from milldam.stores.tokens.format import Spans
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import Verdicts
from milldam.tokenizers.document_encoder import EMPTY, NO_WHITE_SPACE, DocumentEncoder, add_special_tokens
from milldam.tokenizers.loading import SpecialTokens

TOO_LONG, NOTHING_TRAINED = "too_long", "nothing_to_train_on"
CUT, CUT_TURN = "cut", "cut_turn"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The sides of some records."""

    tokens: Tokens
    verdicts: Verdicts
    """On the records."""
    counts: Counter[str]
    """Of all sides: truncated."""


class HuggingFace:
    """The tokenizer of HF, loaded when it is first needed: that it is is rare, and it takes memory."""

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._loaded: Any = None

    def load(self) -> Any:
        if self._loaded is None:
            import tokenizers

            self._loaded = tokenizers.Tokenizer.from_str(self._json)
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


class ChatEncoder:
    """One for each unit."""

    def __init__(
        self, recipe: ChatRecipe, encoder: DocumentEncoder, finder: TokenSpans, special: SpecialTokens
    ) -> None:
        """`encoder`: adds no special tokens. `special`: those that are asked for, besides the template's."""
        self._recipe, self._encoder, self._finder, self._special = recipe, encoder, finder, special

    def encode(self, texts: pa.LargeStringArray, sides: Sides) -> Encoded:
        both = sides.texts(texts)
        flat, lengths = self._ids(both)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        pairs, begins = self._finder.find(flat, offsets, both, sides.stretches, sides.offsets, sides.derived)
        labels = None if sides.labels is None else np.repeat(sides.labels, sides.count)
        spans = Spans(pairs, np.diff(begins), labels)
        verdicts, uncut = Verdicts(len(texts)), np.isin(np.arange(len(lengths)), self._encoder.uncut)
        verdicts.drop(_any_side(uncut, sides.count), NO_WHITE_SPACE)
        verdicts.drop(_any_side(lengths == 0, sides.count), EMPTY)
        verdicts.drop(_any_side(spans.counts == 0, sides.count), NOTHING_TRAINED)
        tokens, too_long, cut = self._fit(Tokens(flat, lengths, spans=spans))
        verdicts.drop(_any_side(too_long, sides.count), TOO_LONG)
        kept = np.repeat(verdicts.keep, sides.count)
        truncated = int(np.count_nonzero(cut & kept))
        return Encoded(tokens, verdicts, Counter(truncated=truncated) if truncated else Counter())

    def finished(self, tokens: Tokens) -> Tokens:
        """Documents that are kept, with the special tokens that were asked for."""
        special, spans = self._special, tokens.spans
        assert spans is not None
        if (special.bos is None and special.eos is None) or not len(tokens.lengths):
            return tokens
        ends = np.cumsum(tokens.lengths)
        before = tokens.flat[ends - tokens.lengths] != special.bos if special.bos is not None else np.zeros_like(ends)
        plain: Any = tokens.flat
        flat, lengths = add_special_tokens(plain, tokens.lengths, special, self._encoder.dtype)
        owner = np.repeat(np.arange(len(lengths)), spans.counts)
        pairs = spans.pairs + before.astype(np.int64)[owner][:, None]
        # An end that is added belongs to a turn that goes on to the end.
        pairs[:, 1] += (pairs[:, 1] == (tokens.lengths + before)[owner]) & (lengths > tokens.lengths + before)[owner]
        return Tokens(flat, lengths, spans=replace(spans, pairs=pairs))

    def _ids(self, texts: pa.LargeStringArray) -> tuple[Any, Int64s]:
        """The tokens of all texts, and how many each has."""
        lengths = np.zeros(len(texts), dtype=np.int64)
        found = []
        for tokens in self._encoder.encode(texts):
            assert tokens.positions is not None
            lengths[tokens.positions] += tokens.lengths
            found.append(tokens.flat)
        # Counted here, by record.
        self._encoder.dropped.clear()
        return np.concatenate([*found, np.empty(0, self._encoder.dtype)]), lengths

    def _fit(self, tokens: Tokens) -> tuple[Tokens, Any, Any]:
        """The documents cut to their longest, which are too long, and which were cut."""
        most, lengths, spans = self._recipe.max_tokens, tokens.lengths, tokens.spans
        no = np.zeros(len(lengths), dtype=bool)
        if most is None or not (lengths > most).any():
            return tokens, no, no
        assert spans is not None
        long = lengths > most
        if self._recipe.too_long not in (CUT, CUT_TURN):
            return tokens, long, no
        owner = np.repeat(np.arange(len(lengths)), spans.counts)
        kept = np.minimum(lengths, most)
        if self._recipe.too_long == CUT_TURN:
            fitting = np.where(spans.pairs[:, 1] <= most, spans.pairs[:, 1], 0)
            last = np.zeros(len(lengths), dtype=np.int64)
            np.maximum.at(last, owner, fitting)
            kept = np.where(long, last, lengths)
        ends = np.minimum(spans.pairs[:, 1], kept[owner])
        there = spans.pairs[:, 0] < ends
        counts = np.bincount(owner[there], minlength=len(lengths)).astype(np.int64)
        pairs = np.stack([spans.pairs[there, 0], ends[there]], 1)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        inside = np.arange(len(tokens.flat)) - starts < np.repeat(kept, lengths)
        fitted = Tokens(tokens.flat[inside], kept, spans=Spans(pairs, counts, spans.labels))
        return fitted, long & (counts == 0), long


def _any_side(which: Any, sides: int) -> Any:
    return which.reshape(-1, sides).any(axis=1)
