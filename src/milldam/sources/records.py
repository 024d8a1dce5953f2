"""Bytes -> blocks of whole records, for formats whose records end at a separator (lines, paragraphs, a string).

A record belongs to the slice in which its first byte lies; so slices of a file give each record once, wherever they
are cut. Blocks are about `BLOCK_BYTES`; a record larger than `GIANT_BYTES` comes in parts, so memory is bounded for
any record.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO

import numpy as np

from milldam.native import kernel
from milldam.sources.batch import KEPT_RECORD_CHARS, Reject
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.units import Slice

BLOCK_BYTES = 1 << 20
GIANT_BYTES = 2 << 20

BOM = codecs.BOM_UTF8
WHOLE, PART, LAST = "whole", "part", "last"
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
    kind: str = WHOLE
    """"whole" records; or a "part", and at the end the "last" part, of one giant record."""


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

    def last(self, data: bytes) -> int | None:
        """End of the last separator."""
        if self.splittable:
            found = ((data.rfind(s), len(s)) for s in self.separators)
            return max((at + size for at, size in found if at >= 0), default=None)
        ends = [match.end() for match in re.finditer(re.escape(self.separators[0]), data)]
        return ends[-1] if ends else None


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

    def last(self, data: bytes) -> int | None:
        newline = data.rfind(b"\n")
        while newline >= 0:
            if self._BLANK_BEFORE.search(data, max(0, newline - self.longest), newline):
                return newline + 1
            newline = data.rfind(b"\n", 0, newline)
        return None


def record_blocks(
    file: IO[bytes], compression: str | None, boundary: Boundary, start: int, stop: int | None
) -> Iterator[Block]:
    """Blocks of the records that begin in [start, stop) of a file."""
    if start:
        file.seek(start - boundary.longest if start >= boundary.longest else 0)
        blocks, position = _skip_to_record(read_blocks(file, None, BLOCK_BYTES), boundary, start)
    else:
        blocks, position = read_blocks(file, compression, BLOCK_BYTES), 0
    if stop is None or position < stop:
        yield from _Splitter(boundary, position, stop).split(blocks)


def split_records(blocks: Iterator[bytes], boundary: Boundary) -> Iterator[Block]:
    """Blocks of the records of bytes that come from elsewhere."""
    return _Splitter(boundary, 0, None).split(blocks)


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
    """Cuts a stream of bytes at record boundaries; holds at most a giant's worth of bytes."""

    def __init__(self, boundary: Boundary, position: int, stop: int | None) -> None:
        self._boundary, self._position, self._stop = boundary, position, stop
        self._origin = position
        self._line = 1
        self._in_giant = False
        self._held = b""

    def split(self, blocks: Iterator[bytes]) -> Iterator[Block]:
        """Blocks of whole records. Where the bytes are damaged, the error takes what there is of the next one along."""
        try:
            for bytes_read in blocks:
                if (block := self._join_records(bytes_read)) is not None:
                    yield block
                    continue
                self._held += bytes_read
                while (block := self._next_block()) is not None:
                    yield block
                if self._done():
                    return
        except DamagedError as error:
            if self._held or self._in_giant:
                error.cut, error.line = b"" if self._in_giant else self._held, self._line
            raise
        if self._held:
            yield self._take(len(self._held), LAST if self._in_giant else WHOLE)

    def _join_records(self, data: bytes) -> Block | None:
        """What is held and the records that end in `data`, with one copy of each byte; None: it is not that simple."""
        reach = self._position + len(self._held) + len(data)
        if self._in_giant or not self._boundary.splittable or (self._stop is not None and reach >= self._stop):
            return None
        end = self._boundary.last(data)
        # A longer separator that begins in what is held might end behind a shorter one.
        if end is None or end < self._boundary.longest:
            return None
        joined, self._held = b"".join((self._held, memoryview(data)[:end])), data[end:]
        return self._block(joined, WHOLE)

    def _next_block(self) -> Block | None:
        """What can be handed on of the bytes held."""
        if self._done():
            return None
        end = self._boundary.first(self._held, 1) if self._in_giant else self._end_of_records()
        if end is not None:
            kind, self._in_giant = LAST if self._in_giant else WHOLE, False
            return self._take(end, kind)
        most = BLOCK_BYTES if self._in_giant else GIANT_BYTES
        if len(self._held) > max(most, 2 * self._boundary.longest):
            self._in_giant = True
            # A separator may straddle the end: keep its length back.
            return self._take(len(self._held) - self._boundary.longest, PART)
        return None

    def _end_of_records(self) -> int | None:
        """Where the last whole record ends, of those that begin before `stop`."""
        if self._stop is not None and self._position + len(self._held) >= self._stop:
            end = self._boundary.first(self._held, self._stop - self._position, at_record=True)
            if end is not None:
                return end
        return self._boundary.last(self._held)

    def _done(self) -> bool:
        return self._stop is not None and not self._in_giant and self._position >= self._stop

    def _take(self, size: int, kind: str = WHOLE) -> Block:
        data, self._held = self._held[:size], self._held[size:]
        return self._block(data, kind)

    def _block(self, data: bytes, kind: str) -> Block:
        block = Block(data, self._line, self._origin, count_line_ends(data), kind)
        self._position += len(data)
        self._line += block.line_ends
        return block


# ---- what could not be read ----


def make_line_reject(slice: Slice, block: Block, line: int, reason: str, detail: str, raw: bytes) -> Reject:
    record = raw.decode("utf-8", "backslashreplace")
    return _placed(Reject(slice.path, reason, detail, record, line=line, origin=block.origin), slice)


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
