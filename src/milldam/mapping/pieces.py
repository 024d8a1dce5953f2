"""Input files -> pieces with an identity each; and pieces in so many even groups.

A piece of a large file of lines is known by the hash of its bytes, not by the file's modification time: what is
appended leaves the pieces before it as they are. That costs one pass over the file at the speed of the disk, when it is
new or has changed; the hashes are kept in `Hashes`. Everything else is known by path, size and version of its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from milldam.errors import InputError
from milldam.files import explain_os_errors, hash_bytes
from milldam.input_files import is_address, version_of
from milldam.mapping.plan import HASHES
from milldam.run.records import Journal
from milldam.sources.batch import TextRules
from milldam.sources.compression import open_bytes
from milldam.sources.csv_records import csv_header, slice_csv
from milldam.sources.listing import InputFile
from milldam.sources.plain_text import LINE, boundary_of
from milldam.sources.reading import can_cut, seen_format, slice_file
from milldam.sources.records import Boundary
from milldam.sources.units import Slice, by_bytes

_BLOCK, _TAIL = 1 << 20, 1 << 16
Cuts = list[tuple[int, int | None, str]]
"""(start, stop, hash of what the rows between them depend on)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a slice of one."""

    slice: Slice
    identity: list[Any]
    """What its rows depend on, plain JSON."""
    version: str | None = None
    """Of its file, where a look at the file can tell whether it is still that one."""


class Hashes:
    """The hashes of pieces, kept in a file by path, size and version. A line per large file is held in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Cuts] | None = None

    def cuts(self, file: InputFile, how: str, find: Callable[[], Cuts]) -> Cuts:
        """As `find` gives them; it is asked only for what is not known."""
        if self._known is None:
            lines = Journal(self._folder).read(HASHES)
            self._known = {line["key"]: [tuple(cut) for cut in line["cuts"]] for line in lines}
        key = hash_bytes(json.dumps([file.path, file.size, file.version, how]).encode())
        if key not in self._known:
            found = find()
            if version_of(os.stat(file.path)) != file.version:
                raise InputError(f"{file.path}: changed while it was read. Run the same call again.")
            self._known[key] = found
            with explain_os_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            journal = Journal(self._folder)
            journal.append(HASHES, {"key": key, "cuts": found})
            journal.close()
        return self._known[key]


def pieces_of(file: InputFile, shard_size: int, rules: TextRules, hashes: Hashes | None) -> Iterator[Piece]:
    """The file, cut as its format allows. `hashes` None: known by version."""
    # A local file is known by the time of its last change, which can be looked up again.
    version = file.version if file.version.isdigit() and not is_address(file.path) else None
    file = seen_format(file, shard_size)
    # However its path is spelled; but in rows of plain text it stands as it is.
    name = file.path if file.format == "txt" or is_address(file.path) else os.path.abspath(file.path)
    if hashes is None or not _is_cut_by_bytes(file, shard_size, rules):
        for slice in slice_file(file, shard_size, rules):
            identity = [name, file.compression, file.size, file.version, slice.start, slice.stop]
            yield Piece(slice, identity, version)
        return
    how, find = _hashing(file, shard_size, rules)
    cuts = hashes.cuts(file, how, find)
    for (start, stop, digest), end in zip(cuts, [*(start for start, _, _ in cuts[1:]), file.size], strict=True):
        yield Piece(Slice(file.path, file.format, None, start, stop, end - start), [name, start, digest], version)


def _is_cut_by_bytes(file: InputFile, shard_size: int, rules: TextRules) -> bool:
    has_bytes = file.format not in ("parquet", "arrow") and can_cut(file, rules)
    return has_bytes and file.size > shard_size * 1.25 and not is_address(file.path)


def _hashing(file: InputFile, shard_size: int, rules: TextRules) -> tuple[str, Callable[[], Cuts]]:
    """What the cuts of a file depend on beside it, and how to find them."""
    if file.format in ("csv", "tsv"):
        return f"{file.format} {shard_size}", lambda: _hash_csv(file, shard_size)
    boundary = LINE if file.format == "jsonl" else boundary_of(rules)
    assert boundary is not None
    how = json.dumps([shard_size, type(boundary).__name__, [one.hex() for one in boundary.separators]])
    return how, lambda: _hash_records(file, by_bytes(file, shard_size), boundary)


def _hash_csv(file: InputFile, shard_size: int) -> Cuts:
    header = csv_header(file.path, None, file.format)
    with open_bytes(file.path) as source:
        return [
            (one.start, one.stop, hash_bytes(_csv_facts(header, _hash_range(source, one.start, one.stop))))
            for one in slice_csv(file, shard_size)
        ]


def _csv_facts(header: list[str], digest: xxhash.xxh3_128) -> bytes:
    facts: list[Any] = [header, digest.hexdigest()]
    return json.dumps(facts).encode()


def _hash_records(file: InputFile, slices: Iterable[Slice], boundary: Boundary) -> Cuts:
    """Reads each byte once, but for ends of records. Where a giant record goes on and none begins, there is no cut."""
    cuts: Cuts = []
    reached = 0
    with open_bytes(file.path) as source:
        for start, stop in ((slice.start, slice.stop) for slice in slices):
            if start < reached and (file.size if stop is None else stop) <= reached:
                continue
            # What stands right before tells whether a record begins at `start`.
            digest = _hash_range(source, max(0, start - boundary.longest), stop)
            if stop is not None:
                reached = _hash_tail(digest, source, stop, boundary)
            cuts.append((start, stop, digest.hexdigest()))
    return cuts


def _hash_range(source: IO[bytes], start: int, stop: int | None) -> xxhash.xxh3_128:
    digest = xxhash.xxh3_128()
    source.seek(start)
    left = stop - start if stop is not None else None
    while (left is None or left > 0) and (block := source.read(_BLOCK if left is None else min(_BLOCK, left))):
        digest.update(block)
        left = None if left is None else left - len(block)
    return digest


def _hash_tail(digest: xxhash.xxh3_128, source: IO[bytes], stop: int, boundary: Boundary) -> int:
    """The record that goes on behind `stop` belongs to the piece: to its end, where the next begins."""
    position = max(0, stop - boundary.longest)
    source.seek(position)
    held = b""
    while block := source.read(_TAIL):
        held += block
        end = boundary.first(held, stop - position, at_record=position == 0)
        if end is not None:
            digest.update(held[:end])
            return position + end
        kept = held[-boundary.longest :]
        digest.update(held[: len(held) - len(kept)])
        position += len(held) - len(kept)
        held = kept
    digest.update(held)
    return position + len(held)


# ---- groups ----


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
