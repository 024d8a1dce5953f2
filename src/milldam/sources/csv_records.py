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
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    MAX_DOCUMENT_BYTES,
    TOO_LARGE,
    Batch,
    MalformedError,
    Reading,
    Reject,
    no_such_column,
    require_columns,
    too_large,
)
from milldam.sources.compression import DamagedError, open_bytes, open_head, read_blocks
from milldam.sources.decoding import decode_text
from milldam.sources.records import BLOCK_BYTES, make_damage_reject
from milldam.sources.units import InputFile, Slice, whole

_LARGEST_FIELD = 1 << 30
_LOST = 8
_ROW_BYTES = 100
DELIMITERS = {"csv": ",", "tsv": "\t"}
_CSV_ERRORS = {
    "new-line character seen in unquoted field": "a carriage return (\\r) in a field without quotes",
}
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_BETWEEN_QUOTES = re.compile(rb'[^"](?=[^"])')
_limit_lock = threading.Lock()


# ---- slices ----


def slice_csv(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Byte ranges that begin at records. A large file is read once for that, at the speed of the disk.

    A file with stray quotes can be read only from its start: it stays whole.
    """
    if file.compression is not None or file.size <= shard_size * 1.25:
        yield whole(file)
        return
    cuts = _find_cuts(file, shard_size)
    edges = [0, *cuts, None] if cuts is not None else [0, None]
    for start, stop in itertools.pairwise(edges):
        assert start is not None
        size = (file.size if stop is None else stop) - start
        yield Slice(file.path, file.format, None, start, stop, size)


def _find_cuts(file: InputFile, shard_size: int) -> list[int] | None:
    """Where to cut: the first record end after each `shard_size` bytes; None when quotes are not as they should be."""
    cuts: list[int] = []
    position, inside, wanted = 0, False, shard_size
    with open_bytes(file.path) as source:
        for lines in _stretches(read_blocks(source, None, BLOCK_BYTES), 2 * BLOCK_BYTES):
            array = np.frombuffer(lines, dtype=np.uint8)
            quotes = np.flatnonzero(array == _QUOTE)
            if not _well_placed(array, quotes, ord(DELIMITERS[file.format]), inside):
                return None
            newlines = np.flatnonzero(array == _NEWLINE)
            # Records end at line ends with an even number of quotes before them.
            ends = position + newlines[(np.searchsorted(quotes, newlines) + inside) % 2 == 0] + 1
            after = ends[ends >= wanted]
            while len(after) and int(after[0]) < file.size:
                cuts.append(int(after[0]))
                wanted = cuts[-1] + shard_size
                after = after[after >= wanted]
            inside ^= bool(len(quotes) % 2)
            position += len(lines)
    return cuts


def _well_placed(array: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64], delimiter: int, inside: bool) -> bool:
    """Whether every quote opens a field, closes one, or is doubled inside one."""
    padded = np.concatenate(([_NEWLINE], array, [_NEWLINE]))
    opening, closing = quotes[int(inside) :: 2], quotes[1 - int(inside) :: 2]
    edges = np.zeros(256, dtype=bool)
    edges[[delimiter, _NEWLINE, _RETURN, _QUOTE]] = True
    return bool(edges[padded[opening]].all() and edges[padded[closing + 2]].all())


def _stretches(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Whole lines; of a larger one, pieces of more than `most` bytes, cut where no quote is near."""
    held = b""
    try:
        for block in blocks:
            held += block
            end = held.rfind(b"\n") + 1
            if not end and len(held) > most:
                cuts = _BETWEEN_QUOTES.search(held, most)
                end = cuts.end() if cuts is not None else 0
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
    problem: str = ""
    """Why it is none; then its one field is the record as it stands there."""
    too_large: int = 0
    """Its bytes, where these are more than may be; then its one field is the head of the record."""


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
        self.size += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        self.count += line.endswith("\n")
        if self.size > self._most:
            raise _TooLargeError
        return line

    def begin_record(self) -> None:
        self.record, self.size = [], 0

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
            try:
                piece = next(self._pieces)
            except StopIteration:
                return
            self.size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogateescape"))
            self.count += piece.endswith("\n")
            quotes += piece.count('"')


def records(blocks: Iterator[bytes], delimiter: str, most: int = MAX_DOCUMENT_BYTES) -> Iterator[Record]:
    """The records of bytes that begin with one, in order."""
    lines, line = _Lines(blocks, most), 1
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        while True:
            lines.begin_record()
            line = lines.count + 1
            try:
                row = _next_row(reader)
            except csv.Error as error:
                problem = _CSV_ERRORS.get(str(error).split(" - ")[0], str(error))
                yield Record(line, [lines.taken.rstrip("\r\n")], problem)
            except _TooLargeError:
                head = lines.taken
                lines.pass_over()
                yield Record(line, [head], too_large=lines.size)
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
        for number, record in enumerate(records(blocks, DELIMITERS[slice.format])):
            if not (record.problem or record.too_large):
                yield record.fields
            elif number == 0:
                head, problem = record.fields[0], record.problem or f"{record.too_large:,} bytes"
                hint = " Do its lines end with it? Convert it: tr '\\r' '\\n' < OLD > NEW" if "\r" in head else ""
                raise InputError(
                    f"{slice.path}: its first record, which names the columns, can't be read: {problem}.{hint}"
                )


def csv_header(slice: Slice) -> list[str]:
    """The column names in the first record."""
    return next(csv_head(slice), [])


def csv_columns(slice: Slice) -> list[str]:
    """The same, for rows: raises InputError where a name stands twice."""
    names = csv_header(slice)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{slice.path}: two columns are called "{twice}". Give each a name of its own.')
    return names


# ---- texts and rows ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column, and the columns that are kept."""
    wanted, names = str(reading.rules.text_column), csv_header(slice)
    if wanted not in names:
        raise no_such_column(slice.path, wanted, names)
    for batch in _batches(slice, reading, names, (wanted, *reading.keep)):
        texts, kept = batch.column(0), range(1, batch.num_columns)
        yield Batch(texts, bytes_read=texts.nbytes, columns=batch.select(list(kept)) if reading.keep else None)


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Text columns as the header names them."""
    names = csv_columns(slice)
    require_columns(reading.columns, names, reading.name(slice.path))
    wanted = tuple(names) if reading.columns is None else reading.columns
    return (rows for rows in _batches(slice, reading, names, wanted) if rows.num_rows)


def _batches(slice: Slice, reading: Reading, names: list[str], wanted: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Record batches of the wanted columns, null where there is none of that name.

    A row with too few or too many fields is rejected with its line, as is one that is too large or no UTF-8.
    """
    held, size = list[Record](), 0
    with open_bytes(slice.path) as file:
        if slice.start:
            file.seek(slice.start)
        blocks = _limited(read_blocks(file, slice.compression, BLOCK_BYTES), slice)
        found = records(blocks, DELIMITERS[slice.format], reading.rules.max_document_bytes)
        try:
            for number, record in enumerate(found):
                if number == 0 and slice.start == 0:
                    continue  # the header
                held.append(record)
                # A row counts for something even without text: neither texts nor rejects may pile up.
                size += sum(map(len, record.fields)) + _ROW_BYTES
                if size >= BATCH_BYTES // 2:
                    yield _as_batch(held, slice, reading, names, wanted)
                    held, size = [], 0
        except DamagedError as error:
            yield _as_batch(held, slice, reading, names, wanted)
            held = []
            reading.reject(make_damage_reject(slice, error))
        yield _as_batch(held, slice, reading, names, wanted)


def _limited(blocks: Iterator[bytes], slice: Slice) -> Iterator[bytes]:
    """The bytes of a slice, of those from its start on."""
    left = None if slice.stop is None else slice.stop - slice.start
    for block in blocks:
        yield block if left is None else block[:left]
        if left is not None:
            left -= len(block)
            if left <= 0:
                return


def _as_batch(
    held: list[Record], slice: Slice, reading: Reading, names: list[str], wanted: tuple[str, ...]
) -> pa.RecordBatch:
    at = [names.index(name) if name in names else None for name in wanted]
    rows = [record.fields for record in held]
    try:
        if any(record.problem or record.too_large or len(record.fields) != len(names) for record in held):
            raise ValueError
        columns = _columns(rows, at)
    except ValueError:  # UnicodeEncodeError is one
        rows = []
        for record in held:
            try:
                rows.append(_sound(record, reading, names, wanted))
            except MalformedError as error:
                shown = DELIMITERS[slice.format].join(record.fields)
                shown = shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                reject = Reject(slice.path, error.reason, error.detail, shown, line=record.line, origin=slice.start)
                reading.reject(reject, len(rows))
        columns = _columns(rows, at)
    return pa.record_batch(columns, names=list(wanted))


def _columns(rows: list[list[str]], at: list[int | None]) -> list[pa.Array]:
    return [
        pa.nulls(len(rows), pa.large_string()) if k is None else pa.array([row[k] for row in rows], pa.large_string())
        for k in at
    ]


def _sound(record: Record, reading: Reading, names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """The fields of a record, as text those that are wanted; raises MalformedError with what is wrong."""
    if record.too_large:
        raise MalformedError(TOO_LARGE, too_large(record.too_large, reading.rules))
    if record.problem or len(record.fields) != len(names):
        problem = record.problem or f"{len(record.fields)} fields where the header has {len(names)}"
        raise MalformedError("bad_row", problem)
    fields = list(record.fields)
    for name in wanted:
        if name in names:
            at = names.index(name)
            text, problem = decode_text(fields[at].encode("utf-8", "surrogateescape"), reading.rules)
            if text is None:
                raise MalformedError("not_utf8", f'"{name}": {problem}' if len(wanted) > 1 else problem)
            fields[at] = text
    return fields
