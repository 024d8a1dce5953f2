"""Conversations -> tokens, with the stretches of tokens that are trained on: two steps. A record comes out whole or not
at all. Runs in a worker; holds one batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.chat.reading import ChatRecipe
from milldam.chat.token_spans import TokenSpans
from milldam.sources.batch import Batch
from milldam.stores.tokens.format import Spans
from milldam.text.arrays import Verdicts
from milldam.tokenizers.document_encoder import EMPTY, NO_WHITE_SPACE, DocumentEncoder, add_special_tokens
from milldam.tokenizers.loading import SpecialTokens

TOO_LONG, NOTHING_TRAINED = "too_long", "nothing_to_train_on"
CUT, CUT_TURN = "cut", "cut_turn"

Int64s = npt.NDArray[np.int64]


class ChatEncoder:
    """One for each unit."""

    def __init__(
        self, recipe: ChatRecipe, encoder: DocumentEncoder, finder: TokenSpans, special: SpecialTokens
    ) -> None:
        """`encoder`: adds no special tokens. `special`: those that are asked for, besides the template's."""
        self._recipe, self._encoder, self._finder, self._special = recipe, encoder, finder, special

    def encode(self, batch: Batch) -> Batch:
        """Texts to ids and spans; what is too long is cut, or dropped as what has nothing to train on."""
        sides, encoder = batch.sides, self._encoder
        if not len(batch.texts):
            return batch
        assert sides is not None
        both = sides.texts(batch.texts)
        batch.ids, batch.lengths = encoder.encode(both)
        batch.counts["exact_documents"], encoder.exact_documents = encoder.exact_documents, 0
        offsets = np.concatenate(([0], np.cumsum(batch.lengths)))
        pairs, counts = self._finder.find(batch.ids, offsets, both, sides.stretches, sides.counts, sides.derived)
        labels = None if sides.labels is None else np.repeat(sides.labels, sides.count)
        batch.spans = Spans(pairs, counts, labels)

        def any_side(which: Any) -> Any:
            return which.reshape(-1, sides.count).any(axis=1)

        verdicts = Verdicts(len(batch.texts))
        verdicts.drop(any_side(np.isin(np.arange(len(both)), encoder.uncut)), NO_WHITE_SPACE)
        verdicts.drop(any_side(batch.lengths == 0), EMPTY)
        verdicts.drop(any_side(batch.spans.counts == 0), NOTHING_TRAINED)
        too_long, cut = self._fit(batch)
        verdicts.drop(any_side(too_long), TOO_LONG)
        batch.counts["truncated"] += int(np.count_nonzero(cut & np.repeat(verdicts.keep, sides.count)))
        return batch.narrow(verdicts, "encode")

    def finish(self, batch: Batch) -> Batch:
        """The special tokens that were asked for, and what is counted."""
        special, spans = self._special, batch.spans
        if batch.ids is None or spans is None or batch.sides is None:
            return batch
        if (special.bos is not None or special.eos is not None) and len(batch.lengths):
            ends = np.cumsum(batch.lengths)
            before: Any = np.zeros_like(ends)
            if special.bos is not None:
                before = (batch.ids[ends - batch.lengths] != special.bos).astype(np.int64)
            last = batch.lengths + before
            batch.ids, batch.lengths = add_special_tokens(batch.ids, batch.lengths, special, self._encoder.dtype)
            owner = np.repeat(np.arange(len(batch.lengths)), spans.counts)
            pairs = spans.pairs + before[owner][:, None]
            # An end that is added belongs to a turn that goes on to the end.
            pairs[:, 1] += (pairs[:, 1] == last[owner]) & (batch.lengths > last)[owner]
            batch.spans = spans = replace(spans, pairs=pairs)
        batch.counts += batch.sides.turn_counts()
        batch.counts += Counter(conversations=len(batch.lengths), trained_tokens=spans.trained_tokens)
        return batch

    def _fit(self, batch: Batch) -> tuple[Any, Any]:
        """Cut documents to their longest; which are too long, and which were cut."""
        most, lengths, spans = self._recipe.max_tokens, batch.lengths, batch.spans
        assert spans is not None and batch.ids is not None
        none = np.zeros(len(lengths), dtype=bool)
        if most is None or not (lengths > most).any():
            return none, none
        long = lengths > most
        if self._recipe.too_long not in (CUT, CUT_TURN):
            return long, none
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
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        batch.ids = batch.ids[np.arange(len(batch.ids)) - starts < np.repeat(kept, lengths)]
        batch.lengths = kept
        batch.spans = Spans(np.stack([spans.pairs[there, 0], ends[there]], 1), counts, spans.labels)
        return long & (counts == 0), long
