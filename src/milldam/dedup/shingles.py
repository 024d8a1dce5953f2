"""Text -> hashes of its word n-grams (shingles), for a whole batch of documents at once.

A word is a run of letters, digits and non-ASCII characters, in lower case, of at most 64 bytes (a longer run is cut
into such pieces). Where a script is written without spaces (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese,
Tibetan; emoji too) each character is a word. ASCII marks, the Latin-1 signs and general punctuation (U+2000 to
U+2BFF) separate words, so that curly and straight quotes make no difference.

A document of fewer words than `ngram` gives one shingle of all its words; one without words gives none. Repeated
n-grams are repeated here: what takes minima need not care. The hashes depend on the text and `ngram` alone, not on how
documents lie in batches, nor on where a giant one is cut. Kernels in C (native/shingles.c) have the same words and
hashes, in 4 bytes of memory a byte of text; numpy takes about 12, so callers cut batches with `slices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.native import kernel
from milldam.text.arrays import text_offsets

Bytes = npt.NDArray[np.uint8]
Characters = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

SLICE_BYTES = 1 << 18
"""Text taken at once: large enough that a numpy call costs little, small enough for the processor's cache."""
SLICE_DOCUMENTS = 512
"""The same for many short documents, whose signatures are larger than their texts."""
_LONGEST_WORD = 64
_OPEN_WORDS = 128
"""Numbers of 64 bits that the kernel holds of a text that comes in parts."""
_BLOCK = 8
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_BLOCK + 1)], dtype=np.uint64)
_WORD_FACTOR = np.uint64(0x9FB21C651E98DF25)
_ORDER_FACTOR = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Shingles:
    """The n-gram hashes of some documents, end to end."""

    flat: Hashes
    offsets: Int64s
    """Where each document begins in `flat`, and the end: (documents + 1,)."""


def shingle(texts: pa.LargeStringArray, ngram: int) -> Shingles:
    """The shingles of each document of a batch.

    >>> shingle(pa.array(["To be, or not to be", "to be", "..."], pa.large_string()), 3).offsets.tolist()
    [0, 4, 5, 5]
    """
    if found := kernel("shingles", *TEXTS, np.uint64, np.int64):
        data, starts = raw(texts)
        hashes, offsets = np.empty(most_words(data, len(texts)), np.uint64), np.empty(len(starts), np.int64)
        return Shingles(hashes[: found(data, starts, ngram, lower_case(), hashes, offsets)], offsets)
    hashes, offsets = word_hashes(*lowered(texts))
    return ngrams(hashes, offsets, ngram)


TEXTS = (np.uint8, np.int64, int, np.uint32)
"""What a kernel takes to read texts: their bytes, where each begins, words in an n-gram, `lower_case`."""


def most_words(data: Bytes, texts: int) -> int:
    """More words than some texts can have: two that touch have at least four bytes, others a mark between them."""
    return len(data) // 2 + texts


def slices(texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
    """Runs of at most `SLICE_DOCUMENTS` and `SLICE_BYTES`, without a copy; a larger document stands alone."""
    offsets = text_offsets(texts)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(offsets, offsets[start] + SLICE_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), start + SLICE_DOCUMENTS)
        yield texts[start:stop]
        start = stop


def is_giant(texts: pa.LargeStringArray) -> bool:
    """Whether a slice is one document that is larger than a slice should be."""
    offsets = text_offsets(texts)
    return bool(offsets[-1] - offsets[0] > SLICE_BYTES)


def pieces(text: pa.Buffer) -> Iterator[pa.LargeStringArray]:
    """A text in arrays of one piece of at most `SLICE_BYTES`, cut between characters, without a copy."""
    data = np.frombuffer(text, dtype=np.uint8)
    start = 0
    while start < len(data):
        stop = min(start + SLICE_BYTES, len(data))
        while stop < len(data) and data[stop] & 0xC0 == 0x80:
            stop -= 1
        offsets = pa.py_buffer(np.array([0, stop - start], dtype=np.int64))
        yield pa.LargeStringArray.from_buffers(1, offsets, text.slice(start, stop - start))
        start = stop


def raw(texts: pa.LargeStringArray) -> tuple[Bytes, Int64s]:
    """The bytes of the texts, and where each begins."""
    offsets = text_offsets(texts)
    buffer = texts.buffers()[2]
    data = np.frombuffer(buffer, dtype=np.uint8) if buffer is not None else np.empty(0, np.uint8)
    return data[offsets[0] : offsets[-1]], offsets - offsets[0]


def lowered(texts: pa.LargeStringArray) -> tuple[Bytes, Int64s]:
    """The same in lower case. Goes character by character, so cuts do no harm."""
    data, offsets = raw(texts)
    if not len(data):
        return data, offsets
    # Unicode's table gives what ASCII's gives where there is nothing else, at a sixth of its speed.
    return raw(pc.utf8_lower(texts) if data.max() >= 0x80 else pc.ascii_lower(texts))


_LOWERED = 0x20000
"""No character from here on has a lower case."""


@cache
def lower_case() -> Characters:
    """The lower case of each character by its number, as `lowered` has it, for kernels."""
    found = np.arange(_LOWERED, dtype="<u4")
    valid = (found < 0xD800) | (found >= 0xE000)
    text = pc.utf8_lower(pa.scalar(found[valid].tobytes().decode("utf-32-le"))).as_py()
    found[valid] = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return found


# ---- words ----


def word_hashes(data: Bytes, offsets: Int64s) -> tuple[Hashes, Int64s]:
    """A hash for each word of lower-cased texts that lie end to end, and where each text's words begin."""
    starts, lengths = word_bounds(data, offsets)
    return hash_words(data, starts, lengths), np.searchsorted(starts, offsets).astype(np.int64)


def word_bounds(data: Bytes, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Where each word begins, and how many bytes it has."""
    if not len(data):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    inside, borders = _word_bytes(data)
    borders = np.concatenate((borders, offsets))
    borders = borders[(borders > 0) & (borders < len(data))]
    first, last = inside.copy(), inside.copy()
    first[1:] = inside[1:] > inside[:-1]
    last[:-1] = inside[:-1] > inside[1:]
    first[borders] = inside[borders]
    last[borders - 1] = inside[borders - 1]
    starts = np.flatnonzero(first)
    return _cut_long(starts, np.flatnonzero(last) + 1 - starts)


def _word_bytes(data: Bytes) -> tuple[npt.NDArray[np.bool_], Int64s]:
    """Which bytes belong to words, and where words end although the next byte belongs to one as well."""
    # Below the first letter the difference wraps round to large numbers.
    inside = (data - np.uint8(ord("a")) < 26) | (data - np.uint8(ord("0")) < 10)
    if data.max() < 0x80:
        return inside, np.empty(0, np.int64)
    inside |= data >= 0x80
    at = np.flatnonzero(data >= 0xC2)  # where a character of more than one byte begins
    lead, second = data[at], data[np.minimum(at + 1, len(data) - 1)]
    size = 2 + (lead >= 0xE0).astype(np.int64) + (lead >= 0xF0)
    mark = (lead == 0xC2) | ((lead == 0xE2) & (second < 0xB0))
    for k in range(3):
        inside[(at + k)[mark & (size > k)]] = False
    alone = _stands_alone(lead, second)
    return inside, np.concatenate((at[alone], (at + size)[alone]))


def _stands_alone(lead: Bytes, second: Bytes) -> npt.NDArray[np.bool_]:
    """Characters of scripts without spaces, by the first two bytes of their UTF-8."""
    east_asian = (lead >= 0xE3) & (lead <= 0xED)
    thai_lao_tibetan = (lead == 0xE0) & (second >= 0xB8)
    burmese_khmer = (lead == 0xE1) & ((second <= 0x82) | (second == 0x9E) | (second == 0x9F))
    alone: npt.NDArray[np.bool_] = east_asian | thai_lao_tibetan | burmese_khmer | (lead >= 0xF0)
    return alone


def _cut_long(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Cut words that are too long (of a binary file, say), so that the end of a giant text is never far behind."""
    if not len(lengths) or lengths.max() <= _LONGEST_WORD:
        return starts, lengths
    pieces = -(-lengths // _LONGEST_WORD)
    before = np.cumsum(pieces) - pieces
    moved = (np.arange(int(pieces.sum())) - np.repeat(before, pieces)) * _LONGEST_WORD
    return np.repeat(starts, pieces) + moved, np.minimum(np.repeat(lengths, pieces) - moved, _LONGEST_WORD)


def hash_words(data: Bytes, starts: Int64s, lengths: Int64s) -> Hashes:
    """Eight bytes of each word at a time; longer words take more rounds, at most eight."""
    padded = np.zeros(len(data) + _BLOCK, dtype=np.uint8)
    padded[: len(data)] = data
    # The eight bytes from every position on, as one number each; a view, no copy.
    blocks: Hashes = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    hashes = _fold(blocks[starts] & _MASKS[np.minimum(lengths, _BLOCK)])
    longer = np.flatnonzero(lengths > _BLOCK)
    for done in range(_BLOCK, _LONGEST_WORD, _BLOCK):
        longer = longer[lengths[longer] > done]
        if not len(longer):
            break
        block = blocks[starts[longer] + done] & _MASKS[np.minimum(lengths[longer] - done, _BLOCK)]
        hashes[longer] = _fold(hashes[longer] * _ORDER_FACTOR + block)
    return hashes


def _fold(values: Hashes) -> Hashes:
    values = values ^ (values >> np.uint64(32))
    values *= _WORD_FACTOR
    values ^= values >> np.uint64(29)
    return values


def mix(values: Hashes) -> Hashes:
    """Spread numbers over all 64 bits, one to one (two rounds of multiply and shift)."""
    values = _fold(values)
    values *= _ORDER_FACTOR
    values ^= values >> np.uint64(32)
    return values


# ---- n-grams ----


def ngrams(words: Hashes, offsets: Int64s, ngram: int) -> Shingles:
    """The hashes of neighbouring words put together, within each document. offsets: (documents + 1,)."""
    counts = np.diff(offsets)
    if not len(words):
        return Shingles(words, np.zeros(len(counts) + 1, np.int64))
    chained, ends = _chain(words, ngram), offsets[1:]
    keep = np.ones(len(words), dtype=bool)
    for back in range(1, ngram):
        keep[(ends - back)[counts >= back]] = False  # here an n-gram would run over the document's end
        short = offsets[:-1][counts == back]
        chained[short] = _chain_few(words, short, back)
    keep[offsets[:-1][counts > 0]] = True
    sizes = np.where(counts > 0, np.maximum(counts - (ngram - 1), 1), 0)
    return Shingles(mix(chained[keep]), np.concatenate(([0], np.cumsum(sizes))))


def _chain(words: Hashes, ngram: int) -> Hashes:
    """For each word, itself and the next ones; the last few of all have no meaning."""
    chained = words.copy()
    for k in range(1, min(ngram, len(words))):
        chained *= _ORDER_FACTOR
        chained[: len(words) - k] += words[k:]
    return chained


def _chain_few(words: Hashes, starts: Int64s, count: int) -> Hashes:
    chained = words[starts]
    for k in range(1, count):
        chained = chained * _ORDER_FACTOR + words[starts + k]
    return chained


class OpenText:
    """The shingles of one document that comes in parts: together the same as those of the whole.

    Holds back the last word, since it may go on, and the hashes of the last n-1 words.
    """

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._tail: Bytes = np.empty(0, np.uint8)
        self._words: Hashes = np.empty(0, np.uint64)
        self._any = False
        self._state: Hashes = np.zeros(_OPEN_WORDS, np.uint64)  # the same for the kernel

    def feed(self, part: pa.LargeStringArray) -> Hashes:
        """The n-grams that are complete with this part (an array of one text, at most `SLICE_BYTES`)."""
        if (found := self._native(raw(part)[0], last=False)) is not None:
            return found
        data = np.concatenate((self._tail, lowered(part)[0]))
        starts, lengths = word_bounds(data, np.array([0, len(data)]))
        if len(starts) and starts[-1] + lengths[-1] == len(data):
            self._tail = data[starts[-1] :].copy()
            starts, lengths = starts[:-1], lengths[:-1]
        else:
            self._tail = data[:0].copy()
        return self._add(hash_words(data, starts, lengths))

    def finish(self) -> Hashes:
        """What was held back."""
        if (found := self._native(self._tail, last=True)) is not None:
            return found
        starts, lengths = word_bounds(self._tail, np.array([0, len(self._tail)]))
        found = self._add(hash_words(self._tail, starts, lengths))
        if self._any or not len(self._words):
            return found
        return ngrams(self._words, np.array([0, len(self._words)]), self._ngram).flat

    def _native(self, part: Bytes, *, last: bool) -> Hashes | None:
        shingle_part = kernel("shingle_part", np.uint64, np.uint8, int, int, np.uint32, np.uint64)
        if shingle_part is None:
            return None
        hashes = np.empty(most_words(part, 1) + 1, np.uint64)
        given = self._state, part, last, self._ngram, lower_case(), hashes
        return hashes[: shingle_part(*given)]

    def _add(self, words: Hashes) -> Hashes:
        words = np.concatenate((self._words, words))
        self._words = words[max(0, len(words) - self._ngram + 1) :].copy()
        if len(words) < self._ngram:
            return words[:0]
        self._any = True
        return ngrams(words, np.array([0, len(words)]), self._ngram).flat
