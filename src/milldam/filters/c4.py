"""The rules of C4 for whole documents: a group of documents -> which are at fault, by reason.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2.2, as printed
in JMLR and as in the code that made the dataset: lines of at least 5 words, pages of at least 3 sentences. (The first
preprint, and datatrove after it, has it the other way round: 3 words and 5 sentences.)

C4 edits text: it keeps only lines that end in a terminal punctuation mark, have enough words, no word of more than 1000
characters, and speak neither of javascript nor of policies; and it takes out citation marks. A filter leaves text as it
is. So all lines stay, but sentences are counted in those that C4 would keep, and a document goes when C4 would drop it.

Sentences are counted by words that end in . ? or !, with or without a closing quote or bracket; C4 used NLTK. "Mr." is
taken for an end. "lorem ipsum" and { are looked for everywhere, as the paper has it; its code looks in kept lines only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from milldam.filters.layout import Layout, Mask
from milldam.rules import C4Rules

JAVASCRIPT: Final = (b"javascript",)
POLICY: Final = (
    b"terms of use", b"privacy policy", b"cookie policy", b"uses cookies", b"use of cookies", b"use cookies"
)  # fmt: skip
_END_MARKS: Final = np.isin(np.arange(256), list(b'.?!"'))
_SENTENCE_ENDS: Final = np.isin(np.arange(256), list(b".?!"))
_CLOSERS: Final = tuple(one.encode() for one in ('"', "'", ")", "]", "”", "’"))
_CLOSER_BYTES: Final = np.isin(np.arange(256), [one[-1] for one in _CLOSERS])


def c4_faults(layout: Layout, rules: C4Rules) -> Iterator[tuple[Mask, str]]:
    """Which documents break a rule; the first reason for one is the one that counts."""
    if rules.lorem_ipsum:
        yield layout.count_at(layout.find(b"lorem ipsum", ignore_case=True)) > 0, "lorem_ipsum"
    if rules.curly_bracket:
        yield layout.count_at(layout.find(b"{")) > 0, "curly_bracket"
    if rules.min_sentences is not None:
        counts = _lines_that_count(layout, rules)
        last = np.zeros(len(layout.word_starts), dtype=bool)
        last[layout.lines.stops - 1] = True
        lines = layout.lines
        inside = np.repeat(counts, lines.stops - lines.starts)
        sentences = layout.sum_words((_ends_sentence(layout) | last) & inside)
        yield sentences < rules.min_sentences, "too_few_sentences"


def _lines_that_count(layout: Layout, rules: C4Rules) -> Mask:
    """The lines that C4 would keep."""
    lines = layout.lines
    counts = lines.stops - lines.starts >= rules.min_words_per_line
    if not len(counts):
        return counts
    if rules.terminal_punctuation:
        last = lines.stops - 1
        counts &= _END_MARKS[layout.data[layout.word_stops[last] - 1]] & ~layout.words_end_with(last, b"...")
    if rules.max_word_length is not None:
        counts &= np.maximum.reduceat(layout.word_characters, lines.starts) <= rules.max_word_length
    for phrase in (JAVASCRIPT if rules.javascript else ()) + (POLICY if rules.policy else ()):
        # It begins with a letter: so it lies after its line's first word begins.
        at = layout.find(phrase, ignore_case=True)
        counts[np.searchsorted(layout.word_starts[layout.lines.starts], at, side="right") - 1] = False
    return counts


def _ends_sentence(layout: Layout) -> Mask:
    """Words that end in a terminal punctuation mark, closed or not."""
    last = layout.data[layout.word_stops - 1]
    ends: Mask = _SENTENCE_ENDS[last]
    maybe_closed = np.flatnonzero(_CLOSER_BYTES[last])
    for closer in _CLOSERS:
        closed = maybe_closed[layout.words_end_with(maybe_closed, closer)]
        ends[closed] |= _SENTENCE_ENDS[layout.data[layout.word_stops[closed] - len(closer) - 1]]
    return ends
