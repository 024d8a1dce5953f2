"""Text -> its words as bytes in lower case: what passages and documents are compared by.

Letters, digits and marks of any script count; all else (white space, punctuation, symbols) separates words and becomes
a zero byte, so that texts that differ only in case, punctuation and white space have the same letters. Where a script
is written without spaces (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese, Tibetan; emoji too) each character is a
word. A word of more than 64 bytes counts as several, each of whole characters that have the next 64 bytes.

Every byte keeps its place, so that what is found can be shown. Near-dedup's words (`dedup/minhash.py`) are found by
another rule: nothing is shown there, so lower case may have another length, and every character beyond ASCII that is
no general punctuation is a letter. Signatures in the indexes of earlier runs go by that rule, so it stays.

Memory: 10 bytes a byte of text; callers take slices.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam import native

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

LONGEST_WORD = 64
BLOCK = 8
"""Letters that are looked at at once."""
_PADDING = 192
_BMP = 1 << 16


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some texts that lie end to end."""

    folded: Bytes
    """The texts in lower case, 0 for what is in no word; then 192 zeros."""
    starts: Int64s
    stops: Int64s

    @property
    def lengths(self) -> Int64s:
        return self.stops - self.starts


def blocks_at(letters: Bytes) -> Hashes:
    """The eight bytes from every position on, as one number each; a view, no copy."""
    return np.ndarray((len(letters) - BLOCK + 1,), "<u8", letters, strides=(1,))


def letters_in(words: Words) -> Bytes:
    """The bytes of words, end to end."""
    return np.frombuffer(words.folded.tobytes().translate(None, b"\0"), np.uint8)


class Room:
    """What kernels are given of texts, and the memory that they write to. It is kept for the next texts: taking it anew
    costs as much as the work."""

    TYPES = (np.uint8, np.int64, np.uint16, np.bool_, np.uint8, np.uint64, np.uint32, np.uint32)

    def __init__(self) -> None:
        self.folded = np.empty(0, np.uint8)

    def arguments(self, data: bytes | memoryview, offsets: Int64s, at_once: int) -> tuple[npt.NDArray[Any], ...]:
        """UTF-8 texts that lie end to end, so many bytes of them at once. offsets: (texts + 1,)."""
        if len(self.folded) < at_once + _PADDING:
            self.folded = np.empty(at_once + _PADDING, np.uint8)
            self._blocks = np.empty(3 * (at_once // 64 + 3), np.uint64)
            self.starts, self.stops = (np.empty(at_once + 8, np.uint32) for _ in range(2))
        raw = np.frombuffer(data, np.uint8)
        return raw, offsets, *letter_tables(), self.folded, self._blocks, self.starts, self.stops


def words_of(data: bytes | memoryview, offsets: Int64s) -> Words:
    """The words of UTF-8 texts that lie end to end. offsets: (texts + 1,).

    >>> found = words_of("It’s 5.".encode(), np.array([0, 9]))
    >>> bytes(found.folded[:9]), found.starts.tolist(), found.stops.tolist()
    (b'it\\x00\\x00\\x00s\\x005\\x00', [0, 5, 7], [2, 6, 8])
    """
    room = Room()
    count = native.kernel("words", *Room.TYPES)(*room.arguments(data, offsets, len(data)))
    return Words(room.folded, room.starts[:count].astype(np.int64), room.stops[:count].astype(np.int64))


@functools.cache
def letter_tables() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """By the number of a character, as far as two bytes hold it: what it becomes, 0 for what is in no word; and
    whether it is a word of its own."""
    folds = np.zeros(_BMP, np.uint16)
    for code in range(_BMP):
        character = chr(code)
        if unicodedata.category(character)[0] in "LNM":
            lower = character.lower()
            # Every byte keeps its place.
            same = len(lower) == 1 and len(lower.encode()) == len(character.encode())
            folds[code] = ord(lower if same else character)
    alone = np.zeros(_BMP, np.bool_)
    # Thai, Lao, Tibetan, Burmese; Khmer; Chinese, Japanese, Korean.
    for first, stop in ((0x0E00, 0x10A0), (0x1780, 0x1800), (0x3000, 0xD800)):
        alone[first:stop] = folds[first:stop] != 0
    return folds, alone
