"""CSV and TSV -> records, as Python's csv module reads them; and byte ranges that begin at records.

A field may hold line ends, blank lines are skipped. Texts are those of one column. A row with too few or too many
fields is rejected with its line, as is one that is too large. Holds one batch, and a record.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.sources.arrays import BATCH_BYTES, Int64s
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    MAX_DOCUMENT_BYTES,
    TOO_LARGE,
    Batch,
    Reading,
    Reject,
    no_such_column,
    require_columns,
    too_large,
)
from milldam.sources.compression import DamagedError, open_bytes, open_head, read_blocks
from milldam.sources.decoding import decode_text
from milldam.sources.records import BLOCK_BYTES, limited, make_damage_reject
from milldam.sources.units import InputFile, Slice, whole

_LARGEST_FIELD = 1 << 30
_LOST = 8
_ROW_BYTES = 100
DELIMITERS = {"csv": ",", "tsv": "\t"}
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_BETWEEN_QUOTES = re.compile(rb'[^"](?=[^"])')
_limit_lock = threading.Lock()


# ---- slices ----


def slice_csv(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Byte ranges that begin at records. A large file is read once for that, at the speed of the disk.

    A file with stray quotes can be read only from its start: it stays whole.
    """
    is_small = file.compression is not None or file.size <= shard_size * 1.25
    cuts = [] if is_small else _find_cuts(file, shard_size)
    if not cuts:
        yield whole(file)
        return
    for start, stop in itertools.pairwise([0, *cuts, file.size]):
        yield Slice(file.path, file.format, None, start, None if stop == file.size else stop, stop - start)


def _find_cuts(file: InputFile, shard_size: int) -> list[int]:
    """Where to cut: the first record end after each `shard_size` bytes; nowhere when a quote neither opens a field, nor
    closes one, nor is doubled inside one."""
    cuts: list[int] = []
    position, inside, wanted = 0, 0, shard_size
    edges = np.zeros(256, dtype=bool)
    edges[[ord(DELIMITERS[file.format]), _NEWLINE, _RETURN, _QUOTE]] = True
    with open_bytes(file.path) as source:
        for lines in _stretches(read_blocks(source, None, BLOCK_BYTES), 2 * BLOCK_BYTES):
            array = np.frombuffer(lines, dtype=np.uint8)
            quotes = np.flatnonzero(array == _QUOTE)
            padded = np.concatenate(([_NEWLINE], array, [_NEWLINE]))
            before_opening, behind_closing = padded[quotes[inside::2]], padded[quotes[1 - inside :: 2] + 2]
            if not (edges[before_opening].all() and edges[behind_closing].all()):
                return []
            newlines = np.flatnonzero(array == _NEWLINE)
            # Records end at line ends with an even number of quotes before them.
            ends = position + newlines[(np.searchsorted(quotes, newlines) + inside) % 2 == 0] + 1
            while len(ends := ends[ends >= wanted]) and int(ends[0]) < file.size:
                cuts.append(int(ends[0]))
                wanted = cuts[-1] + shard_size
            inside ^= len(quotes) % 2
            position += len(lines)
    return cuts


def _stretches(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Whole lines; of a larger one, pieces of more than `most` bytes, cut where no quote is near."""
    held = b""
    try:
        for block in blocks:
            held += block
            end = held.rfind(b"\n") + 1
            if not end and len(held) > most:
                cut = _BETWEEN_QUOTES.search(held, most)
                end = cut.end() if cut is not None else 0
            if end:
                yield held[:end]
                held = held[end:]
    except DamagedError as error:
        error.cut = held or None
        raise
    if held:
        yield held


# ---- records ----


class Record(NamedTuple):
    """A record as csv reads it."""

    line: int
    fields: list[str]
    reason: str = ""
    """Why it is none, where it is none; then its one field is the record as it stands there, or the head of it."""
    detail: str = ""


class _TooLargeError(Exception):
    """The record at hand is larger than it may be."""


class _Lines:
    """Lines with their ends, for csv's reader; bytes that are no UTF-8 come as lone surrogates."""

    def __init__(self, blocks: Iterator[bytes], most: int) -> None:
        texts = codecs.iterdecode(_stretches(blocks, most), "utf-8", "surrogateescape")
        first = next(texts, "").removeprefix("\ufeff")
        self._pieces = (line for text in itertools.chain([first], texts) for line in io.StringIO(text, newline="\n"))
        """Lines; but one that is too large in several."""
        self._most, self.count, self.size = most, 0, 0
        self.record: list[str] = []
        """What was read of the record at hand."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._pieces)
        self.record.append(line)
        self._measure(line)
        if self.size > self._most:
            raise _TooLargeError
        return line

    def _measure(self, piece: str) -> None:
        self.size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogateescape"))
        self.count += piece.endswith("\n")

    @property
    def taken(self) -> str:
        """What was read of the record at hand, as much as a reject keeps."""
        return "".join(self.record)[: KEPT_RECORD_CHARS + 1]

    def pass_over(self) -> None:
        """Go on behind the record that is too large: behind a line end that is in no quotes.

        A quote that is still open after eight times as much as may be was lost: the next line is another record.
        """
        piece, quotes = self.record[-1], sum(piece.count('"') for piece in self.record)
        while not piece.endswith("\n") or (quotes % 2 and self.size < _LOST * self._most):
            if not (piece := next(self._pieces, "")):
                return
            self._measure(piece)
            quotes += piece.count('"')


def _records(blocks: Iterator[bytes], delimiter: str, most: int) -> Iterator[Record]:
    """The records of bytes that begin with one, in order."""
    lines, line = _Lines(blocks, most), 1
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        while True:
            lines.record, lines.size = [], 0
            line = lines.count + 1
            try:
                row = _next_row(reader)
            except csv.Error as error:
                detail = str(error)
                if detail.startswith("new-line character seen"):
                    detail = "a carriage return (\\r) in a field without quotes"
                yield Record(line, [lines.taken.rstrip("\r\n")], "bad_row", detail)
            except _TooLargeError:
                head = lines.taken
                lines.pass_over()
                yield Record(line, [head], TOO_LARGE, too_large(lines.size, most))
                reader = csv.reader(lines, delimiter=delimiter)
            else:
                if row is None:
                    return
                if row:
                    yield Record(line, row)
    except DamagedError as error:
        if lines.record or error.cut is not None:
            error.cut = lines.taken.encode("utf-8", "surrogateescape") + (error.cut or b"")
            error.line = line
        raise


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """The next row, whose fields may be large. The csv module has one limit for the whole process: the program that
    uses milldam gets its own back."""
    with _limit_lock:
        before = csv.field_size_limit(_LARGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def csv_head(slice: Slice) -> Iterator[list[str]]:
    """The first records, column names first: of standard input only what can be seen without using it up."""
    with open_head(slice.path) as file, contextlib.suppress(DamagedError):
        blocks = read_blocks(file, slice.compression, BLOCK_BYTES)
        for number, record in enumerate(_records(blocks, DELIMITERS[slice.format], MAX_DOCUMENT_BYTES)):
            if not record.reason:
                yield record.fields
            elif number == 0:
                hint = " Do its lines end with it? Convert it: tr '\\r' '\\n' < OLD > NEW"
                raise InputError(
                    f"{slice.path}: its first record, which names the columns, can't be read: {record.detail}."
                    + (hint if "\r" in record.fields[0] else "")
                )


def columns_of(slice: Slice) -> list[str]:
    """The column names in the first record; raises InputError where a name stands twice."""
    names = next(csv_head(slice), [])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{slice.path}: two columns are called "{twice}". Give each a name of its own.')
    return names


# ---- texts and rows ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column, and the columns that are kept."""
    wanted, names = str(reading.rules.text_column), next(csv_head(slice), [])
    if wanted not in names:
        raise no_such_column(slice.path, wanted, names)
    for batch, numbers in _batches(slice, reading, names, (wanted, *reading.keep)):
        columns = batch.select(list(range(1, batch.num_columns))) if reading.keep else None
        yield Batch(batch.column(0), bytes_read=batch.column(0).nbytes, columns=columns, origins=numbers)


def read_rows(slice: Slice, reading: Reading) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Text columns as the header names them."""
    names = columns_of(slice)
    require_columns(reading.columns, names, reading.name(slice.path))
    wanted = tuple(names) if reading.columns is None else reading.columns
    return (rows for rows in _batches(slice, reading, names, wanted) if len(rows[1]))


def _batches(
    slice: Slice, reading: Reading, names: list[str], wanted: tuple[str, ...]
) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Record batches of the wanted columns, null where there is none of that name; and the numbers of the records.

    A row with too few or too many fields is rejected with its line, as is one that is too large or no UTF-8.
    """
    held, size, first = list[Record](), 0, 0
    with open_bytes(slice.path) as file:
        if slice.start:
            file.seek(slice.start)
        left = None if slice.stop is None else slice.stop - slice.start
        blocks = limited(read_blocks(file, slice.compression, BLOCK_BYTES), left)
        records = _records(blocks, DELIMITERS[slice.format], reading.rules.max_document_bytes)
        damage = None
        try:
            if slice.start == 0:
                next(records, None)  # the header
            for record in records:
                held.append(record)
                # A row counts for something even without text: neither texts nor rejects may pile up.
                size += sum(map(len, record.fields)) + _ROW_BYTES
                if size >= BATCH_BYTES // 2:
                    yield _as_batch(held, first, slice, reading, names, wanted)
                    held, size, first = [], 0, first + len(held)
        except DamagedError as error:
            damage = error
        yield _as_batch(held, first, slice, reading, names, wanted)
        if damage is not None:
            reading.reject(make_damage_reject(slice, damage))


def _as_batch(
    held: list[Record], first: int, slice: Slice, reading: Reading, names: list[str], wanted: tuple[str, ...]
) -> tuple[pa.RecordBatch, Int64s]:
    at = [names.index(name) if name in names else None for name in wanted]
    rows, numbers = [record.fields for record in held], first + np.arange(len(held))
    try:
        if any(record.reason or len(record.fields) != len(names) for record in held):
            raise ValueError
        columns = _columns(rows, at)
    except ValueError:  # UnicodeEncodeError is one
        rows, kept = [], list[int]()
        for number, record in enumerate(held, start=first):
            fields, reason, detail = _sound(record, reading, names, at)
            if not reason:
                rows.append(fields)
                kept.append(number)
                continue
            shown = DELIMITERS[slice.format].join(record.fields)
            shown = shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            reading.reject(Reject(slice.path, reason, detail, shown, line=record.line, origin=slice.start))
        columns, numbers = _columns(rows, at), np.array(kept, np.int64)
    return pa.record_batch(columns, names=list(wanted)), numbers


def _columns(rows: list[list[str]], at: list[int | None]) -> list[pa.Array]:
    return [
        pa.nulls(len(rows), pa.large_string()) if k is None else pa.array([row[k] for row in rows], pa.large_string())
        for k in at
    ]


def _sound(record: Record, reading: Reading, names: list[str], at: list[int | None]) -> tuple[list[str], str, str]:
    """The fields of a record, as text those that are wanted; or the reason and the detail of a reject."""
    if record.reason:
        return [], record.reason, record.detail
    if len(record.fields) != len(names):
        return [], "bad_row", f"{len(record.fields)} fields where the header has {len(names)}"
    fields = list(record.fields)
    for k in at:
        if k is not None:
            text, problem = decode_text(fields[k].encode("utf-8", "surrogateescape"), reading.rules)
            if text is None:
                return [], "not_utf8", f'"{names[k]}": {problem}' if len(at) > 1 else problem
            fields[k] = text
    return fields, "", ""
