"""Documents -> the stretches of them that are n-grams of a passage, letter by letter.

A pair of words that may be a seed is looked up in two small tables and then among the seeds; the letters around it are
compared with the passage's to both sides. That is the kernel's work, or numpy's. What is left is rare: a match is a
maximal run of n-grams of one passage in one stretch of a document, which begins and ends where words do. The matches of
a document depend on its text and the index alone, not on how it comes in batches or parts.

Memory: 3 bytes a byte of the largest document, 10 where words have one letter, and as much again for one that has
matches (numpy: 80 a byte of all of them).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from milldam import native
from milldam.decontamination.index import SEED_LETTERS, Index, may_hold, pair_keys, seed_keys, shift_of
from milldam.decontamination.letters import (
    BLOCK,
    Hashes,
    Int64s,
    Room,
    Words,
    blocks_at,
    letters_in,
    pair_hashes,
    words_of,
)
from milldam.text.arrays import text_offsets

AT_ONCE = 1 << 15
"""Bytes of text; the processor's cache holds what is made of them."""
KEPT_BYTES = 1 << 16
"""Of a document that comes in parts, so much is looked at again with the next one: no n-gram is spread over more."""
_FIRST_LOOK = 1 << 7
_EXPECTED = 256
"""Places where letters are equal, as a rule."""
_REMEMBERED = 3 * 4096
"""What the kernel remembers of such places."""


def scanning_bytes() -> int:
    """What a process takes to scan, as measured: documents of 2 MB that have matches, of words of one letter."""
    return (40 if native.library() is not None else 120) * 10**6


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
            self._regions = _Regions(index)

    def whole(self, texts: pa.LargeStringArray) -> Iterator[Match]:
        """The matches of whole documents, in order; `document` is a position among them."""
        if not self._index.passages:
            return
        offsets = text_offsets(texts)
        data = memoryview(texts.buffers()[2] or b"")[offsets[0] : offsets[-1]]
        yield from self._scan(data, offsets - offsets[0])

    def part(self, data: bytes) -> Iterator[Match]:
        """The matches of one text."""
        if self._index.passages and data:
            yield from self._scan(data, np.array([0, len(data)]))

    def _scan(self, data: bytes | memoryview, offsets: Int64s) -> Iterator[Match]:
        found = self._regions.find(data, offsets)
        documents = np.searchsorted(offsets, found[:, 0], side="right") - 1
        for document, first, stop in _runs(documents):
            low, high = offsets[document : document + 2].tolist()
            text = _Document(words_of(data[low:high], np.array([0, high - low])))
            for match in self._matches(text, found[first:stop] - [low, 0, 0, 0]):
                yield Match(document, *match)

    def _matches(self, text: _Document, found: Int64s) -> Iterator[tuple[int, int, int, int, int]]:
        """Passage, n-grams, from where to where."""
        places, seeds, left, right = found.T
        each = text.letters(places), self._index.seed_letters[seeds], self._index.seed_passages[seeds], left, right
        reached: dict[tuple[int, int], int] = {}
        passages: dict[int, _Passage] = {}
        for here, letter, passage, before, after in zip(*(one.tolist() for one in each), strict=True):
            if reached.get((passage, here - letter), 0) > here:
                continue  # the same letters beside each other
            reached[passage, here - letter] = here + after
            if passage not in passages:
                passages[passage] = _Passage.of(self._index, passage)
            grams = passages[passage].grams(text, letter - before, letter + after, here - letter)
            if grams is not None:
                yield passage, *grams


def _runs(values: Int64s) -> Iterator[tuple[int, int, int]]:
    """Values that come in order, each with where it begins and ends.

    >>> list(_runs(np.array([4, 4, 7])))
    [(4, 0, 2), (7, 2, 3)]
    """
    firsts = np.flatnonzero(np.diff(values, prepend=-1)).tolist()
    for first, stop in itertools.pairwise([*firsts, len(values)]):
        yield int(values[first]), first, stop


class _Regions:
    """Where letters of documents and passages are equal, as many as the passage's shortest n-gram has."""

    def __init__(self, index: Index) -> None:
        self._index, self._room = index, Room()
        tables = int, np.uint64, int, np.uint64, int
        seeds = np.uint64, np.int64, np.int64, np.uint8, np.int64, np.int64
        self._kernel = native.kernel("regions", *Room.TYPES, int, np.int64, *tables, *seeds, np.int64)
        self._memory, self._found = np.empty(_REMEMBERED, np.int64), np.empty((_EXPECTED, 4), np.int64)

    def find(self, data: bytes | memoryview, offsets: Int64s) -> Int64s:
        """(places, 4): the place in the texts, the seed that led there, and how many letters are equal before and from
        there on. In order; of one stretch some or all places."""
        if self._kernel is None:
            return self._find(words_of(data, offsets), offsets)
        index, at_once = self._index, max(AT_ONCE, int(np.diff(offsets).max(initial=0)))
        tables = index.pair_bits, int(shift_of(index.pair_bits)), index.key_bits, int(shift_of(index.key_bits))
        seeds = index.seed_keys, index.seed_letters, index.seed_passages
        rules = index.kinds, *tables, *seeds, index.letters, index.bounds, index.shortest
        given = *self._room.given(data, offsets, at_once), at_once, self._memory, *rules
        count = self._kernel(*given, self._found)
        if count > len(self._found):
            self._found = np.empty((count, 4), np.int64)
            self._kernel(*given, self._found)
        return self._found[:count].copy()

    # ---- the kernel's twin ----

    def _find(self, words: Words, offsets: Int64s) -> Int64s:
        index = self._index
        at, seeds = self._seeds(words)
        places, here = words.starts[at], (np.cumsum(words.lengths) - words.lengths)[at]
        texts = np.searchsorted(offsets, places, side="right") - 1
        letters, passages = index.seed_letters[seeds], index.seed_passages[seeds]
        each = places, offsets[texts], offsets[texts + 1], letters, passages, here - letters
        found = np.zeros((len(at), 2), np.int64)
        reached: dict[tuple[int, int], int] = {}
        for k, (place, low, high, letter, passage, beside) in enumerate(
            zip(*map(np.ndarray.tolist, each), strict=True)
        ):
            if reached.get((passage, beside), 0) > letter:
                continue  # inside of what is equal
            begin, end = index.bounds[passage : passage + 2].tolist()
            found[k] = (
                _equal_left(words, place, low, index.letters[begin:letter].tobytes()),
                _equal_right(words, place, high, index.letters[letter:end].tobytes()),
            )
            reached[passage, beside] = letter + int(found[k, 1])
        enough = found.sum(axis=1) >= index.shortest[passages]
        regions: Int64s = np.column_stack((places, seeds, found))[enough]
        return regions

    def _seeds(self, words: Words) -> tuple[Int64s, Int64s]:
        """Words that begin a seed, as far as hashes tell, and which: a word as often as it has seeds."""
        index, blocks = self._index, words.blocks
        at = np.flatnonzero(may_hold(index.pair_bits, pair_hashes(blocks)[:-1]))
        keys = [seed_keys(*_sixteen_letters(words, at))]
        if index.kinds == 2:
            keys.append(pair_keys(blocks[at], blocks[at + 1]))
        at, every = np.repeat(at, index.kinds), np.stack(keys, axis=1).ravel()
        first, stop = (np.searchsorted(index.seed_keys, every, side=side) for side in ("left", "right"))
        counts = stop - first
        seeds = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        return np.repeat(at, counts), seeds


def _sixteen_letters(words: Words, at: Int64s) -> tuple[Hashes, Hashes]:
    """The letters from some words on, whatever lies between the words: two numbers of eight each."""
    letters = np.concatenate((letters_in(words), np.zeros(SEED_LETTERS, np.uint8)))
    from_letter = (np.cumsum(words.lengths) - words.lengths)[at]
    return blocks_at(letters)[from_letter], blocks_at(letters)[from_letter + BLOCK]


def _equal_right(words: Words, place: int, high: int, wanted: bytes) -> int:
    """How many letters from a place on are those of the passage."""
    look = _FIRST_LOOK
    while True:
        stop = min(high, place + look)
        there = words.folded[place:stop].tobytes().translate(None, b"\0")
        equal = _common_prefix(there, wanted)
        if equal < len(there) or equal == len(wanted) or stop == high:
            return equal
        look *= 4


def _equal_left(words: Words, place: int, low: int, wanted: bytes) -> int:
    look = _FIRST_LOOK
    while True:
        start = max(low, place - look)
        there = words.folded[start:place].tobytes().translate(None, b"\0")
        equal = _common_prefix(there[::-1], wanted[::-1])
        if equal < len(there) or equal == len(wanted) or start == low:
            return equal
        look *= 4


def _common_prefix(one: bytes, other: bytes) -> int:
    """
    >>> _common_prefix(b"abcd", b"abxd!")
    2
    """
    size = min(len(one), len(other))
    different = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - (different.bit_length() + 7) // 8


# ---- what is equal -> whole n-grams ----


class _Document:
    """Words of documents, by the letters that lie before them."""

    def __init__(self, words: Words) -> None:
        self._starts, self._lengths = words.starts, words.lengths
        self._before = np.cumsum(self._lengths) - self._lengths

    def letters(self, places: Int64s) -> Int64s:
        """How many letters lie before words that begin at some places."""
        return self._before[np.searchsorted(self._starts, places)]

    def _word_of(self, letter: int) -> int:
        return int(np.searchsorted(self._before, letter, side="right")) - 1

    def place(self, letter: int) -> int:
        """Where a letter stands, counted over all texts."""
        word = self._word_of(letter)
        return int(self._starts[word] + letter - self._before[word])

    def begins_word(self, letter: int) -> bool:
        return bool(self._before[self._word_of(letter)] == letter)

    def ends_word(self, letter: int) -> bool:
        """Whether a word ends before a letter."""
        word = self._word_of(letter - 1)
        return bool(self._before[word] + self._lengths[word] == letter)


@dataclass(frozen=True, slots=True)
class _Passage:
    edges: list[int]
    """Where words begin, and where the last one ends."""
    first_gram: int
    size: int
    """Words of an n-gram."""

    @classmethod
    def of(cls, index: Index, passage: int) -> _Passage:
        low, high = index.word_bounds[passage : passage + 2].tolist()
        first_gram, last_gram = index.gram_bounds[passage : passage + 2].tolist()
        edges = [*index.words[low:high].tolist(), int(index.bounds[passage + 1])]
        return cls(edges, first_gram, high - low - (last_gram - first_gram) + 1)

    def grams(self, document: _Document, begin: int, end: int, beside: int) -> tuple[int, int, int, int] | None:
        """N-grams (first, behind the last) in some letters of the passage that stand in the document, `beside` letters
        on, and from where to where; None: there are none. A word that goes on beyond what is equal is another word."""
        edges = self.edges
        first, stop = bisect.bisect_left(edges, begin), bisect.bisect_right(edges, end) - 1
        while stop - first >= self.size and not document.begins_word(edges[first] + beside):
            first += 1
        while stop - first >= self.size and not document.ends_word(edges[stop] + beside):
            stop -= 1
        if stop - first < self.size:
            return None
        grams = self.first_gram + first, self.first_gram + stop - self.size + 1
        return *grams, document.place(edges[first] + beside), document.place(edges[stop] + beside - 1) + 1
