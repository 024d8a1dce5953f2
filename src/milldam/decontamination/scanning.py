"""Documents -> the stretches of them that are n-grams of a passage, letter by letter.

The sixteen letters from each word on, whatever lies between and inside of words, are looked up in a small table and
then among the seeds; the letters around are compared with those of the n-grams that have the seed. An n-gram is
reported where a document has it for the first time, so that time and memory are linear however often a text repeats
itself. The matches of a document depend on its text and the index alone, not on how it comes in batches or parts.

Memory: 12 bytes a byte of the largest document or part, and a byte for each n-gram of the evaluation sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from milldam import native
from milldam.decontamination.index import SEED_LETTERS, Index, shift_of
from milldam.decontamination.letters import Int64s, Room
from milldam.text.arrays import text_offsets

AT_ONCE = 1 << 15
"""Bytes of text; the processor's cache holds what is made of them."""
KEPT_BYTES = 1 << 16
"""Of a document that comes in parts, so much is looked at again with the next one: no n-gram is spread over more."""
SCANNING_BYTES = 40 * 10**6
"""What a process takes to scan, as measured: documents of 2 MB that have matches, of words of one letter."""
_EXPECTED = 256
"""Runs of n-grams that are found at once, as a rule."""


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
        self._index, self._room, self._open = index, Room(), False
        if index.passages:
            tables = np.uint64, int, np.uint64, *[np.int64] * 4, np.uint8, np.bool_, np.uint32, np.int64, np.int64
            room = *Room.TYPES, np.uint8, np.uint32, np.uint32, int, int
            self._kernel = native.kernel("matches", *room, *tables, np.uint8, np.int64)
            self._seen = np.zeros(len(index.ignored), np.uint8)
            self._letters, self._found = np.empty(0, np.uint8), np.empty((_EXPECTED, 7), np.int64)

    def whole(self, texts: pa.LargeStringArray) -> Iterator[Match]:
        """The matches of whole documents, in order; `document` is a position among them."""
        if self._index.passages:
            offsets = text_offsets(texts)
            data = memoryview(texts.buffers()[2] or b"")[offsets[0] : offsets[-1]]
            yield from self._matches(data, offsets - offsets[0], open=False)

    def part(self, data: bytes, *, last: bool) -> list[Match]:
        """The matches of a part of one document, but what its parts before had."""
        if not self._index.passages:
            return []
        found = list(self._matches(data, np.array([0, len(data)]), open=not last))
        self._open = True
        if last:
            self.cancel()
        return found

    def forget(self, match: Match) -> None:
        """Find it again, in the next part."""
        self._seen[match.first : match.stop] = 0

    def cancel(self) -> None:
        """Forget the document that is open."""
        if self._open:
            self._seen[:] = 0
            self._open = False

    def _matches(self, data: bytes | memoryview, offsets: Int64s, *, open: bool) -> Iterator[Match]:
        found = self._find(data, offsets, open=open)
        found[:, 5:] -= offsets[found[:, :1]]
        document, passage, beside, first, stop, start, end = found[np.lexsort(found.T[[3, 2, 1, 0]])].T
        # What one seed led to goes on where another one's begins.
        another = (np.diff(document) != 0) | (np.diff(passage) != 0) | (np.diff(beside) != 0) | (first[1:] > stop[:-1])
        begins = np.flatnonzero(np.concatenate((np.ones(min(1, len(found)), bool), another)))
        ends = np.concatenate((begins[1:], [len(found)])) - 1 if len(begins) else begins
        columns = document[begins], passage[begins], first[begins], stop[ends], start[begins], end[ends]
        for values in zip(*(one.tolist() for one in columns), strict=True):
            yield Match(*values)

    def _find(self, data: bytes | memoryview, offsets: Int64s, *, open: bool) -> Int64s:
        """(runs, 7): document, passage, letters beside each other, n-grams from and to, bytes from and to."""
        index, at_once = self._index, max(AT_ONCE, int(np.diff(offsets).max(initial=0)))
        room = self._room.arguments(data, offsets, at_once)
        if len(self._letters) < len(self._room.starts) + SEED_LETTERS:
            size = len(self._room.starts)
            self._letters = np.empty(size + SEED_LETTERS, np.uint8)
            self._before, self._likely = np.empty(size, np.uint32), np.empty(size, np.uint32)
        seeds = index.seed_keys, index.seed_letters, index.seed_passages, index.seed_grams, index.seed_stops
        passages = index.letters, index.ignored, index.edges, index.word_bounds, index.gram_bounds
        tables = index.key_bits, int(shift_of(index.key_bits)), *seeds, *passages
        arguments = *room, self._letters, self._before, self._likely, at_once, open, *tables, self._seen
        while (count := self._kernel(*arguments, self._found)) < 0:
            self._found = np.empty((4 * len(self._found), 7), np.int64)
        return self._found[:count].copy()
