"""The rules of Gopher: a group of documents -> which are at fault, by reason.

Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher". What the paper leaves
open is decided so. Quality (A.1.1): a bullet is any of `BULLETS`, at the start of a line but for white space; blank
lines do not count; an ellipsis is three dots or U+2026; stop words are told by the whole word, in whatever case, and
different ones are counted. Repetition (table A1): lines, paragraphs and sequences of words are the same when their
words are; the first of several is no duplicate; characters are those of words, without white space; the most frequent
sequence must occur at least twice, and when several are as frequent the longest is taken.

Words are told apart by 64-bit hashes, all sequences of a group by sorting theirs. A sequence of n + 1 words can be
there twice only when both sequences of n words in it are, so after pairs few are left to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from milldam.filters.layout import Hashes, Int64s, Layout, Mask, Stretches, mix, share
from milldam.rules import GopherQualityRules, GopherRepetitionRules

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
    if rules.min_alphabetic_words is not None:
        alphabetic = layout.per_word(layout.sum_words(layout.has_letter))
        yield alphabetic < rules.min_alphabetic_words, "too_few_alphabetic_words"
    if rules.min_stop_words is not None:
        found = np.zeros(layout.documents, dtype=np.int64)
        for word in set(rules.stop_words):
            found[np.unique(layout.document_of_word[layout.words_equal(word)])] += 1
        yield found < rules.min_stop_words, "too_few_stop_words"


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


# ---- repetition ----
TOP: Final = range(2, 5)
DUPLICATE: Final = range(5, 11)
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_CHARACTER_BITS: Final = 32


def repetition_faults(layout: Layout, rules: GopherRepetitionRules) -> Faults:
    """Which documents repeat themselves; the first reason for one is the one that counts."""
    for name in ("line", "paragraph"):
        most = getattr(rules, f"max_duplicate_{name}s")
        most_characters = getattr(rules, f"max_duplicate_{name}_characters")
        if (most, most_characters) == (None, None):
            continue
        stretches = layout.lines if name == "line" else layout.paragraphs
        if not len(stretches.starts):
            continue
        duplicate = _Runs(_hash_stretches(layout, stretches)).later_mask()
        if most is not None and duplicate.any():
            number = stretches.count(duplicate)
            yield share(number, stretches.count()) > most, f"too_many_duplicate_{name}s"
        if most_characters is not None and duplicate.any():
            characters = layout.sum_characters(stretches.starts[duplicate], stretches.stops[duplicate])
            yield share(characters, layout.characters) > most_characters, f"too_many_duplicate_{name}_characters"
    limits = {size: getattr(rules, f"max_top_{size}_gram") for size in TOP}
    limits |= {size: getattr(rules, f"max_duplicate_{size}_grams") for size in DUPLICATE}
    last = max((size for size, limit in limits.items() if limit is not None), default=0)
    for size, places, runs in _repeated_sequences(layout, last):
        limit = limits[size]
        if limit is not None and size in TOP:
            characters = _top_characters(layout, size, places, runs)
            yield share(characters, layout.characters) > limit, f"too_frequent_{size}_gram"
        elif limit is not None:
            characters = _covered_characters(layout, size, places, runs)
            yield share(characters, layout.characters) > limit, f"too_many_duplicate_{size}_grams"


def _hash_stretches(layout: Layout, stretches: Stretches) -> Hashes:
    """By document, words and their places; stretches of different documents differ."""
    sizes = stretches.stops - stretches.starts
    place = np.arange(len(layout.word_hashes)) - np.repeat(stretches.starts, sizes)
    words = mix(layout.word_hashes + place.astype(np.uint64) * _MULTIPLIER)
    return mix(np.add.reduceat(words, stretches.starts) + stretches.documents.astype(np.uint64))


class _Runs:
    """Which of some hashes are the same: `order` puts them together, in `lengths` of each kind."""

    def __init__(self, hashes: Hashes) -> None:
        self.order: npt.NDArray[np.intp] = np.argsort(hashes)
        ordered = hashes[self.order]
        self.starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        self.lengths = np.diff(self.starts, append=len(hashes))

    def later_mask(self) -> Mask:
        """All but the first of each kind."""
        later = np.ones(len(self.order), dtype=bool)
        later[np.minimum.reduceat(self.order, self.starts)] = False
        return later

    def several_mask(self) -> Mask:
        """All that are not alone."""
        several = np.empty(len(self.order), dtype=bool)
        several[self.order] = np.repeat(self.lengths > 1, self.lengths)
        return several


def _repeated_sequences(layout: Layout, last: int) -> Iterator[tuple[int, Int64s, _Runs]]:
    """Sequences of two words, of three and so on up to `last`, as long as some occur more than once in their document:
    how many words, the word that each begins with, in order, and which of them are the same."""
    if last < TOP.start:
        return
    words = layout.word_hashes
    left = np.repeat(layout.first_words[1:], layout.word_counts) - np.arange(len(words))
    places = np.flatnonzero(left >= TOP.start)
    hashes = mix(words + layout.document_of_word.astype(np.uint64) * _MULTIPLIER)
    for size in range(TOP.start, last + 1):
        if not len(places):
            return
        # `hashes` are those of size - 1 words by the word they begin with.
        hashes[places] = hashes[places] * _MULTIPLIER + words[places + size - 1]
        runs = _Runs(hashes[places])
        yield size, places, runs
        places = places[runs.several_mask()]
        begins = np.zeros(len(words) + 1, dtype=bool)
        begins[places] = True
        places = places[begins[places + 1] & (left[places] > size)]


def _top_characters(layout: Layout, size: int, places: Int64s, runs: _Runs) -> Int64s:
    """Characters of the most frequent sequence of each document, times its number."""
    several = runs.lengths > 1
    first = places[runs.order[runs.starts[several]]]
    characters = layout.characters_before[first + size] - layout.characters_before[first]
    best = np.zeros(layout.documents, dtype=np.int64)
    # The number first, then the characters: the largest is the most frequent, and the longest of those.
    np.maximum.at(best, layout.document_of_word[first], (runs.lengths[several] << _CHARACTER_BITS) | characters)
    return (best >> _CHARACTER_BITS) * (best & ((1 << _CHARACTER_BITS) - 1))


def _covered_characters(layout: Layout, size: int, places: Int64s, runs: _Runs) -> Int64s:
    """Characters of each document in sequences that were there before; each counts once."""
    starts = places[runs.later_mask()]
    stops = starts + size
    # They are in order and equally long: what one shares with others before it, it shares with the one before it.
    starts = np.maximum(starts, np.concatenate(([0], stops[:-1]))) if len(starts) else starts
    return layout.sum_characters(starts, stops)
