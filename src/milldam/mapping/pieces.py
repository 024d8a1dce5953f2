"""Input files -> pieces with an identity each.

A file of lines that is larger than `shard_size` is cut every `shard_size` bytes. Such a piece is known by the hash of
its bytes, not by the file's modification time: what is appended leaves the pieces before it as they are. That costs one
pass over the file at the speed of the disk, when it is new or has changed; the hashes are kept in `Hashes`. Everything
else is known by path, size and version of its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import xxhash

from milldam.errors import InputError
from milldam.files import explain_os_errors, hash_bytes
from milldam.input_files import is_address, version_of
from milldam.mapping.cutting import Piece
from milldam.mapping.plan import HASHES
from milldam.run.journal import Journal
from milldam.sources.batch import TextRules
from milldam.sources.lines import LINE, boundary_of
from milldam.sources.listing import InputFile
from milldam.sources.opening import STDIN, open_bytes
from milldam.sources.reading import seen_format
from milldam.sources.records import Boundary
from milldam.sources.table_text import csv_header, slice_csv
from milldam.sources.tables import open_arrow, slice_arrow, slice_parquet
from milldam.sources.units import Slice, by_parts, whole

_BLOCK, _TAIL = 1 << 20, 1 << 16
Cuts = list[tuple[int, int | None, str]]
"""(start, stop, hash of what the rows between them depend on)."""


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
    """The file, cut where it is larger than `shard_size` as its format allows. `hashes` None: known by version."""
    # A local file is known by the time of its last change, which can be looked up again.
    version = file.version if file.version.isdigit() and not is_address(file.path) else None
    return (replace(piece, version=version) for piece in _cut(file, shard_size, rules, hashes))


def _cut(file: InputFile, shard_size: int, rules: TextRules, hashes: Hashes | None) -> Iterator[Piece]:
    file = seen_format(file, shard_size)
    if file.format == "parquet":
        yield from (_by_version(file, slice) for slice in slice_parquet(file, shard_size))
    elif file.format == "arrow":
        yield from (_by_version(file, slice) for slice in _slice_arrow(file, shard_size))
    elif file.compression is not None or file.path == STDIN or file.size <= shard_size or file.format == "json":
        yield _by_version(file, whole(file))
    elif file.format in ("csv", "tsv"):
        yield from _csv_pieces(file, shard_size, hashes)
    else:
        yield from _byte_pieces(file, shard_size, rules, hashes)


def _known_as(file: InputFile) -> str:
    """However its path is spelled; but in rows of plain text it stands as it is."""
    return file.path if file.format == "txt" or is_address(file.path) else os.path.abspath(file.path)


def _by_version(file: InputFile, slice: Slice) -> Piece:
    return Piece(slice, [_known_as(file), file.compression, file.size, file.version, slice.start, slice.stop])


def _slice_arrow(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """As for reading text; besides, a large local file in the stream format (as HF writes them) is cut too."""
    if file.compression is not None or file.size <= shard_size:
        yield whole(file)
        return
    with open_arrow(file.path, None, None) as reader:
        is_stream = not hasattr(reader, "num_record_batches")
        if is_stream and not is_address(file.path):
            try:
                sizes = [batch.nbytes for batch in reader]  # mapped: only what describes the batches is read
            except (pa.ArrowInvalid, OSError):
                sizes = []
            yield from by_parts(file, sizes, shard_size) if sizes else [whole(file)]
            return
    yield from slice_arrow(file, shard_size)


# ---- lines and other separated records ----


def _byte_pieces(file: InputFile, shard_size: int, rules: TextRules, hashes: Hashes | None) -> Iterator[Piece]:
    boundary = LINE if file.format == "jsonl" else boundary_of(rules)
    if boundary is None or not boundary.splittable:
        yield _by_version(file, whole(file))
        return
    edges = [*range(0, file.size, shard_size), None]
    how = json.dumps([shard_size, type(boundary).__name__, [one.hex() for one in boundary.separators]])
    yield from _pieces(file, edges, how, hashes, lambda: _hash_records(file, edges, boundary))


def _pieces(
    file: InputFile, edges: list[int | None], how: str, hashes: Hashes | None, find: Callable[[], Cuts]
) -> Iterator[Piece]:
    local = hashes is not None and not is_address(file.path)
    cuts = hashes.cuts(file, how, find) if hashes is not None and local else [(a, b, "") for a, b in pairwise(edges)]
    ends = [start for start, _, _ in cuts[1:]]
    for (start, stop, digest), end in zip(cuts, [*ends, file.size], strict=True):
        assert start is not None
        slice = Slice(file.path, file.format, None, start, stop, (end or 0) - start)
        yield Piece(slice, [_known_as(file), start, digest]) if local else _by_version(file, slice)


def _hash_records(file: InputFile, edges: list[int | None], boundary: Boundary) -> Cuts:
    """Reads each byte once, but for ends of records. Where a giant record goes on and none begins, there is no cut."""
    cuts: Cuts = []
    reached = 0
    with open_bytes(file.path) as source:
        for start, stop in pairwise(edges):
            assert start is not None
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


# ---- CSV ----


def _csv_pieces(file: InputFile, shard_size: int, hashes: Hashes | None) -> Iterator[Piece]:
    def find() -> Cuts:
        header = csv_header(file.path, None, file.format)
        with open_bytes(file.path) as source:
            return [
                (one.start, one.stop, hash_bytes(_csv_facts(header, _hash_range(source, one.start, one.stop))))
                for one in slice_csv(file, shard_size)
            ]

    if hashes is None or is_address(file.path):
        yield from (_by_version(file, slice) for slice in slice_csv(file, shard_size))
        return
    yield from _pieces(file, [], f"{file.format} {shard_size}", hashes, find)


def _csv_facts(header: list[str], digest: xxhash.xxh3_128) -> bytes:
    facts: list[Any] = [header, digest.hexdigest()]
    return json.dumps(facts).encode()
