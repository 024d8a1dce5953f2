"""Signatures of all documents -> near-duplicates to drop, in bounded memory.

Four steps, each streamed. The first is done for some bands at a time, each on its own, so that bands can be worked on
in parallel and on several machines (`find_pairs`); the others bring together what it left (`join_pairs`).

1. Bands. Documents whose signatures are equal in a whole band fall into one bucket: (hash of the band, position) as
   one 64-bit key, sorted on disk. Within a bucket each document is paired with the one before it and with the first.
2. Candidates. The pairs of all bands, sorted on disk, each once.
3. Check. The share of equal places of two signatures estimates their similarity. A pair is taken when the estimate is
   at least the threshold less 2.5 standard deviations: of pairs whose true similarity is the threshold, 99 % are taken.
   With 0.8 and 32 x 8 values that is an estimate of 0.7375; of pairs at 0.655, less than 1 % reach it.
4. Clusters. Pairs join documents into clusters (union-find, labels in a mapped file). The first document of a cluster
   in plan order is kept, the others are dropped.

Documents dropped as exact duplicates and those without words take no part. The result depends on the signatures and
the rules alone, not on how documents are cut into units, on memory or threads. Nothing is kept of a broken attempt:
call again. Besides the signatures, disk while it works: 65 bytes a document for each call of `find_pairs` that is at
work, and 8 for each band that makes a pair.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from milldam.dedup.drops import BLOOM, EXACT, NEAR, DropWriter, drop_file_name
from milldam.dedup.minhash import CHANCE, NO_WORDS, SignatureFiles, Signatures
from milldam.dedup.rules import NearRules
from milldam.dedup.shingles import Hashes, Int64s, mix
from milldam.files import NewFile, explain_os_errors

DEVIATIONS = 2.5
_BANDS_AT_ONCE = 8
_SMALLEST_BLOCK = 1024
_EXACT_SIZES = 64


@dataclass(frozen=True, slots=True)
class NearResolved:
    """What came out, for the report."""

    documents: int
    """All that have a signature."""
    candidates: int
    """Pairs that were compared."""
    clusters: int
    dropped: int
    cluster_sizes: dict[int, int] = field(default_factory=dict)
    """Size -> clusters of it. From 64 on, a size stands for all up to twice as large."""


def resolve_near(folder: Path, rules: NearRules, *, exempt_below: int, memory_bytes: int, threads: int) -> NearResolved:
    """Find near-duplicates among the signatures in a folder and write the drop file there: all steps, one by one."""
    for step in range(pair_steps(rules)):
        find_pairs(folder, rules, step, memory_bytes=memory_bytes, threads=threads)
    found = join_pairs(folder, rules, exempt_below=exempt_below, memory_bytes=memory_bytes, threads=threads)
    remove_pairs(folder)
    return found


def pair_steps(rules: NearRules) -> int:
    """How many calls of `find_pairs` there are.

    >>> pair_steps(NearRules(bands=32, rows=8))
    4
    """
    return -(-rules.bands // _BANDS_AT_ONCE)


def find_pairs(folder: Path, rules: NearRules, step: int, *, memory_bytes: int, threads: int) -> int:
    """Write the pairs of documents that share a bucket of some band of this step; how many there are."""
    bands = range(step * _BANDS_AT_ONCE, min((step + 1) * _BANDS_AT_ONCE, rules.bands))
    with _work_folder(folder / f"near-work-{step}") as work:
        return _Search(folder, work, rules, memory_bytes, threads).find_pairs(bands, step)


def join_pairs(folder: Path, rules: NearRules, *, exempt_below: int, memory_bytes: int, threads: int) -> NearResolved:
    """From the pairs of all steps to the drop file. When that is recorded, `remove_pairs`.

    Documents of units below `exempt_below` are never dropped; what is like them is.
    """
    with _work_folder(folder / "near-work") as work:
        return _Search(folder, work, rules, memory_bytes, threads).join(exempt_below)


def remove_pairs(folder: Path) -> None:
    for path in folder.glob("pairs-*.keys"):
        path.unlink()


@contextmanager
def _work_folder(work: Path) -> Iterator[Path]:
    """A folder for the time of the work, anew when a killed run left it."""
    shutil.rmtree(work, ignore_errors=True)
    with explain_os_errors(work):
        work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def least_matches(rules: NearRules) -> int:
    """How many places of two signatures must be equal for the pair to be taken.

    >>> least_matches(NearRules(bands=32, rows=8, threshold=0.8))
    190
    """
    size = rules.bands * rules.rows
    deviation = (rules.threshold * (1 - rules.threshold) / size) ** 0.5
    estimate = max(0.0, rules.threshold - DEVIATIONS * deviation)
    return int(np.ceil((CHANCE + estimate * (1 - CHANCE)) * size - 1e-9))


class _Search:
    """One search over one folder."""

    def __init__(self, folder: Path, work: Path, rules: NearRules, memory_bytes: int, threads: int) -> None:
        self._folder, self._work, self._rules = folder, work, rules
        self._memory, self._threads = memory_bytes, max(1, threads)
        self._signatures = SignatureFiles(folder, rules.bands * rules.rows)
        self._layout = KeyLayout(self._signatures.documents)

    def join(self, exempt_below: int) -> NearResolved:
        documents = self._signatures.documents
        if not documents:
            return self._write_drops(None, exempt_below, 0)
        clusters = Clusters(self._work, documents, self._share(64))
        candidates = 0
        for first, second in self._compared():
            candidates += len(first)
            clusters.join(*self._alike(first, second))
        return self._write_drops(clusters, exempt_below, candidates)

    def _share(self, bytes_each: int) -> int:
        """How many things of a size to hold at once. Half of the memory is left to what numpy makes on the way."""
        return max(_SMALLEST_BLOCK, self._memory // 2 // bytes_each)

    # ---- bands to candidates ----

    def find_pairs(self, bands: range, step: int) -> int:
        """The pairs of some bands, each once and in order, a file for each group of documents."""
        count = 0
        for group, keys in enumerate(self._candidates(bands) if self._signatures.documents else []):
            with NewFile(self._folder / f"pairs-{group:05d}-{step:03d}.keys") as new:
                for unique in _each_once(keys.blocks(self._share(100))):
                    new.write(unique.data)
                    count += len(unique)
                new.commit()
            keys.remove()
        return count

    def _pair_files(self, group: int) -> list[Path]:
        return sorted(self._folder.glob(f"pairs-{group:05d}-*.keys"))

    def _candidates(self, bands: range) -> list[SortedKeys]:
        """The pairs of documents that share a bucket of some band."""
        groups = range(self._layout.pair_groups)
        pairs = [SortedKeys(self._work / f"pairs-{k}", self._share(96 * len(groups))) for k in groups]
        lock = threading.Lock()

        def pair_up(band: list[SortedKeys]) -> None:
            for part in band:
                for first, second in bucket_pairs(part.blocks(self._share(200 * self._threads)), self._layout):
                    with lock:
                        self._layout.add_pairs(pairs, first, second)
                part.remove()

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(pair_up, self._band_keys(bands)))
        return pairs

    def _band_keys(self, bands: range) -> list[list[SortedKeys]]:
        """The keys of some bands, from one pass over the signatures."""
        sections = range(self._layout.hash_sections)
        run_keys = self._share(32 * len(bands) * len(sections))
        keys = [[SortedKeys(self._work / f"band-{k}-{part}", run_keys) for part in sections] for k in bands]
        rows = self._rules.rows
        for positions, signatures in self._taking_part():
            for band, parts in zip(bands, keys, strict=True):
                hashes = hash_bands(signatures[:, band * rows : (band + 1) * rows])
                self._layout.add_hashes(parts, hashes, positions)
        for parts in keys:
            for part in parts:
                part.flush()
        return keys

    def _taking_part(self) -> Iterator[tuple[Int64s, Signatures]]:
        """(positions, signatures) of the documents that have words and are not dropped already."""
        dropped = self._dropped_before()
        for base, signatures in self._signatures.blocks(self._share(8 * self._signatures.size)):
            # Only rows without words hold this value at all.
            part = signatures[:, 0] != NO_WORDS
            if dropped is not None:
                part &= ~dropped[base : base + len(part)]
            positions = np.flatnonzero(part)
            yield positions + base, signatures if part.all() else signatures[positions]

    def _dropped_before(self) -> npt.NDArray[np.bool_] | None:
        """For each position whether it is an exact duplicate, in a mapped file; None when there are no drop files."""
        paths = [path for way in (EXACT, BLOOM) for path in sorted(self._folder.glob(f"drops-{way}-*.parquet"))]
        mapped = self._work / "dropped"
        if not paths:
            return None
        if mapped.exists():
            return np.asarray(np.memmap(mapped, np.bool_, "r"))
        dropped = _new_mapped(mapped, np.bool_, self._signatures.documents)
        bases, units = self._signatures.bases, self._signatures.units
        for path in paths:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(1 << 15, columns=["unit", "row"]):
                    at = np.searchsorted(units, batch["unit"].to_numpy())
                    dropped[bases[at] + batch["row"].to_numpy().astype(np.int64)] = True
        return dropped

    # ---- candidates to clusters ----

    def _compared(self) -> Iterator[tuple[Int64s, Int64s]]:
        """The candidates, each once, as many at a time as their signatures fit."""
        at_once = self._share(8 * self._signatures.size)
        for group in range(self._layout.pair_groups):
            files = [path for path in self._pair_files(group) if path.stat().st_size]
            runs = [np.asarray(np.memmap(path, np.uint64, "r")) for path in files]
            for unique in _each_once(_in_order(runs, 0, 1 << 64, self._share(100))):
                for start in range(0, len(unique), at_once):
                    yield self._layout.pairs(group, unique[start : start + at_once])

    def _alike(self, first: Int64s, second: Int64s) -> tuple[Int64s, Int64s]:
        """The pairs whose signatures agree in enough places."""
        equal = self._signatures.at(first) == self._signatures.at(second)
        taken = np.count_nonzero(equal, axis=1) >= least_matches(self._rules)
        return first[taken], second[taken]

    def _write_drops(self, clusters: Clusters | None, exempt_below: int, candidates: int) -> NearResolved:
        with DropWriter(self._folder / drop_file_name(NEAR, 0)) as writer:
            for positions, kept in clusters.members() if clusters else ():
                unit, row = self._signatures.named(positions)
                drop = unit >= exempt_below
                of_unit, of_row = self._signatures.named(kept[drop])
                writer.add(unit[drop], row[drop], of_unit, of_row)
            writer.commit()
        sizes = clusters.sizes() if clusters else {}
        return NearResolved(self._signatures.documents, candidates, sum(sizes.values()), writer.dropped, sizes)


# ---- keys ----


def hash_bands(values: Signatures) -> Hashes:
    """A hash of each row: (documents, values in a band) -> (documents,)."""
    documents, size = values.shape
    padded = np.zeros((documents, -(-size // 8) * 8), np.uint8)
    padded[:, :size] = values
    words = padded.view("<u8")
    hashes = mix(words[:, 0])
    for k in range(1, words.shape[1]):
        hashes = mix(hashes + words[:, k])
    return hashes


class KeyLayout:
    """How a hash and a position, or two positions, are one 64-bit key. Follows from the number of documents alone.

    What does not fit (hashes from 500 million documents on, pairs from 4 billion) is in the choice of the file.
    """

    def __init__(self, documents: int) -> None:
        bits = max(1, (documents - 1).bit_length())
        self._bits = np.uint64(bits)
        self._rest = np.uint64(64 - bits)
        self._mask = np.uint64((1 << bits) - 1)
        # With 6 bits of hash more than of position, one document in 128 is paired with an unlike one: cheap to check.
        self._section_bits = max(0, 2 * bits - 58)
        self.hash_sections = 1 << self._section_bits
        self.pair_groups = ((documents - 1) >> (64 - bits)) + 1

    def add_hashes(self, parts: list[SortedKeys], hashes: Hashes, positions: Int64s) -> None:
        keys = (hashes << np.uint64(self._section_bits)) >> self._bits << self._bits | positions.astype(np.uint64)
        # The upper bits of a hash stay in the key of the only file, or choose one of several.
        sections = hashes >> np.uint64(64 - self._section_bits) if self._section_bits else None
        _distribute(parts, sections, keys)

    def hashes(self, keys: Hashes) -> tuple[Hashes, Int64s]:
        """(hash, position) of each key."""
        return keys >> self._bits, (keys & self._mask).astype(np.int64)

    def add_pairs(self, groups: list[SortedKeys], first: Int64s, second: Int64s) -> None:
        later = second.astype(np.uint64)
        sections = later >> self._rest if self.pair_groups > 1 else None
        _distribute(groups, sections, later << self._bits | first.astype(np.uint64))

    def pairs(self, group: int, keys: Hashes) -> tuple[Int64s, Int64s]:
        """The two positions of each key, the first in plan order first."""
        later = (keys >> self._bits) + (np.uint64(group) << self._rest)
        return (keys & self._mask).astype(np.int64), later.astype(np.int64)


def _distribute(parts: list[SortedKeys], sections: Hashes | None, keys: Hashes) -> None:
    if sections is None:
        parts[0].add(keys)
        return
    # Sorted, and not looked for part by part: ten billion documents have a thousand parts. Small numbers sort fastest.
    small = sections.astype(np.uint16 if len(parts) <= 1 << 16 else np.uint64)
    stops = np.cumsum(np.bincount(small.astype(np.int64), minlength=len(parts)))
    ordered = keys[np.argsort(small, kind="stable")]
    for part, start, stop in zip(parts, [0, *stops[:-1].tolist()], stops.tolist(), strict=True):
        if stop > start:
            # A copy: a view would keep all keys as long as the smallest part waits.
            part.add(ordered[start:stop].copy())


def bucket_pairs(blocks: Iterable[Hashes], layout: KeyLayout) -> Iterator[tuple[Int64s, Int64s]]:
    """Pairs of positions from sorted keys: each document with the one before it in its bucket, and with the first."""
    open_bucket = np.empty(0, np.uint64)  # of the last block's last bucket, the first and the last key
    for block in blocks:
        keys = np.concatenate((open_bucket, block))
        hashes, positions = layout.hashes(keys)
        begins = np.concatenate(([True], hashes[1:] != hashes[:-1]))
        starts = np.flatnonzero(begins)
        first = positions[np.repeat(starts, np.diff(np.append(starts, len(keys))))]
        inside = np.flatnonzero(~begins)
        yield positions[inside - 1], positions[inside]
        far = inside[first[inside] != positions[inside - 1]]
        yield first[far], positions[far]
        open_bucket = keys[[starts[-1], -1]] if starts[-1] < len(keys) - 1 else keys[-1:]


class SortedKeys:
    """Numbers of 64 bits, more than fit into memory, given back in order.

    They go to disk in sorted runs of `run_keys`. Coming back, the range of numbers is halved until what lies in it,
    over all runs, fits; that is read and sorted. So a huge bucket costs no memory. 8 bytes of disk each.
    """

    def __init__(self, path: Path, run_keys: int) -> None:
        self._path, self._run_keys = path, run_keys
        self._waiting: list[Hashes] = []
        self._count = 0
        self._stops = [0]

    def add(self, keys: Hashes) -> None:
        self._waiting.append(keys)
        self._count += len(keys)
        if self._count >= self._run_keys:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a run."""
        keys = np.concatenate(self._waiting) if self._waiting else np.empty(0, np.uint64)
        self._waiting, self._count = [], 0
        if not len(keys):
            return
        keys.sort()
        with explain_os_errors(self._path), self._path.open("ab") as file:
            file.write(keys.data)
        self._stops.append(self._stops[-1] + len(keys))

    def blocks(self, block_keys: int) -> Iterator[Hashes]:
        """All numbers in order, `block_keys` or fewer at a time. Equal ones come in one block, however many."""
        self.flush()
        if len(self._stops) == 1:
            return
        keys = np.asarray(np.memmap(self._path, np.uint64, "r"))
        runs = [keys[start:stop] for start, stop in pairwise(self._stops)]
        yield from _in_order(runs, 0, 1 << 64, block_keys)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._stops = [0]


def _each_once(blocks: Iterator[Hashes]) -> Iterator[Hashes]:
    """Sorted numbers without repetitions; equal ones come in one block."""
    for block in blocks:
        yield block[np.concatenate(([True], block[1:] != block[:-1]))]


def _in_order(runs: list[Hashes], low: int, high: int, block_keys: int) -> Iterator[Hashes]:
    """The numbers of sorted runs, all in [low, high), in order."""
    runs = [run for run in runs if len(run)]
    if not runs:
        return
    if sum(map(len, runs)) <= block_keys or high - low <= 1:
        block = np.concatenate(runs)
        block.sort()
        yield block
        return
    middle = (low + high) // 2
    cuts = [int(np.searchsorted(run, np.uint64(middle))) for run in runs]
    yield from _in_order([run[:cut] for run, cut in zip(runs, cuts, strict=True)], low, middle, block_keys)
    yield from _in_order([run[cut:] for run, cut in zip(runs, cuts, strict=True)], middle, high, block_keys)


def _new_mapped(path: Path, dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
    """An array of zeros in a new file. Its space is taken at once: a full disk is an error now, not a crash later."""
    size = count * np.dtype(dtype).itemsize
    with explain_os_errors(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+"))


# ---- clusters ----


class Clusters:
    """Which documents belong together: union-find over a mapped file, a label of 8 bytes a document.

    A label is a document of the same cluster that comes before, or the document itself: following labels leads to the
    first. Joining takes each pair once, in blocks; the result is the same in any order.
    """

    def __init__(self, work: Path, documents: int, block: int) -> None:
        self._documents, self._block = documents, block
        self._labels = _new_mapped(work / "labels", np.int64, documents)
        self._others = _new_mapped(work / "others", np.uint32, documents)
        for start, stop in self._ranges():
            self._labels[start:stop] = np.arange(start, stop)

    def join(self, first: Int64s, second: Int64s) -> None:
        """Put the two documents of each pair into one cluster."""
        while len(first):
            roots = self._roots(np.concatenate((first, second)))
            first, second = roots[: len(first)], roots[len(first) :]
            apart = first != second
            first, second = first[apart], second[apart]
            # Several pairs may move one root; those that lose are still apart, and come again in the next round.
            np.minimum.at(self._labels, np.maximum(first, second), np.minimum(first, second))

    def _roots(self, positions: Int64s) -> Int64s:
        """The first document of each one's cluster; on the way, labels are moved nearer to it."""
        while True:
            labels = self._labels[positions]
            above = self._labels[labels]
            if np.array_equal(labels, above):
                return labels
            self._labels[positions] = above

    def members(self) -> Iterator[tuple[Int64s, Int64s]]:
        """(positions, the first of their cluster) of all but the first ones, in plan order."""
        for start, stop in self._ranges():
            moved = np.flatnonzero(self._labels[start:stop] != np.arange(start, stop)) + start
            if len(moved):
                roots = self._roots(moved)
                np.add.at(self._others, roots, np.uint32(1))
                yield moved, roots

    def sizes(self) -> dict[int, int]:
        """Size -> clusters, after `members` has gone through; from 64 on, by powers of two."""
        found: Counter[int] = Counter()
        for start, stop in self._ranges():
            others = self._others[start:stop]
            sizes, counts = np.unique(others[others > 0], return_counts=True)
            for size, count in zip((sizes + np.uint32(1)).tolist(), counts.tolist(), strict=True):
                found[size if size < _EXACT_SIZES else 1 << (size.bit_length() - 1)] += count
        return dict(sorted(found.items()))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._documents, self._block):
            yield start, min(start + self._block, self._documents)
