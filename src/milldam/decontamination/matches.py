"""What the first pass leaves of a unit: its matches, with the words of the documents, and how many documents it has.

56 bytes a match, and at most `EXCERPT_BYTES` of text for the first `EXCERPTS` matches of each passage. Holds the
matches of one unit, which are few unless the unit is made of evaluation sets.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.decontamination.array_file import map_arrays, write_arrays
from milldam.decontamination.index import Index
from milldam.decontamination.letters import Int64s, words_of
from milldam.decontamination.scanning import KEPT_BYTES, Match, Scanner
from milldam.text.arrays import Mask

EXCERPT_BYTES, EXCERPTS = 600, 50
_COLUMNS = ("row", "passage", "first", "stop", "start", "end", "excerpt")


def match_path(folder: Path, name: str) -> Path:
    """Where the matches of a unit are, by its key or its number."""
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
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        return Matches(documents=self.documents, texts=self.texts, **columns)

    def text(self, number: int) -> str | None:
        """What the document says there, as far as it was kept."""
        at = int(self.excerpt[number])
        if at < 0:
            return None
        size = int.from_bytes(self.texts[at : at + 2], "little")
        return self.texts[at + 2 : at + 2 + size].decode("utf-8", "ignore")


class MatchFinder:
    """Gathers the matches of one unit, document by document."""

    def __init__(self, scanner: Scanner, path: Path) -> None:
        self._scanner, self.path = scanner, path
        self._columns = {name: array("q") for name in _COLUMNS}
        self._texts = bytearray()
        self._kept: Counter[int] = Counter()
        self._documents = 0
        self._tail, self._before = b"", 0

    def add(self, texts: pa.LargeStringArray, first_row: int, wanted: Mask) -> None:
        """Whole documents."""
        self._documents += int(np.count_nonzero(wanted))
        for match in self._scanner.whole(texts):
            if wanted[match.document]:
                self._keep(match, first_row + match.document, texts[match.document].as_buffer(), 0)

    def feed(self, part: bytes, row: int, *, last: bool) -> None:
        """A part of a document."""
        data = self._tail + part
        known, again = (len(data), len(data)) if last else _open_at(data)
        for match in self._scanner.part(data[:known], last=last):
            if match.start < again:
                self._keep(match, row, memoryview(data), self._before)
            else:  # perhaps longer with the next part
                self._scanner.forget(match)
        self._before += again
        self._tail = data[again:]
        if last:
            self._documents += 1
            self.cancel()

    def cancel(self) -> None:
        """Forget the document that is open."""
        self._tail, self._before = b"", 0
        self._scanner.cancel()

    def _keep(self, match: Match, row: int, text: Any, before: int) -> None:
        excerpt = -1
        if self._kept[match.passage] < EXCERPTS:
            self._kept[match.passage] += 1
            excerpt = len(self._texts)
            said = bytes(memoryview(text)[match.start : min(match.end, match.start + EXCERPT_BYTES)])
            self._texts += len(said).to_bytes(2, "little") + said
        values = (row, match.passage, match.first, match.stop, match.start + before, match.end + before, excerpt)
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name].append(value)

    def commit(self) -> dict[str, dict[str, Any]]:
        columns: dict[str, Any] = {name: np.frombuffer(values, np.int64) for name, values in self._columns.items()}
        order = np.lexsort((columns["first"], columns["passage"], columns["row"]))
        columns = {name: values[order] for name, values in columns.items()}
        columns["texts"] = np.frombuffer(self._texts, np.uint8)
        return {self.path.name: write_arrays(self.path, columns, documents=self._documents)}


def _open_at(data: bytes) -> tuple[int, int]:
    """Up to where the words of a part are known, as its last one may go on; and from where on it is looked at again.
    There a word begins, so that words are the same wherever a document is cut."""
    words = words_of(data, np.array([0, len(data)]))
    starts, size = words.starts, len(data)
    at = int(np.searchsorted(starts, size - KEPT_BYTES))
    open = len(starts) > 0 and words.stops[-1] == size
    return int(starts[-1]) if open else size, int(starts[at]) if at < len(starts) else size


def counted_grams(index: Index, units: Iterable[Matches]) -> tuple[Int64s, int]:
    """In how many documents each n-gram occurs; and how many documents there are."""
    total = int(index.gram_bounds[-1]) if index.passages else 0
    changes, documents = np.zeros(total + 1, np.int64), 0
    for unit in units:
        documents += unit.documents
        _, first, stop = joined(unit)
        np.add.at(changes, first, 1)
        np.add.at(changes, stop, -1)
    return np.cumsum(changes)[:-1], documents


def joined(unit: Matches) -> tuple[Int64s, Int64s, Int64s]:
    """Runs of n-grams that each document has of each passage, none of them twice: where among the matches each run's
    document and passage begin, and its first n-gram and the one behind its last."""
    if not len(unit.row):
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    another = np.concatenate(([True], (unit.row[1:] != unit.row[:-1]) | (unit.passage[1:] != unit.passage[:-1])))
    group = np.cumsum(another) - 1
    # How far the matches before reach, in the same document and passage: n-grams of a passage lie below the next one's.
    shift = group * (int(unit.stop.max()) + 1)
    reached = np.maximum.accumulate(unit.stop + shift)
    before = np.concatenate(([-1], reached[:-1]))
    first = np.maximum(unit.first + shift, before)
    stop = unit.stop + shift
    new = first < stop
    owner = np.flatnonzero(another)[group]
    return owner[new], (first - shift)[new], (stop - shift)[new]
