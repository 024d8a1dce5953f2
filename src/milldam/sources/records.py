"""Bytes -> blocks of whole records, for formats whose records end at a separator (lines, paragraphs, a string).

A record belongs to the slice in which its first byte lies; so slices of a file give each record once, wherever they
are cut. Blocks are about `BLOCK_BYTES`. Of a record larger than `most` bytes only the head and the size are kept, so
memory is bounded for any record: `most` bytes and a block.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO

import numpy as np

from milldam.sources.batch import KEPT_RECORD_CHARS, TOO_LARGE, Reading, Reject, too_large
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.units import Slice

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 4 * KEPT_RECORD_CHARS
"""Of a record that is too large: what a reject shows of it."""
BOM = codecs.BOM_UTF8
_LOOK_BYTES = 1 << 16
_LINE_END = 10


@dataclass(frozen=True, slots=True)
class Block:
    data: bytes
    line: int
    """Line of its first byte, counted from the first record of the slice, from 1."""
    origin: int
    """Where the first record of the slice begins in the file."""
    line_ends: int
    """How many line ends it holds."""
    too_large: int = 0
    """Bytes of the one record that is larger than it may be: `data` is its head. 0: whole records."""

    @property
    def size(self) -> int:
        """Bytes of the input."""
        return self.too_large or len(self.data)


def count_line_ends(data: bytes) -> int:
    """As data.count(b"\\n"), many times as fast."""
    array, found, count = np.frombuffer(data, np.uint8), np.empty(1 << 16, bool), 0
    for start in range(0, len(array), len(found)):  # what fits into the processor's cache at a time
        some = array[start : start + len(found)]
        count += int(np.count_nonzero(np.equal(some, _LINE_END, out=found[: len(some)])))
    return count


class Boundary:
    """Where records end: after any match of a pattern."""

    def __init__(self, pattern: bytes, longest: int, separator: bytes = b"") -> None:
        self.separator, self.longest, self._pattern = separator, longest, re.compile(pattern)
        # A separator that overlaps itself ("abab" in "ababab") can be found only by reading from the start.
        self.splittable = not any(separator[:k] == separator[-k:] for k in range(1, len(separator)))

    @classmethod
    def of(cls, separator: bytes) -> Boundary:
        return cls(re.escape(separator), len(separator), separator)

    def ends(self, data: bytes, start: int = 0) -> Iterator[int]:
        """The ends of records from `start` on, in data that begins with a record."""
        return (end.end() for end in self._pattern.finditer(data, max(0, start - self.longest)) if end.end() >= start)

    def last(self, data: bytes, searched: int = 0) -> int:
        """The end of the last whole record, 0 where there is none. `searched`: no record ends before this byte."""
        if self.separator and self.splittable:
            at = data.rfind(self.separator, searched)
            return 0 if at < 0 else at + self.longest
        return max(self.ends(data), default=0)


LINE = Boundary.of(b"\n")
PARAGRAPH = Boundary(rb"\n(?:[ \t\r]{0,256}\n)+", 258)
"""Paragraphs end after lines of nothing but white space (of a length that people write)."""


# ---- blocks ----


def record_blocks(
    file: IO[bytes], compression: str | None, boundary: Boundary, start: int, stop: int | None, most: int
) -> Iterator[Block]:
    """Blocks of the records that begin in [start, stop) of a file."""
    if not start and stop is None:
        yield from split_records(read_blocks(file, compression, BLOCK_BYTES), boundary, most)
        return
    end = None if stop is None else _record_start(file, boundary, stop)
    begin = _record_start(file, boundary, start)
    file.seek(begin)
    yield from split_records(limited(read_blocks(file, None, BLOCK_BYTES), end and end - begin), boundary, most, begin)


def _record_start(file: IO[bytes], boundary: Boundary, start: int) -> int:
    """Where the first record begins that begins at this byte or behind it; the end of the file where none does."""
    position, held = max(0, start - boundary.longest), b""
    file.seek(position)
    while start and (data := file.read(_LOOK_BYTES)):
        held += data
        end = next(boundary.ends(held, start - position), None)
        if end is not None:
            return position + end
        kept = held[-boundary.longest :]
        position, held = position + len(held) - len(kept), kept
    return position + len(held)


def limited(blocks: Iterator[bytes], size: int | None) -> Iterator[bytes]:
    """The first bytes of blocks; None: all."""
    for block in blocks:
        if size is None or len(block) < size:
            yield block
            size = None if size is None else size - len(block)
        else:
            yield block[:size]
            return


def split_records(blocks: Iterator[bytes], boundary: Boundary, most: int, origin: int = 0) -> Iterator[Block]:
    """Blocks of whole records, of bytes that lie at `origin` of their file and begin with a record. Where the bytes are
    damaged, the error takes what there is of the next record along."""
    line, held, searched = 1, b"", 0  # held: what is not handed on; searched: how much of it has no end of a record
    head, size, line_ends = b"", 0, 0  # of a record that is too large: the head, and what was passed over
    try:
        for data in blocks:
            if not size and boundary.splittable and (cut := boundary.last(data)):
                whole, held, searched = b"".join((held, memoryview(data)[:cut])), data[cut:], 0  # a copy of each byte
            else:
                held += data
                cut = next(boundary.ends(held, 1), 0) if size else boundary.last(held, searched)
                searched = 0 if cut else max(0, len(held) - boundary.longest)  # a separator may straddle the end
                if not cut and (size or len(held) > most):
                    cut, searched = searched, 0
                    head, size = head + held[: min(cut, HEAD_BYTES - len(head))], size + cut
                    line_ends += count_line_ends(held[:cut])
                    held = held[cut:]
                    continue
                whole, held = held[:cut], held[cut:]
            if size:
                head, size = head + whole[: HEAD_BYTES - len(head)], size + len(whole)
                yield (block := Block(head, line, origin, line_ends + count_line_ends(whole), size))
                line, head, size, line_ends, whole = line + block.line_ends, b"", 0, 0, b""
            for block in _whole_records(whole, boundary, most, line, origin):
                line += block.line_ends
                yield block
    except DamagedError as error:
        error.cut = (head + held)[:HEAD_BYTES] or None
        error.line = line if error.cut else None
        raise
    if size:
        head = head + held[: HEAD_BYTES - len(head)]
        yield Block(head, line, origin, line_ends + count_line_ends(held), size + len(held))
    else:
        yield from _whole_records(held, boundary, most, line, origin)


def _whole_records(data: bytes, boundary: Boundary, most: int, line: int, origin: int) -> Iterator[Block]:
    """One block; but a record that is too large for itself."""
    if len(data) <= most:
        if data:
            yield Block(data, line, origin, count_line_ends(data))
        return
    start = at = 0
    for end in (*boundary.ends(data), len(data)):
        if end - at > most or end == len(data):
            stop = at if end - at > most else end
            if stop > start:
                yield (block := Block(data[start:stop], line, origin, count_line_ends(data[start:stop])))
                line += block.line_ends
            if stop < end:
                lines = count_line_ends(data[at:end])
                yield Block(data[at : min(end, at + HEAD_BYTES)], line, origin, lines, end - at)
                line += lines
            start = end
        at = end


# ---- what could not be read ----


def make_line_reject(slice: Slice, block: Block, line: int, reason: str, detail: str, raw: bytes) -> Reject:
    """The items of a .json file come a line each, and are counted as rows are."""
    record = raw.decode("utf-8", "backslashreplace")
    if slice.format == "json":
        return Reject(slice.path, reason, detail, record, row=line - 1)
    return Reject(slice.path, reason, detail, record, line=line, origin=block.origin)


def reject_too_large(block: Block, slice: Slice, reading: Reading) -> None:
    detail = too_large(block.too_large, reading.rules.max_document_bytes)
    reading.reject(make_line_reject(slice, block, block.line, TOO_LARGE, detail, block.data))


def make_damage_reject(slice: Slice, error: DamagedError) -> Reject:
    """What a damaged file lost: the record that was cut off, if one was, and all that may follow."""
    record, lost = (error.cut or b"")[:HEAD_BYTES].decode("utf-8", "backslashreplace"), int(error.cut is not None)
    reject = Reject(slice.path, error.reason, str(error), record, line=error.line, records=lost, damaged=True)
    if slice.format != "json" or error.line is None:
        return reject
    return replace(reject, line=None, row=error.line - 1)
