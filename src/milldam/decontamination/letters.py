"""Text -> its words as bytes in lower case: what passages and documents are compared by.

Letters, digits and marks of any script count; all else (white space, punctuation, symbols) separates words and becomes
a zero byte, so that texts that differ only in case, punctuation and white space have the same letters. Where a script
is written without spaces (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese, Tibetan; emoji too) each character is a
word. A word of more than 64 bytes counts as several.

Every byte keeps its place, so that what is found can be cut out. Memory: about 12 bytes a byte of text; callers take
slices.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

LONGEST_WORD = 64
BLOCK = 8
"""Bytes of a word that are looked at at once."""
MASKS = np.array([(1 << 8 * size) - 1 for size in range(BLOCK + 1)], dtype=np.uint64)
"""For the first so many bytes of a block."""
_WORD_FACTOR, _ORDER_FACTOR = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


_BMP = 1 << 16


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some texts that lie end to end."""

    folded: Bytes
    """The texts in lower case, 0 for what is in no word; then `BLOCK` zeros."""
    starts: Int64s
    lengths: Int64s

    @property
    def blocks(self) -> Hashes:
        """The first eight bytes of each word, as a number."""
        blocks: Hashes = blocks_at(self.folded)[self.starts]
        blocks &= MASKS.take(self.lengths, mode="clip")
        return blocks


def blocks_at(letters: Bytes) -> Hashes:
    """The eight bytes from every position on, as one number each; a view, no copy."""
    return np.ndarray((len(letters) - BLOCK + 1,), "<u8", letters, strides=(1,))


def words_of(data: bytes | memoryview, offsets: Int64s) -> Words:
    """The words of UTF-8 texts that lie end to end. offsets: (texts + 1,), from 0.

    >>> found = words_of("It’s 5.".encode(), np.array([0, 9]))
    >>> bytes(found.folded), found.starts.tolist(), found.lengths.tolist()
    (b'it\\x00\\x00\\x00s\\x005\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00', [0, 5, 7], [2, 1, 1])
    """
    padded = _fold_ascii(np.frombuffer(data, np.uint8))
    borders = np.concatenate((offsets, _fold_others(padded)))
    inside = np.zeros(len(padded) + 1, np.bool_)  # of the byte before
    np.not_equal(padded, 0, out=inside[1:])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    # Where a text or a character of its own ends and letters go on, one word ends and another begins.
    borders = borders[(borders > 0) & (borders < len(padded) - BLOCK)]
    borders = borders[inside[borders + 1] & inside[borders]]
    if len(borders):
        edges = np.concatenate((edges, np.repeat(_distinct(borders), 2)))
        edges.sort(kind="stable")  # merges two runs that are in order
    starts = np.ascontiguousarray(edges[0::2])
    return _cut_long(Words(padded, starts, edges[1::2] - starts))


def _distinct(values: Int64s) -> Int64s:
    ordered = np.sort(values, kind="stable")
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]


def _fold_ascii(raw: Bytes) -> Bytes:
    """ASCII letters in lower case, 0 for all else that is ASCII, what is beyond as it is; then `BLOCK` zeros.

    No table: a byte takes a fraction of a nanosecond, as each step is done for many of them at once.
    """
    padded = np.zeros(len(raw) + BLOCK, np.uint8)
    folded, beyond = padded[: len(raw)], raw >= 0x80
    # The bit that makes small letters of capitals; digits have it.
    np.bitwise_or(raw, (~beyond).view(np.uint8) << np.uint8(5), out=folded)
    # Below the first letter the difference wraps round to large numbers.
    inside = folded - np.uint8(ord("a")) < 26
    inside |= raw - np.uint8(ord("0")) < 10
    inside |= beyond
    folded *= inside.view(np.uint8)
    return padded


def _fold_others(folded: Bytes) -> Int64s:
    """Lower the letters beyond ASCII in place, and put 0 where there is none; the borders of characters that are words
    of their own."""
    at = _without_marks(folded, np.flatnonzero(folded >= 0xC2))
    if not len(at):
        return at
    two_bytes, three_bytes, alone = _tables()
    lead = folded[at]
    two = at[lead < 0xE0]
    pair = folded[two].astype(np.uint16) << np.uint16(8) | folded[two + 1]
    target = two_bytes[pair]
    changed = np.flatnonzero(target != pair)
    folded[two[changed]], folded[two[changed] + 1] = target[changed] >> np.uint16(8), target[changed] & np.uint16(0xFF)
    three = at[(lead >= 0xE0) & (lead < 0xF0)]
    code = folded[three].astype(np.uint16) << np.uint16(12)
    code |= (folded[three + 1] & np.uint8(0x3F)).astype(np.uint16) << np.uint16(6)
    code |= folded[three + 2] & np.uint8(0x3F)
    target = three_bytes[code]
    changed = np.flatnonzero(target != code)
    for k, byte in enumerate(_three_bytes(target[changed])):
        folded[three[changed] + k] = byte
    own, four = three[alone[code]], at[lead >= 0xF0]
    return np.concatenate((own, own + 3, four, four + 4))


def _without_marks(folded: Bytes, at: Int64s) -> Int64s:
    """Put 0 for U+2000 to U+203F, quotation marks and dashes, of which many texts have more than of all others; what is
    left."""
    marks = folded[at] == 0xE2
    marks &= folded[at + 1] == 0x80
    there = at[marks]
    for k in range(3):
        folded[there + k] = 0
    rest: Int64s = at[~marks]
    return rest


def _three_bytes(code: npt.NDArray[np.uint16]) -> list[npt.NDArray[np.uint16]]:
    """The UTF-8 of some characters; zeros where there is none."""
    there = code != 0
    low = np.uint16(0x3F)
    parts = (
        code >> np.uint16(12) | np.uint16(0xE0),
        code >> np.uint16(6) & low | np.uint16(0x80),
        code & low | np.uint16(0x80),
    )
    return [np.where(there, part, np.uint16(0)) for part in parts]


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """What characters become, 0 for none: of two bytes by both of them, of three by their number; and which of the
    latter are words of their own."""
    two_bytes, three_bytes = np.zeros(_BMP, np.uint16), np.zeros(_BMP, np.uint16)
    for code in range(0x80, _BMP):
        character = chr(code)
        if unicodedata.category(character)[0] not in "LNM":
            continue
        lower = character.lower()
        same = len(lower) == 1 and ord(lower) >= 0x80 and (ord(lower) < 0x800) == (code < 0x800)
        target = lower if same else character
        if code < 0x800:
            two_bytes[int.from_bytes(character.encode(), "big")] = int.from_bytes(target.encode(), "big")
        else:
            three_bytes[code] = ord(target)
    alone = np.zeros(_BMP, np.bool_)
    # Thai, Lao, Tibetan, Burmese; Khmer; Chinese, Japanese, Korean.
    for first, stop in ((0x0E00, 0x10A0), (0x1780, 0x1800), (0x3000, 0xD800)):
        alone[first:stop] = three_bytes[first:stop] != 0
    return two_bytes, three_bytes, alone


def _cut_long(words: Words) -> Words:
    lengths = words.lengths
    if not len(lengths) or lengths.max() <= LONGEST_WORD:
        return words
    pieces = -(-lengths // LONGEST_WORD)
    moved = (np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * LONGEST_WORD
    starts, left = np.repeat(words.starts, pieces) + moved, np.repeat(lengths, pieces) - moved
    return Words(words.folded, starts, np.minimum(left, LONGEST_WORD))


def pair_hashes(blocks: Hashes) -> Hashes:
    """A number for each word together with the next one, whose first bits tell most; the last has no meaning."""
    hashes = blocks * _ORDER_FACTOR
    hashes[:-1] += blocks[1:] * _WORD_FACTOR
    return hashes
