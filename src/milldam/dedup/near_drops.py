"""What each dropped document is like -> the drop files of near-dedup, the sizes of clusters, and what a person should
look at: the removals that are closest to the threshold, and the documents for which most others were removed.

By position, in mapped files: 14 bytes of disk a document. All of it in threads, range by range of the positions. What
comes out follows from what was entered, not from threads or memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milldam.dedup.drops import NEAR, DropWriter, drop_file_name
from milldam.dedup.keys import new_mapped
from milldam.dedup.minhash import SignatureFiles
from milldam.dedup.near_summary import CLUSTERS, PAIRS, Cluster, NearSummary, Pair
from milldam.dedup.shingles import Int64s
from milldam.native import kernel
from milldam.prefetch import in_threads

MOST_FILES, FILE_DROPS = 8, 1 << 16
"""There is a file for each so many drops, to be written side by side: not many, each unit opens all."""
_EXACT_SIZES = 64
_SCALE = 1000
"""Similarities are stored in thousandths."""
Drops = npt.NDArray[np.int64]
"""(3, drops): position, position of what it is like, similarity."""


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
        kernel("count", np.int64, np.uint32)(of, self._others)

    # ---- clusters ----

    def sizes(self) -> dict[int, int]:
        """Documents of a cluster, the one that stays among them -> clusters of that size, from 64 on rounded down to
        a power of two."""
        found: Counter[int] = Counter()
        for some in in_threads(self._sizes_in, self._ranges(0, self._table.documents), self._threads):
            found.update(some)
        return dict(sorted(found.items()))

    def _sizes_in(self, part: slice) -> dict[int, int]:
        others = self._others[part]
        sizes = others[others > 0].astype(np.int64) + 1
        large = 1 << (np.frexp(sizes)[1].astype(np.int64) - 1)
        values, counts = np.unique(np.where(sizes < _EXACT_SIZES, sizes, large), return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def _largest(self) -> Int64s:
        """The documents of this run for which most others are dropped, the first of equal ones before the others."""
        own = self._ranges(self._table.before(0), self._table.documents)
        at = np.concatenate([np.empty(0, np.int64), *in_threads(self._largest_in, own, self._threads)])
        largest: Int64s = at[np.lexsort((at, -self._others[at].astype(np.int64)))][:CLUSTERS]
        return largest

    def _largest_in(self, part: slice) -> Int64s:
        at: Int64s = np.flatnonzero(self._others[part]) + part.start
        counts = self._others[at]
        if len(at) <= CLUSTERS:
            return at
        least = np.partition(counts, -CLUSTERS)[-CLUSTERS]
        largest: Int64s = np.concatenate((at[counts > least], at[counts == least][:CLUSTERS]))
        return largest

    # ---- drop files ----

    def write(self, folder: Path) -> tuple[int, NearSummary]:
        """Write the drop files; how many drops are like a document of an earlier run, and what to look at."""
        for path in folder.glob(f"drops-{NEAR}-*.parquet"):
            path.unlink()
        largest, files = self._largest(), max(1, min(MOST_FILES, self.count // FILE_DROPS))
        edges = [self._table.documents * number // files for number in range(files + 1)]
        write = partial(self._write_file, folder, np.sort(largest), edges)
        seen, pairs, worst = zip(*in_threads(write, range(files), self._threads), strict=True)
        shown = self._named(_least_alike(np.concatenate(pairs, axis=1)))
        of_each = {pair.kept: pair for pair in self._named(_least_alike_of_each(np.concatenate(worst, axis=1)))}
        kept = zip(*(values.tolist() for values in self._table.named(largest)), strict=True)
        counts = self._others[largest].tolist()
        clusters = (Cluster(one, count, of_each[one]) for one, count in zip(kept, counts, strict=True))
        return sum(seen), NearSummary(tuple(shown), tuple(clusters))

    def _write_file(self, folder: Path, largest: Int64s, edges: list[int], number: int) -> tuple[int, Drops, Drops]:
        """One of the files; its drops that are like an earlier run's, and the least alike: of all, of each cluster."""
        seen, first_own, pairs, worst = 0, self._table.before(0), *np.empty((2, 3, 0), np.int64)
        with DropWriter(folder / drop_file_name(NEAR, number)) as writer:
            for part in self._ranges(*edges[number : number + 2]):
                at = np.flatnonzero(self._kept[part]) + part.start
                drops = np.stack((at, self._kept[at] - 1, self._similarities[at].astype(np.int64)))
                writer.add(*self._table.named(drops[0]), *self._table.named(drops[1]), drops[2])
                own = drops[1] >= first_own
                seen += int(np.count_nonzero(~own))
                pairs = _least_alike(np.concatenate((pairs, drops[:, own]), axis=1))
                worst = _least_alike_of_each(np.concatenate((worst, drops[:, np.isin(drops[1], largest)]), axis=1))
            writer.commit()
        return seen, pairs, worst

    def _named(self, drops: Drops) -> list[Pair]:
        units, rows = (values.tolist() for values in self._table.named(drops[:2].T.reshape(-1)))
        places = list(zip(units, rows, strict=True))
        similarities = (drops[2] / _SCALE).tolist()
        return [Pair(*both) for both in zip(places[::2], places[1::2], similarities, strict=True)]

    def _ranges(self, start: int, stop: int) -> Iterator[slice]:
        for at in range(start, stop, self._share):
            yield slice(at, min(stop, at + self._share))


def _least_alike(drops: Drops) -> Drops:
    """The first ones of equals."""
    keys = drops[2] << 48 | drops[0]
    if len(keys) > PAIRS:
        drops = drops[:, keys <= np.partition(keys, PAIRS - 1)[PAIRS - 1]]
    least: Drops = drops[:, np.lexsort((drops[0], drops[2]))]
    return least


def _least_alike_of_each(drops: Drops) -> Drops:
    """Of those that are like one document, the first of the least alike."""
    ordered = drops[:, np.lexsort((drops[0], drops[2], drops[1]))]
    least: Drops = ordered[:, np.unique(ordered[1], return_index=True)[1]]
    return least
