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
   such and the one before it, and all is decided anew, `ROUNDS` times at most.

The drop file names for each document the one that stays that it is most like, and how much. The result depends on the
texts and the rules alone, not on how documents are cut into units, on memory or workers. Nothing is kept of a broken
attempt: call again. Disk: 10 bytes an edge, 1 byte a document while it decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milldam.dedup.candidates import (
    Documents,
    NearWork,
    bucket_pairs,
    find_pairs,
    pair_files,
    pair_steps,
    work_folder,
)
from milldam.dedup.drops import NEAR, DropWriter, drop_file_name
from milldam.dedup.keys import SortedKeys, each_once, in_order, in_ranges, mapped, new_mapped
from milldam.dedup.ranking import rank
from milldam.dedup.shingles import Hashes, Int64s
from milldam.dedup.sketches import SketchFiles
from milldam.files import NewFile
from milldam.native import kernel

MOST_PARTS, UNIT_PARTS, ROUNDS = 256, 2, 8
_EXACT_SIZES = 64
_EDGE_KINDS: tuple[tuple[str, type[np.generic]], ...] = ((".keys", np.uint64), (".similarities", np.uint16))
"""The files of edges: their endings, and what is in them."""
Similarities = npt.NDArray[np.uint16]
"""In thousandths, rounded down."""


@dataclass(frozen=True, slots=True)
class NearResolved:
    """What came out, for the report."""

    documents: int
    """All that have a signature."""
    candidates: int
    """Pairs that were compared by their shingles."""
    verified: int
    """Of these, those that are alike."""
    clusters: int
    """Documents that stay and that others were dropped for."""
    dropped: int
    seen_before: int = 0
    """Of the dropped, those that are like a document of an earlier run."""
    cluster_sizes: dict[int, int] = field(default_factory=dict)
    """Documents of a cluster, the one that stays among them -> clusters of that size. From 64 on, a size stands for all
    up to twice as large."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Pairs of ranks that are alike: sorted keys of pairs, and how alike each is."""

    keys: Hashes
    similarities: Similarities


def resolve_near(work: NearWork) -> NearResolved:
    """Find near-duplicates from the signatures and sketches in a folder and write the drop file: all steps, one by one.

    All documents must have a sketch. In a job, the steps are stages (pipeline/resolving.py).
    """
    if work.rules.prefer != "first":
        rank(work)
    for step in range(pair_steps(work.rules)):
        find_pairs(work, step)
    found = decide(work, verify_pairs(work, 0, 1))
    remove_work(work)
    return found


def remove_work(work: NearWork) -> None:
    """Remove what is not needed once the drop file is recorded; sketches of all documents are for somebody else too."""
    patterns = ("pairs-*.keys", "marks-*.bits", "edges-*", "ranks.bin", "positions.bin")
    for pattern in patterns if work.mark_all else (*patterns, "sketches-*"):
        for path in work.folder.glob(pattern):
            path.unlink()


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
    documents = Documents(work)
    start, stop = (documents.count * edge // parts for edge in (part, part + 1))
    compared, layout = 0, documents.layout
    for group in range(layout.pair_groups):
        low, high = layout.key_range(group, start, stop)
        runs = [_between(mapped(path, np.uint64), low, high) for path in pair_files(work.folder, group)]
        with _EdgeWriter(work.folder, _edge_name(group, part)) as writer:
            for keys in each_once(in_order(runs, work.share(400))):
                compared += len(keys)
                writer.add(_alike(work, documents, group, keys))
            writer.commit()
    return compared


def _between(keys: Hashes, low: int, high: int) -> Hashes:
    """Those from `low` up to `high`, which may be one more than a key can be."""
    first = int(np.searchsorted(keys, np.uint64(low))) if low < 1 << 64 else len(keys)
    last = int(np.searchsorted(keys, np.uint64(high))) if high < 1 << 64 else len(keys)
    return keys[first:last]


def _alike(work: NearWork, documents: Documents, group: int, keys: Hashes) -> Edges:
    first, second = (documents.positions(ranks) for ranks in documents.layout.pairs(group, keys))
    sketches = SketchFiles(work.folder, documents.signatures)
    counts = [np.stack(each) for each in sketches.compare(first, second, work.memory_bytes // 2)]
    common, union = np.concatenate(counts, axis=1) if counts else np.zeros((2, 0), np.int64)
    # A billionth: 0.8 as a float is a little more than four fifths.
    alike = common + 1e-9 * union >= work.rules.threshold * union
    alike &= union > 0
    similarities = common[alike] * 1000 // union[alike]
    return Edges(keys[alike], similarities.astype(np.uint16))


class _EdgeWriter:
    """Two new files; use it as a context manager."""

    def __init__(self, folder: Path, name: str) -> None:
        self._similarities, self._keys = (NewFile(folder / f"{name}{kind}") for kind, _ in reversed(_EDGE_KINDS))
        self.edges = 0

    def add(self, edges: Edges) -> None:
        self._keys.write(edges.keys.data)
        self._similarities.write(edges.similarities.data)
        self.edges += len(edges.keys)

    def commit(self) -> None:
        self._similarities.commit()
        self._keys.commit()

    def __enter__(self) -> _EdgeWriter:
        return self

    def __exit__(self, *given: object) -> None:
        for new in (self._keys, self._similarities):
            new.__exit__(*given)  # type: ignore[arg-type]


def _edge_name(group: int, part: int) -> str:
    return f"edges-{group:05d}-{part:05d}"


# ---- edges to drops ----


def decide(work: NearWork, compared: int) -> NearResolved:
    """From the edges of all parts to the drop file. When that is recorded, `remove_work`."""
    with work_folder(work.folder / "near-work") as folder:
        return _Decision(work, folder).run(compared)


class _Decision:
    """Which documents stay, and what the others are most like."""

    def __init__(self, work: NearWork, folder: Path) -> None:
        self._work, self._folder = work, folder
        self._documents = Documents(work)
        self._layout = self._documents.layout
        self._dropped = new_mapped(folder / "dropped", np.bool_, self._documents.count)
        """By rank."""

    def run(self, compared: int) -> NearResolved:
        self._drop()
        for number in range(ROUNDS):
            more, added = self._bring_together(number)
            compared += more
            if not added:
                break
            self._drop()
        return self._write_drops(compared)

    def _edges(self) -> Iterator[tuple[Int64s, Int64s, Similarities]]:
        """(first, second, similarity) of all edges, by the second, in blocks with all that each second has."""
        for group in range(self._layout.pair_groups):
            names = (path.with_suffix("") for path in self._edge_files(group))
            files = [[mapped(Path(f"{name}{kind}"), dtype) for kind, dtype in _EDGE_KINDS] for name in names]
            held_keys, held_similarities = np.empty(0, np.uint64), np.empty(0, np.uint16)
            for parts in in_ranges([keys for keys, _ in files], self._work.share(300)):
                keys = np.concatenate([held_keys, *(files[k][0][part] for k, part in parts)])
                similarities = np.concatenate([held_similarities, *(files[k][1][part] for k, part in parts)])
                order = np.argsort(keys, kind="stable")
                keys, similarities = keys[order], similarities[order]
                seconds = self._layout.seconds(keys)
                cut = int(np.searchsorted(seconds, seconds[-1]))
                held_keys, held_similarities = keys[cut:], similarities[cut:]
                if cut:
                    yield (*self._layout.pairs(group, keys[:cut]), similarities[:cut])
            if len(held_keys):
                yield (*self._layout.pairs(group, held_keys), held_similarities)

    def _edge_files(self, group: int) -> list[Path]:
        return sorted(path for at in (self._work.folder, self._folder) for path in at.glob(f"edges-{group:05d}-*.keys"))

    def _drop(self) -> None:
        """Decide on every document, in order."""
        for start in range(0, self._documents.count, self._work.share(1)):
            self._dropped[start : start + self._work.share(1)] = False
        for first, second, _ in self._edges():
            drop(first, second, self._dropped)

    def _bring_together(self, number: int) -> tuple[int, int]:
        """Compare documents that stay and are like the same dropped one; how many pairs, and how many were alike."""
        groups = range(self._layout.pair_groups)
        stars = [SortedKeys(self._folder / f"stars-{k}", self._work.share(96 * len(groups))) for k in groups]
        pairs = [SortedKeys(self._folder / f"pairs-{k}", self._work.share(96 * len(groups))) for k in groups]
        for first, second, _ in self._edges():
            stays = ~self._dropped[first], ~self._dropped[second]
            for one, other, chosen in ((first, second, stays[0] & ~stays[1]), (second, first, stays[1] & ~stays[0])):
                self._layout.add_pairs(stars, one[chosen], other[chosen])
        for star in stars:
            for first, second in bucket_pairs(star.blocks(self._work.share(400)), self._layout, leader=number):
                new = second >= self._documents.exempt
                self._layout.add_pairs(pairs, first[new], second[new])
            star.remove()
        compared = added = 0
        for group, keys in enumerate(pairs):
            with _EdgeWriter(self._folder, _edge_name(group, MOST_PARTS + number)) as writer:
                for block in each_once(keys.blocks(self._work.share(400))):
                    compared += len(block)
                    writer.add(_alike(self._work, self._documents, group, block))
                writer.commit()
            keys.remove()
            added += writer.edges
        return compared, added

    def _write_drops(self, compared: int) -> NearResolved:
        """The drop file, in the order of positions."""
        documents, table, verified = self._documents, self._documents.signatures, 0
        kept = new_mapped(self._folder / "kept", np.int64, documents.count)  # position + 1 of what a document is like
        similarities = new_mapped(self._folder / "similarities", np.uint16, documents.count)
        others = new_mapped(self._folder / "others", np.uint32, documents.count)
        for first, second, similarity in self._edges():
            verified += len(first)
            valid = self._dropped[second] & ~self._dropped[first]
            best = _most_alike(second[valid], similarity[valid])
            at, of = (documents.positions(ranks[valid][best]) for ranks in (second, first))
            kept[at], similarities[at] = of + 1, similarity[valid][best]
            np.add.at(others, of, np.uint32(1))
        seen_before = 0
        with DropWriter(self._work.folder / drop_file_name(NEAR, 0)) as writer:
            for start in range(0, documents.count, self._work.share(100)):
                at = np.flatnonzero(kept[start : start + self._work.share(100)]) + start
                of_unit, of_row = table.named(kept[at] - 1)
                writer.add(*table.named(at), of_unit, of_row, similarities[at])
                seen_before += int(np.count_nonzero(of_unit < 0))
            writer.commit()
        sizes = self._sizes(others)
        clusters = sum(sizes.values())
        return NearResolved(documents.count, compared, verified, clusters, writer.dropped, seen_before, sizes)

    def _sizes(self, others: npt.NDArray[np.uint32]) -> dict[int, int]:
        found: Counter[int] = Counter()
        for start in range(0, len(others), self._work.share(100)):
            some = others[start : start + self._work.share(100)]
            sizes, counts = np.unique(some[some > 0], return_counts=True)
            for size, count in zip((sizes + np.uint32(1)).tolist(), counts.tolist(), strict=True):
                found[size if size < _EXACT_SIZES else 1 << (size.bit_length() - 1)] += count
        return dict(sorted(found.items()))


def _most_alike(second: Int64s, similarity: Similarities) -> Int64s:
    """Of sorted pairs, for each second the place of the pair that is most alike, the first of several."""
    order = np.lexsort((-similarity.astype(np.int64), second))
    ordered = second[order]
    best: Int64s = order[np.concatenate((np.ones(min(1, len(order)), bool), ordered[1:] != ordered[:-1]))]
    return best


def drop(first: Int64s, second: Int64s, dropped: npt.NDArray[np.bool_]) -> None:
    """Decide on the later documents of edges, which are sorted by them: one is dropped when a first of its edges stays.

    `dropped`: by rank, true already for those that come before the seconds and are dropped.
    """
    if decide_all := kernel("drop", np.int64, np.int64, int, np.uint8):
        decide_all(first, second, len(first), dropped.view(np.uint8))
        return
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        dropped[other] |= not dropped[one]
