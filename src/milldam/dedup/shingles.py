"""Text -> hashes of its word n-grams (shingles), for a whole batch of documents at once.

A word is a run of letters, digits and non-ASCII characters, in lower case, of at most 64 bytes (a longer run is cut
into such pieces). Where a script is written without spaces (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese,
Tibetan; emoji too) each character is a word. ASCII marks, the Latin-1 signs and general punctuation (U+2000 to
U+2BFF) separate words, so that curly and straight quotes make no difference.

A document of fewer words than `ngram` gives one shingle of all its words; one without words gives none. Repeated
n-grams are repeated here: what takes minima need not care. The hashes depend on the text and `ngram` alone, not on how
documents lie in batches. Made in C (native/shingles.c), in 4 bytes of memory a byte
of text.
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
    data, starts = raw(texts)
    hashes, offsets = np.empty(most_words(data, len(texts)), np.uint64), np.empty(len(starts), np.int64)
    made = kernel("shingles", *TEXTS, np.uint64, np.int64)(data, starts, ngram, lower_case(), hashes, offsets)
    return Shingles(hashes[:made], offsets)


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


def raw(texts: pa.LargeStringArray) -> tuple[Bytes, Int64s]:
    """The bytes of the texts, and where each begins."""
    offsets = text_offsets(texts)
    buffer = texts.buffers()[2]
    data = np.frombuffer(buffer, dtype=np.uint8) if buffer is not None else np.empty(0, np.uint8)
    return data[offsets[0] : offsets[-1]], offsets - offsets[0]


_LOWERED = 0x20000
"""No character from here on has a lower case."""


@cache
def lower_case() -> Characters:
    """The lower case of each character by its number, for kernels."""
    found = np.arange(_LOWERED, dtype="<u4")
    valid = (found < 0xD800) | (found >= 0xE000)
    text = pc.utf8_lower(pa.scalar(found[valid].tobytes().decode("utf-32-le"))).as_py()
    found[valid] = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return found


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
