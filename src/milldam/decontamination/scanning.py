"""Documents -> the stretches of them that are n-grams of a passage, letter by letter.

A pair of words that may be a seed is looked up in two small tables and then among the seeds; the letters around it are
compared with the passage's to both sides. That is the kernel's work, or numpy's. What is left is rare: a match is a
maximal run of n-grams of one passage in one stretch of a document, which begins and ends where words do. The matches of
a document depend on its text and the index alone, not on how it comes in batches or parts.

Memory: 5 bytes a byte of text for one slice of 512 KB (numpy: 80); a larger document is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from milldam import native
from milldam.decontamination.index import SEED_LETTERS, Index, may_hold, pair_keys, seed_keys, shift_of
from milldam.decontamination.letters import BLOCK, Hashes, Int64s, WordFinder, Words, blocks_at, pair_hashes
from milldam.text.arrays import text_offsets

SLICE_BYTES = 1 << 19
KEPT_BYTES = 1 << 16
"""Of a document that comes in parts, so much is looked at again with the next one: no n-gram is spread over more."""
_FIRST_LOOK = 1 << 7
_EXPECTED = 256
"""Places where letters are equal in a slice, as a rule."""
_REMEMBERED = 3 * 4096
"""What the kernel remembers of such places."""


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
            self._words = WordFinder()  # its tables are there before workers are forked
            self._regions = _Regions(index)

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
            inner = offsets[start : stop + 1]
            for match in self._scan(data[inner[0] : inner[-1]], inner - inner[0]):
                yield Match(match.document + start, match.passage, match.first, match.stop, match.start, match.end)
            start = stop

    def part(self, data: bytes, *, open: bool) -> Iterator[Match]:
        """The matches of one text. `open`: it goes on, and its last word may: that one is left for the next part."""
        if not self._index.passages or not data:
            return
        yield from self._scan(data, np.array([0, len(data)]), open=open)

    def _scan(self, data: bytes | memoryview, offsets: Int64s, *, open: bool = False) -> Iterator[Match]:
        words = self._words.find(data, offsets)
        if open:
            words = Words(words.folded, words.edges[:-1])
            offsets = np.array([0, int(words.edges[-1, 1]) if len(words) else 0])
        at, seeds, left, right = self._regions.find(words, offsets).T
        if not len(at):
            return
        index, document = self._index, _Document(words)
        documents = np.searchsorted(offsets, words.edges[at, 0], side="right") - 1
        each = (at, documents, index.seed_letters[seeds], index.seed_passages[seeds], left, right)
        reached: dict[tuple[int, int], int] = {}
        for word, number, letter, passage, before, after in zip(*(one.tolist() for one in each), strict=True):
            here = document.letter(word)
            if reached.get((passage, here - letter), 0) > here:
                continue  # the same letters beside each other
            reached[passage, here - letter] = here + after
            found = _grams(index, document, passage, letter - before, letter + after, here - letter)
            if found is not None:
                first, stop, start, end = found
                low = int(offsets[number])
                yield Match(number, passage, first, stop, start - low, end - low)


class _Regions:
    """Where letters of documents and passages are equal, as many as the passage's shortest n-gram has."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kinds = 2 if index.short_seeds else 1
        tables = np.uint64, int, np.uint64, int, int
        seeds = np.uint64, np.int64, np.int64, int, np.uint8, np.int64, np.int64
        words, out = (np.uint8, np.uint32, int, np.int64), (np.int64, np.int64, int)
        self._kernel = native.kernel("regions", *words, *tables, *seeds, *out)
        self._memory = np.empty(_REMEMBERED, np.int64)
        self._found = np.empty((_EXPECTED, 4), np.int64)

    def find(self, words: Words, offsets: Int64s) -> Int64s:
        """(places, 4): the word of the document and the seed that led there, and how many letters are equal before
        and from there on. In order; of one stretch some or all places."""
        if self._kernel is None:
            return self._find(words, offsets)
        index = self._index
        tables = index.pair_bits, int(shift_of(index.pair_bits)), index.key_bits, int(shift_of(index.key_bits))
        seeds = index.seed_keys, index.seed_letters, index.seed_passages, len(index.seed_keys)
        passages = index.letters, index.bounds, index.shortest
        given = words.folded, words.edges, len(words), offsets, *tables, self._kinds, *seeds, *passages, self._memory
        count = self._kernel(*given, self._found, len(self._found))
        if count > len(self._found):
            self._found = np.empty((count, 4), np.int64)
            self._kernel(*given, self._found, count)
        return self._found[:count]

    # ---- the kernel's twin ----

    def _find(self, words: Words, offsets: Int64s) -> Int64s:
        index, starts = self._index, words.starts
        at, seeds = self._seeds(words)
        texts = np.searchsorted(offsets, starts[at], side="right") - 1
        each = (starts[at], offsets[texts], offsets[texts + 1], index.seed_letters[seeds], index.seed_passages[seeds])
        found = np.zeros((len(at), 2), np.int64)
        for k, (place, low, high, letter, passage) in enumerate(zip(*(one.tolist() for one in each), strict=True)):
            begin, end = index.bounds[passage : passage + 2].tolist()
            found[k] = (
                _equal_left(words, place, low, index.letters[begin:letter].tobytes()),
                _equal_right(words, place, high, index.letters[letter:end].tobytes()),
            )
        enough = found.sum(axis=1) >= index.shortest[index.seed_passages[seeds]]
        places: Int64s = np.column_stack((at, seeds, found))[enough]
        return places

    def _seeds(self, words: Words) -> tuple[Int64s, Int64s]:
        """Words that begin a seed, as far as hashes tell, and which: a word as often as it has seeds."""
        known, blocks = self._index.seed_keys, words.blocks
        at = np.flatnonzero(may_hold(self._index.pair_bits, pair_hashes(blocks)[:-1]))
        keys = [seed_keys(*_sixteen_letters(words, at))]
        if self._kinds == 2:
            keys.append(pair_keys(blocks[at], blocks[at + 1]))
        at, every = np.repeat(at, self._kinds), np.stack(keys, axis=1).ravel()
        first, stop = (np.searchsorted(known, every, side=side) for side in ("left", "right"))
        counts = stop - first
        seeds = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        return np.repeat(at, counts), seeds


def _sixteen_letters(words: Words, at: Int64s) -> tuple[Hashes, Hashes]:
    """The letters from some words on, whatever lies between the words: two numbers of eight each."""
    folded = words.folded[: int(words.edges[-1, 1]) if len(words) else 0]
    letters = folded[folded != 0]
    padded = np.concatenate((letters, np.zeros(SEED_LETTERS, np.uint8)))
    from_letter = (np.cumsum(words.lengths) - words.lengths)[at]
    return blocks_at(padded)[from_letter], blocks_at(padded)[from_letter + BLOCK]


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

    def letter(self, word: int) -> int:
        """How many letters lie before a word."""
        return int(self._before[word])

    def _word_of(self, letter: int) -> int:
        return int(np.searchsorted(self._before, letter, side="right")) - 1

    def place(self, letter: int) -> int:
        """Where a letter stands, counted over all texts."""
        word = self._word_of(letter)
        return int(self._starts[word]) + letter - self.letter(word)

    def begins_word(self, letter: int) -> bool:
        return self.letter(self._word_of(letter)) == letter

    def ends_word(self, letter: int) -> bool:
        """Whether a word ends before a letter."""
        word = self._word_of(letter - 1)
        return self.letter(word) + int(self._lengths[word]) == letter


def _grams(
    index: Index, document: _Document, passage: int, begin: int, end: int, beside: int
) -> tuple[int, int, int, int] | None:
    """N-grams (first, behind the last) in some letters of a passage that stand in the document, `beside` letters on,
    and from where to where; None: there are none. A word that goes on beyond what is equal is another word."""
    low, high = index.word_bounds[passage : passage + 2].tolist()
    first_gram, last_gram = index.gram_bounds[passage : passage + 2].tolist()
    size = high - low - (last_gram - first_gram) + 1
    # Where words begin, and where the last one ends.
    edges = np.append(index.words[low:high], index.bounds[passage + 1]).astype(np.int64)
    first, stop = np.searchsorted(edges, begin), np.searchsorted(edges, end, side="right") - 1
    while stop - first >= size and not document.begins_word(int(edges[first]) + beside):
        first += 1
    while stop - first >= size and not document.ends_word(int(edges[stop]) + beside):
        stop -= 1
    if stop - first < size:
        return None
    start, behind = (int(edges[k]) + beside for k in (first, stop))
    grams = first_gram + int(first), first_gram + int(stop) - size + 1
    return *grams, document.place(start), document.place(behind - 1) + 1
