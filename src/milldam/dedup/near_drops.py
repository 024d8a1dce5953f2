"""What each dropped document is like -> the drop file of near-dedup, the sizes of clusters, and what a person should
look at: the removals that are closest to the threshold, and the documents for which most others were removed.

By position, in mapped files: 14 bytes of disk a document. What comes out follows from what was entered, not from
threads or memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.dedup.drops import NEAR, DropWriter, drop_file_name, place_of
from milldam.dedup.keys import begins, new_mapped
from milldam.dedup.minhash import SignatureFiles
from milldam.dedup.shingles import Int64s
from milldam.prefetch import in_threads

PAIRS, CLUSTERS = 10, 10
_EXACT_SIZES = 64
_SCALE = 1000
"""Similarities are stored in thousandths."""
Drops = npt.NDArray[np.int64]
"""(3, drops): position, position of what it is like, similarity."""
Place = tuple[int, int]
"""Unit and row of a document."""


Shown = dict[str, Any]
"""`pairs`: (dropped, kept, similarity), the least alike first. `clusters`: a document that stays has so many `dropped`
for it, of which `worst` is the pair that is least alike; the largest first. As JSON has it."""


def places_of(shown: Shown) -> list[Place]:
    """Of all documents in it, in order."""
    pairs = [*shown["pairs"], *(one["worst"] for one in shown["clusters"])]
    return sorted({tuple(pair[side]) for pair in pairs for side in ("dropped", "kept")})


class NearDrops:
    """`share`: documents to look at in one thread at a time."""

    def __init__(self, folder: Path, table: SignatureFiles, share: int, threads: int) -> None:
        self._table, self._share, self._threads = table, share, threads
        self._kept = new_mapped(folder / "kept", np.int64, table.documents)  # position + 1 of what it is like
        self._similarities = new_mapped(folder / "similarities", np.uint16, table.documents)
        self._others = new_mapped(folder / "others", np.uint32, table.documents)  # how many were dropped for it
        self.count = 0

    def enter(self, at: Int64s, of: Int64s, similarity: npt.NDArray[np.uint16]) -> None:
        """Documents to drop and what they are like, each once; in any thread. `book` what is entered, too."""
        self._kept[at], self._similarities[at] = of + 1, similarity

    def book(self, of: Int64s) -> None:
        """Count what others are dropped for; in one thread."""
        self.count += len(of)
        np.add.at(self._others, of, np.uint32(1))

    def sizes(self) -> dict[int, int]:
        """Documents of a cluster, the one that stays among them -> clusters of that size, from 64 on rounded down to
        a power of two."""
        found: Counter[int] = Counter()
        for part in self._ranges():
            others = self._others[part]
            sizes = others[others > 0].astype(np.int64) + 1
            large = 1 << (np.frexp(sizes)[1].astype(np.int64) - 1)
            values, counts = np.unique(np.where(sizes < _EXACT_SIZES, sizes, large), return_counts=True)
            found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        return dict(sorted(found.items()))

    def _largest(self) -> Int64s:
        """The documents of this run for which most others are dropped, the first of equal ones before the others."""
        largest = np.empty(0, np.int64)
        for part in self._ranges(self._table.before(0)):
            largest = np.append(largest, np.flatnonzero(self._others[part]) + part.start)
            largest = largest[_smallest(-self._others[largest].astype(np.int64) << 32 | largest, CLUSTERS)]
        return largest

    def write(self, folder: Path) -> tuple[int, Shown]:
        """Write the drop file; how many drops are like a document of an earlier run, and what to look at."""
        seen, first_own, largest = 0, self._table.before(0), self._largest()
        pairs, worst = np.empty((2, 3, 0), np.int64)
        with DropWriter(folder / drop_file_name(NEAR, 0)) as writer:
            for drops in in_threads(self._drops_in, self._ranges(), self._threads):
                place, of = (place_of(*self._table.named(positions)) for positions in drops[:2])
                writer.add(place, of, drops[2])
                own = drops[1] >= first_own
                seen += int(np.count_nonzero(~own))
                pairs = np.append(pairs, drops[:, own], axis=1)
                pairs = pairs[:, _smallest(pairs[2] << 48 | pairs[0], PAIRS)]
                worst = _least_alike_of_each(np.append(worst, drops[:, np.isin(drops[1], largest)], axis=1))
            writer.commit()
        of_each = {pair["kept"]: pair for pair in self._named(worst)}
        kept = zip(*(values.tolist() for values in self._table.named(largest)), strict=True)
        counts = self._others[largest].tolist()
        clusters = [{"dropped": count, "worst": of_each[one]} for one, count in zip(kept, counts, strict=True)]
        return seen, {"pairs": self._named(pairs), "clusters": clusters}

    def _drops_in(self, part: slice) -> Drops:
        at = np.flatnonzero(self._kept[part]) + part.start
        return np.stack((at, self._kept[at] - 1, self._similarities[at].astype(np.int64)))

    def _named(self, drops: Drops) -> list[dict[str, Any]]:
        units, rows = (values.tolist() for values in self._table.named(drops[:2].T.reshape(-1)))
        places = list(zip(units, rows, strict=True))
        both = zip(places[::2], places[1::2], (drops[2] / _SCALE).tolist(), strict=True)
        return [{"dropped": one, "kept": other, "similarity": similarity} for one, other, similarity in both]

    def _ranges(self, start: int = 0) -> Iterator[slice]:
        for at in range(start, self._table.documents, self._share):
            yield slice(at, min(self._table.documents, at + self._share))


def _smallest(numbers: Int64s, count: int) -> Int64s:
    """Where the smallest of distinct numbers are, in order."""
    some = np.argpartition(numbers, count)[:count] if len(numbers) > count else np.arange(len(numbers))
    return some[np.argsort(numbers[some])]


def _least_alike_of_each(drops: Drops) -> Drops:
    """Of those that are like one document, the first of the least alike."""
    ordered = drops[:, np.lexsort((drops[0], drops[2], drops[1]))]
    return ordered[:, begins(ordered[1])]
