"""Bytes -> blocks of whole records, for formats whose records end at a separator (lines, paragraphs, a string).

A record belongs to the slice in which its first byte lies; so slices of a file give each record once, wherever they
are cut. Blocks are about `BLOCK_BYTES`. Of a record larger than `most` bytes only the head and the size are kept, so
memory is bounded for any record: `most` bytes and a block.
"""

from __future__ import annotations

import codecs
import itertools
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
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _LINE_END))


class Boundary:
    """Where records end: after any occurrence of a separator."""

    def __init__(self, separator: bytes) -> None:
        self.separator, self.longest = separator, len(separator)
        # A separator that overlaps itself ("abab" in "ababab") can be told only by reading from the start.
        self.splittable = not any(separator[:k] == separator[-k:] for k in range(1, len(separator)))

    def first(self, data: bytes, start: int, *, at_record: bool = False) -> int | None:
        """End of the first separator that ends at or after `start`. `at_record`: the data begins where a record may."""
        at = data.find(self.separator, max(0, start - self.longest))
        return None if at < 0 else at + self.longest

    def last(self, data: bytes, searched: int = 0) -> int | None:
        """End of the last separator. `searched`: none begins before this byte."""
        if not self.splittable:
            return max(self.ends(data), default=None)
        at = data.rfind(self.separator, searched)
        return None if at < 0 else at + self.longest

    def ends(self, data: bytes) -> list[int]:
        """Ends of all separators in data that begins with a record."""
        return [match.end() for match in re.finditer(re.escape(self.separator), data)]


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


# ---- blocks ----


def record_blocks(
    file: IO[bytes], compression: str | None, boundary: Boundary, start: int, stop: int | None, most: int
) -> Iterator[Block]:
    """Blocks of the records that begin in [start, stop) of a file."""
    if not start:
        yield from split_records(read_blocks(file, compression, BLOCK_BYTES), boundary, most, 0, stop)
        return
    # The end of a record that belongs to the slice before is dropped.
    position, held = max(0, start - boundary.longest), b""
    file.seek(position)
    blocks = read_blocks(file, None, BLOCK_BYTES)
    for block in blocks:
        held += block
        end = boundary.first(held, start - position, at_record=position == 0)
        if end is not None:
            if stop is None or position + end < stop:
                rest = itertools.chain([held[end:]], blocks)
                yield from split_records(rest, boundary, most, position + end, stop)
            return
        kept = held[-boundary.longest :]
        position, held = position + len(held) - len(kept), kept


def split_records(
    blocks: Iterator[bytes], boundary: Boundary, most: int, origin: int = 0, stop: int | None = None
) -> Iterator[Block]:
    """Blocks of the records that begin before `stop`, of bytes that lie at `origin` of their file and begin with a
    record. Where the bytes are damaged, the error takes what there is of the next record along."""
    line, head, size, line_ends = 1, b"", 0, 0  # of a record that is too large: its head, its size, its lines
    try:
        for data, is_whole in _pieces(blocks, boundary, most, origin, stop):
            if not is_whole or size:
                head, size = head + data[: HEAD_BYTES - len(head)], size + len(data)
                line_ends += count_line_ends(data)
            if is_whole:
                large = iter([Block(head, line, origin, line_ends, size)])
                for block in large if size else _whole_records(data, boundary, most, line, origin):
                    line += block.line_ends
                    yield block
                head, size, line_ends = b"", 0, 0
    except DamagedError as error:
        error.cut = head or error.cut
        error.line = None if error.cut is None else line
        raise


def _pieces(
    blocks: Iterator[bytes], boundary: Boundary, most: int, position: int, stop: int | None
) -> Iterator[tuple[bytes, bool]]:
    """The bytes in pieces of whole records; or, with False, a part of a record that is larger than `most`."""
    held, searched, inside = b"", 0, False
    """What is not handed on yet; how much of it surely has no end of a record; a part of its record was handed on."""
    try:
        for data in blocks:
            reach = position + len(held) + len(data)
            simple = boundary.splittable and not inside and (stop is None or reach < stop)
            if simple and (cut := boundary.last(data) or 0) >= boundary.longest:
                yield b"".join((held, memoryview(data)[:cut])), True  # with one copy of each byte
                position, held, searched = position + len(held) + cut, data[cut:], 0
                continue
            held += data
            while (end := _end_of_records(held, boundary, searched, inside, stop and stop - position)) is not None:
                yield held[:end], True
                position, held, searched, inside = position + end, held[end:], 0, False
                if stop is not None and position >= stop:
                    return
            searched = max(0, len(held) - boundary.longest)  # a separator may straddle the end
            if inside or (searched and len(held) > most):
                yield held[:searched], False
                position, held, searched, inside = position + searched, held[searched:], 0, True
    except DamagedError as error:
        error.cut = held or None
        raise
    if held or inside:
        yield held, True


def _end_of_records(held: bytes, boundary: Boundary, searched: int, inside: bool, stop: int | None) -> int | None:
    """Where the last whole record ends, of those that begin before `stop`; or the one that the bytes are a part of."""
    if inside:
        return boundary.first(held, 1)
    if stop is not None and len(held) >= stop and (end := boundary.first(held, stop, at_record=True)) is not None:
        return end
    return boundary.last(held, searched)


def _whole_records(data: bytes, boundary: Boundary, most: int, line: int, origin: int) -> Iterator[Block]:
    """One block; but a record that is too large for itself."""
    if len(data) <= most:
        yield Block(data, line, origin, count_line_ends(data))
        return
    start = at = 0
    for end in (*boundary.ends(data), len(data)):
        if end - at > most or end == len(data):
            stop = at if end - at > most else end
            if stop > start:
                yield (block := Block(data[start:stop], line, origin, data.count(b"\n", start, stop)))
                line += block.line_ends
            if stop < end:
                lines = data.count(b"\n", at, end)
                yield Block(data[at : min(end, at + HEAD_BYTES)], line, origin, lines, end - at)
                line += lines
            start = end
        at = end


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
        damaged=True,
    )
    return _placed(reject, slice)
