"""Numbers of 64 bits on disk, more than fit into memory, given back in order: (hash, rank) and (rank, rank) as keys.

A rank is a document's place in the order of preference: of two that are alike, the one with the lower rank stays.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ResourceError
from milldam.files import explain_os_errors

Hashes = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Slices = list[tuple[int, slice]]
"""Parts of sorted runs: (number of the run, from, to)."""
SCATTERED: tuple[Int64s, Int64s] = (np.empty(0, np.int64), np.empty(0, np.int64))
"""What is `wanted` of a mapped file where only its being far apart is known before."""
MOST_DOCUMENTS = 1 << 32
_MANY_RUNS = 16
"""So many, numpy sorts as fast; of so many runs, merging them two by two takes as long as sorting."""


class KeyLayout:
    """How a hash and a rank, or two ranks, are one 64-bit key. Follows from the number of documents alone."""

    def __init__(self, documents: int) -> None:
        if documents > MOST_DOCUMENTS:
            message = f"Near-dedup compares at most {MOST_DOCUMENTS:,} documents, those of the index included"
            raise ResourceError(f"{message}; there are {documents:,}. Make several stores, or use dedup: exact.")
        self._bits = max(1, (documents - 1).bit_length())
        self.together = 1 << self._bits
        """The keys of pairs with the same second, or of the same hash, differ by less."""

    def of_hashes(self, hashes: Hashes, ranks: Int64s) -> Hashes:
        """The lower bits of a hash make room for the rank: some unlike ones fall together, cheap to check."""
        bits = np.uint64(self._bits)
        return hashes >> bits << bits | ranks.astype(np.uint64)

    def of_pairs(self, first: Int64s, second: Int64s) -> Hashes:
        """Sorted by the second, then by the first."""
        return second.astype(np.uint64) << np.uint64(self._bits) | first.astype(np.uint64)

    def hashes(self, keys: Hashes) -> tuple[Hashes, Int64s]:
        """(hash, rank) of each key."""
        return keys >> np.uint64(self._bits), (keys & np.uint64(self.together - 1)).view(np.int64)

    def pairs(self, keys: Hashes) -> tuple[Int64s, Int64s]:
        """(first, second) of each key."""
        second, first = self.hashes(keys)
        return first, second.view(np.int64)


class SortedKeys:
    """Numbers of 64 bits, more than fit into memory, given back in order: sorted runs, end to end in a file that is
    mapped and merged range by range. However many there are, everything is written once. 8 bytes of disk each."""

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

    def __len__(self) -> int:
        return self._stops[-1] + self._count

    def flush(self) -> None:
        """Write what waits as a run."""
        if not self._count:
            return
        keys = np.concatenate(self._waiting)
        self._waiting, self._count = [], 0
        keys.sort()
        with explain_os_errors(self._path), self._path.open("ab") as file:
            file.write(keys.data)
        self._stops.append(self._stops[-1] + len(keys))

    def blocks(self, block_keys: int, *, together: int = 1, read_keys: int = 0) -> Iterator[Hashes]:
        """All numbers in order, `block_keys` or fewer at a time. Equal ones come in one block, however many, and so do
        those that differ by less than `together`, a power of two, in their lower bits alone.

        `read_keys`: to merge at once, when more than a block.
        """
        self.flush()
        if len(self._stops) > 1:
            keys = mapped(self._path, np.uint64)
            runs = [keys[start:stop] for start, stop in pairwise(self._stops)]
            for parts in in_ranges(runs, max(block_keys, read_keys), together=together):
                yield from _cut(merged(runs, parts), block_keys, together)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._stops = [0]


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


def in_order(values: Hashes) -> tuple[Hashes, Int64s]:
    """Numbers in order, and where each was; of equal ones, the first comes first.

    What a stable argsort does, at a third of its time: a number and its place are sorted as one. As many of the upper
    bits of a number as a place takes must be zero.

    >>> in_order(np.array([5, 3, 5], np.uint64))
    (array([3, 5, 5], dtype=uint64), array([1, 0, 2]))
    """
    bits = np.uint64(len(values).bit_length())
    keys = values << bits
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    places = (keys & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    keys >>= bits
    return keys, places


def begins(*columns: npt.NDArray[Any]) -> Bools:
    """Where each run of equal entries begins: a mask. Several columns: of entries equal in all of them."""
    new = np.ones(len(columns[0]), bool)
    if len(new):
        np.not_equal(columns[0][1:], columns[0][:-1], out=new[1:])
    for column in columns[1:]:
        new[1:] |= column[1:] != column[:-1]
    return new


def each_once(block: Hashes) -> Hashes:
    """Sorted numbers without repetitions."""
    return block[begins(block)]


def merged(runs: Sequence[Hashes], parts: Slices) -> Hashes:
    """Parts of sorted runs as one."""
    block = np.concatenate([runs[number][part] for number, part in parts])
    if len(parts) > _MANY_RUNS:
        block.sort()
    elif len(parts) > 1:
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
    ranges = [([(k, slice(0, len(run))) for k, run in enumerate(runs) if len(run)], low, high)]
    while ranges:
        parts, low, high = ranges.pop()
        if not parts:
            continue
        if sum(part.stop - part.start for _, part in parts) <= block_keys or high - low <= together:
            yield parts
            continue
        middle = (low + high) // 2 // together * together
        lower, upper = [], []
        for number, part in parts:
            cut = part.start + int(np.searchsorted(runs[number][part], np.uint64(middle)))
            if cut > part.start:
                lower.append((number, slice(part.start, cut)))
            if cut < part.stop:
                upper.append((number, slice(cut, part.stop)))
        ranges += [(upper, middle, high), (lower, low, middle)]


def numbered(values: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct ones of some positions in order, and for each value which of them it is."""
    ordered, places = in_order(values.view(np.uint64))
    new = begins(ordered)
    where = np.empty(len(values), np.int64)
    where[places] = np.cumsum(new) - 1
    return ordered[new].view(np.int64), where


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


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """A folder for the time of the work, anew when a killed run left it."""
    shutil.rmtree(folder, ignore_errors=True)
    with explain_os_errors(folder):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
