"""Signatures of all documents -> pairs of documents that may be alike, some bands of the signatures at a time.

Documents whose signatures are equal in a whole band fall into one bucket: (hash of the band, rank) as one 64-bit key,
sorted on disk. Within a bucket each document is paired with the first and with the `WINDOW` before it, so that pairs
grow with the bucket and not with its square. A pair is worth a look when its signatures agree in enough places; of
these a document keeps, of each call, the `PAIRS_KEPT` that agree most, and the first.

A document's position is its place in the plan, behind those of the runs of the index; its rank is its place in the
order of preference. Documents that are dropped already and those without words take no part.

Memory: what is asked for. Disk: 33 bytes a document and 8 a pair of a bucket while a call is at work; it leaves 8 a
pair that is kept and a bit a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milldam.dedup.drops import EVALUATION, EXACT, drop_files, drops_in, unit_and_row
from milldam.dedup.keys import (
    Bools,
    Hashes,
    Int64s,
    KeyLayout,
    SortedKeys,
    begins,
    each_once,
    in_order,
    mapped,
    new_mapped,
    work_folder,
)
from milldam.dedup.minhash import CHANCE, NO_WORDS, SignatureFiles, mix
from milldam.files import NewFile
from milldam.prefetch import in_threads
from milldam.rules import NearRules

DEVIATIONS = 3
"""A pair is worth a look from so many standard deviations of the estimate below the threshold on."""
WINDOW, PAIRS_KEPT = 4, 4
_BANDS_AT_ONCE = 4
_ROWS_AT_ONCE, _KEYS_AT_ONCE, _RUN_KEYS = 1 << 13, 1 << 17, 1 << 20
"""However much memory there is: what caches hold, and malloc gives again without asking the system, takes less time."""
_SMALLEST_BLOCK = 1024
_MOST_VALUES = 2048
"""More than a signature has: two numbers of pairs at once and one of values fit into 64 bits."""
_MARKED_AT_ONCE = 1 << 23
RANKS, POSITIONS = "ranks.bin", "positions.bin"
"""Files of `preferred.rank`: the rank of each position, and the position of each rank."""
Pairs = tuple[Int64s, Int64s]


@dataclass(frozen=True, slots=True, kw_only=True)
class NearWork:
    """The folder, rules and memory of a search for near-duplicates."""

    folder: Path
    """Has signatures and the drop files of other ways, then pairs, sketches and edges."""
    rules: NearRules
    exempt_below: int
    """Documents of units below this one are never dropped; what is like them is."""
    memory_bytes: int
    mark_all: bool = False
    """Sketches are wanted of all documents, not only of those in pairs."""
    threads: int = 1
    """To decide with."""

    def share(self, bytes_each: int) -> int:
        """How many things of a size to hold at once. Half of the memory is left to what numpy makes on the way."""
        return max(_SMALLEST_BLOCK, self.memory_bytes // 2 // bytes_each)


class Documents:
    """All documents: their signatures by position, their ranks."""

    def __init__(self, work: NearWork) -> None:
        self.signatures = SignatureFiles(work.folder, work.rules.bands * work.rules.rows)
        self.count = self.signatures.documents
        self.exempt = self.signatures.before(work.exempt_below)
        """So many come first and are never dropped: their ranks are their positions."""
        self.layout = KeyLayout(self.count)
        files = work.folder / RANKS, work.folder / POSITIONS
        self._by_position, self._by_rank = (mapped(path, np.int64) if path.exists() else None for path in files)

    def ranks(self, positions: Int64s) -> Int64s:
        return positions if self._by_position is None else self._by_position[positions]

    def positions(self, ranks: Int64s) -> Int64s:
        return ranks if self._by_rank is None else self._by_rank[ranks]


def hash_bands(values: npt.NDArray[np.uint8]) -> Hashes:
    """A hash of each row: (documents, values in a band) -> (documents,)."""
    documents, size = values.shape
    padded = np.zeros((documents, -(-size // 8) * 8), np.uint8)
    padded[:, :size] = values
    words = padded.view("<u8")
    hashes = mix(words[:, 0])
    for k in range(1, words.shape[1]):
        hashes = mix(hashes + words[:, k])
    return hashes


def pair_steps(rules: NearRules) -> int:
    """How many calls of `find_pairs` there are.

    >>> pair_steps(NearRules(bands=32, rows=8))
    8
    """
    return -(-rules.bands // _BANDS_AT_ONCE)


def least_matches(rules: NearRules) -> int:
    """How many places of two signatures must be equal for the pair to be worth a look.

    >>> least_matches(NearRules(bands=32, rows=8, threshold=0.8))
    186
    """
    size = rules.bands * rules.rows
    deviation = (rules.threshold * (1 - rules.threshold) / size) ** 0.5
    estimate = max(0.0, rules.threshold - DEVIATIONS * deviation)
    return int(np.ceil((CHANCE + estimate * (1 - CHANCE)) * size - 1e-9))


def find_pairs(work: NearWork, step: int) -> int:
    """Write the pairs of ranks that share a bucket of some band of this step; how many there are."""
    with work_folder(work.folder / f"near-work-{step}") as folder:
        return _Search(work, folder).find_pairs(step)


def pair_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("pairs-*.keys"))


def marked_rows(folder: Path, base: int, count: int) -> Bools:
    """Which of the documents from a position on are in a pair of any step."""
    first, last = base // 8, -(-(base + count) // 8)
    bits = np.zeros(last - first, np.uint8)
    for path in folder.glob("marks-*.bits"):
        bits |= mapped(path, np.uint8)[first:last]
    return np.unpackbits(bits, bitorder="little")[base - 8 * first :][:count].astype(bool)


class _Search:
    """One search over one folder."""

    def __init__(self, work: NearWork, folder: Path) -> None:
        self._work, self._folder = work, folder
        self._documents = Documents(work)
        self._layout, self._signatures = self._documents.layout, self._documents.signatures
        self._marks = new_mapped(folder / "marks", np.bool_, self._documents.count)

    def find_pairs(self, step: int) -> int:
        """The pairs that are worth a look, each once and in order; and a bit for each of their documents."""
        bands = range(step * _BANDS_AT_ONCE, min((step + 1) * _BANDS_AT_ONCE, self._work.rules.bands))
        count = 0
        with NewFile(self._work.folder / f"pairs-{step:03d}.keys") as new:
            pairs = self._bucket_pairs(bands)
            for block in pairs.blocks(min(self._work.share(200), _KEYS_AT_ONCE), together=self._layout.together):
                worth = self._worth_a_look(each_once(block))
                new.write(worth.data)
                count += len(worth)
            new.put_in_place()
        with NewFile(self._work.folder / f"marks-{step:03d}.bits") as new:
            for start in range(0, len(self._marks), _MARKED_AT_ONCE):
                new.write(np.packbits(self._marks[start : start + _MARKED_AT_ONCE], bitorder="little").data)
            new.put_in_place()
        return count

    def _bucket_pairs(self, bands: range) -> SortedKeys:
        share = self._work.share
        pairs = SortedKeys(self._folder / "pairs", share(96))
        for band in self._band_keys(bands):
            blocks = band.blocks(min(share(400), _KEYS_AT_ONCE), read_keys=min(share(48), _RUN_KEYS))
            for found in bucket_pairs(blocks, self._layout):
                for first, second in found:
                    new = second >= self._documents.exempt
                    pairs.add(self._layout.of_pairs(first[new], second[new]))
            band.remove()
        return pairs

    def _band_keys(self, bands: range) -> list[SortedKeys]:
        """The keys of some bands, from one pass over the signatures, of documents that have words and are not dropped
        already."""
        run_keys = min(self._work.share(32 * len(bands)), _RUN_KEYS)
        keys = [SortedKeys(self._folder / f"band-{k}", run_keys) for k in bands]
        rows = self._work.rules.rows
        dropped: Bools | None = None
        """For each position whether it is dropped for another reason, in a mapped file; None: nothing is."""
        for path in drop_files(self._work.folder, EXACT, EVALUATION):
            if dropped is None:
                dropped = new_mapped(self._folder / "dropped", np.bool_, self._documents.count)
            for drops in drops_in(path):
                dropped[self._signatures.positions(*unit_and_row(drops["place"]))] = True
        at_once = min(self._work.share(8 * self._signatures.size), _ROWS_AT_ONCE)
        for base, signatures in self._signatures.blocks(at_once):
            # Only rows without words hold this value at all.
            part = signatures[:, 0] != NO_WORDS
            if dropped is not None:
                part &= ~dropped[base : base + len(part)]
            if not part.all():
                signatures = signatures[part]
            positions = np.flatnonzero(part) + base
            if self._work.mark_all:
                self._marks[positions] = True
            ranks = self._documents.ranks(positions)
            for band, sorted_keys in zip(bands, keys, strict=True):
                hashes = hash_bands(signatures[:, band * rows : (band + 1) * rows])
                sorted_keys.add(self._layout.of_hashes(hashes, ranks))
        for sorted_keys in keys:
            sorted_keys.flush()
        return keys

    def _worth_a_look(self, keys: Hashes) -> Hashes:
        """Of the pairs of some documents, with all that each has, those to compare by shingles."""
        first, second = self._layout.pairs(keys)
        matches = np.empty(len(keys), np.int64)
        at_once = self._work.share(3 * self._signatures.size)
        for start in range(0, len(keys), at_once):
            part = slice(start, start + at_once)
            positions = (self._documents.positions(ranks[part]) for ranks in (first, second))
            matches[part] = self._signatures.agreements(*positions)
        taken = np.flatnonzero(matches >= least_matches(self._work.rules))
        taken = taken[_best(second[taken], matches[taken])]
        self._marks[self._documents.positions(first[taken])] = True
        self._marks[self._documents.positions(second[taken])] = True
        return keys[taken]


def _best(second: Int64s, matches: Int64s) -> Int64s:
    """Of sorted pairs, for each second the `PAIRS_KEPT` that agree most, and the first; in order."""
    new = begins(second)
    starts = np.flatnonzero(new)
    # By which second it is, then by how little they agree; equal ones stay in order.
    _, order = in_order((np.cumsum(new) * _MOST_VALUES - 1 - matches).view(np.uint64))
    place = np.empty(len(second), np.int64)
    place[order] = np.arange(len(second)) - np.repeat(starts, np.diff(np.append(starts, len(second))))
    place[starts] = 0
    return np.flatnonzero(place < PAIRS_KEPT)


def bucket_pairs(
    blocks: Iterable[Hashes], layout: KeyLayout, *, leader: int = 0, threads: int = 1
) -> Iterator[list[Pairs]]:
    """Pairs of ranks from sorted keys: each document with the `WINDOW` before it in its bucket, and with the first, or
    the one that `leader` tells. A pair may come twice."""
    return in_threads(lambda keys: _pairs_of(keys, layout, leader), _continued(blocks, layout, leader), threads)


def _continued(blocks: Iterable[Hashes], layout: KeyLayout, leader: int) -> Iterator[Hashes]:
    """Blocks that begin with what their first bucket is paired with of the blocks before."""
    held = np.empty(0, np.uint64)
    for block in blocks:
        keys = np.concatenate((held, block))
        yield keys
        last = int(keys[-1]) // layout.together * layout.together
        held = keys[int(np.searchsorted(keys, np.uint64(last))) :]
        if len(held) > leader + 1 + WINDOW:
            held = np.concatenate((held[: leader + 1], held[-WINDOW:]))


def _pairs_of(keys: Hashes, layout: KeyLayout, leader: int) -> list[Pairs]:
    hashes, ranks = layout.hashes(keys)
    starts = np.flatnonzero(begins(hashes))
    begin = np.repeat(starts, np.diff(np.append(starts, len(keys))))
    place = np.arange(len(keys)) - begin
    found, inside = [], np.flatnonzero(place)
    for back in range(1, WINDOW + 1):
        inside = inside[place[inside] >= back]
        found.append((ranks[inside - back], ranks[inside]))
    far = inside[place[inside] > leader + WINDOW]
    return [*found, (ranks[begin[far] + leader], ranks[far])]
