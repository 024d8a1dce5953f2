"""Pieces of the input, in order -> so many groups, as even as the pieces allow. Streams; holds one group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from milldam.sources.units import Slice


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a slice of one."""

    slice: Slice
    identity: list[Any]
    """What its rows depend on, plain JSON."""
    version: str | None = None
    """Of its file, where a look at the file can tell whether it is still that one."""


def gather_evenly(pieces: Iterable[Piece], shards: int, *, count: int, total: int) -> Iterator[list[Piece]]:
    """`shards` groups of even size, or as many as there are pieces. `count`, `total`: pieces, and bytes in all."""
    group: list[Piece] = []
    done = number = begun = 0
    for seen, piece in enumerate(pieces):
        goal = begun + (total - begun) / (shards - number)
        # A group for each of those that are still to come must be left.
        short = count - seen <= shards - 1 - number
        if group and number < shards - 1 and (short or done + piece.slice.size / 2 > goal):
            yield _merged(group)
            group, begun, number = [], done, number + 1
        group.append(piece)
        done += piece.slice.size
    if group:
        yield _merged(group)


def _merged(group: list[Piece]) -> list[Piece]:
    """Neighbours in a file become one piece."""
    merged = group[:1]
    for piece in group[1:]:
        before, slice = merged[-1], piece.slice
        if before.slice.path == slice.path and before.slice.stop == slice.start:
            joint = replace(before.slice, stop=slice.stop, size=before.slice.size + slice.size)
            merged[-1] = Piece(joint, [*before.identity, *piece.identity], before.version)
        else:
            merged.append(piece)
    return merged
