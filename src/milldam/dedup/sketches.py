"""Texts -> their sets of shingles, and from two sets how alike the texts are: what every near-duplicate is verified on.

Of each shingle the upper half of its hash is kept, sorted, each once: 4 bytes a distinct shingle, about two thirds of
the text. Two unlike sets of 1,000 shingles have one hash in common by chance once in 4,000 pairs. A document of more
than `MOST` distinct shingles (some 100 KB of English) keeps the `MOST` smallest hashes, a uniform sample of its set:
then the similarity is that of the two sets below the smaller of both bounds, 0.003 off on average (one standard
deviation at 0.8); else it is exact.

A unit's sketches are two files: the hashes end to end, and for each document that has a sketch its row, where its
hashes end, and whether these are all (16 bytes). Memory: making them, one slice of text and its hashes, 10 MB;
comparing them, what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.dedup.keys import Bools, Hashes, Int64s, begins, mapped, numbered
from milldam.dedup.minhash import (
    SLICE_BYTES,
    TEXTS,
    SignatureFiles,
    lower_case,
    most_words,
    raw,
    slices,
    unit_name,
)
from milldam.errors import StoreError
from milldam.files import NewFile
from milldam.native import kernel

MOST = 1 << 14
Values = npt.NDArray[np.uint32]
_CUT = np.uint64(1 << 63)
_SCATTERED = 8
"""When less than this part of a file is wanted, what lies between is not read."""
_PAIR_BYTES = 10
"""Of memory, for each hash of the two documents of a pair."""


class Sketcher:
    """One per worker."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._spare: Hashes = np.empty(0, np.uint64)

    def sketches(self, texts: pa.LargeStringArray) -> Iterator[tuple[Values, Int64s]]:
        """(hashes, how many each document has) of some documents at a time, in order."""
        for part in slices(texts):
            data, offsets = raw(part)
            room = MOST + most_words(data[: SLICE_BYTES + 1], 2 * len(part)) + (MOST if len(data) > SLICE_BYTES else 0)
            if len(self._spare) < room:
                self._spare = np.empty(room, np.uint64)
            values, counts = np.empty(room, np.uint32), np.empty(len(part), np.int64)
            sketches = kernel("sketches", *TEXTS, int, np.uint64, np.uint32, np.int64)
            made = sketches(data, offsets, self._ngram, lower_case(), MOST, self._spare, values, counts)
            yield values[:made], counts


# ---- on disk ----


def sketch_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of sketches: hashes, and rows with the ends of theirs.

    >>> [path.name for path in sketch_paths(Path(), unit_name(12))]
    ['sketches-0000012.bin', 'sketches-0000012.rows']
    """
    return folder / f"sketches-{name}.bin", folder / f"sketches-{name}.rows"


class SketchWriter:
    """Writes the sketches of some documents of a unit, in their order; use it as a context manager."""

    def __init__(self, values: Path, rows: Path) -> None:
        self._values, self._rows = NewFile(values), NewFile(rows)
        self._end = 0

    def add(self, rows: Int64s, values: Values, counts: Int64s, cut: Bools | None = None) -> None:
        """The sketches of the documents of some rows; `cut`: those that had more hashes, else those of `MOST`."""
        ends = (self._end + np.cumsum(counts)).astype(np.uint64)
        ends[counts == MOST if cut is None else cut] |= _CUT
        self._rows.write(np.stack((rows.astype(np.uint64), ends), axis=1).astype("<u8").data)
        self._values.write(np.ascontiguousarray(values, "<u4").data)
        self._end += len(values)

    def commit(self, *, durable: bool) -> dict[str, dict[str, Any]]:
        """Put the files in place; their sizes and hashes. `durable`: wait for the disk."""
        return {new.path.name: new.commit() if durable else new.put_in_place() for new in (self._values, self._rows)}

    def __enter__(self) -> SketchWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._values.discard()
        self._rows.discard()


class SketchFiles:
    """The sketches in a folder, by the positions of their documents."""

    def __init__(self, folder: Path, table: SignatureFiles) -> None:
        self._folder, self._table = folder, table

    def compare(self, first: Int64s, second: Int64s, memory_bytes: int) -> Iterator[tuple[Int64s, Int64s]]:
        """(shingles in both, shingles in one or both) of pairs of positions, some pairs at a time, in order."""
        positions, where = numbered(np.concatenate((first, second)))
        counts = np.concatenate([spans.counts for _, spans in self._spans(positions)] or [positions])
        one, other = where[: len(first)], where[len(first) :]
        taken = np.cumsum((counts[one] + counts[other]) * _PAIR_BYTES)
        start = 0
        while start < len(first):
            before = int(taken[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(taken, before + memory_bytes, side="right")))
            some, chosen = numbered(np.concatenate((one[start:stop], other[start:stop])))
            spans = list(self._spans(positions[some]))
            values = np.concatenate([each.read(path) for path, each in spans])
            sizes, cut = (np.concatenate([getattr(each, name) for _, each in spans]) for name in ("counts", "cut"))
            yield compare_sets(values, sizes, cut, chosen[: stop - start], chosen[stop - start :])
            start = stop

    def _spans(self, positions: Int64s) -> Iterator[tuple[Path, Spans]]:
        """Where the hashes of documents are, file by file."""
        units, rows = self._table.named(positions)
        edges = [*np.flatnonzero(begins(units)).tolist(), len(units)]
        for start, stop in pairwise(edges):
            values, ends = sketch_paths(self._folder, unit_name(int(units[start])))
            yield values, SketchRows(ends).find(rows[start:stop])


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the hashes of some documents begin, how many there are, and whether there were more."""

    starts: Int64s
    counts: Int64s
    cut: Bools

    def read(self, path: Path, most: int = MOST) -> Values:
        """The hashes, at most so many of each."""
        counts = np.minimum(self.counts, most)
        wanted, some = None, np.flatnonzero(counts)
        if len(some) and int(counts.sum()) * 4 * _SCATTERED < path.stat().st_size:
            wanted = 4 * self.starts[some], 4 * (self.starts + counts)[some]
        values, found, at = mapped(path, "<u4", wanted=wanted), np.empty(int(counts.sum()), np.uint32), 0
        for start, count in zip(self.starts.tolist(), counts.tolist(), strict=True):
            found[at : at + count] = values[start : start + count]
            at += count
        return found


class SketchRows:
    """Which documents of a unit have a sketch, and where it is."""

    def __init__(self, path: Path) -> None:
        self._path, self._table = path, mapped(path, "<u8").reshape(-1, 2)
        self.rows = self._table[:, 0]

    def find(self, rows: Int64s) -> Spans:
        at = np.searchsorted(self.rows, rows.astype(np.uint64))
        if len(self.rows) <= at.max(initial=-1) or (self.rows[at] != rows).any():
            message = "lacks documents that are compared. Run the same command again to make it again."
            raise StoreError(f"{self._path}: {message}")
        ends = self._table[at, 1]
        starts = np.where(at > 0, self._table[at - 1, 1] & ~_CUT, 0).astype(np.int64)
        return Spans(starts, (ends & ~_CUT).astype(np.int64) - starts, (ends & _CUT) > 0)


def compare_sets(values: Values, counts: Int64s, cut: Bools, first: Int64s, second: Int64s) -> tuple[Int64s, Int64s]:
    """(hashes in both, hashes in one or both) of pairs of sketches, below the bound that both are complete to."""
    ends, bounds = np.cumsum(counts), np.full(len(counts), 2**32 - 1, np.uint32)
    bounds[cut] = values[ends[cut] - 1]
    common, either = np.empty((2, len(first)), np.int64)
    compare = kernel("compare_sets", np.uint32, *[np.int64] * 4, np.uint32, np.int64, np.int64)
    compare(values, ends - counts, counts, first, second, np.minimum(bounds[first], bounds[second]), common, either)
    return common, either
