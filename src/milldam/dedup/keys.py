"""Numbers of 64 bits on disk, more than fit into memory, given back in order: (hash, rank) and (rank, rank) as keys.

A rank is a document's place in the order of preference: of two that are alike, the one with the lower rank stays.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from milldam.dedup.shingles import Hashes, Int64s, mix
from milldam.files import explain_os_errors
from milldam.native import kernel

Slices = list[tuple[int, slice]]
"""Parts of sorted runs: (number of the run, from, to)."""
SCATTERED: tuple[Int64s, Int64s] = (np.empty(0, np.int64), np.empty(0, np.int64))
"""What is `wanted` of a mapped file where only its being far apart is known before."""
_FEW, _MANY_RUNS = 4096, 16
"""So many, numpy sorts as fast; of so many runs, merging them two by two takes as long as sorting."""
_SAMPLED = 512
"""A page has so many."""


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


class KeyLayout:
    """How a hash and a rank, or two ranks, are one 64-bit key. Follows from the number of documents alone.

    What does not fit (hashes from 500 million documents on, pairs from 4 billion) is in the choice of the file.
    """

    def __init__(self, documents: int) -> None:
        bits = max(1, (documents - 1).bit_length())
        self._bits = np.uint64(bits)
        self._rest = np.uint64(64 - bits)
        self._mask = np.uint64((1 << bits) - 1)
        # With 6 bits of hash more than of rank, one document in 128 is paired with an unlike one: cheap to check.
        self._section_bits = max(0, 2 * bits - 58)
        self.hash_sections = 1 << self._section_bits
        self.pair_groups = (max(0, documents - 1) >> (64 - bits)) + 1

    def add_hashes(self, parts: list[SortedKeys], hashes: Hashes, ranks: Int64s) -> None:
        keys = (hashes << np.uint64(self._section_bits)) >> self._bits << self._bits | ranks.astype(np.uint64)
        # The upper bits of a hash stay in the key of the only file, or choose one of several.
        sections = hashes >> np.uint64(64 - self._section_bits) if self._section_bits else None
        _distribute(parts, sections, keys)

    def hashes(self, keys: Hashes) -> tuple[Hashes, Int64s]:
        """(hash, rank) of each key."""
        return keys >> self._bits, (keys & self._mask).astype(np.int64)

    def add_pairs(self, groups: list[SortedKeys], first: Int64s, second: Int64s) -> None:
        """Pairs, to be sorted by the second, then by the first."""
        later = second.astype(np.uint64)
        sections = later >> self._rest if self.pair_groups > 1 else None
        _distribute(groups, sections, later << self._bits | first.astype(np.uint64))

    def pairs(self, group: int, keys: Hashes) -> tuple[Int64s, Int64s]:
        """(first, second) of each key."""
        later = (keys >> self._bits) + (np.uint64(group) << self._rest)
        return (keys & self._mask).astype(np.int64), later.astype(np.int64)

    @property
    def together(self) -> int:
        """The keys of pairs with the same second, or of the same hash, differ by less."""
        return 1 << int(self._bits)

    def key_range(self, group: int, start: int, stop: int) -> tuple[int, int]:
        """The keys of a group whose second is from `start` up to `stop`: from, up to."""
        size, base = 1 << int(self._rest), group << int(self._rest)
        low, high = (min(max(edge - base, 0), size) << int(self._bits) for edge in (start, stop))
        return low, high


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


class SortedKeys:
    """Numbers of 64 bits, more than fit into memory, given back in order.

    They go to disk in sorted runs of `run_keys`. Of each run, one number in 512 stays in memory: these tell where in
    the runs a range of numbers lies, which is read without a look at anything else, and merged. However many there
    are, everything is written once and read once. 8 bytes of disk each, a 64th of a byte of memory.
    """

    def __init__(self, path: Path, run_keys: int) -> None:
        self._path, self._run_keys = path, run_keys
        self._waiting: list[Hashes] = []
        self._count = 0
        self._stops = [0]
        self._samples: list[Hashes] = []

    def add(self, keys: Hashes) -> None:
        self._waiting.append(keys)
        self._count += len(keys)
        if self._count >= self._run_keys:
            self.flush()

    def __len__(self) -> int:
        return self._stops[-1] + self._count

    def flush(self) -> None:
        """Write what waits as a run."""
        keys = np.concatenate(self._waiting) if self._waiting else np.empty(0, np.uint64)
        self._waiting, self._count = [], 0
        if not len(keys):
            return
        sort(keys)
        with explain_os_errors(self._path), self._path.open("ab") as file:
            file.write(keys.data)
        self._stops.append(self._stops[-1] + len(keys))
        self._samples.append(keys[::_SAMPLED].copy())

    def blocks(self, block_keys: int, *, together: int = 1, read_keys: int = 0) -> Iterator[Hashes]:
        """All numbers in order, `block_keys` or fewer at a time. Equal ones come in one block, however many, and so do
        those that differ by less than `together`, a power of two, in their lower bits alone.

        `read_keys`: to read at once, when more than a block; less than some hundred of each run are no use.
        """
        self.flush()
        if not self._samples:
            return
        with self._path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for low, high in pairwise(self._edges(max(block_keys, read_keys), together)):
                yield from _cut(self._read(file, low, high), block_keys, together)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._stops, self._samples = [0], []

    def _edges(self, read_keys: int, together: int) -> list[int]:
        """Numbers between which about so many lie, the last one more than any."""
        samples = np.concatenate(self._samples)
        sort(samples)
        # Of each run, some lie in front of the first sample in a range.
        step = max(1, read_keys // _SAMPLED - len(self._samples))
        inner = np.unique(samples[step::step] // np.uint64(together) * np.uint64(together))
        return [0, *inner[inner > 0].tolist(), 1 << 64]

    def _read(self, file: IO[bytes], low: int, high: int) -> Hashes:
        """The numbers from `low` up to `high`, in order."""
        spans = []
        for (start, stop), samples in zip(pairwise(self._stops), self._samples, strict=True):
            inside = between(samples, low, high)
            first = start + max(0, inside.start - 1) * _SAMPLED
            spans.append((first, min(stop, start + inside.stop * _SAMPLED) - first))
        if hasattr(os, "posix_fadvise"):
            for first, count in spans:
                os.posix_fadvise(file.fileno(), first * 8, count * 8, os.POSIX_FADV_WILLNEED)
        parts = []
        for first, count in spans:
            if count > 0:
                file.seek(first * 8)
                # Not by np.fromfile, which takes an error for the end of the file.
                keys = np.frombuffer(file.read(count * 8), np.uint64)
                parts.append(keys[between(keys, low, high)])
        return _merge(parts)


def _cut(keys: Hashes, block_keys: int, together: int) -> Iterator[Hashes]:
    """Sorted numbers in blocks, each with all that belong together."""
    start = 0
    while start < len(keys):
        stop = start + block_keys
        if stop < len(keys):
            group = int(keys[stop]) // together * together
            held = between(keys, group, group + together)
            stop = held.start if held.start > start else held.stop
        yield keys[start:stop]
        start = stop


def sort(keys: Hashes) -> None:
    """In place, with as much memory again."""
    if len(keys) > _FEW:
        kernel("sort", np.uint64, np.uint64)(keys, np.empty_like(keys))
    else:
        keys.sort()


def each_once(block: Hashes) -> Hashes:
    """Sorted numbers without repetitions."""
    found: Hashes = block[np.concatenate((np.ones(min(1, len(block)), bool), block[1:] != block[:-1]))]
    return found


def merged(runs: Sequence[Hashes], parts: Slices) -> Hashes:
    """Parts of sorted runs as one."""
    return _merge([runs[number][part] for number, part in parts])


def _merge(runs: list[Hashes]) -> Hashes:
    block = np.concatenate(runs) if runs else np.empty(0, np.uint64)
    if len(runs) > _MANY_RUNS:
        sort(block)
    elif len(runs) > 1:
        # Runs one after the other: what merges them takes a tenth of the time of what sorts anything.
        block.sort(kind="stable")
    return block


def between(keys: Hashes, low: int, high: int) -> slice:
    """Of sorted numbers those from `low` up to `high`, which may be one more than a number can be."""
    first, last = (int(np.searchsorted(keys, np.uint64(edge))) if edge < 1 << 64 else len(keys) for edge in (low, high))
    return slice(first, last)


def in_ranges(
    runs: Sequence[Hashes], block_keys: int, *, low: int = 0, high: int = 1 << 64, together: int = 1
) -> Iterator[Slices]:
    """The parts of sorted runs that lie in one range of numbers, range after range, `block_keys` or fewer in each.

    `together`: a power of two; numbers that differ by less, in their lower bits alone, come in one range, however many.
    `low` and `high`, between which all of them lie, are multiples of it.
    """
    return _halved(runs, [(k, slice(0, len(run))) for k, run in enumerate(runs)], low, high, (block_keys, together))


def _halved(runs: Sequence[Hashes], parts: Slices, low: int, high: int, sizes: tuple[int, int]) -> Iterator[Slices]:
    parts = [(number, part) for number, part in parts if part.stop > part.start]
    if not parts:
        return
    block_keys, together = sizes
    if sum(part.stop - part.start for _, part in parts) <= block_keys or high - low <= together:
        yield parts
        return
    middle = (low + high) // 2 // together * together
    cuts = [part.start + int(np.searchsorted(runs[number][part], np.uint64(middle))) for number, part in parts]
    lower = [(number, slice(part.start, cut)) for (number, part), cut in zip(parts, cuts, strict=True)]
    upper = [(number, slice(cut, part.stop)) for (number, part), cut in zip(parts, cuts, strict=True)]
    yield from _halved(runs, lower, low, middle, sizes)
    yield from _halved(runs, upper, middle, high, sizes)


def numbered(values: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct ones of some positions in order, and for each value which of them it is.

    What `np.unique` does, at a third of its time: a position and its place are one number, sorted as such.
    """
    bits = np.uint64(len(values).bit_length())
    keys = values.astype(np.uint64) << bits | np.arange(len(values), dtype=np.uint64)
    sort(keys)
    ordered = (keys >> bits).astype(np.int64)
    new = np.concatenate((np.ones(min(1, len(keys)), bool), ordered[1:] != ordered[:-1]))
    where = np.empty(len(values), np.int64)
    where[keys & ((np.uint64(1) << bits) - np.uint64(1))] = np.cumsum(new) - 1
    return ordered[new], where


def mapped(path: Path, dtype: Any, *, wanted: tuple[Int64s, Int64s] | None = None) -> npt.NDArray[Any]:
    """The numbers in a file, read where they are looked at; an empty file can't be mapped, and needs not.

    `wanted`: of all bytes only those from here up to there will be looked at, in order. They are asked for at once,
    since one after the other each waits for the disk, and nothing else is read, 128 KB for each look otherwise.
    """
    if not path.stat().st_size:
        return np.empty(0, dtype)
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if wanted is not None and hasattr(whole, "madvise"):
        whole.madvise(mmap.MADV_RANDOM)
        for start, stop in _pages(*wanted):
            whole.madvise(mmap.MADV_WILLNEED, start, min(stop, len(whole)) - start)
    return np.frombuffer(whole, dtype)


def _pages(starts: Int64s, stops: Int64s) -> Iterator[tuple[int, int]]:
    """The pages that some stretches lie in, those side by side as one: from, up to."""
    first, last = starts // mmap.PAGESIZE, (stops - 1) // mmap.PAGESIZE
    new = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
    begin, end = np.append(first[:1], first[new]), np.append(last[new - 1], last[-1:])
    return zip((begin * mmap.PAGESIZE).tolist(), ((end + 1) * mmap.PAGESIZE).tolist(), strict=True)


def new_mapped(path: Path, dtype: Any, count: int) -> npt.NDArray[Any]:
    """An array of zeros in a new file. Its space is taken at once: a full disk is an error now, not a crash later."""
    size = count * np.dtype(dtype).itemsize
    if not size:
        return np.empty(0, dtype)
    with explain_os_errors(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+"))
