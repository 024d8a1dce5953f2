"""Documents -> the stretches of them that are n-grams of a passage, letter by letter.

A pair of words that may be a seed is looked up in small tables, its sixteen letters among the seeds; what is left is
compared with the passage to both sides. A match is a maximal run of n-grams of one passage in one stretch of a
document. The matches of a document depend on its text and the index alone, not on how it comes in batches or parts.

Memory: the table, and 20 bytes a byte of text for one slice of 512 KB; a larger document is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from milldam.decontamination.index import REACH, ROOMY, SEED_LETTERS, Index, seed_keys
from milldam.decontamination.letters import (
    BLOCK,
    MASKS,
    Hashes,
    Int64s,
    Words,
    blocks_at,
    pair_hashes,
    words_of,
)
from milldam.text.arrays import Mask, text_offsets

SLICE_BYTES = 1 << 19
KEPT_BYTES = 1 << 16
"""Of a document that comes in parts, so much is looked at again with the next one: no n-gram is spread over more."""
_FIRST_LOOK = 1 << 7


@dataclass(frozen=True, slots=True)
class Match:
    """N-grams `first` up to `stop` of a passage, counted over all passages, in the bytes `start` to `end` of a
    document."""

    document: int
    passage: int
    first: int
    stop: int
    start: int
    end: int


class Scanner:
    """Holds documents against an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        if index.passages:
            _keep_freed_memory()
            words_of("é".encode(), np.array([0, 2]))  # its tables are there before workers are forked
            self._tables = index.tables()

    def whole(self, texts: pa.LargeStringArray) -> Iterator[Match]:
        """The matches of whole documents, in order; `document` is a position among them."""
        if not self._index.passages:
            return
        offsets = text_offsets(texts)
        data = memoryview(texts.buffers()[2] or b"")
        start = 0
        while start < len(texts):
            stop = int(np.searchsorted(offsets, offsets[start] + SLICE_BYTES, side="right")) - 1
            stop = min(max(stop, start + 1), len(texts))
            inner = offsets[start : stop + 1] - offsets[start]
            for match in self._scan(words_of(data[offsets[start] : offsets[stop]], inner), inner):
                yield Match(match.document + start, match.passage, match.first, match.stop, match.start, match.end)
            start = stop

    def part(self, data: bytes, *, open: bool) -> Iterator[Match]:
        """The matches of one text. `open`: it goes on: what touches its end may be longer."""
        if not self._index.passages or not data:
            return
        bounds = np.array([0, len(data)])
        words = words_of(data, bounds)
        last = int(words.starts[-1] + words.lengths[-1]) if len(words.starts) else 0
        for match in self._scan(words, bounds):
            if not (open and match.end == last):
                yield match

    def _scan(self, words: Words, offsets: Int64s) -> Iterator[Match]:
        at, seeds = self._seeds(words)
        if not len(at):
            return
        comparing = _Comparing(self._index, words)
        documents = np.searchsorted(offsets, words.starts[at], side="right") - 1
        letters = self._index.seed_letters[seeds]
        passages = np.searchsorted(self._index.bounds, letters, side="right") - 1
        before, low, high = -1, 0, 0
        done: dict[tuple[int, int], int] = {}
        each = (one.tolist() for one in (at, documents, letters, passages))
        for word, document, letter, passage in zip(*each, strict=True):
            if document != before:
                before, low, high = document, int(offsets[document]), int(offsets[document + 1])
                done.clear()
            beside = comparing.letter(word) - letter
            if done.get((passage, beside), 0) > words.starts[word]:
                continue  # inside of what was just found
            found = comparing.at(word, letter, passage, low, high)
            if found is not None:
                first, last, start, end = found
                done[passage, beside] = end
                yield Match(document, passage, first, last, start - low, end - low)

    def _seeds(self, words: Words) -> tuple[Int64s, Int64s]:
        """Words that begin a seed, as far as a few letters tell, and which: a word as often as it has seeds."""
        at = self._tables.pairs(pair_hashes(words.blocks))
        keys = seed_keys(*_letters_from(words, at, SEED_LETTERS))
        likely = self._tables.keys(keys)
        at, keys = at[likely], keys[likely]
        known = self._index.seed_keys
        first = np.searchsorted(known, keys, side="left")
        inside = np.flatnonzero(first < len(known))
        inside = inside[known[first[inside]] == keys[inside]]
        at, first, stop = at[inside], first[inside], np.searchsorted(known, keys[inside], side="right")
        counts = stop - first
        seeds = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        at = np.repeat(at, counts)
        goes_on = self._goes_on(words, at, seeds)
        return at[goes_on], seeds[goes_on]

    def _goes_on(self, words: Words, at: Int64s, seeds: Int64s) -> Mask:
        """Whether more letters than those of a seed are equal, on its left or its right. Where an n-gram may have no
        more, they need not be."""
        index = self._index
        letters = index.seed_letters[seeds]
        passages = np.searchsorted(index.bounds, letters, side="right") - 1
        known = blocks_at(index.letters)
        # A seed in the last few letters of a passage runs on into the next one.
        behind = (index.bounds[passages + 1] - letters - SEED_LETTERS).clip(0, BLOCK)
        right = (_letters_from(words, at, SEED_LETTERS + BLOCK)[-1] ^ known[letters + SEED_LETTERS]) & MASKS[behind]
        # The last letters of the word before, as many as the passage has too.
        previous = np.maximum(at - 1, 0)
        ends = words.starts[previous] + words.lengths[previous]
        ahead = np.minimum(np.minimum(words.lengths[previous], letters - index.bounds[passages]), BLOCK)
        left = blocks_at(words.folded)[np.maximum(ends - BLOCK, 0)] ^ known[np.maximum(letters - BLOCK, 0)]
        left &= ~MASKS[BLOCK - ahead]
        first = (ends < BLOCK) | (letters < BLOCK)
        likely: Mask = (
            (index.shortest[passages] < ROOMY) | ((behind > 0) & (right == 0)) | ((ahead > 0) & (left == 0)) | first
        )
        return likely


def _keep_freed_memory() -> None:
    """Let this process keep what a slice takes, for the next one: giving it back and taking it anew costs nearly as
    much as the rest of a scan. glibc keeps twice the largest array that was freed."""
    np.empty(20 * SLICE_BYTES // 2, np.uint8)


def _letters_from(words: Words, at: Int64s, count: int) -> list[Hashes]:
    """The letters from some words on, whatever lies between the words: numbers of eight each."""
    found = [np.zeros(len(at), np.uint64) for _ in range(count // BLOCK)]
    blocks, last = blocks_at(words.folded), len(words.starts)
    which, word, inner, filled = np.arange(len(at)), at, np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    while len(which):
        left = words.lengths.take(word) - inner
        block = blocks[words.starts.take(word) + inner]
        block &= MASKS.take(left, mode="clip")
        for number, numbers in enumerate(found):
            numbers[which] |= _shifted(block, filled - BLOCK * number)
        filled = filled + np.minimum(left, BLOCK)
        ends = left <= BLOCK
        word, inner = word + ends, np.where(ends, 0, inner + BLOCK)
        more = np.flatnonzero((filled < count) & (word < last))
        which, word, inner, filled = which[more], word[more], inner[more], filled[more]
    return found


def _shifted(block: Hashes, by: Int64s) -> Hashes:
    """Blocks moved by some bytes to either side; what does not fit is gone."""
    bits = (by * 8).view(np.uint64)
    # A negative number of bits is a huge one here, and such a shift leaves nothing.
    return block << bits | block >> (np.uint64(0) - bits)


class _Comparing:
    """A place in a document beside a place in a passage."""

    def __init__(self, index: Index, words: Words) -> None:
        self._index, self._words, self._folded = index, words, words.folded
        self._letters_before = np.cumsum(words.lengths) - words.lengths

    def letter(self, word: int) -> int:
        """How many letters lie before a word."""
        return int(self._letters_before[word])

    def at(self, word: int, letter: int, passage: int, low: int, high: int) -> tuple[int, int, int, int] | None:
        """N-grams (first, behind the last) around a letter of a passage that stand in the document (from `low` up to
        `high`) around a word, and from where to where; None: there are none."""
        index, place, here = self._index, int(self._words.starts[word]), self.letter(word)
        begin, end = int(index.bounds[passage]), int(index.bounds[passage + 1])
        right = self._equal_right(place, high, letter, min(end, letter + REACH))
        left = self._equal_left(place, low, letter, max(begin, letter - REACH))
        if left + right < index.shortest[passage]:
            return None
        first_letter, behind = letter - left, letter + right
        if self._grams(passage, first_letter, behind) is None:
            return None
        # A word that goes on beyond what is equal is another word.
        first_letter += not self._begins_word(here - left)
        behind -= not self._ends_word(here + right - 1)
        found = self._grams(passage, first_letter, behind)
        if found is None:
            return None
        from_letter, to_letter = self._letters(passage, *found)
        return *found, self._place(here + from_letter - letter), self._place(here + to_letter - 1 - letter) + 1

    # ---- the passage ----

    def _size(self, passage: int) -> int:
        """Words of its n-grams."""
        index = self._index
        words = int(index.word_bounds[passage + 1] - index.word_bounds[passage])
        return words - int(index.gram_bounds[passage + 1] - index.gram_bounds[passage]) + 1

    def _first_word(self, passage: int, gram: int) -> int:
        return int(self._index.word_bounds[passage]) + gram - int(self._index.gram_bounds[passage])

    def _stop_of_word(self, passage: int, word: int) -> int:
        index = self._index
        last = word + 1 == index.word_bounds[passage + 1]
        return int(index.bounds[passage + 1] if last else index.words[word + 1])

    def _grams(self, passage: int, begin: int, end: int) -> tuple[int, int] | None:
        """The n-grams of a passage that lie in some of its letters."""
        index, size = self._index, self._size(passage)
        first_word, behind = int(index.word_bounds[passage]), int(index.word_bounds[passage + 1])
        words = index.words[first_word:behind]
        first = int(np.searchsorted(words, begin))
        if end >= index.bounds[passage + 1]:
            stop = behind - first_word
        else:
            stop = int(np.searchsorted(words, end, side="right")) - 1
        count = stop - first - size + 1
        if count <= 0:
            return None
        base = int(index.gram_bounds[passage])
        return base + first, base + first + count

    def _letters(self, passage: int, first: int, stop: int) -> tuple[int, int]:
        """From which letter to which some n-grams reach."""
        last_word = self._first_word(passage, stop - 1) + self._size(passage) - 1
        return int(self._index.words[self._first_word(passage, first)]), self._stop_of_word(passage, last_word)

    # ---- the document ----

    def _equal_right(self, place: int, high: int, letter: int, end: int) -> int:
        """How many letters from a place on are those of the passage."""
        wanted = self._index.letters[letter:end].tobytes()
        look = _FIRST_LOOK
        while True:
            stop = min(high, place + look)
            there = self._folded[place:stop].tobytes().translate(None, b"\0")
            equal = _common_prefix(there, wanted)
            if equal < len(there) or equal == len(wanted) or stop == high:
                return equal
            look *= 4

    def _equal_left(self, place: int, low: int, letter: int, begin: int) -> int:
        wanted = self._index.letters[begin:letter].tobytes()
        look = _FIRST_LOOK
        while True:
            start = max(low, place - look)
            there = self._folded[start:place].tobytes().translate(None, b"\0")
            equal = _common_suffix(there, wanted)
            if equal < len(there) or equal == len(wanted) or start == low:
                return equal
            look *= 4

    def _word_of(self, letter: int) -> int:
        return int(np.searchsorted(self._letters_before, letter, side="right")) - 1

    def _place(self, letter: int) -> int:
        """Where a letter stands, counted over all texts."""
        word = self._word_of(letter)
        return int(self._words.starts[word]) + letter - self.letter(word)

    def _begins_word(self, letter: int) -> bool:
        return self.letter(self._word_of(letter)) == letter

    def _ends_word(self, letter: int) -> bool:
        word = self._word_of(letter)
        return self.letter(word) + int(self._words.lengths[word]) == letter + 1


def _common_prefix(one: bytes, other: bytes) -> int:
    """
    >>> _common_prefix(b"abcd", b"abxd!")
    2
    """
    size = min(len(one), len(other))
    different = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - (different.bit_length() + 7) // 8


def _common_suffix(one: bytes, other: bytes) -> int:
    """
    >>> _common_suffix(b"abcd", b"!cd")
    2
    """
    size = min(len(one), len(other))
    different = int.from_bytes(one[len(one) - size :], "little") ^ int.from_bytes(other[len(other) - size :], "little")
    return size - (different.bit_length() + 7) // 8
