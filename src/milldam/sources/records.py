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

from milldam.native import kernel
from milldam.sources.batch import KEPT_RECORD_CHARS, TOO_LARGE, Reading, Reject, too_large
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.units import Slice

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 4 * KEPT_RECORD_CHARS
"""Of a record that is too large: what a reject shows of it."""
BOM = codecs.BOM_UTF8
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
    return kernel("count_byte", np.uint8, int)(np.frombuffer(data, np.uint8), _LINE_END)


class Boundary:
    """Where records end: after any of some byte strings."""

    def __init__(self, *separators: bytes) -> None:
        self.separators = separators
        self.longest = max(map(len, separators))
        # A separator that overlaps itself ("abab" in "ababab") can be told only by reading from the start.
        self.splittable = not any(s[:k] == s[-k:] for s in separators for k in range(1, len(s)))

    def first(self, data: bytes, start: int, *, at_record: bool = False) -> int | None:
        """End of the first separator that ends at or after `start`. `at_record`: the data begins where a record may."""
        found = ((data.find(s, max(0, start - len(s))), len(s)) for s in self.separators)
        return min((at + size for at, size in found if at >= 0), default=None)

    def last(self, data: bytes, searched: int = 0) -> int | None:
        """End of the last separator. `searched`: none begins before this byte."""
        if self.splittable:
            found = ((data.rfind(s, searched), len(s)) for s in self.separators)
            return max((at + size for at, size in found if at >= 0), default=None)
        return max(self.ends(data), default=None)

    def ends(self, data: bytes) -> list[int]:
        """Ends of all separators in data that begins with a record."""
        return [match.end() for match in re.finditer(b"|".join(map(re.escape, self.separators)), data)]


LINE = Boundary(b"\n")


class BlankLine(Boundary):
    """Records end after a line of nothing but white space (of a length that people write)."""

    _LONGEST = 256
    _BLANK = re.compile(rb"\n[ \t\r]{0,%d}\n" % _LONGEST)
    _BLANK_FIRST = re.compile(rb"(?:[ \t\r]{0,%d}\n)+" % _LONGEST)
    _BLANK_BEFORE = re.compile(rb"\n[ \t\r]{0,%d}\Z" % _LONGEST)

    def __init__(self) -> None:
        super().__init__(b"\n\n")
        self.longest = self._LONGEST + 2
        self.splittable = True

    def first(self, data: bytes, start: int, *, at_record: bool = False) -> int | None:
        if at_record and (leading := self._BLANK_FIRST.match(data)) and leading.end() >= start:
            return leading.end()
        match = self._BLANK.search(data, max(0, start - self.longest))
        while match is not None and match.end() < start:
            match = self._BLANK.search(data, match.start() + 1)
        if match is None:
            return None
        # A record begins after the last of several blank lines, so that it has one place and no other.
        further = self._BLANK_FIRST.match(data, match.end())
        return further.end() if further is not None else match.end()

    def last(self, data: bytes, searched: int = 0) -> int | None:
        newline = data.rfind(b"\n", searched)
        while newline >= 0:
            if self._BLANK_BEFORE.search(data, max(0, newline - self.longest), newline):
                return newline + 1
            newline = data.rfind(b"\n", searched, newline)
        return None

    def ends(self, data: bytes) -> list[int]:
        ends = [0]
        while (end := self.first(data, ends[-1] + 1)) is not None and end > ends[-1]:
            ends.append(end)
        return ends[1:]


def record_blocks(
    file: IO[bytes], compression: str | None, boundary: Boundary, start: int, stop: int | None, most: int
) -> Iterator[Block]:
    """Blocks of the records that begin in [start, stop) of a file."""
    if start:
        file.seek(start - boundary.longest if start >= boundary.longest else 0)
        blocks, position = _skip_to_record(read_blocks(file, None, BLOCK_BYTES), boundary, start)
    else:
        blocks, position = read_blocks(file, compression, BLOCK_BYTES), 0
    if stop is None or position < stop:
        yield from _Splitter(boundary, position, stop, most).split(blocks)


def split_records(blocks: Iterator[bytes], boundary: Boundary, most: int) -> Iterator[Block]:
    """Blocks of the records of bytes that come from elsewhere."""
    return _Splitter(boundary, 0, None, most).split(blocks)


def _skip_to_record(blocks: Iterator[bytes], boundary: Boundary, start: int) -> tuple[Iterator[bytes], int]:
    """Drop the end of a record that belongs to the slice before."""
    position = start - boundary.longest if start >= boundary.longest else 0
    held = b""
    for block in blocks:
        held += block
        end = boundary.first(held, start - position, at_record=position == 0)
        if end is not None:
            return _prepend(held[end:], blocks), position + end
        kept = held[-boundary.longest :]
        position += len(held) - len(kept)
        held = kept
    return iter(()), position + len(held)


def _prepend(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


class _Splitter:
    """Cuts a stream of bytes at record boundaries."""

    def __init__(self, boundary: Boundary, position: int, stop: int | None, most: int) -> None:
        self._boundary, self._position, self._stop, self._most = boundary, position, stop, most
        self._origin, self._line = position, 1
        self._held, self._searched = b"", 0
        """What is not handed on yet, and how much of it surely has no end of a record."""
        self._head, self._passed, self._passed_lines = b"", 0, 0
        """Of a record that is too large: its head, and how much of it was read."""

    def split(self, blocks: Iterator[bytes]) -> Iterator[Block]:
        """Blocks of whole records. Where the bytes are damaged, the error takes what there is of the next one along."""
        try:
            for data in blocks:
                yield from self._joined(data)
                while not self._done() and (end := self._end_of_records()) is not None:
                    yield from self._take(end)
                if self._done():
                    return
                if self._passed or len(self._held) > max(self._most, 2 * self._boundary.longest):
                    # A separator may straddle the end: keep its length back.
                    self._pass_over(len(self._held) - self._boundary.longest)
        except DamagedError as error:
            if self._held or self._passed:
                error.cut, error.line = self._head or self._held, self._line
            raise
        if self._held or self._passed:
            yield from self._take(len(self._held))

    def _joined(self, data: bytes) -> Iterator[Block]:
        """What is held and the records that end in `data`, with one copy of each byte; where it is not that simple,
        `data` is held as well."""
        reach = self._position + len(self._held) + len(data)
        simple = self._boundary.splittable and not self._passed and (self._stop is None or reach < self._stop)
        end = self._boundary.last(data) if simple else None
        # A longer separator that begins in what is held might end behind a shorter one.
        if end is None or end < self._boundary.longest:
            self._held += data
            return
        joined, self._held, self._searched = b"".join((self._held, memoryview(data)[:end])), data[end:], 0
        yield from self._blocks(joined)

    def _end_of_records(self) -> int | None:
        """Where the last whole record ends, of those that begin before `stop`; or the one that is passed over."""
        end = None
        if self._passed:
            return self._boundary.first(self._held, 1)
        if self._stop is not None and self._position + len(self._held) >= self._stop:
            end = self._boundary.first(self._held, self._stop - self._position, at_record=True)
        if end is None:
            end = self._boundary.last(self._held, self._searched)
        if end is None:
            self._searched = max(0, len(self._held) - self._boundary.longest)
        return end

    def _pass_over(self, size: int) -> None:
        if size > 0:
            passed, self._held, self._searched = self._held[:size], self._held[size:], 0
            self._head += passed[: HEAD_BYTES - len(self._head)]
            self._passed += size
            self._passed_lines += count_line_ends(passed)

    def _done(self) -> bool:
        return self._stop is not None and not self._passed and self._position >= self._stop

    def _take(self, size: int) -> Iterator[Block]:
        if self._passed:
            self._pass_over(size)
            yield self._block(self._head, self._passed_lines, self._passed)
            self._head, self._passed, self._passed_lines = b"", 0, 0
        else:
            data, self._held, self._searched = self._held[:size], self._held[size:], 0
            yield from self._blocks(data)

    def _blocks(self, data: bytes) -> Iterator[Block]:
        """Whole records; one that is too large for itself."""
        if len(data) <= self._most:
            yield self._block(data, count_line_ends(data))
            return
        start = at = 0
        for end in (*self._boundary.ends(data), len(data)):
            if end - at > self._most:
                if at > start:
                    yield self._block(data[start:at], data.count(b"\n", start, at))
                yield self._block(data[at : min(end, at + HEAD_BYTES)], data.count(b"\n", at, end), end - at)
                start = end
            at = end
        if at > start:
            yield self._block(data[start:at], data.count(b"\n", start, at))

    def _block(self, data: bytes, line_ends: int, too_large: int = 0) -> Block:
        block = Block(data, self._line, self._origin, line_ends, too_large)
        self._position += block.size
        self._line += line_ends
        return block


# ---- what could not be read ----


def make_line_reject(slice: Slice, block: Block, line: int, reason: str, detail: str, raw: bytes) -> Reject:
    record = raw.decode("utf-8", "backslashreplace")
    return _placed(Reject(slice.path, reason, detail, record, line=line, origin=block.origin), slice)


def reject_too_large(block: Block, slice: Slice, reading: Reading) -> None:
    detail = too_large(block.too_large, reading.rules)
    reading.reject(make_line_reject(slice, block, block.line, TOO_LARGE, detail, block.data), ahead=0)


def _placed(reject: Reject, slice: Slice) -> Reject:
    """The items of a .json file come a line each, and are counted as rows are."""
    if slice.format != "json" or reject.line is None:
        return reject
    return replace(reject, line=None, row=reject.line - 1)


def make_damage_reject(slice: Slice, error: DamagedError) -> Reject:
    """What a damaged file lost: the record that was cut off, if one was, and all that may follow."""
    reject = Reject(
        slice.path,
        error.reason,
        str(error),
        (error.cut or b"")[: 4 * KEPT_RECORD_CHARS].decode("utf-8", "backslashreplace"),
        line=error.line,
        records=0 if error.cut is None else 1,
        unproven_bytes=error.unproven_bytes,
    )
    return _placed(reject, slice)
