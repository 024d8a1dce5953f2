"""What a person should look at of near-duplicates: the removals that are closest to the threshold, and the documents
for which most others were removed (near_drops.py finds them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAIRS, CLUSTERS = 10, 10

Place = tuple[int, int]
"""Unit and row of a document."""


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
    pairs: tuple[Pair, ...] = ()
    """The least alike first."""
    clusters: tuple[Cluster, ...] = ()
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
