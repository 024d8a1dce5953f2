"""Drop files of near-dedup -> what a person should look at: the removals that are closest to the threshold, and the
documents for which most others were removed.

Three passes over the files, which come in plan order. Memory: a batch of drops and `_COUNTERS` counters, about 10 MB,
whatever was dropped. The worst pairs are exact. So are the counts of the clusters; one with fewer than a 65,536th of
all drops may be missing from the list, but only when there are more clusters than counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

PAIRS, CLUSTERS = 10, 10
_COUNTERS = 1 << 16
_BATCH_ROWS = 1 << 16
_COLUMNS = ["unit", "row", "of_unit", "of_row", "similarity"]
_ROW_BITS = 40
_SCALE = 1000
"""Similarities are stored in thousandths."""

Place = tuple[int, int]
"""Unit and row of a document."""
Int64s = npt.NDArray[np.int64]
Columns = dict[str, Int64s]


@dataclass(frozen=True, slots=True)
class Pair:
    """A document that was dropped, and the one that stays."""

    dropped: Place
    kept: Place
    similarity: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """A document that stays, and those that were dropped for it."""

    kept: Place
    dropped: int
    worst: Pair
    """Of them, the one that is least like it."""


@dataclass(frozen=True, slots=True)
class NearSummary:
    pairs: tuple[Pair, ...]
    """The least alike first."""
    clusters: tuple[Cluster, ...]
    """The largest first."""

    @property
    def places(self) -> set[Place]:
        """Of all documents in it."""
        pairs = [*self.pairs, *(one.worst for one in self.clusters)]
        return {place for one in pairs for place in (one.dropped, one.kept)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NearSummary:
        """From what `asdict` made of it."""

        def pair(one: dict[str, Any]) -> Pair:
            (unit, row), (of_unit, of_row) = one["dropped"], one["kept"]
            return Pair((unit, row), (of_unit, of_row), one["similarity"])

        clusters = ((one["dropped"], pair(one["worst"])) for one in value["clusters"])
        return cls(
            tuple(map(pair, value["pairs"])), tuple(Cluster(worst.kept, count, worst) for count, worst in clusters)
        )


def summarize(files: Sequence[Path], *, pairs: int = PAIRS, clusters: int = CLUSTERS) -> NearSummary:
    """Of the drops that name a document of this run; what an earlier one has seen can't be looked at here."""
    worst = _worst(_batches(files), pairs)
    largest = _count(_batches(files), _frequent(_batches(files)), clusters)
    return NearSummary(tuple(worst), tuple(largest))


def _batches(files: Iterable[Path]) -> Iterator[Columns]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=_COLUMNS):
                found = {name: batch[name].to_numpy().astype(np.int64) for name in _COLUMNS}
                own = found["of_unit"] >= 0
                yield {name: values[own] for name, values in found.items()}


def _worst(batches: Iterable[Columns], count: int) -> list[Pair]:
    held = {name: np.empty(0, np.int64) for name in _COLUMNS}
    for batch in batches:
        held = {name: np.concatenate((held[name], batch[name])) for name in _COLUMNS}
        order = np.lexsort((held["row"], held["unit"], held["similarity"]))[:count]
        held = {name: values[order] for name, values in held.items()}
    return [_pair(held, at) for at in range(len(held["unit"]))]


def _pair(columns: Columns, at: int) -> Pair:
    unit, row, of_unit, of_row, similarity = (int(columns[name][at]) for name in _COLUMNS)
    return Pair((unit, row), (of_unit, of_row), similarity / _SCALE)


# ---- clusters ----


def _names(columns: Columns) -> Int64s:
    """The kept document of each drop as one number: its unit, then its row."""
    return columns["of_unit"] << _ROW_BITS | columns["of_row"]


def _frequent(batches: Iterable[Columns]) -> Int64s:
    """All kept documents, or, when they are too many, among others those that took most (Misra and Gries 1982)."""
    names, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for batch in batches:
        new, new_counts = np.unique(_names(batch), return_counts=True)
        names, place = np.unique(np.concatenate((names, new)), return_inverse=True)
        counts = np.bincount(place, np.concatenate((counts, new_counts)), len(names)).astype(np.int64)
        if len(names) > _COUNTERS:
            # What every counter loses was counted for so many others as well: nothing frequent gets lost.
            counts -= np.partition(counts, -_COUNTERS - 1)[-_COUNTERS - 1]
            names, counts = names[counts > 0], counts[counts > 0]
    return names


def _count(batches: Iterable[Columns], names: Int64s, clusters: int) -> list[Cluster]:
    counts = np.zeros(len(names), np.int64)
    worst = {name: np.full(len(names), _SCALE + 1) for name in ("unit", "row", "similarity")}
    for batch in batches if len(names) else ():
        found = _names(batch)
        at = np.minimum(np.searchsorted(names, found), len(names) - 1)
        known = np.flatnonzero(names[at] == found)
        np.add.at(counts, at[known], 1)
        # Of each cluster the first drop in this batch that is the least alike.
        order = known[np.lexsort((known, batch["similarity"][known], at[known]))]
        first = order[np.unique(at[order], return_index=True)[1]]
        lower = first[batch["similarity"][first] < worst["similarity"][at[first]]]
        for name, values in worst.items():
            values[at[lower]] = batch[name][lower]
    largest = np.lexsort((names, -counts))[:clusters]
    held = worst | {"of_unit": names >> _ROW_BITS, "of_row": names & ((1 << _ROW_BITS) - 1)}
    pairs = [_pair(held, k) for k in largest.tolist()]
    return [Cluster(pair.kept, int(counts[k]), pair) for k, pair in zip(largest, pairs, strict=True)]
