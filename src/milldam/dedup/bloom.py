"""Hash files of all units -> a drop file in one pass and a fixed amount of memory, by a Bloom filter.

No duplicate is missed: of equal documents the first in plan order is kept, all others are dropped. A new document is
taken for a duplicate with a chance that grows from 0 to `rate` while the filter fills, so that fewer than `rate` of
the new documents are lost. Memory: 1.44 log2(1 / rate) bits a document (29 for one in a million, 3.6 MB a million
documents), and 80 MB at the most. No temporary disk. What a document duplicates is not known.

Documents are looked up in stretches of the same size whatever the input's batches or the memory: the result depends
on the hashes and the rate alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milldam.dedup.drops import BLOOM, ROW_BITS, UNKNOWN, DropWriter, drop_file_name
from milldam.dedup.exact import Resolved, count_hashes, sources_of
from milldam.dedup.fingerprints import Hashes, stretches
from milldam.dedup.keys import begins, mapped
from milldam.errors import ResourceError, Setting
from milldam.memory import format_size

_STRETCH = 1 << 15
_FIXED_BYTES = 80 << 20
_LN2_SQUARED = math.log(2) ** 2

Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


def filter_bytes(documents: int, rate: float) -> int:
    """The size of the filter for so many documents.

    >>> filter_bytes(1_000_000, 1e-6)
    3594397
    """
    return max(8, math.ceil(-documents * math.log(rate) / _LN2_SQUARED / 8))


def resolve_bloom(
    folder: Path,
    *,
    rate: float,
    exempt_below: int,
    memory_bytes: int,
    index_files: Sequence[Path] = (),
) -> Resolved:
    """Write the drop file of all hashes in a folder; `rate`: the share of new documents that may be dropped.

    Units below `exempt_below` are never dropped, but what they have counts as seen, as does what is in `index_files`.
    """
    sources = sources_of(folder, index_files)
    seen = BloomFilter(count_hashes(sources), rate, memory_bytes - _FIXED_BYTES)
    documents = repeated = 0
    with DropWriter(folder / drop_file_name(BLOOM, 0)) as writer:
        for path, unit in sources:
            for rows, hashes in _in_order(path, unit):
                known = seen.add(hashes)
                if unit < 0:
                    continue
                documents += len(hashes)
                repeated += int(np.count_nonzero(known))
                if unit >= exempt_below:
                    dropped = unit << ROW_BITS | rows[known].astype(np.int64)
                    writer.add(dropped, np.full(len(dropped), UNKNOWN))
        writer.commit()
    found = {"documents": documents, "distinct": documents - repeated, "dropped": writer.dropped}
    return found | {"seen_before": 0, "clusters": {}}


def _in_order(path: Path, unit: int) -> Iterator[tuple[Words, Hashes]]:
    """(rows, hashes) of a unit's documents in their order, `_STRETCH` at a time; of a run of the index in any."""
    for stretch in stretches(path) if unit >= 0 else [mapped(path, np.uint64).reshape(2, -1)]:
        order = np.argsort(stretch[2]) if unit >= 0 else np.arange(stretch.shape[1])
        for start in range(0, len(order), _STRETCH):
            some = stretch[:, order[start : start + _STRETCH]]
            yield some[-1], some[:2].T


class BloomFilter:
    """What was added is known from then on; what was not is taken for known with a chance of `rate` at the most.

    >>> seen = BloomFilter(1000, 0.001, memory_bytes=1 << 20)
    >>> hashes = np.arange(6, dtype=np.uint64).reshape(3, 2)
    >>> seen.add(hashes[:2]).tolist(), seen.add(hashes).tolist()
    ([False, False], [True, True, False])
    """

    def __init__(self, documents: int, rate: float, memory_bytes: int) -> None:
        size = filter_bytes(documents, rate)
        if size > memory_bytes:
            raise ResourceError(*_too_large(documents, rate, size, memory_bytes))
        self._bits = np.zeros(size, dtype=np.uint8)
        self._probes = max(1, round(-math.log2(rate)))

    def add(self, hashes: Hashes) -> Mask:
        """Add documents; which of them were known before, or by an earlier one of the same call."""
        known = self._look_up(hashes)
        fresh = np.flatnonzero(~known)
        again = _repeated(hashes[fresh])
        known[fresh[again]] = True
        self._insert(hashes[fresh[~again]])
        return known

    def _look_up(self, hashes: Hashes) -> Mask:
        at, step = _double(hashes)
        left = np.arange(len(hashes))
        for _ in range(self._probes):
            place, bit = self._place(at)
            # Half of the new documents fail each probe: the later probes have few left.
            hit = (self._bits[place] & bit) != 0
            left, step, at = left[hit], step[hit], at[hit] + step[hit]
        known = np.zeros(len(hashes), dtype=bool)
        known[left] = True
        return known

    def _insert(self, hashes: Hashes) -> None:
        at, step = _double(hashes)
        for _ in range(self._probes):
            # Unbuffered: two documents may set different bits of the same byte.
            np.bitwise_or.at(self._bits, *self._place(at))
            at += step

    def _place(self, at: Words) -> tuple[Words, npt.NDArray[np.uint8]]:
        """(byte, bit in it)."""
        at = at % np.uint64(8 * len(self._bits))
        return at >> np.uint64(3), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)


def _double(hashes: Hashes) -> tuple[Words, Words]:
    """Where the probes of a document begin, and how far apart they are: two hashes do the work of many."""
    return hashes[:, 0].copy(), hashes[:, 1] | np.uint64(1)


def _repeated(hashes: Hashes) -> Mask:
    """Whether an earlier one is equal."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # of equal ones the first comes first
    repeated = np.empty(len(hashes), dtype=bool)
    repeated[order] = ~begins(*hashes[order].T)
    return repeated


def _too_large(documents: int, rate: float, size: int, memory_bytes: int) -> tuple[str | Setting, ...]:
    what = f"A Bloom filter for {documents:,} documents at a false positive rate of {rate:g} takes {format_size(size)}"
    there = f"; there are {format_size(max(0, memory_bytes))} for it.\n"
    fitting = math.exp(-max(0, memory_bytes) * 8 * _LN2_SQUARED / max(1, documents)) * 1.05  # so that rounding fits
    lower = f"Set dedup.false_positive_rate: {fitting:.1e}, or give" if fitting < 0.1 else "Give"
    return what, there, f"{lower} more ", Setting("memory"), ", or set dedup.method: exact, which works on disk."
