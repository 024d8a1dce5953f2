"""Pieces of the input, in order -> groups that become units.

By default a group ends where the hash of a piece's name says so, with a probability of its share of `shard_size`: a
file that is added, removed or changed moves the ends near it and no others. Never more than twice `shard_size` (but for
a piece that is larger), never less than a quarter but at the end or where the format changes.

With a number of shards: so many groups, as even as the pieces allow. Both stream; they hold one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from milldam.sources.units import Slice

_LEAST, _MOST = 0.25, 2.0
_PIECES = 10_000
"""So many small pieces weigh as much as `shard_size` bytes: opening a file costs something however small it is."""
_EXPANSION = 4
"""A byte of a compressed file counts as so many: text packs about that well."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a slice of one."""

    slice: Slice
    identity: list[Any]
    """What its rows depend on, plain JSON."""
    version: str | None = None
    """Of its file, where a look at the file can tell whether it is still that one."""

    @property
    def luck(self) -> float:
        """From 0 to 1, by the piece's name alone."""
        name = f"{self.slice.path}\0{self.slice.start}".encode("utf-8", "surrogateescape")
        return float(xxhash.xxh3_64_intdigest(name)) / 2.0**64


def gather(pieces: Iterable[Piece], shard_size: int) -> Iterator[list[Piece]]:
    """Groups of about `shard_size` with ends that the pieces' names choose."""
    group: list[Piece] = []
    held = 0.0
    for piece in pieces:
        weight = piece.slice.size * (_EXPANSION if piece.slice.compression else 1) / shard_size + 1 / _PIECES
        if group and (held + weight > _MOST or piece.slice.format != group[0].slice.format):
            yield group
            group, held = [], 0.0
        group.append(piece)
        held += weight
        if held >= _LEAST and piece.luck < weight:
            yield group
            group, held = [], 0.0
    if group:
        yield group


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
