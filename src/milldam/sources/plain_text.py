"""Plain text files (.txt) -> documents: a file, a line, a paragraph or a stretch between separators.

A document larger than a batch flows in parts. A file that is no UTF-8 is rejected whole: when that shows after some
parts of it have been handed on, a cancelled batch takes them back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from milldam.sources.arrays import (
    batches_of,
    bytes_of,
    checked_text,
    decoded_parts,
    one_text,
    open_batches,
    split_at,
    split_lines,
    split_paragraphs,
    without_blank,
)
from milldam.sources.batch import Batch, MalformedError, Reading, Reject, TextRules
from milldam.sources.compression import DamagedError, open_bytes, raising, read_blocks
from milldam.sources.records import (
    BLOCK_BYTES,
    BOM,
    LAST,
    LINE,
    PART,
    WHOLE,
    BlankLine,
    Block,
    Boundary,
    make_damage_reject,
    make_line_reject,
    record_blocks,
)
from milldam.sources.rows import LargeRow, TextWeight
from milldam.sources.units import Slice

PARAGRAPH = BlankLine()
TEXT_COLUMNS = ("text", "file")
_BLANK = "blank"


def boundary_of(rules: TextRules) -> Boundary | None:
    """Where documents end inside a file; None when a file is one document."""
    if rules.separator is not None:
        return Boundary(rules.separator.encode())
    return {"line": LINE, "paragraph": PARAGRAPH}.get(rules.documents)


# ---- several documents in a file ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The documents of a file, or of a slice of one."""
    boundary = boundary_of(reading.rules)
    if boundary is None:
        return read_whole_files((slice,), reading)
    return _read_separated(slice, reading, boundary)


def _read_separated(slice: Slice, reading: Reading, boundary: Boundary) -> Iterator[Batch]:
    with open_bytes(slice.path) as file:
        blocks = record_blocks(file, slice.compression, boundary, slice.start, slice.stop)
        try:
            for number, block in enumerate(blocks):
                if number == 0 and slice.start == 0:
                    block = replace(block, data=block.data.removeprefix(BOM))
                if block.kind == WHOLE:
                    texts = _split(block, slice, reading, boundary)
                    yield from batches_of(without_blank(texts), len(block.data))
                else:
                    parts = _parts_of_giant(block, blocks, boundary)
                    place = Reject(slice.path, "", "", line=block.line, origin=block.origin)
                    yield from _in_parts(parts, reading, place, may_be_blank=False)
        except DamagedError as error:
            reading.reject(make_damage_reject(slice, error))


def _split(block: Block, slice: Slice, reading: Reading, boundary: Boundary) -> pa.LargeStringArray:
    data = block.data
    pieces = _SPLITTERS[boundary](data) if boundary in _SPLITTERS else split_at(data, boundary.separators[0])

    searched = 0

    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        # Rejects come in order: each is searched for behind the one before.
        nonlocal searched
        at = data.index(raw, searched)
        searched = at + len(raw)
        return make_line_reject(slice, block, block.line + data.count(b"\n", 0, at), reason, detail, raw)

    texts = checked_text(pieces, reading, make_reject)
    if boundary is not PARAGRAPH:
        return texts
    import pyarrow.compute as pc

    return pc.utf8_trim(texts, characters="\r\n")


_SPLITTERS = {LINE: split_lines, PARAGRAPH: split_paragraphs}


def _without_end(data: bytes, boundary: Boundary) -> bytes:
    """The last part of a giant document, without what ends it."""
    if boundary is LINE:
        return data.removesuffix(b"\n").removesuffix(b"\r") if data.endswith(b"\n") else data
    return data.rstrip(b" \t\r\n") if boundary is PARAGRAPH else data.removesuffix(boundary.separators[0])


def _parts_of_giant(first: Block, blocks: Iterator[Block], boundary: Boundary) -> Iterator[bytes]:
    """The bytes of the giant document that a block begins; what follows it stays in `blocks`."""
    for block in itertools.chain([first], blocks):
        yield block.data if block.kind == PART else _without_end(block.data, boundary)
        if block.kind == LAST:
            return


def _in_parts(parts: Iterator[bytes], reading: Reading, place: Reject, *, may_be_blank: bool) -> Iterator[Batch]:
    """A document that comes in parts: checked as it flows, taken back when it turns out to be no UTF-8, or no document.

    `place`: the reject that it would be.
    """
    texts = decoded_parts(parts, reading.rules)
    try:
        yield from open_batches(texts if may_be_blank else _with_ink(texts))
    except MalformedError as error:
        for _ in parts:
            pass
        if error.reason != _BLANK:
            reading.reject(replace(place, reason=error.reason, detail=error.detail))


def _with_ink(texts: Iterator[pa.LargeStringArray]) -> Iterator[pa.LargeStringArray]:
    """Raises MalformedError of what is nothing but white space from end to end: no document, as everywhere."""
    has_ink = False
    for text in texts:
        has_ink = has_ink or len(without_blank(text)) > 0
        yield text
    if not has_ink:
        raise MalformedError(_BLANK, "")


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Documents as rows, whole, with the name of their file."""
    wanted = reading.columns if reading.columns is not None else TEXT_COLUMNS
    # a file's name need not be UTF-8
    name = reading.name(slice.path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    for texts in _whole_documents(read_texts(slice, reading), reading):
        made = {"text": texts, "file": pa.repeat(name, len(texts)) if "file" in wanted else None}
        yield pa.record_batch([made[column] for column in wanted], names=list(wanted))


def _whole_documents(batches: Iterator[Batch], reading: Reading) -> Iterator[pa.LargeStringArray]:
    """Documents that come in parts put together."""
    large: LargeRow | None = None
    for batch in batches:
        if batch.cancel:
            large = None
            continue
        if batch.open or large is not None:
            large = large or LargeRow(reading.room, reading.places, TextWeight)
            large.add(bytes_of(batch.texts))
        if not batch.open:
            texts = batch.texts if large is None else one_text(large.whole())
            large = None
            if len(texts):
                yield texts


# ---- a document per file ----


@dataclass(slots=True)
class _SmallFiles:
    """Whole small files, gathered into one batch."""

    raw: list[bytes]
    paths: list[str]
    size: int = 0

    def add(self, path: str, data: bytes) -> None:
        self.raw.append(data)
        self.paths.append(path)
        self.size += len(data)


def read_whole_files(slices: tuple[Slice, ...], reading: Reading) -> Iterator[Batch]:
    """One document a file; many small files make one batch, a large file flows in parts."""
    small = _SmallFiles([], [])
    for slice in slices:
        first, rest = _open_head(slice)
        if rest is None:
            small.add(slice.path, first)
            if small.size < BLOCK_BYTES and len(small.raw) < 4096:
                continue
        yield from _flush(small, reading)
        small = _SmallFiles([], [])
        if rest is not None:
            yield from _flow(slice, first, rest, reading)
    yield from _flush(small, reading)


def _open_head(slice: Slice) -> tuple[bytes, Iterator[bytes] | None]:
    """The first block, and the blocks after it; None when the file ends there."""
    blocks = _file_blocks(slice)
    try:
        first = next(blocks, b"")
        second = next(blocks, None)
    except DamagedError as error:
        return b"", raising(error)
    first = first.removeprefix(BOM)
    return (first, None) if second is None else (first + second, blocks)


def _file_blocks(slice: Slice) -> Iterator[bytes]:
    with open_bytes(slice.path) as file:
        yield from read_blocks(file, slice.compression, BLOCK_BYTES)


def _flush(small: _SmallFiles, reading: Reading) -> Iterator[Batch]:
    lost: set[int] = set()

    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        lost.add(position)
        return Reject(small.paths[position], reason, detail, raw.decode("utf-8", "backslashreplace"))

    if small.raw:
        texts = checked_text(pa.array(small.raw, pa.large_binary()), reading, make_reject)
        kept = (path for position, path in enumerate(small.paths) if position not in lost)
        for ahead, path in enumerate(kept):
            reading.places.begin(path, ahead=ahead)
        yield Batch(texts, bytes_read=small.size)


def _flow(slice: Slice, first: bytes, rest: Iterator[bytes], reading: Reading) -> Iterator[Batch]:
    reading.places.begin(slice.path)
    try:
        parts = itertools.chain([first], rest)
        yield from _in_parts(parts, reading, Reject(slice.path, "", "", line=1), may_be_blank=True)
    except DamagedError as error:
        error.cut = b""  # the document: nobody knows where it would have ended
        reading.reject(make_damage_reject(slice, error))
