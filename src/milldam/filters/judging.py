"""A batch of texts -> a reason to drop, per document.

Every rule judges a document by itself, so the verdict does not depend on what else is in the batch. Rules on text look
at the first MiB; that also bounds the memory beside the batch: 30 MB for ordinary text, 100 MB for a MiB of one-letter
words. Lengths come first, then the rule sets, language and a user's function; what is dropped the next do not see.

Too short and too long, in characters and in tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.rules import C4Rules, FilterRules, GopherQualityRules, GopherRepetitionRules
from milldam.text.arrays import Verdicts, byte_count, character_counts, groups

if TYPE_CHECKING:
    from milldam.filters.layout import Layout, Mask
    from milldam.text.user_functions import UserFunction


HEAD_BYTES: Final = 1 << 20
"""How much of a document rules on text look at: whole characters within so many bytes."""
GROUP_BYTES: Final = 1 << 18
"""How much is judged at once: what belongs to it stays in the processor's cache."""
DROPPED, FAILURE = "dropped_by_filter", "error_in_filter_function"
Int64s = npt.NDArray[np.int64]
Faults = Iterator[tuple["Mask", str]]
"""Which documents are at fault, and the reason."""


class Filters:
    """One per unit of work."""

    def __init__(self, rules: FilterRules) -> None:
        self._rules = rules
        self._rule_sets = list(_rule_sets(rules))
        self._asked: list[Callable[[Any], str | None]] = []
        """Why a document is dropped, one document after the other."""
        if rules.language is not None:
            from milldam.filters.language import LanguageFilter

            self._asked.append(LanguageFilter(rules.language).fault)
        self._function: UserFunction | None = None
        if rules.function is not None:
            from milldam.text.user_functions import UserFunction

            self._function = UserFunction(rules.function)
            self._asked.append(self._ask_function)

    def judge(self, texts: pa.LargeStringArray, verdicts: Verdicts) -> None:
        """Mark what is dropped."""
        rules = self._rules
        if rules.min_characters is not None or rules.max_characters is not None:
            _mark_lengths(character_counts(texts), rules.min_characters, rules.max_characters, "characters", verdicts)
        if self._rule_sets:
            self._judge_by_layout(texts, verdicts)
        for ask in self._asked:
            for position in np.flatnonzero(verdicts.keep).tolist():
                reason = ask(head(texts[position : position + 1])[0])
                if reason is not None:
                    verdicts.drop_one(position, reason)

    def judge_tokens(self, lengths: Int64s, verdicts: Verdicts) -> None:
        """Mark what has too few or too many tokens."""
        _mark_lengths(lengths, self._rules.min_tokens, self._rules.max_tokens, "tokens", verdicts)

    def _judge_by_layout(self, texts: pa.LargeStringArray, verdicts: Verdicts) -> None:
        from milldam.filters.layout import Layout

        positions, start = np.flatnonzero(verdicts.keep), 0
        kept = texts if len(positions) == len(texts) else texts.take(pa.array(positions))
        for group in groups(kept, GROUP_BYTES):
            layout = Layout(head(group) if byte_count(group) > GROUP_BYTES else group)
            where = positions[start : start + len(group)]
            start += len(group)
            for rule_set in self._rule_sets:
                for mask, reason in rule_set(layout):
                    if mask.any():
                        which = np.zeros(len(texts), dtype=bool)
                        which[where[mask]] = True
                        verdicts.drop(which, reason)

    def _ask_function(self, text: Any) -> str | None:
        assert self._function is not None
        result = self._function(text.as_py())
        if result is True or result is None:
            return None
        if result is self._function.FAILED:
            return FAILURE
        if result is False:
            return DROPPED
        if not isinstance(result, str) or not result:
            raise self._function.wrong_type(result, "True or False, or a text: the reason to drop the document")
        return result


def _rule_sets(rules: FilterRules) -> Iterator[Callable[[Layout], Faults]]:
    from milldam.filters.c4 import c4_faults
    from milldam.filters.gopher import quality_faults, repetition_faults

    sets: list[tuple[Any, Any, Callable[..., Faults]]] = [
        (rules.c4, C4Rules, c4_faults),
        (rules.gopher_quality, GopherQualityRules, quality_faults),
        (rules.gopher_repetition, GopherRepetitionRules, repetition_faults),
    ]
    for wanted, kind, faults in sets:
        if wanted:
            yield functools.partial(faults, rules=kind() if wanted is True else wanted)


def _mark_lengths(lengths: Int64s, least: int | None, most: int | None, unit: str, verdicts: Verdicts) -> None:
    if least is not None:
        verdicts.drop(lengths < least, f"too_few_{unit}")
    if most is not None:
        verdicts.drop(lengths > most, f"too_many_{unit}")


def head(text: pa.LargeStringArray) -> pa.LargeStringArray:
    """An array of one text, cut to the whole characters within `HEAD_BYTES`."""
    data = text[0].as_buffer()
    if data.size <= HEAD_BYTES:
        return text
    stop = HEAD_BYTES
    while data[stop] & 0xC0 == 0x80:
        stop -= 1
    return pa.LargeStringArray.from_buffers(1, pa.py_buffer(np.array([0, stop])), data.slice(0, stop))
