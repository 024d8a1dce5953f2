"""A group of documents as numbers: where words, lines and paragraphs begin and end.

Documents lie in one buffer with a line end between them, so that no word or line runs from one into the next, and every
rule works on all of them at once. Words are what stands between white space, as Python's `str.split` has it. Lines are
counted by the words they begin with; a line without words is blank and is no line here. Needs some 40 bytes for each
word, and the group is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from milldam.text.arrays import wide_characters

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

# Loads of eight bytes may begin at the last one, and looks at the byte before may begin at the first.
_BEFORE, _AFTER = b"\n" * 4, b"\n" * 9
_INK: Final = bytes(not chr(byte).isspace() or byte >= 0x80 for byte in range(256))


_WIDE_SPACES: Final = "".join(chr(code) for code in range(0x80, 0x3001) if chr(code).isspace())
_ASCII_LETTERS: Final = np.array([byte < 0x80 and chr(byte).isalpha() for byte in range(256)])
_LONG_WORD_BYTES: Final = 64
_FEW: Final = 32
"""One in so many bytes."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Lines, or paragraphs: each a stretch of words."""

    starts: Int64s
    """The word that each begins with."""
    stops: Int64s
    """The word after its last."""
    documents: Int64s
    """The document that each is in."""
    all_documents: int

    def count(self, which: Mask | None = None) -> Int64s:
        """How many, or how many of a mask, lie in each document."""
        documents = self.documents if which is None else self.documents[which]
        return np.bincount(documents, minlength=self.all_documents)


class Layout:
    """Words, lines and paragraphs of some documents; each is worked out when first asked for."""

    def __init__(self, texts: pa.LargeStringArray) -> None:
        self.documents = len(texts)
        together = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
        joined = pc.binary_join(together, pa.scalar("\n", pa.large_string()))[0].as_buffer()
        self.bytes = b"".join((_BEFORE, joined, _AFTER))
        self.data: Bytes = np.frombuffer(self.bytes, dtype=np.uint8)
        sizes = pc.binary_length(texts).to_numpy(zero_copy_only=False) + 1
        self.offsets: Int64s = len(_BEFORE) + np.concatenate(([0], np.cumsum(sizes)))
        """Where each document begins. offsets: (documents + 1,)"""
        self.is_ascii = int(self.data.max()) < 0x80
        ink = np.frombuffer(bytearray(self.bytes.translate(_INK)), dtype=bool)
        for at, size in () if self.is_ascii else wide_characters(self.data, _WIDE_SPACES):
            ink[at[:, None] + np.arange(size)] = False
        # The buffer begins and ends with white space, so starts and stops take turns.
        turns = np.flatnonzero(ink[1:] != ink[:-1]) + 1
        self.word_starts: Int64s = turns[::2]
        """Where each word begins in the bytes. word_starts: (words,)"""
        self.word_stops: Int64s = turns[1::2]
        self.first_words: Int64s = np.searchsorted(self.word_starts, self.offsets)
        """The word that each document begins with. first_words: (documents + 1,)"""
        self.word_counts: Int64s = np.diff(self.first_words)

    def find(self, what: bytes, *, ignore_case: bool = False) -> Int64s:
        """Where some bytes begin, in order. `ignore_case`: of ASCII letters; `what` is in lower case."""
        if len(what) == 1:
            return np.flatnonzero(self.data == what[0])
        text = self.lowered if ignore_case else self.bytes
        return np.array([match.start() for match in re.finditer(re.escape(what), text)], dtype=np.int64)

    def count_at(self, places: Int64s) -> Int64s:
        """How many of some places, in order, lie in each document."""
        return np.diff(np.searchsorted(places, self.offsets))

    def sum_words(self, values: npt.NDArray[np.generic]) -> Int64s:
        """Sums of a value per word over each document."""
        total = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return np.diff(total[self.first_words])

    def per_word(self, numbers: Int64s) -> Floats:
        """Numbers per document over its words; 0 where it has none."""
        return share(numbers, self.word_counts)

    # ---- words ----

    @cached_property
    def word_characters(self) -> Int64s:
        """Characters of each word."""
        if self.is_ascii:
            return self.word_stops - self.word_starts
        within: Mask = (self.data & 0xC0) == 0x80
        if np.count_nonzero(within) * _FEW > len(within):
            before = np.concatenate(([0], np.cumsum(within, dtype=np.int32)))
            return (self.word_stops - before[self.word_stops]) - (self.word_starts - before[self.word_starts])
        # Where they are few it is quicker to find the word that each is in; in wide white space they are in none.
        at = np.flatnonzero(within)
        word = np.searchsorted(self.word_starts, at, side="right") - 1
        word = word[(word >= 0) & (at < self.word_stops[word])]
        return self.word_stops - self.word_starts - np.bincount(word, minlength=len(self.word_starts))

    @cached_property
    def document_of_word(self) -> Int64s:
        return np.repeat(np.arange(self.documents), self.word_counts)

    @cached_property
    def characters_before(self) -> Int64s:
        """Characters of all words before each. (words + 1,)"""
        return np.concatenate(([0], np.cumsum(self.word_characters)))

    @cached_property
    def characters(self) -> Int64s:
        """Characters of the words of each document."""
        return np.diff(self.characters_before[self.first_words])

    @cached_property
    def word_hashes(self) -> Hashes:
        """Equal words have equal hashes, others do not: 64 bits, eight bytes at a time."""
        starts, sizes = self.word_starts, self.word_stops - self.word_starts
        hashes = mix(_load(self.bytes, starts, sizes) + sizes.astype(np.uint64))
        rest = np.flatnonzero((sizes > 8) & (sizes <= _LONG_WORD_BYTES))
        step = 8
        while len(rest):
            hashes[rest] = mix(hashes[rest] ^ _load(self.bytes, starts[rest] + step, sizes[rest] - step))
            step += 8
            rest = rest[sizes[rest] > step]
        for word in np.flatnonzero(sizes > _LONG_WORD_BYTES).tolist():
            hashes[word] = xxhash.xxh3_64_intdigest(self.bytes[self.word_starts[word] : self.word_stops[word]])
        return hashes

    def words_equal(self, word: str) -> Int64s:
        """The words that are this one, in whatever case (of ASCII letters), in order."""
        letters = word.encode()
        at: Int64s = np.flatnonzero(self._lowered_starts == np.uint64(int.from_bytes(letters[:8], "little")))
        at = at[self.word_stops[at] - self.word_starts[at] == len(letters)]
        if len(letters) <= 8:
            return at
        found = [one for one in at.tolist() if self.lowered.startswith(letters, self.word_starts[one])]
        return np.array(found, dtype=np.int64)

    @cached_property
    def _lowered_starts(self) -> Hashes:
        return _load(self.lowered, self.word_starts, self.word_stops - self.word_starts)

    @cached_property
    def lowered(self) -> bytes:
        """The bytes with ASCII letters in lower case."""
        return self.bytes.lower()

    @cached_property
    def has_letter(self) -> Mask:
        """Whether a word has an alphabetic character: most begin with one, the others are searched."""
        found = _is_letter(self.data, self.word_starts)
        rest = np.flatnonzero(~found)
        sizes = self.word_stops[rest] - self.word_starts[rest]
        word = np.repeat(rest, sizes)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        at = self.word_starts[word] + np.arange(len(word)) - first
        found[word[_is_letter(self.data, at)]] = True
        return found

    def words_end_with(self, words: Int64s, what: bytes) -> Mask:
        """Whether some words end with some ink."""
        ends = self.word_stops[words]
        # Before the word is white space, which is not in `what`: a shorter word can't match.
        found = np.ones(len(words), dtype=bool)
        for step, byte in enumerate(reversed(what), start=1):
            found &= self.data[ends - step] == byte
        return found

    # ---- lines and paragraphs ----

    @cached_property
    def _first_word_after_line_end(self) -> Int64s:
        """The first line ends are before the first document."""
        return np.searchsorted(self.word_starts, self.find(b"\n"))

    @cached_property
    def lines(self) -> Stretches:
        """Lines that are not blank."""
        after = self._first_word_after_line_end
        return self._stretches(after[np.flatnonzero(np.diff(after))])

    @cached_property
    def paragraphs(self) -> Stretches:
        """Stretches of lines between blank ones."""
        after = self._first_word_after_line_end
        blank = np.diff(after) == 0
        starts = after[np.flatnonzero(~blank & np.concatenate(([True], blank[:-1])))]
        firsts = self.first_words[:-1][self.word_counts > 0]
        return self._stretches(np.union1d(starts, firsts))

    def _stretches(self, starts: Int64s) -> Stretches:
        stops = np.concatenate((starts[1:], [len(self.word_starts)])) if len(starts) else starts
        return Stretches(starts, stops, self.document_of_word[starts], self.documents)

    def sum_characters(self, starts: Int64s, stops: Int64s) -> Int64s:
        """Characters of each document in some stretches of words."""
        characters = self.characters_before[stops] - self.characters_before[starts]
        sums = np.bincount(self.document_of_word[starts], weights=characters, minlength=self.documents)
        return sums.astype(np.int64)


def _is_letter(data: Bytes, at: Int64s) -> Mask:
    """Whether an alphabetic character begins at some bytes."""
    lead = data[at]
    found: Mask = _ASCII_LETTERS[lead]
    if not len(lead) or int(lead.max()) < 0x80:
        return found
    for first, last, size in ((0xC2, 0xDF, 2), (0xE0, 0xEF, 3), (0xF0, 0xF4, 4)):
        wide = np.flatnonzero((lead >= first) & (lead <= last))
        if len(wide):
            code = (lead[wide] & (0xFF >> (size + 1))).astype(np.int32)
            for step in range(1, size):
                code = (code << 6) | (data[at[wide] + step] & 0x3F)
            found[wide] = _letters()[code]
    return found


def share(numbers: npt.NDArray[np.generic], of: Int64s) -> Floats:
    """Numbers over others; 0 over nothing."""
    shares: Floats = np.divide(numbers, of, out=np.zeros(len(of)), where=of > 0)
    return shares


def _load(data: bytes, at: Int64s, sizes: Int64s) -> Hashes:
    """The first eight bytes at some places as numbers, those beyond `sizes` zero."""
    every = np.ndarray(len(data) - 7, dtype="<u8", buffer=data, strides=(1,))
    unused = (8 * (8 - np.minimum(sizes, 8))).astype(np.uint64)
    return every[at].astype(np.uint64) << unused >> unused


def mix(values: Hashes) -> Hashes:
    """A permutation of 64-bit numbers that leaves no pattern (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def _letters() -> Mask:
    """For every code point whether it is alphabetic: 1 MB, made in a tenth of a second when first needed."""
    return np.fromiter((chr(code).isalpha() for code in range(0x110000)), dtype=bool, count=0x110000)
