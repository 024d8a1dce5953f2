"""Bytes -> blocks of whole records, for formats whose records end at a separator (lines, paragraphs, a string).

A record belongs to the slice in which its first byte lies; so slices of a file give each record once, wherever they
are cut. Blocks are about `BLOCK_BYTES`. Of a record that is far too large only the head is kept, so memory is bounded
for any record: `max_document_bytes` and a few blocks.

The items of a JSON array, or values one after the other, become lines first. Where an item ends is found by Python's
JSON decoder; what follows a broken item can't be told from it: the file is damaged from there on.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

import numpy as np

from milldam.sources.batch import KEPT_RECORD_CHARS, TOO_LARGE, Reading, Reject, too_large
from milldam.sources.compression import BLOCK_BYTES, DamagedError, open_bytes, read_blocks
from milldam.sources.units import Slice

BOM = codecs.BOM_UTF8
LINE = b"\n"
PARAGRAPH = re.compile(rb"\n(?:[ \t\r]{0,256}\n)+")
"""Paragraphs end after lines of nothing but white space (of a length that people write)."""
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_DECODER = json.JSONDecoder(strict=False)
_LOOK_BACK, _LOOK_BYTES = 258, 1 << 16
_LINE_END = 10

Separator = bytes | re.Pattern[bytes]
Block = tuple[bytes, int, int, int]
"""Whole records; the line of the first, from 1, counted from where the slice begins; how many line ends there are; and
how many bytes of input. Without records where one that was too large is rejected."""


def count_line_ends(data: bytes) -> int:
    """As data.count(b"\\n"), many times as fast."""
    array, found, count = np.frombuffer(data, np.uint8), np.empty(1 << 16, bool), 0
    for start in range(0, len(array), len(found)):  # what fits into the processor's cache at a time
        some = array[start : start + len(found)]
        count += int(np.count_nonzero(np.equal(some, _LINE_END, out=found[: len(some)])))
    return count


def last_end(data: bytes, separator: Separator) -> int:
    """Behind the last separator; 0 where there is none."""
    if isinstance(separator, bytes):
        at = data.rfind(separator)
        return 0 if at < 0 else at + len(separator)
    return max((match.end() for match in separator.finditer(data)), default=0)


def first_end(data: bytes, separator: Separator, start: int) -> int:
    """Behind the first separator that ends at `start` or behind it; -1 where none does."""
    pattern = re.compile(re.escape(separator)) if isinstance(separator, bytes) else separator
    behind = max(0, start - (len(separator) if isinstance(separator, bytes) else _LOOK_BACK))
    return next((match.end() for match in pattern.finditer(data, behind) if match.end() >= start), -1)


def record_blocks(slice: Slice, reading: Reading, separator: Separator = LINE) -> Iterator[Block]:
    """Blocks of the records that begin in a slice; of a .json file each is a line.

    Where the file is damaged, what follows is one reject.
    """
    most, line, begin, size = reading.rules.max_document_bytes, 1, slice.start, None
    held, passed, line_ends = b"", 0, 0  # what is not handed on; of a record that is too large the head, and its size
    with open_bytes(slice.path) as file:
        if slice.stop is not None:
            size = _record_start(file, separator, slice.stop)[0]
        if slice.start or size is not None:
            begin, line = _record_start(file, separator, slice.start)
            file.seek(begin)
        blocks = read_blocks(file, slice.compression, None if size is None else size - begin)
        try:
            for data in blocks if slice.format != "json" else as_json_lines(blocks, most):
                if passed:
                    end = first_end(data, separator, 0)
                    rest = data if end < 0 else data[:end]
                    passed, line_ends = passed + len(rest), line_ends + count_line_ends(rest)
                    if end < 0:
                        continue
                    _reject_too_large(slice, reading, held, line, passed)
                    yield b"", line, 0, passed
                    held, passed, line, data = b"", 0, line + line_ends, data[end:]
                if cut := last_end(data, separator):
                    whole, held = b"".join((held, memoryview(data)[:cut])), data[cut:]  # a copy of each byte
                else:
                    held += data
                    cut = last_end(held, separator)  # a separator may straddle blocks
                    whole, held = held[:cut], held[cut:]
                if whole:
                    ends = count_line_ends(whole)
                    yield (whole.removeprefix(BOM) if line == 1 else whole), line, ends, len(whole)
                    line += ends
                if len(held) > most + BLOCK_BYTES:
                    passed, line_ends, held = len(held), count_line_ends(held), held[: 4 * KEPT_RECORD_CHARS]
        except DamagedError as error:
            reading.reject(Reject(slice.path, error.reason, str(error), line=line, origin=slice.start, damaged=True))
            return
    if passed:
        _reject_too_large(slice, reading, held, line, passed)
        yield b"", line, 0, passed
    elif held:
        yield (held.removeprefix(BOM) if line == 1 else held), line, count_line_ends(held), len(held)


def _record_start(file: IO[bytes], separator: Separator, start: int) -> tuple[int, int]:
    """Where the first record begins that begins at this byte or behind it, the end of the file where none does; and its
    line, from 1, counted from `start`."""
    if not start:
        return 0, 1
    position, held, line = max(0, start - _LOOK_BACK), b"", 1
    file.seek(position)
    while data := file.read(_LOOK_BYTES):
        held += data
        if (end := first_end(held, separator, start - position)) >= 0:
            return position + end, line + count_line_ends(held[start - position : end])
    return position + len(held), line


def make_reject(slice: Slice, line: int, reason: str, detail: str, raw: bytes) -> Reject:
    """Of a record on a line. The items of a .json file come a line each, and are counted as rows are."""
    record = raw.decode("utf-8", "backslashreplace")
    if slice.format == "json":
        return Reject(slice.path, reason, detail, record, row=line - 1)
    return Reject(slice.path, reason, detail, record, line=line, origin=slice.start)


def _reject_too_large(slice: Slice, reading: Reading, head: bytes, line: int, size: int) -> None:
    reading.reject(make_reject(slice, line, TOO_LARGE, too_large(size, reading.rules.max_document_bytes), head))


# ---- JSON of any size ----


def as_json_lines(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Blocks of a JSON text, or of JSON lines -> blocks of JSON lines. `most`: bytes that an item may have.

    >>> b"".join(as_json_lines(iter([b'[{"a":', b' 1},\\n {"a": [2, 3]}]']), 100))
    b'{"a": 1}\\n{"a": [2, 3]}\\n'
    """
    head = next(blocks, b"").removeprefix(BOM)
    if is_json_lines(head):
        yield head
        yield from blocks
        return
    # A byte a character: where an item ends does not depend on what is no ASCII.
    text = head.decode("latin-1").lstrip()
    in_array, ended, lines = text.startswith("["), False, list[str]()
    text = text[in_array:]
    while not ended:
        block = next(blocks, None)
        ended = block is None
        text, lines, at, wrong = text + (block or b"").decode("latin-1"), [], 0, ""
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text) or (in_array and text[at] == "]"):
                break
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                wrong = str(error)
                break
            if end + 2 >= len(text) and not ended:
                break  # a number may go on
            # A line end in a string is as wrong as it was.
            lines.append(text[at:end].replace("\n", "\r"))
            at = end
        yield "".join(f"{line}\n" for line in lines).encode("latin-1")
        if text[at : at + 1] == "]" and in_array:
            yield from (b"" for _ in blocks)  # the checksum is at the end
            return
        text = text[at:]
        if wrong and (ended or len(text) > 2 * most):
            raise DamagedError(
                "truncated" if ended else "bad_json", f"an item is no JSON, cut off or too large ({wrong})"
            )
    if in_array:
        raise DamagedError("truncated", "the JSON array is not closed: the file is cut off, or a bracket is missing")


def is_json_lines(head: bytes) -> bool:
    """Whether the lines of a file are records by themselves, as far as its head tells."""
    line = head.strip().partition(b"\n")[0].rstrip()
    return line.startswith(b"{") and line.endswith(b"}")
