"""Which documents equal one that came before them in plan order, decided unit by unit: what `exact` finds of all units.

The hashes of the units so far lie on disk in sorted runs, (3, hashes): high halves, low halves, positions; 24 bytes
each. A run is merged with the one before it unless that is more than twice as large, so that there are few, and a hash
is written again as often as the number of hashes doubles. Holds a block of them; the runs are mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from milldam.dedup.exact import ROW_BITS, Positions, Words
from milldam.dedup.keys import in_ranges, new_mapped
from milldam.dedup.seen import places_in

_BLOCK_HASHES = 1 << 16
_NOWHERE = -1


class EarlierHashes:
    """The hashes of the units that were decided on. `folder`: empty, for its runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self._runs: list[tuple[Path, Words]] = []

    def decide(self, unit: int, hashes: Path) -> tuple[Positions, Positions]:
        """(position, position of the first equal one) of the documents of the next unit that equal an earlier one."""
        dropped = [self._take(*block) for block in _blocks(hashes, unit)]
        if not dropped:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        position, first = (np.concatenate(columns) for columns in zip(*dropped, strict=True))
        order = np.argsort(position)
        return position[order], first[order]

    def _take(self, hi: Words, lo: Words, position: Positions) -> tuple[Positions, Positions]:
        """The same of a block of hashes, which from now on count as seen."""
        order = np.lexsort((position, lo, hi))
        hi, lo, position = hi[order], lo[order], position[order]
        starts = np.ones(len(hi), bool)
        starts[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
        earlier = self._find(hi[starts], lo[starts])
        new = earlier == _NOWHERE
        self._add(np.stack([hi[starts][new], lo[starts][new], position[starts][new].astype(np.uint64)]))
        first = np.where(new, position[starts], earlier)[np.cumsum(starts) - 1]
        dropped = first != position
        return position[dropped], first[dropped]

    def _find(self, hi: Words, lo: Words) -> Positions:
        """The position of the document that has each of some hashes; -1: there is none."""
        found = np.full(len(hi), _NOWHERE, np.int64)
        for _, run in self._runs:
            places = places_in(run, hi, lo)
            held = places != _NOWHERE
            found[held] = run[2, places[held]].astype(np.int64)
        return found

    def _add(self, run: Words) -> None:
        if not run.shape[1]:
            return
        path, made = self._new(run.shape[1])
        made[:] = run
        self._runs.append((path, made))
        while len(self._runs) > 1 and 2 * self._runs[-1][1].shape[1] >= self._runs[-2][1].shape[1]:
            self._merge()

    def _merge(self) -> None:
        """The last two runs."""
        (old_path, old), (new_path, new) = self._runs[-2:]
        path, merged = self._new(old.shape[1] + new.shape[1])
        at = 0
        for parts in in_ranges([old[0], new[0]], _BLOCK_HASHES):
            block = np.concatenate([(old, new)[number][:, part] for number, part in parts], axis=1)
            merged[:, at : at + block.shape[1]] = block[:, np.argsort(block[0], kind="stable")]
            at += block.shape[1]
        self._runs[-2:] = [(path, merged)]
        old_path.unlink()
        new_path.unlink()

    def _new(self, hashes: int) -> tuple[Path, Words]:
        self._made += 1
        path = self._folder / f"{self._made:07d}.run"
        return path, new_mapped(path, np.uint64, 3 * hashes).reshape(3, hashes)


def _blocks(path: Path, unit: int) -> Iterator[tuple[Words, Words, Positions]]:
    """(hi, lo, position) of a unit's hash file, some at a time; equal ones of two blocks in the order of their rows.

    The file has stretches of rows, sorted by hash in each; equal hashes of a stretch are in one row group.
    """
    waiting: list[tuple[Words, Words, Positions]] = []
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            hi, lo, row = (table.column(name).to_numpy() for name in ("hi", "lo", "row"))
            waiting.append((hi, lo, (unit << ROW_BITS) | row.astype(np.int64)))
            if sum(len(one[0]) for one in waiting) >= _BLOCK_HASHES or group == file.num_row_groups - 1:
                hi, lo, position = (np.concatenate(columns) for columns in zip(*waiting, strict=True))
                yield hi, lo, position
                waiting.clear()
