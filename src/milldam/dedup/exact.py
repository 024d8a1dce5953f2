"""Hash files of all units -> a drop file: every document whose hash an earlier one in plan order has.

Hashes are gone through in ranges. Of a range, the hashes of all files are read in plan order; whenever memory is full,
what is held is sorted, and of equal hashes the first alone stays, whatever their number. The others are dropped: they
go to disk in sorted runs, which are merged in the end. Ranges are worked on side by side, and so can partitions be,
which are ranges too. The result depends on the hashes alone, not on memory, threads or ranges.

Disk beside the hash files (24 bytes a document): 18 bytes a dropped document; while at work 16 more. Time: 0.1 to
0.2 us of one core a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.dedup.drops import EXACT, ROW_BITS, DropWriter, drop_file_name
from milldam.dedup.fingerprints import DOCUMENT_BYTES, HASH_BYTES, stretches
from milldam.dedup.keys import begins, between, in_order, in_ranges, mapped, work_folder
from milldam.files import explain_os_errors
from milldam.prefetch import in_threads

FEW_HASHES = 500_000
"""So many are sorted in a moment, in about 40 MB."""
_FIXED_BYTES, _HASH_BYTES, _LEAST_HASHES = 48 << 20, 72, 1 << 17
"""What grouping takes beside hashes, and for each of them: four numbers, and those that sort them; and how many are
held, however little memory there is."""
_FULL = 0.75
"""The part of what can be held that a range is expected to have, if all its hashes are distinct."""
_AT_ONCE, _READ_AT_ONCE = 1 << 18, 1 << 15

Positions = npt.NDArray[np.int64]
"""Places as in drop files; what an earlier run has seen comes before all of them, below 0."""
Words = npt.NDArray[np.uint64]
Source = tuple[Path, int]
"""A hash file and the number of its unit; below 0 it is that of a run of the index, (2, hashes), all in order."""
Repeated = Callable[[Positions, Positions], None]
T = TypeVar("T")

Resolved = dict[str, Any]
"""What was found; the sum over partitions is the whole. `documents`, `distinct`, `dropped`, of these `seen_before` by
an earlier run; `clusters`: sets of equal documents by size, in powers of two: {1: alone, 2: 2 or 3, 4: 4 to 7, ...}."""


def resolve_exact(
    folder: Path,
    partition: int,
    partitions: int,
    *,
    exempt_below: int,
    memory_bytes: int,
    threads: int,
) -> Resolved:
    """Write the drop file of one partition of the hashes in a folder.

    Units below `exempt_below` are never dropped, but what they have counts as seen; so does what runs of the index
    have. `memory_bytes`: what this call may add to the process.
    """
    sources, documents, seen = sources_of(folder), 0, 0
    runs = sum(unit < 0 for _, unit in sources)
    sizes = np.zeros(64, np.int64)
    with work_folder(folder / f".{EXACT}-{partition:05d}") as work:
        numbers = itertools.count()

        def add(position: Positions, first: Positions) -> None:
            """A sorted run of documents to drop, each with the first equal one; called in any thread."""
            order = np.argsort(position)
            order = order[position[order] >= exempt_below << ROW_BITS]
            path = work / f"{next(numbers):07d}.run"
            with explain_os_errors(path):
                path.write_bytes(np.stack((position[order], first[order])).tobytes())

        def documents_by_size(table: Words) -> tuple[int, Positions]:
            """How many there are, and how many hashes have one, two or three, four to seven, ... of them."""
            each = table[3][table[3] > 0]
            return int(each.sum()), np.bincount(np.frexp(each)[1] - 1, minlength=64)

        cut = {"partition": partition, "partitions": partitions}
        for count, some in each_range(sources, memory_bytes, threads, documents_by_size, add, **cut):
            documents, sizes = documents + count, sizes + some
        with DropWriter(folder / drop_file_name(EXACT, partition)) as writer:
            for position, first in _merged_runs(work):
                of_index = first < 0
                writer.add(position, np.where(of_index, -1 - (first + runs), first))
                seen += int(np.count_nonzero(of_index))
            writer.commit()
    clusters = {1 << k: count for k, count in enumerate(sizes.tolist()) if count}
    found = {"documents": documents, "distinct": sum(clusters.values()), "dropped": writer.dropped}
    return found | {"seen_before": seen, "clusters": clusters}


def _merged_runs(folder: Path) -> Iterator[tuple[Positions, Positions]]:
    """Documents to drop and the first equal ones, in order, from sorted runs."""
    runs = [mapped(path, np.int64).reshape(2, -1) for path in sorted(folder.glob("*.run"))]
    for parts in in_ranges([run[0].view(np.uint64) for run in runs], _AT_ONCE):
        position, first = np.concatenate([runs[number][:, part] for number, part in parts], axis=1)
        order = np.argsort(position, kind="stable")  # runs one after the other are merged
        yield position[order], first[order]


# ---- hashes, each once ----


def sources_of(folder: Path) -> list[Source]:
    """The hash files in a folder, of runs of the index, then of units: in the order in which documents count."""
    runs = sorted(folder.glob("index-*.hashes"))
    earlier = [(path, number - len(runs)) for number, path in enumerate(runs)]
    return earlier + [(path, int(path.stem.split("-")[1])) for path in sorted(folder.glob("hashes-*.bin"))]


def count_hashes(sources: Sequence[Source]) -> int:
    return sum(path.stat().st_size // (DOCUMENT_BYTES if unit >= 0 else HASH_BYTES) for path, unit in sources)


def each_range(
    sources: Sequence[Source],
    memory_bytes: int,
    threads: int,
    make: Callable[[Words], T],
    repeated: Repeated,
    *,
    partition: int = 0,
    partitions: int = 1,
) -> Iterator[T]:
    """The results of `make` on the hashes in each range of a partition, range after range, in threads.

    (4, hashes), in order, each once: high half, low half, the position of the first, how many documents have it.
    `repeated` gets the positions of all others, each with that of the first, some at a time.
    """
    rows = count_hashes(sources) // partitions
    threads = max(1, min(threads, rows // FEW_HASHES))
    # Of what threads make, one more waits than there are threads.
    held = (memory_bytes - _FIXED_BYTES) // (_HASH_BYTES * (1 if threads == 1 else threads + 1))
    held = max(_LEAST_HASHES, held)
    count = max(threads, int(rows / (held * _FULL)) + 1)
    edges = [((partition * count + k) << 64) // (partitions * count) for k in range(count + 1)]
    held = min(held, 2 * rows // count + _LEAST_HASHES)
    yield from in_threads(
        lambda edges: make(_distinct(sources, *edges, held, repeated)), itertools.pairwise(edges), threads
    )


def _distinct(sources: Sequence[Source], low: int, high: int, held: int, repeated: Repeated) -> Words:
    table, filled = np.empty((4, held), np.uint64), 0
    for path, unit in sources:
        for hi, lo, position in _read(path, unit, low, high):
            if filled + len(hi) > table.shape[1]:
                filled = _group(table[:, :filled], low, high, repeated)
            if filled + len(hi) > table.shape[1]:  # as good as never: hashes are spread evenly
                table = np.concatenate((table, np.empty((4, len(hi)), np.uint64)), axis=1)
            stop = filled + len(hi)
            table[0, filled:stop], table[1, filled:stop], table[2, filled:stop] = hi, lo, position.view(np.uint64)
            table[3, filled:stop] = unit >= 0
            filled = stop
    return table[:, : _group(table[:, :filled], low, high, repeated)]


def _read(path: Path, unit: int, low: int, high: int) -> Iterator[tuple[Words, Words, Positions]]:
    """(hi, lo, position) of the hashes whose high half is from `low` up to `high`, some at a time."""
    for stretch in stretches(path) if unit >= 0 else [mapped(path, np.uint64).reshape(2, -1)]:
        part = between(stretch[0], low, high)
        for start in range(part.start, part.stop, _READ_AT_ONCE):
            some = stretch[:, start : min(part.stop, start + _READ_AT_ONCE)]
            position = unit << ROW_BITS | some[2].view(np.int64) if unit >= 0 else np.full(some.shape[1], unit)
            yield some[0], some[1], position


def _group(table: Words, low: int, high: int, repeated: Repeated) -> int:
    """Sort hashes and let each stay once, in place; how many these are."""
    hi, lo, position, documents = table
    # The first bits, as many as fit into a number beside a place; of equal ones, the one that came first is first.
    prefixes = (hi - np.uint64(low)) << np.uint64(64 - (high - 1 - low).bit_length())
    prefixes >>= np.uint64(len(hi).bit_length())
    prefixes, order = in_order(prefixes)
    for column in table:
        column[:] = column[order]
    del order
    new = begins(hi, lo)
    alike = prefixes[1:][new[1:] & (prefixes[1:] == prefixes[:-1])]
    for prefix in np.unique(alike).tolist():  # few: unlike hashes of which so many bits are equal
        run = between(prefixes, prefix, prefix + 1)
        table[:, run] = table[:, run][:, np.lexsort((lo[run], hi[run]))]
    if len(alike):
        new = begins(hi, lo)
    del prefixes
    starts, again = np.flatnonzero(new), np.flatnonzero(~new)
    if not len(again):
        return len(starts)
    number = np.cumsum(new)
    for start in range(0, len(again), _AT_ONCE):
        some = again[start : start + _AT_ONCE]
        first = position[starts[number[some] - 1]]
        repeated(position[some].view(np.int64), first.view(np.int64))
    documents[: len(starts)] = np.add.reduceat(documents, starts)
    for column in (hi, lo, position):
        column[: len(starts)] = column[starts]
    return len(starts)
