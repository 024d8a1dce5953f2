"""CSV and TSV -> documents. Records are found by their quotes, so that a field may hold line ends; Arrow parses
blocks of them.

Quotes matter at the start of a field only, as Arrow and Python's csv read them. A row with too few or too many
fields is rejected with its line. Holds one block; a record may be as large as `_LARGEST_RECORD`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from milldam.errors import InputError
from milldam.sources.arrays import bounded, checked_text
from milldam.sources.batch import Batch, OnReject, Reject, TextRules, stop_or_reject
from milldam.sources.compression import TruncatedError, read_blocks
from milldam.sources.lines import BOM
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes, open_head
from milldam.sources.records import BLOCK_BYTES
from milldam.sources.units import Slice, whole

_LARGEST_RECORD = 64 << 20
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13


@dataclass(frozen=True, slots=True)
class _Records:
    """Whole records: where they lie in the file, and where each ends in `data`."""

    data: bytes
    offset: int
    line: int
    ends: npt.NDArray[np.int64]


def slice_csv(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Byte ranges that begin at records. A large file is read once for that, at the speed of the disk."""
    if file.compression is not None or file.size <= shard_size * 1.25:
        yield whole(file)
        return
    start, wanted = 0, shard_size
    with open_bytes(file.path) as source:
        for records in _record_blocks(source, None, 0, _DELIMITERS[file.format]):
            end = records.offset + len(records.data)
            if end >= wanted and end < file.size:
                yield Slice(file.path, file.format, None, start, end, end - start)
                start, wanted = end, end + shard_size
    yield Slice(file.path, file.format, None, start, None, file.size - start)


def read_csv(slice: Slice, rules: TextRules, on_reject: OnReject) -> Iterator[Batch]:
    delimiter = _DELIMITERS[slice.format]
    names = csv_header(slice.path, slice.compression, slice.format)
    column = rules.text_column
    if column not in names:
        found = ", ".join(f'"{name}"' for name in names)
        raise InputError(f'{slice.path}: no column "{column}"; found {found}. Set --text-column.')
    with open_bytes(slice.path) as file:
        file.seek(slice.start) if slice.start else None
        try:
            for records in _record_blocks(file, slice.compression, slice.start, delimiter):
                if slice.stop is not None and records.offset >= slice.stop:
                    return
                yield from _parse(records, names, delimiter, slice, rules, on_reject)
        except TruncatedError as error:
            stop_or_reject(Reject(slice.path, "truncated", str(error)), rules, on_reject)


def csv_header(path: str, compression: str | None, format: str) -> list[str]:
    """The column names in the first record."""
    with open_head(path) as file:
        head = next(_record_blocks(file, compression, 0, _DELIMITERS[format]), None)
    if head is None:
        return []
    first = head.data[: int(head.ends[0])].removeprefix(BOM).decode("utf-8", "replace")
    return next(csv.reader([first], delimiter=_DELIMITERS[format]), [])


def _parse(
    records: _Records, names: list[str], delimiter: str, slice: Slice, rules: TextRules, on_reject: OnReject
) -> Iterator[Batch]:
    skip = int(records.ends[0]) if records.offset == 0 else 0
    data = records.data[skip:]
    if not data.strip():
        return
    starts = np.concatenate(([0], records.ends))[1 if skip else 0 :]

    def line_of(position: int) -> int:
        at = int(starts[min(position, len(starts) - 1)])
        return records.line + records.data.count(b"\n", 0, at)

    def reject_row(row: pyarrow.csv.InvalidRow) -> str:
        detail = f"{row.actual_columns} fields where the header has {row.expected_columns}"
        line = line_of((row.number or 1) - 1)
        stop_or_reject(Reject(slice.path, "bad_row", detail, row.text, line=line, origin=slice.start), rules, on_reject)
        return "skip"

    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        record = raw.decode("utf-8", "backslashreplace")
        return Reject(slice.path, reason, detail, record, line=line_of(position), origin=slice.start)

    column = rules.text_column
    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=reject_row
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=[column], column_types={column: pa.large_binary()}, check_utf8=False
        ),
    )
    for chunk in table.column(0).chunks:
        texts = checked_text(chunk, rules, on_reject, make_reject)
        for part in bounded(texts):
            yield Batch(part, bytes_read=part.nbytes)


# ---- where records end ----


def _record_blocks(file: IO[bytes], compression: str | None, offset: int, delimiter: str) -> Iterator[_Records]:
    held, line = b"", 1
    for block in read_blocks(file, compression, BLOCK_BYTES):
        held += block
        ends = _record_ends(held, ord(delimiter))
        if len(ends):
            size = int(ends[-1])
            yield _Records(held[:size], offset, line, ends)
            line += held.count(b"\n", 0, size)
            held, offset = held[size:], offset + size
        elif len(held) > _LARGEST_RECORD:
            raise InputError(
                f"near byte {offset:,}: a record of more than {_LARGEST_RECORD:,} bytes; is a quote not closed?"
            )
    if held:
        yield _Records(held, offset, line, np.array([len(held)]))


def _record_ends(data: bytes, delimiter: int) -> npt.NDArray[np.int64]:
    """Where each whole record ends, in bytes that begin at a record."""
    array = np.frombuffer(data, dtype=np.uint8)
    newlines = np.flatnonzero(array == _NEWLINE)
    quotes = np.flatnonzero(array == _QUOTE)
    if not len(quotes):
        return newlines + 1
    if not _well_placed(array, quotes, delimiter):
        return _record_ends_by_field(data, chr(delimiter))
    # An even number of quotes before it: outside of quotes.
    ends: npt.NDArray[np.int64] = newlines[np.searchsorted(quotes, newlines) % 2 == 0] + 1
    return ends


def _well_placed(array: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64], delimiter: int) -> bool:
    """Whether every quote opens a field, closes one, or is doubled inside one."""
    padded = np.concatenate(([_NEWLINE], array, [_NEWLINE]))
    opening, closing = quotes[::2], quotes[1::2]
    edges = np.zeros(256, dtype=bool)
    edges[[delimiter, _NEWLINE, _RETURN, _QUOTE]] = True
    return bool(edges[padded[opening]].all() and edges[padded[closing + 2]].all())


def _record_ends_by_field(data: bytes, delimiter: str) -> npt.NDArray[np.int64]:
    """The slow way, field by field, for files with stray quotes."""
    d = re.escape(delimiter.encode())
    field = re.compile(rb'(?:"(?:[^"]|"")*"[^%s\n]*|(?!")[^%s\n]*)(%s|\n)' % (d, d, d))
    ends, at = [], 0
    while (match := field.match(data, at)) is not None:
        at = match.end()
        if match[1] == b"\n":
            ends.append(at)
    return np.array(ends, dtype=np.int64)
