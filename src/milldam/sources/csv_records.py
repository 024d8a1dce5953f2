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
from collections.abc import Iterator, Sequence
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
DELIMITERS = {"csv": ",", "tsv": "\t"}
_CSV_ERRORS = {
    "new-line character seen in unquoted field": "a carriage return (\\r) in a field without quotes",
}
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_BETWEEN_QUOTES = re.compile(rb'[^"](?=[^"])')
_limit_lock = threading.Lock()
Positions = npt.NDArray[np.int64]


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
            ends = position + _record_ends(array, quotes, inside)
            after = ends[ends >= wanted]
            while len(after) and int(after[0]) < file.size:
                cuts.append(int(after[0]))
                wanted = cuts[-1] + shard_size
                after = after[after >= wanted]
            inside ^= bool(len(quotes) % 2)
            position += len(lines)
    return cuts


def _well_placed(array: npt.NDArray[np.uint8], quotes: Positions, delimiter: int, inside: bool) -> bool:
    """Whether every quote opens a field, closes one, or is doubled inside one."""
    padded = np.concatenate(([_NEWLINE], array, [_NEWLINE]))
    opening, closing = quotes[int(inside) :: 2], quotes[1 - int(inside) :: 2]
    edges = np.zeros(256, dtype=bool)
    edges[[delimiter, _NEWLINE, _RETURN, _QUOTE]] = True
    return bool(edges[padded[opening]].all() and edges[padded[closing + 2]].all())


def _record_ends(array: npt.NDArray[np.uint8], quotes: Positions, inside: bool) -> Positions:
    """Line ends outside of quotes: those with an even number of quotes before them."""
    newlines = np.flatnonzero(array == _NEWLINE)
    ends: Positions = newlines[(np.searchsorted(quotes, newlines) + inside) % 2 == 0] + 1
    return ends


def _stretches(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Whole lines; one of more than `most` bytes is cut, but not beside a quote."""
    held = b""
    try:
        for block in blocks:
            held += block
            end = held.rfind(b"\n") + 1
            if not end and len(held) > most:
                cuts = _BETWEEN_QUOTES.search(held, len(held) // 2)
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


class _Lines:
    """Lines with their ends, for csv's reader; bytes that are no UTF-8 come as lone surrogates.

    In a record of more than `most` bytes they end for that reader, and `pass_over` goes on behind it.
    """

    def __init__(self, blocks: Iterator[bytes], most: int) -> None:
        texts = codecs.iterdecode(_stretches(blocks, most), "utf-8", "surrogateescape")
        first = next(texts, "").removeprefix("\ufeff")
        self._pieces = (line for text in itertools.chain([first], texts) for line in io.StringIO(text, newline="\n"))
        """Lines; but one that is too large in several."""
        self._most, self.count, self.ended = most, 0, False
        self.begin_record()

    def begin_record(self) -> None:
        self._record: list[str] = []
        self._size = 0
        self.too_large = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = None if self.too_large else next(self._pieces, None)
        if line is None:
            self.ended = not self.too_large
            raise StopIteration
        self._take(line)
        if self._size > self._most:
            self.too_large = True
            raise StopIteration
        if len(self._record) == 1 and line in ("\n", "\r\n"):
            self.begin_record()
        return line

    def _take(self, piece: str) -> None:
        self._record.append(piece)
        self._size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogateescape"))
        self.count += piece.endswith("\n")

    @property
    def taken(self) -> str:
        """What was read of the record at hand, as much as a reject keeps."""
        return "".join(self._record)[: KEPT_RECORD_CHARS + 1]

    def pass_over(self) -> Record:
        """Go on behind the record that is too large: behind a line end that is in no quotes.

        A quote that is still open after eight times as much as may be was lost: the next line is another record.
        """
        line = self.count - sum(piece.endswith("\n") for piece in self._record) + 1
        head, quotes = self.taken, sum(piece.count('"') for piece in self._record)
        while not self._record[-1].endswith("\n") or (quotes % 2 and self._size < _LOST * self._most):
            piece = next(self._pieces, None)
            if piece is None:
                self.ended = True
                break
            self._record.clear()
            self._take(piece)
            quotes += piece.count('"')
        record = Record(line, [head], too_large=self._size)
        self.begin_record()
        return record


def records(blocks: Iterator[bytes], delimiter: str, most: int = MAX_DOCUMENT_BYTES) -> Iterator[Record]:
    """The records of bytes that begin with one, in order."""
    lines = _Lines(blocks, most)
    while not lines.ended:
        reader, before, line = csv.reader(lines, delimiter=delimiter), lines.count, 0
        while True:
            line, problem = before + reader.line_num + 1, ""
            try:
                row = _next_row(reader)
                if lines.too_large:
                    yield lines.pass_over()
                    break
            except csv.Error as error:
                problem = _CSV_ERRORS.get(str(error).split(" - ")[0], str(error))
                row = [lines.taken.rstrip("\r\n")]
            except DamagedError as error:
                if lines.taken or error.cut is not None:
                    error.cut = lines.taken.encode("utf-8", "surrogateescape") + (error.cut or b"")
                    error.line = line
                raise
            if row is None:
                break
            lines.begin_record()
            if row:
                yield Record(line, row, problem)


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """The next row, whose fields may be large. The csv module has one limit for the whole process: the program that
    uses milldam gets its own back."""
    with _limit_lock:
        before = csv.field_size_limit(_LARGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def csv_head(path: str, compression: str | None, format: str) -> Iterator[list[str]]:
    """The first records, column names first: of standard input only what can be seen without using it up."""
    with open_head(path) as file, contextlib.suppress(DamagedError):
        for number, record in enumerate(records(read_blocks(file, compression, BLOCK_BYTES), DELIMITERS[format])):
            if not (record.problem or record.too_large):
                yield record.fields
            elif number == 0:
                raise _unreadable_header(path, record.fields[0], record.problem or f"{record.too_large:,} bytes")


def _unreadable_header(path: str, record: str, problem: str) -> InputError:
    hint = " Do its lines end with it? Convert it: tr '\\r' '\\n' < OLD > NEW" if "\r" in record else ""
    return InputError(f"{path}: its first record, which names the columns, can't be read: {problem}.{hint}")


def csv_header(path: str, compression: str | None, format: str) -> list[str]:
    """The column names in the first record."""
    return next(csv_head(path, compression, format), [])


def csv_columns(path: str, compression: str | None, format: str) -> list[str]:
    """The same, for rows: raises InputError where a name stands twice."""
    names = csv_header(path, compression, format)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{path}: two columns are called "{twice}". Give each a name of its own.')
    return names


def limited(blocks: Iterator[bytes], slice: Slice) -> Iterator[bytes]:
    """The bytes of a slice, of those from its start on."""
    size = None if slice.stop is None else slice.stop - slice.start
    for block in blocks:
        yield block if size is None else block[:size]
        if size is not None:
            size -= len(block)
            if size <= 0:
                return


_ROW_BYTES = 100


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column."""
    wanted = str(reading.rules.text_column)
    names = csv_header(slice.path, slice.compression, slice.format)
    if wanted not in names:
        raise no_such_column(slice.path, wanted, names)
    for batch in _Reader(slice, reading, names, (wanted,)).read():
        texts, values = batch.column(0), None if reading.value is None else batch.column(1).to_numpy()
        yield Batch(texts, bytes_read=texts.nbytes, values=values)


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Text columns as the header names them."""
    names = csv_columns(slice.path, slice.compression, slice.format)
    require_columns(reading.columns, names, reading.name(slice.path))
    reader = _Reader(slice, reading, names, names if reading.columns is None else reading.columns)
    return (rows for rows in reader.read() if rows.num_rows)


class _Reader:
    """Record batches of the wanted columns. A row with too few or too many fields is rejected with its line, as is one
    that is too large or no UTF-8."""

    def __init__(self, slice: Slice, reading: Reading, names: Sequence[str], wanted: Sequence[str]) -> None:
        self._slice, self._reading = slice, reading
        self._width, self._wanted = len(names), list(wanted)
        self._at = [names.index(name) for name in wanted]
        self._value = reading.value
        """The field whose numbers are one more column."""
        self._value_at = names.index(self._value.name) if self._value and self._value.name in names else None

    def read(self) -> Iterator[pa.RecordBatch]:
        slice, held, size = self._slice, list[Record](), 0
        with open_bytes(slice.path) as file:
            if slice.start:
                file.seek(slice.start)
            blocks = limited(read_blocks(file, slice.compression, BLOCK_BYTES), slice)
            found = records(blocks, DELIMITERS[slice.format], self._reading.rules.max_document_bytes)
            try:
                for number, record in enumerate(found):
                    if number == 0 and slice.start == 0:
                        continue  # the header
                    held.append(record)
                    # A row counts for something even without text: neither texts nor rejects may pile up.
                    size += sum(map(len, record.fields)) + _ROW_BYTES
                    if size >= BATCH_BYTES // 2:
                        yield self._batch(held)
                        held, size = [], 0
            except DamagedError as error:
                yield self._batch(held)
                held = []
                self._reading.reject(make_damage_reject(slice, error))
            yield self._batch(held)

    def _batch(self, held: list[Record]) -> pa.RecordBatch:
        try:
            if any(record.problem or record.too_large or len(record.fields) != self._width for record in held):
                raise ValueError
            columns = [pa.array([record.fields[at] for record in held], pa.large_string()) for at in self._at]
        except ValueError:  # UnicodeEncodeError is one
            held, rows = self._sound_rows(held)
            columns = [pa.array([row[k] for row in rows], pa.large_string()) for k in range(len(self._at))]
        if self._value is None:
            return pa.record_batch(columns, names=self._wanted)
        at = self._value_at
        numbers = self._value.of_all(None if at is None else record.fields[at] for record in held)
        return pa.record_batch([*columns, pa.array(numbers)], names=[*self._wanted, self._value.name])

    def _sound_rows(self, held: list[Record]) -> tuple[list[Record], list[list[str]]]:
        """The records that have nothing wrong with them and their wanted fields; the others are rejected."""
        sound: list[Record] = []
        rows: list[list[str]] = []
        for record in held:
            row: list[str] = []
            try:
                self._require_sound(record)
                row = [self._text(record.fields[at], name) for at, name in zip(self._at, self._wanted, strict=True)]
            except MalformedError as error:
                self._reject(record.line, error, DELIMITERS[self._slice.format].join(record.fields), len(rows))
            else:
                sound.append(record)
                rows.append(row)
        return sound, rows

    def _require_sound(self, record: Record) -> None:
        if record.too_large:
            raise MalformedError(TOO_LARGE, too_large(record.too_large, self._reading.rules))
        if record.problem or len(record.fields) != self._width:
            problem = record.problem or f"{len(record.fields)} fields where the header has {self._width}"
            raise MalformedError("bad_row", problem)

    def _text(self, field: str, name: str) -> str:
        text, problem = decode_text(field.encode("utf-8", "surrogateescape"), self._reading.rules)
        if text is None:
            raise MalformedError("not_utf8", f'"{name}": {problem}' if len(self._wanted) > 1 else problem)
        return text

    def _reject(self, line: int, error: MalformedError, record: str, ahead: int = 0) -> None:
        shown = record.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        slice = self._slice
        reject = Reject(slice.path, error.reason, error.detail, shown, line=line, origin=slice.start)
        self._reading.reject(reject, ahead)
