"""Texts -> shingles (hashes of word n-grams) -> MinHash signatures, whose share of equal places estimates how alike two
documents are.

A word is a run of letters, digits and non-ASCII characters, in lower case, of at most 64 bytes (a longer run is cut
into such pieces). Where a script is written without spaces (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese,
Tibetan; emoji too) each character is a word. ASCII marks, the Latin-1 signs and general punctuation (U+2000 to
U+2BFF) separate words, so that curly and straight quotes make no difference. A document of fewer words than `ngram`
gives one shingle of all its words; one without words gives none. The hashes depend on the text and `ngram` alone.

One permutation instead of hundreds: each shingle's hash falls into one of `bands x rows` bins, and each bin keeps the
smallest. A bin that stays empty (in short documents many do) borrows from the first bin with something in it, in an
order that is random but fixed for each bin. Of a bin one byte is stored, a hash of its smallest shingle with a factor
of the bin's own; two unlike documents agree in one place of 254. The probability that two signatures agree in a place
is their Jaccard similarity, as with many permutations, at a cost that does not grow with the signature. Measured with
32 x 8 values on pairs at similarities 0.5 to 0.8 (`benchmarks/near.py`): the estimate is off by less than 0.002 on
average; its standard deviation is 0.9 times that of 256 true permutations for documents of 300 words and more, 1.15
times for those of 30.

Made in C (native/shingles.c). On disk the signatures of a unit are a file of `bands x rows` bytes a document, not
compressed: they look like noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.dedup.keys import Hashes, Int64s, mapped, numbered
from milldam.native import kernel
from milldam.rules import NearRules
from milldam.text.arrays import text_offsets

Bytes = npt.NDArray[np.uint8]
Characters = npt.NDArray[np.uint32]

SLICE_BYTES = 1 << 18
"""Text taken at once: large enough that a numpy call costs little, small enough for the processor's cache."""
SLICE_DOCUMENTS = 512
"""The same for many short documents, whose signatures are larger than their texts."""
_WORD_FACTOR = np.uint64(0x9FB21C651E98DF25)
_ORDER_FACTOR = np.uint64(0xD6E8FEB86659FD93)


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


def mix(values: Hashes) -> Hashes:
    """Spread numbers over all 64 bits, one to one (two rounds of multiply and shift)."""
    values = values ^ (values >> np.uint64(32))
    values *= _WORD_FACTOR
    values ^= values >> np.uint64(29)
    values *= _ORDER_FACTOR
    values ^= values >> np.uint64(32)
    return values


# ---- signatures ----

Signatures = npt.NDArray[np.uint8]
"""(documents, bands x rows); a document without words has `NO_WORDS` in every place."""

NO_WORDS = 0xFF
CHANCE = (254 + 2 * 2) / 2**16
"""How often unlike values agree: 256 values, of which the last is merged with the one before; so `NO_WORDS` is free."""
_FAR, _ROWS_AT_ONCE = 64, 1 << 14
"""Of so many rows of a file, one is wanted, or less; so many are looked up at a time: they lie in the page cache."""
_BINS = (np.int16, np.int16, np.uint64, np.uint64, np.int16)
"""What the kernel takes to fill bins: whom they ask, when, their factors, and room for two numbers of each."""


class MinHasher:
    """One per worker."""

    def __init__(self, rules: NearRules) -> None:
        self.size = rules.bands * rules.rows
        self._ngram = rules.ngram
        numbers = np.arange(self.size * self.size, dtype=np.uint64).reshape(self.size, self.size)
        scores = mix(numbers + np.uint64(1))
        np.fill_diagonal(scores, 0)  # a bin with something in it borrows from itself
        self._order = np.argsort(scores, axis=1).astype(np.int16)
        # ranks[lender, borrower]: how many bins the borrower asks before this lender
        self._ranks = np.ascontiguousarray(np.argsort(self._order, axis=1).T.astype(np.int16))
        self._factors = mix(~np.arange(self.size, dtype=np.uint64)) | np.uint64(1)

    def signatures(self, texts: pa.LargeStringArray) -> Signatures:
        """A row for each document of the batch."""
        rows = np.empty((len(texts), self.size), np.uint8)
        bins = self._order, self._ranks, self._factors, *(np.empty(self.size, kind) for kind in _BINS[3:])
        kernel("signatures", *TEXTS, *_BINS, np.uint8)(*raw(texts), self._ngram, lower_case(), *bins, rows)
        return rows


# ---- on disk ----


def unit_name(unit: int) -> str:
    """The name of a unit in file names; below 0 it is no unit: -1 - k is the run k of the index.

    >>> unit_name(12), unit_name(-1)
    ('0000012', 'index-00000')
    """
    return f"{unit:07d}" if unit >= 0 else f"index-{-1 - unit:05d}"


def signature_files(folder: Path) -> dict[int, Path]:
    """The signature files of a folder by unit, in plan order; before them the runs of the index."""
    found: dict[int, Path] = {}
    for path in folder.glob("signatures-*.bin"):
        *kind, number = path.stem.split("-")[1:]
        found[-1 - int(number) if kind else int(number)] = path
    return dict(sorted(found.items()))


class SignatureFiles:
    """The signatures of all units of a folder, as one long table in plan order that is read in parts.

    A document's place in it is its position. Files are mapped while they are read, one at a time.
    """

    def __init__(self, folder: Path, size: int) -> None:
        files = signature_files(folder)
        self.size = size
        self.units = np.array(list(files), dtype=np.int64)
        self._paths = list(files.values())
        rows = [path.stat().st_size // size for path in self._paths]
        self.bases = np.concatenate(([0], np.cumsum(rows))).astype(np.int64)  # (units + 1,)
        self.documents = int(self.bases[-1])

    def blocks(self, rows: int) -> Iterator[tuple[int, Signatures]]:
        """(first position, signatures) of at most `rows` documents at a time, in plan order."""
        for path, (base, stop) in zip(self._paths, pairwise(self.bases.tolist()), strict=True):
            with path.open("rb") as file:
                for start in range(base, stop, rows):
                    # Not by np.fromfile, which takes an error for the end of the file.
                    block = np.frombuffer(file.read(min(rows, stop - start) * self.size), np.uint8)
                    yield start, block.reshape(-1, self.size)

    def agreements(self, first: Int64s, second: Int64s) -> Int64s:
        """In how many places the signatures of pairs of positions are equal."""
        positions, where = numbered(np.concatenate((first, second)))
        rows, one, other = np.empty((len(positions), self.size), np.uint8), where[: len(first)], where[len(first) :]
        stops = np.searchsorted(positions, self.bases).tolist()
        for file, (start, stop) in enumerate(pairwise(stops)):
            # Few and far between, rows are asked for one by one: reading ahead would read the whole file for them.
            few = (stop - start) * _FAR < self.bases[file + 1] - self.bases[file]
            for at in range(start, stop, _ROWS_AT_ONCE):
                part = positions[at : min(stop, at + _ROWS_AT_ONCE)] - self.bases[file]
                wanted = (part * self.size, (part + 1) * self.size) if few else None
                table = mapped(self._paths[file], np.uint8, wanted=wanted).reshape(-1, self.size)
                rows[at : at + len(part)] = table[part]
        equal = np.empty(len(first), np.int64)
        kernel("agreements", np.uint8, int, np.int64, np.int64, np.int64)(rows, self.size, one, other, equal)
        return equal

    def named(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """(unit, row) of the documents at some positions."""
        files = np.searchsorted(self.bases, positions, side="right") - 1
        return self.units[files], positions - self.bases[files]

    def positions(self, units: Int64s, rows: Int64s) -> Int64s:
        """Of documents by their names."""
        places: Int64s = self.bases[np.searchsorted(self.units, units)] + rows
        return places

    def before(self, unit: int) -> int:
        """How many documents there are before the first of a unit."""
        return int(self.bases[np.searchsorted(self.units, unit)])
