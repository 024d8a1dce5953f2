"""Pairs of documents and their shingles -> near-duplicates to drop: those that are like a document that stays.

Documents have an order: what is never dropped (runs of the index, exempt units), then by preference, then as in the
plan. In that order, a document is dropped when one that stays is like it: when the Jaccard similarity of their
shingles, not that of their signatures, is at least the threshold. In steps, each streamed, all but the last cut into
parts that workers and machines do in parallel:

1. `find_pairs` (candidates.py): pairs of documents that may be alike, by their signatures.
2. Sketches (sketches.py) of the documents in pairs, from their texts.
3. `verify_pairs`: the pairs of all bands, each once, compared by shingles; those that are alike are edges.
4. `decide`: one pass over the edges in order, with a byte a document in a mapped file. Documents that stay and are like
   the same dropped one may be like each other though no bucket brought them together: each is compared with the first
   such and the one before it, and all is decided anew, `ROUNDS` times at most. All but the pass itself is done by
   threads.

The drop file names for each document the one that stays that it is most like, and how much. The result depends on the
texts and the rules alone, not on how documents are cut into units, on memory or workers. Nothing is kept of a broken
attempt: call again. Disk: 10 bytes an edge, 1 byte a document while it decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.dedup.candidates import Documents, NearWork, bucket_pairs, pair_files
from milldam.dedup.drops import NEAR, DropWriter, drop_file_name, place_of
from milldam.dedup.keys import (
    Hashes,
    Int64s,
    Slices,
    SortedKeys,
    begins,
    between,
    each_once,
    in_ranges,
    mapped,
    merged,
    new_mapped,
    work_folder,
)
from milldam.dedup.minhash import SignatureFiles
from milldam.dedup.sketches import SketchFiles
from milldam.files import NewFile
from milldam.native import kernel
from milldam.prefetch import in_threads

MOST_PARTS, UNIT_PARTS, ROUNDS = 256, 2, 8
_LEAST_PAIRS, _EDGES_A_THREAD = 1 << 14, 1 << 17
"""To compare at once; with less, a thread more takes longer."""
_EDGE_KINDS: tuple[tuple[str, type[np.generic]], ...] = ((".keys", np.uint64), (".similarities", np.uint16))
"""The files of edges: their endings, and what is in them."""
Similarities = npt.NDArray[np.uint16]
"""In thousandths, rounded down."""
Ranked = tuple[Int64s, Int64s, Similarities]
"""(first, second, similarity) of edges, by rank."""
T = TypeVar("T")


NearResolved = dict[str, Any]
"""What came out: `documents` with a signature, `candidates` (pairs that were compared by their shingles), of these
those `verified` to be alike, `clusters` (documents that stay and that others were dropped for), `dropped`, of these
`seen_before` (like a document of an earlier run), `cluster_sizes` (documents of a cluster, with the one that stays ->
clusters of that size; from 64 on, a size stands for all up to twice as large), and what is `shown`."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Pairs of ranks that are alike: sorted keys of pairs, and how alike each is."""

    keys: Hashes
    similarities: Similarities

    def between(self, low: int, high: int) -> Edges:
        part = between(self.keys, low, high)
        return Edges(self.keys[part], self.similarities[part])


def remove_work(folder: Path, *, sketches: bool) -> None:
    """Remove what is not needed once the drop file is recorded; sketches of all documents may be for somebody else."""
    patterns = ("pairs-*.keys", "marks-*.bits", "edges-*", "ranks.bin", "positions.bin")
    for path in chain.from_iterable(map(folder.glob, (*patterns, "sketches-*") if sketches else patterns)):
        path.unlink(missing_ok=True)


# ---- pairs to edges ----


def verify_parts(units: int) -> int:
    """How many calls of `verify_pairs` there are: more than units, so that workers are done at about the same time.

    >>> verify_parts(10), verify_parts(1000)
    (20, 256)
    """
    return min(MOST_PARTS, UNIT_PARTS * max(1, units))


def verify_pairs(work: NearWork, part: int, parts: int) -> int:
    """Compare the pairs whose later document is in one of the parts of the ranks, `MOST_PARTS` at most, and write the
    edges; how many were compared."""
    documents, compared = Documents(work), 0
    low, high = (documents.count * edge // parts * documents.layout.together for edge in (part, part + 1))
    found = [mapped(path, np.uint64) for path in pair_files(work.folder)]
    runs = [keys[between(keys, low, high)] for keys in found]
    with _new_edges(work.folder, part) as write:
        for some in in_ranges(runs, work.share(400)):
            pairs, edges = _compare(work, documents, merged(runs, some))
            compared += pairs
            write(edges)
    return compared


def _compare(work: NearWork, documents: Documents, keys: Hashes) -> tuple[int, Edges]:
    """How many pairs there are among sorted keys, each once, and those that are alike."""
    keys = each_once(keys)
    first, second = (documents.positions(ranks) for ranks in documents.layout.pairs(keys))
    sketches = SketchFiles(work.folder, documents.signatures)
    counts = [np.stack(each) for each in sketches.compare(first, second, work.memory_bytes // 2)]
    common, union = np.concatenate(counts, axis=1) if counts else np.zeros((2, 0), np.int64)
    # A billionth: 0.8 as a float is a little more than four fifths.
    alike = common + 1e-9 * union >= work.rules.threshold * union
    alike &= union > 0
    similarities = common[alike] * 1000 // union[alike]
    return len(keys), Edges(keys[alike], similarities.astype(np.uint16))


@contextmanager
def _new_edges(folder: Path, part: int) -> Iterator[Callable[[Edges], None]]:
    """Writes edges to two files, which appear at the end."""
    names = (folder / f"edges-{part:05d}{kind}" for kind, _ in _EDGE_KINDS)
    with NewFile(next(names)) as keys, NewFile(next(names)) as similarities:

        def write(edges: Edges) -> None:
            keys.write(edges.keys.data)
            similarities.write(edges.similarities.data)

        yield write
        similarities.put_in_place()
        keys.put_in_place()


def _read_edges(folder: Path) -> list[Edges]:
    """Mapped, file by file in order."""
    paths = sorted(folder.glob("edges-*.keys"))
    return [Edges(*(mapped(path.with_suffix(kind), dtype) for kind, dtype in _EDGE_KINDS)) for path in paths]


# ---- edges to drops ----


def decide(work: NearWork, compared: int) -> NearResolved:
    """From the edges of all parts to the drop file. When that is recorded, `remove_work`."""
    with work_folder(work.folder / "near-work") as folder:
        return _Decision(work, folder).run(compared)


class _Decision:
    """Which documents stay, and what the others are most like.

    Edges are read and compared in threads, range by range; decided on one after the other, in order.
    """

    def __init__(self, work: NearWork, folder: Path) -> None:
        edges = sum(path.stat().st_size for path in work.folder.glob("edges-*.keys")) // 8
        threads = min(work.threads, 1 + edges // _EDGES_A_THREAD)
        # Of what threads make, one more waits than there are threads.
        most = work.memory_bytes // (1 if threads == 1 else threads + 1)
        self._work, self._folder = replace(work, memory_bytes=most, threads=threads), folder
        self._documents = Documents(work)
        self._layout = self._documents.layout
        self._dropped = new_mapped(folder / "dropped", np.bool_, self._documents.count)
        """By rank."""

    def run(self, compared: int) -> NearResolved:
        for number in range(ROUNDS + 1):
            # Decide on every document, in order.
            for start in range(0, self._documents.count, self._work.share(1)):
                self._dropped[start : start + self._work.share(1)] = False
            for first, second, _ in self._edges(lambda edges: edges):
                drop(first, second, self._dropped)
            more, added = self._bring_together(number) if number < ROUNDS else (0, 0)
            compared += more
            if not added:
                break
        return self._write_drops(compared)

    def _edges(self, make: Callable[[Ranked], T]) -> Iterator[T]:
        """What is made of (first, second, similarity) of edges, by the second, in blocks with all that each has."""

        def blocks() -> Iterator[tuple[list[Edges], Slices]]:
            """Runs and the parts of these that lie in one range: verified ones, a file after the other, and with each
            what rounds have added between its documents."""
            together, added = self._layout.together, _read_edges(self._folder)
            files = [one for one in _read_edges(self._work.folder) if len(one.keys)]
            starts = [int(one.keys[0]) // together * together for one in files[1:]]
            for one, low, high in zip(files, [0, *starts], [*starts, 1 << 64], strict=False):
                runs = [one, *(more.between(low, high) for more in added)]
                keys = [run.keys for run in runs]
                for parts in in_ranges(keys, self._work.share(300), low=low, high=high, together=together):
                    yield runs, parts

        def read(block: tuple[list[Edges], Slices]) -> T:
            runs, parts = block
            keys = np.concatenate([runs[number].keys[part] for number, part in parts])
            similarities = np.concatenate([runs[number].similarities[part] for number, part in parts])
            if len(parts) > 1:
                order = np.argsort(keys, kind="stable")
                keys, similarities = keys[order], similarities[order]
            return make((*self._layout.pairs(keys), similarities))

        return in_threads(read, blocks(), self._work.threads)

    def _bring_together(self, number: int) -> tuple[int, int]:
        """Compare documents that stay and are like the same dropped one; how many pairs, and how many were alike."""
        share, layout, threads = self._work.share, self._layout, self._work.threads
        stars, pairs = (SortedKeys(self._folder / name, share(96)) for name in ("stars", "pairs"))

        def stars_of(edges: Ranked) -> Hashes:
            """(dropped, stays) of the edges between such."""
            first, second, _ = edges
            dropped, other = self._dropped[first], self._dropped[second]
            earlier, later = ~dropped & other, dropped & ~other
            stays = np.append(first[earlier], second[later])
            return layout.of_pairs(stays, np.append(second[earlier], first[later]))

        for keys in self._edges(stars_of):
            stars.add(keys)
        for found in bucket_pairs(stars.blocks(share(400)), layout, leader=number, threads=threads):
            for first, second in found:
                new = second >= self._documents.exempt
                pairs.add(layout.of_pairs(first[new], second[new]))
        compared = alike = 0
        with _new_edges(self._folder, number) as write:
            compare = partial(_compare, self._work, self._documents)
            at_once = min(share(400), max(_LEAST_PAIRS, len(pairs) // (4 * threads)))
            for count, edges in in_threads(compare, pairs.blocks(at_once), threads):
                compared, alike = compared + count, alike + len(edges.keys)
                write(edges)
        stars.remove()
        pairs.remove()
        return compared, alike

    def _write_drops(self, compared: int) -> NearResolved:
        documents, verified = self._documents, 0
        drops = NearDrops(self._folder, documents.signatures, self._work.share(100), self._work.threads)

        def drops_of(edges: Ranked) -> tuple[int, Int64s, Int64s, Similarities]:
            first, second, similarity = edges
            valid = np.flatnonzero(self._dropped[second] & ~self._dropped[first])
            best = valid[_most_alike(second[valid], similarity[valid])]
            return len(first), documents.positions(second[best]), documents.positions(first[best]), similarity[best]

        for count, positions, of, similarity in self._edges(drops_of):
            verified += count
            drops.add(positions, of, similarity)
        seen_before, shown = drops.write(self._work.folder)
        sizes = drops.sizes()
        clusters = sum(sizes.values())
        found = {"documents": documents.count, "candidates": compared, "verified": verified, "clusters": clusters}
        return found | {"dropped": drops.count, "seen_before": seen_before, "cluster_sizes": sizes, "shown": shown}


def _most_alike(second: Int64s, similarity: Similarities) -> Int64s:
    """Of sorted pairs, for each second the place of the pair that is most alike, the first of several."""
    starts = np.flatnonzero(begins(second))
    if not len(starts):
        return starts
    last = len(second) - 1
    most = np.maximum.reduceat(similarity.astype(np.int64) << 40 | (last - np.arange(len(second))), starts)
    best: Int64s = last - (most & ((1 << 40) - 1))
    return best


def drop(first: Int64s, second: Int64s, dropped: npt.NDArray[np.bool_]) -> None:
    """Decide on the later documents of edges, which are sorted by them: one is dropped when a first of its edges stays.

    `dropped`: by rank, true already for those that come before the seconds and are dropped.
    """
    kernel("drop", np.int64, np.int64, np.uint8)(first, second, dropped.view(np.uint8))


# ---- the drop file, and what a person should look at ----

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

    def add(self, at: Int64s, of: Int64s, similarity: Similarities) -> None:
        """Documents to drop and what they are like, each once."""
        self._kept[at], self._similarities[at] = of + 1, similarity
        np.add.at(self._others, of, np.uint32(1))
        self.count += len(at)

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
            for drops in in_threads(self._in_range, self._ranges(), self._threads):
                place, of = (place_of(*self._table.named(positions)) for positions in drops[:2])
                writer.add(place, of, drops[2])
                own = drops[1] >= first_own
                seen += int(np.count_nonzero(~own))
                pairs = np.append(pairs, drops[:, own], axis=1)
                pairs = pairs[:, _smallest(pairs[2] << 48 | pairs[0], PAIRS)]
                # Of those that are like one document, the first of the least alike.
                worst = np.append(worst, drops[:, np.isin(drops[1], largest)], axis=1)
                worst = worst[:, np.lexsort((worst[0], worst[2], worst[1]))]
                worst = worst[:, begins(worst[1])]
            writer.commit()
        of_each = {pair["kept"]: pair for pair in self._named(worst)}
        kept = zip(*(values.tolist() for values in self._table.named(largest)), strict=True)
        counts = self._others[largest].tolist()
        clusters = [{"dropped": count, "worst": of_each[one]} for one, count in zip(kept, counts, strict=True)]
        return seen, {"pairs": self._named(pairs), "clusters": clusters}

    def _in_range(self, part: slice) -> Drops:
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
