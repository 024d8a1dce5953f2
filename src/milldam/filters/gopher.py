"""The rules of Gopher on quality: a group of documents -> which are at fault, by reason.

Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", A.1.1. What the paper
leaves open is decided so: a bullet is any of `BULLETS`, at the start of a line but for white space; blank lines do not
count; an ellipsis is three dots or U+2026; stop words are told by the whole word, in whatever case, and different ones
are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from milldam.filters.layout import Int64s, Layout, Mask, share
from milldam.filters.rules import GopherQualityRules

BULLETS: Final = ("-", "*", "•", "‣", "⁃", "◦", "▪", "▫", "●", "○", "■", "□")
_ELLIPSIS: Final = "…".encode()

Faults = Iterator[tuple[Mask, str]]


def quality_faults(layout: Layout, rules: GopherQualityRules) -> Faults:
    """Which documents break a rule; the first reason for one is the one that counts."""
    if rules.min_words is not None:
        yield layout.word_counts < rules.min_words, "too_few_words"
    if rules.max_words is not None:
        yield layout.word_counts > rules.max_words, "too_many_words"
    mean = layout.per_word(layout.characters)
    if rules.min_mean_word_length is not None:
        yield mean < rules.min_mean_word_length, "words_too_short"
    if rules.max_mean_word_length is not None:
        yield mean > rules.max_mean_word_length, "words_too_long"
    if rules.max_symbols_per_word is not None:
        hashes = layout.count_at(layout.find(b"#"))
        yield layout.per_word(hashes) > rules.max_symbols_per_word, "too_many_hashes"
        yield layout.per_word(_count_ellipses(layout)) > rules.max_symbols_per_word, "too_many_ellipses"
    lines = layout.lines
    count = lines.count()
    if rules.max_bullet_lines is not None:
        bullets = lines.count(_begins_with_bullet(layout, layout.word_starts[lines.starts]))
        yield share(bullets, count) > rules.max_bullet_lines, "too_many_bullet_lines"
    if rules.max_ellipsis_lines is not None:
        last = lines.stops - 1
        ends = layout.words_end_with(last, b"...") | layout.words_end_with(last, _ELLIPSIS)
        ellipses = lines.count(ends)
        yield share(ellipses, count) > rules.max_ellipsis_lines, "too_many_ellipsis_lines"
    yield from _language_faults(layout, rules)


def _count_ellipses(layout: Layout) -> Int64s:
    """Three dots, or one character; six dots are two."""
    dots = layout.find(b".")
    begins = np.flatnonzero(np.diff(dots, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(dots))
    counts = lengths // 3
    ellipses = np.repeat(dots[begins], counts)
    return layout.count_at(ellipses) + layout.count_at(layout.find(_ELLIPSIS))


def _begins_with_bullet(layout: Layout, at: Int64s) -> Mask:
    found = np.zeros(len(at), dtype=bool)
    for bullet in (one.encode() for one in BULLETS):
        this = layout.data[at] == bullet[0]
        for step in range(1, len(bullet)):
            this &= layout.data[at + step] == bullet[step]
        found |= this
    return found


def _language_faults(layout: Layout, rules: GopherQualityRules) -> Faults:
    if rules.min_alphabetic_words is not None:
        alphabetic = layout.per_word(layout.sum_words(layout.has_letter))
        yield alphabetic < rules.min_alphabetic_words, "too_few_alphabetic_words"
    if rules.min_stop_words is not None:
        found = np.zeros(layout.documents, dtype=np.int64)
        for word in set(rules.stop_words):
            found[np.unique(layout.document_of_word[layout.words_equal(word)])] += 1
        yield found < rules.min_stop_words, "too_few_stop_words"
