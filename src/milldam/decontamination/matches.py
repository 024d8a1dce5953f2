"""Documents -> the stretches of them that are n-grams of a passage, letter by letter: a file of these for each unit.

The sixteen letters from each word on, whatever lies between and inside of words, are looked up in a small table and
then among the seeds; the letters around are compared with those of the n-grams that have the seed. An n-gram is
reported where a document has it for the first time, so that time and memory are linear however often a text repeats
itself. The matches of a document depend on its text and the index alone, not on how it comes in batches.

Memory: 12 MB, a byte for each n-gram of the evaluation sets, and the matches of one unit, which are few unless the unit
is made of evaluation sets. Disk: 56 bytes a match, and at most `EXCERPT_BYTES` of text for the first `EXCERPTS` matches
of each passage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam import native
from milldam.decontamination.index import SEED_LETTERS, Index, map_arrays, shift_of, write_arrays
from milldam.decontamination.letters import Int64s, Room
from milldam.text.arrays import Mask, text_offsets

AT_ONCE = 1 << 15
"""Bytes of text; the processor's cache holds what is made of them."""
LONG_BYTES, OVERLAP_BYTES = 1 << 20, 1 << 16
"""A longer document is looked at in pieces that overlap by so much: no n-gram is spread over more."""
SCANNING_BYTES = 40 * 10**6
"""What a process takes to scan, as measured: documents of 2 MB that have matches, of words of one letter."""
EXCERPT_BYTES, EXCERPTS = 600, 50
_EXPECTED = 256
"""Runs of n-grams that are found at once, as a rule."""
_SPACE = re.compile(rb"\s")
_COLUMNS = ("row", "passage", "first", "stop", "start", "end", "excerpt")


class Scanner:
    """Holds documents against an index."""

    def __init__(self, index: Index) -> None:
        self._index, self._room = index, Room()
        tables = np.uint64, int, np.uint64, *[np.int64] * 4, np.uint8, np.bool_, np.uint32, np.int64, np.int64
        room = *Room.TYPES, np.uint8, np.uint32, np.uint32, int, int
        self._kernel = native.kernel("matches", *room, *tables, np.uint8, np.int64)
        self._seen = np.zeros(len(index.ignored), np.uint8)
        self._letters, self._found = np.empty(0, np.uint8), np.empty((_EXPECTED, 7), np.int64)

    def find(self, texts: pa.LargeStringArray) -> Int64s:
        """The matches of some documents, in order: (6, matches). A match is the position of a document, the passage,
        the first of its n-grams there and the one behind the last, counted over all passages, the bytes from and to."""
        found, offsets, done = [np.empty((6, 0), np.int64)], text_offsets(texts), 0
        data = memoryview(texts.buffers()[2] or b"")
        for long in [*np.flatnonzero(np.diff(offsets) > LONG_BYTES).tolist(), len(texts)]:
            if long > done:
                inner = offsets[done : long + 1]
                found.append(self._matches(data[inner[0] : inner[-1]], inner - inner[0], open=False))
                found[-1][0] += done
            if long < len(texts):
                found.append(self._long(data[offsets[long] : offsets[long + 1]]))
                found[-1][0] += long
            done = long + 1
        return np.concatenate(found, axis=1)

    def _long(self, data: memoryview) -> Int64s:
        """The matches of one document, piece by piece. What a piece has near its end may go on: the next one tells."""
        found, start = [], 0
        while start < len(data):
            stop = _behind_space(data, start + LONG_BYTES)
            last = stop == len(data)
            again = stop if last else _behind_space(data, stop - OVERLAP_BYTES)
            piece = data[start:stop]
            matches = self._matches(piece, np.array([0, len(piece)]), open=not last)
            matches[4:] += start
            here = matches[4] < again
            for _, _, first, beyond, *_ in matches[:, ~here].T.tolist():
                self._seen[first:beyond] = 0
            found.append(matches[:, here])
            start = again
        self._seen[:] = 0
        return np.concatenate(found, axis=1)

    def _matches(self, data: memoryview, offsets: Int64s, *, open: bool) -> Int64s:
        """`open`: the last document goes on; what it has had is not found again."""
        found = self._runs(data, offsets, open=open)
        found[:, 5:] -= offsets[found[:, :1]]
        document, passage, beside, first, stop, start, end = found[np.lexsort(found.T[[3, 2, 1, 0]])].T
        # What one seed led to goes on where another one's begins.
        another = (np.diff(document) != 0) | (np.diff(passage) != 0) | (np.diff(beside) != 0) | (first[1:] > stop[:-1])
        begins = np.flatnonzero(np.concatenate((np.ones(min(1, len(found)), bool), another)))
        ends = np.append(begins[1:], len(found))[: len(begins)] - 1
        return np.stack((document[begins], passage[begins], first[begins], stop[ends], start[begins], end[ends]))

    def _runs(self, data: memoryview, offsets: Int64s, *, open: bool) -> Int64s:
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


def _behind_space(data: memoryview, at: int) -> int:
    """Where the first word that begins behind some byte begins, or the end."""
    space = _SPACE.search(data, at)
    return len(data) if space is None else space.end()


def match_path(folder: Path, name: str) -> Path:
    """The file of the matches of a unit, by its key or its number."""
    return folder / f"matches-{name}.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Of one unit; an entry a match, ordered by document and passage."""

    documents: int
    row: Int64s
    passage: Int64s
    first: Int64s
    stop: Int64s
    start: Int64s
    end: Int64s
    excerpt: Int64s
    """Where its text begins in `texts`; -1: it has none."""
    texts: bytes

    @classmethod
    def read(cls, path: Path) -> Matches:
        arrays, facts = map_arrays(path)
        columns = {name: arrays[name] for name in _COLUMNS}
        return cls(documents=facts["documents"], texts=arrays["texts"].tobytes(), **columns)

    def only(self, which: Mask) -> Matches:
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def text(self, number: int) -> str | None:
        """The text of the document there, as far as it was kept."""
        at = int(self.excerpt[number])
        if at < 0:
            return None
        size = int.from_bytes(self.texts[at : at + 2], "little")
        return self.texts[at + 2 : at + 2 + size].decode("utf-8", "ignore")


class MatchFinder:
    """Gathers the matches of one unit."""

    def __init__(self, scanner: Scanner, path: Path) -> None:
        self._scanner, self.path = scanner, path
        self._columns = [np.empty((len(_COLUMNS), 0), np.int64)]
        self._texts = bytearray()
        self._kept: Counter[int] = Counter()
        self._documents = 0

    def add(self, texts: pa.LargeStringArray, first_row: int, wanted: Mask) -> None:
        """The documents first_row, first_row + 1, ..., so far as they are wanted."""
        self._documents += int(np.count_nonzero(wanted))
        found = self._scanner.find(texts)
        found = found[:, wanted[found[0]]]
        if found.size:
            excerpts = [self._excerpt(texts, *match) for match in found[[0, 1, 4, 5]].T.tolist()]
            found[0] += first_row
            self._columns.append(np.concatenate((found, [excerpts])))

    def _excerpt(self, texts: pa.LargeStringArray, document: int, passage: int, start: int, end: int) -> int:
        """Keep the words of a match, unless there are enough of its passage; where they begin, or -1."""
        if self._kept[passage] >= EXCERPTS:
            return -1
        self._kept[passage] += 1
        at = len(self._texts)
        words = bytes(memoryview(texts[document].as_buffer())[start : min(end, start + EXCERPT_BYTES)])
        self._texts += len(words).to_bytes(2, "little") + words
        return at

    def commit(self) -> dict[str, dict[str, Any]]:
        columns = np.concatenate(self._columns, axis=1)
        columns = columns[:, np.lexsort(columns[[2, 1, 0]])]
        arrays = dict(zip(_COLUMNS, columns, strict=True)) | {"texts": np.frombuffer(self._texts, np.uint8)}
        return {self.path.name: write_arrays(self.path, arrays, durable=False, documents=self._documents)}


def counted_grams(index: Index, units: Iterable[Matches]) -> tuple[Int64s, int]:
    """In how many documents each n-gram occurs; and how many documents there are."""
    changes, documents = np.zeros(int(index.gram_bounds[-1]) + 1, np.int64), 0
    for unit in units:
        documents += unit.documents
        _, first, stop = joined(unit)
        np.add.at(changes, first, 1)
        np.add.at(changes, stop, -1)
    return np.cumsum(changes)[:-1], documents


def joined(unit: Matches) -> tuple[Int64s, Int64s, Int64s]:
    """Runs of n-grams that each document has of each passage, none of them twice: where among the matches each run's
    document and passage begin, and its first n-gram and the one behind its last."""
    another = (np.diff(unit.row, prepend=-1) != 0) | (np.diff(unit.passage, prepend=-1) != 0)
    group = np.cumsum(another) - 1
    # How far the matches before reach, in the same document and passage: n-grams of a passage lie below the next one's.
    shift = group * (int(unit.stop.max(initial=0)) + 1)
    reached = np.maximum.accumulate(unit.stop + shift)
    before = np.concatenate(([-1], reached))[:-1]
    first = np.maximum(unit.first + shift, before)
    stop = unit.stop + shift
    new = first < stop
    owner = np.flatnonzero(another)[group]
    return owner[new], (first - shift)[new], (stop - shift)[new]
