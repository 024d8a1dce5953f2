"""CSV and TSV -> records, as Python's csv module reads them; and byte ranges that begin at records.

A field may hold line ends, blank lines are skipped. A giant record is read in parts (giant_line.py). A field may have
`LARGEST_FIELD` characters, and a quote that is never closed ends there.

CSV and TSV -> texts of one column, or rows.

A row with too few or too many fields is rejected with its line. Holds one batch; a giant record is read in parts, and
put together where rows are wanted.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError
from milldam.sources.arrays import BATCH_BYTES, decode_array, gathered, open_batches, require_array, with_value
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    Batch,
    MalformedError,
    Reading,
    Reject,
    no_such_column,
    require_columns,
)
from milldam.sources.compression import DamagedError, open_bytes, open_head, read_blocks
from milldam.sources.decoding import HEAD_BYTES, decode_text
from milldam.sources.giant_line import GiantRecord
from milldam.sources.records import BLOCK_BYTES, GIANT_BYTES, make_damage_reject
from milldam.sources.rows import LargeRow, TextWeight
from milldam.sources.units import InputFile, Slice, whole
from milldam.sources.values import LONGEST, NOTHING

LARGEST_FIELD = 64 << 20
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
        for lines in _stretches(read_blocks(source, None, BLOCK_BYTES)):
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


def _stretches(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines as far as possible. A giant one is cut, but not beside a quote."""
    held = b""
    try:
        for block in blocks:
            held += block
            end = held.rfind(b"\n") + 1
            if not end and len(held) > GIANT_BYTES:
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


class _Lines:
    """Lines with their ends, for csv's reader; bytes that are no UTF-8 come as lone surrogates.

    When a record turns out to be giant, they end for that reader; `take_record` gives what was read of it, and `pieces`
    what follows.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        texts = codecs.iterdecode(_stretches(blocks), "utf-8", "surrogateescape")
        first = next(texts, "").removeprefix("\ufeff")
        lines = (line for text in itertools.chain([first], texts) for line in io.StringIO(text, newline="\n"))
        self.pieces: Iterator[str] = lines
        """Lines; but a giant line in several."""
        self.count, self.ended, self.giant = 0, False, False
        self.begin_record()

    def begin_record(self) -> None:
        self._record: list[str] = []
        self._size, self._before = 0, self.count

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        piece = None if self.giant else next(self.pieces, None)
        if piece is None:
            self.ended = not self.giant
            raise StopIteration
        self.count += 1
        self._size += len(piece)
        if not self._record and piece in ("\n", "\r\n"):
            self.begin_record()
            return piece
        self._record.append(piece)
        # A piece that is no whole line has half as many bytes, and a character has four at most.
        self.giant = self._size > GIANT_BYTES // 8
        return next(self) if self.giant else piece

    @property
    def taken(self) -> str:
        """What was read of the record at hand, as much as a reject keeps."""
        return "".join(self._record)[: KEPT_RECORD_CHARS + 1]

    def take_record(self) -> tuple[int, str]:
        """The line where the giant record begins, and its text so far."""
        text, self.count = "".join(self._record), self._before
        self.giant = False
        return self.count + 1, text

    def go_on_behind(self, row: GiantRecord) -> None:
        self.count += row.line_ends
        self.pieces = itertools.chain(io.StringIO(row.rest, newline="\n"), self.pieces)
        self.begin_record()


def records(blocks: Iterator[bytes], delimiter: str) -> Iterator[Record | GiantRecord]:
    """The records of bytes that begin with one, in order. One that is giant must be read through before the next."""
    lines = _Lines(blocks)
    while not lines.ended:
        yield from _small_records(lines, delimiter)
        if lines.giant:
            giant = GiantRecord(*lines.take_record(), lines.pieces, delimiter)
            yield giant
            giant.end()
            lines.go_on_behind(giant)


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """The next row, whose fields may be large. The csv module has one limit for the whole process: the program that
    uses milldam gets its own back."""
    with _limit_lock:
        before = csv.field_size_limit(LARGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def _small_records(lines: _Lines, delimiter: str) -> Iterator[Record]:
    """Records up to the end, or to a giant one."""
    reader, before = csv.reader(lines, delimiter=delimiter), lines.count
    while True:
        line = before + reader.line_num + 1
        try:
            row = _next_row(reader)
        except csv.Error as error:
            problem = _CSV_ERRORS.get(str(error).split(" - ")[0], str(error))
            row, problem = [lines.taken.rstrip("\r\n")], problem
        except DamagedError as error:
            if lines.taken or error.cut is not None:
                error.cut = lines.taken.encode("utf-8", "surrogateescape") + (error.cut or b"")
                error.line = line
            raise
        else:
            problem = ""
        if row is None or lines.giant:
            return
        lines.begin_record()
        if row:
            yield Record(line, row, problem)


def csv_head(path: str, compression: str | None, format: str) -> Iterator[list[str]]:
    """The first records, column names first: of standard input only what can be seen without using it up.

    Of a giant record, what its fields begin with.
    """
    with open_head(path) as file, contextlib.suppress(DamagedError, MalformedError):
        found = records(read_blocks(file, compression, BLOCK_BYTES), DELIMITERS[format])
        for number, record in enumerate(found):
            if isinstance(record, GiantRecord):
                yield record.heads()
            elif not record.problem:
                yield record.fields
            elif number == 0:
                raise _unreadable_header(path, record.fields[0], record.problem)


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
Made = TypeVar("Made")


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column; a giant one in parts."""
    wanted = str(reading.rules.text_column)
    names = csv_header(slice.path, slice.compression, slice.format)
    if wanted not in names:
        raise no_such_column(slice.path, wanted, names)
    reader = _Reader(slice, reading, names, (wanted,))
    number = None if reading.value is None else lambda: reader.number
    for found in reader.read(lambda giant: with_value(open_batches(reader.text_in_parts(giant)), number)):
        if isinstance(found, Batch):
            yield found
            continue
        texts, values = found.column(0), None if reading.value is None else found.column(1).to_numpy()
        yield Batch(texts, bytes_read=texts.nbytes, values=values)


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Text columns as the header names them."""
    names = csv_columns(slice.path, slice.compression, slice.format)
    require_columns(reading.columns, names, reading.name(slice.path))
    reader = _Reader(slice, reading, names, names if reading.columns is None else reading.columns)
    return (rows for rows in reader.read(reader.whole) if rows.num_rows)


class _Reader:
    """Record batches of the wanted columns, and giant records. A row with too few or too many fields is rejected with
    its line, as is one that is no UTF-8."""

    def __init__(self, slice: Slice, reading: Reading, names: Sequence[str], wanted: Sequence[str]) -> None:
        self._slice, self._reading = slice, reading
        self._width, self._wanted = len(names), list(wanted)
        self._at = [names.index(name) for name in wanted]
        self._value, self.number = reading.value, NOTHING
        """The field whose numbers are one more column, and its number in a giant record."""
        self._value_at = names.index(self._value.name) if self._value and self._value.name in names else None

    def read(self, of_giant: Callable[[GiantRecord], Iterator[Made]]) -> Iterator[pa.RecordBatch | Made]:
        slice, held, size = self._slice, list[Record](), 0
        with open_bytes(slice.path) as file:
            if slice.start:
                file.seek(slice.start)
            blocks = limited(read_blocks(file, slice.compression, BLOCK_BYTES), slice)
            found = records(blocks, DELIMITERS[slice.format])
            try:
                for number, record in enumerate(found):
                    if number == 0 and slice.start == 0:
                        _pass_over(record)
                        continue
                    if isinstance(record, Record):
                        held.append(record)
                        # A row counts for something even without text: neither texts nor rejects may pile up.
                        size += sum(map(len, record.fields)) + _ROW_BYTES
                    if size >= BATCH_BYTES // 2 or isinstance(record, GiantRecord):
                        yield self._batch(held)
                        held, size = [], 0
                    if isinstance(record, GiantRecord):
                        with self._rejecting(record):
                            yield from of_giant(record)
            except DamagedError as error:
                yield self._batch(held)
                held = []
                self._reading.reject(make_damage_reject(slice, error))
            yield self._batch(held)

    def _batch(self, held: list[Record]) -> pa.RecordBatch:
        try:
            if any(record.problem or len(record.fields) != self._width for record in held):
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
                self._require_width(len(record.fields), record.problem)
                row = [self._text(record.fields[at], name) for at, name in zip(self._at, self._wanted, strict=True)]
            except MalformedError as error:
                self._reject(record.line, error, DELIMITERS[self._slice.format].join(record.fields), len(rows))
            else:
                sound.append(record)
                rows.append(row)
        return sound, rows

    def _require_width(self, width: int, problem: str = "") -> None:
        if problem or width != self._width:
            raise MalformedError("bad_row", problem or f"{width} fields where the header has {self._width}")

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

    # ---- giant records ----

    @contextlib.contextmanager
    def _rejecting(self, row: GiantRecord) -> Iterator[None]:
        try:
            yield
        except MalformedError as error:
            row.end()
            self._reject(row.line, error, row.begin)

    def text_in_parts(self, row: GiantRecord) -> Iterator[pa.LargeStringArray]:
        head: bytes | None = None
        beside: list[str] = []
        for part in gathered(self._wanted_parts(row, beside)):
            raw = part.encode("utf-8", "surrogateescape")
            head = raw[:HEAD_BYTES] if head is None else head
            yield require_array(raw, self._reading.rules, head)
        self.number = self._value.of("".join(beside)) if self._value is not None else NOTHING

    def _wanted_parts(self, row: GiantRecord, beside: list[str]) -> Iterator[str]:
        """The parts of the text; those of the field beside it, as far as they may tell its number, go to `beside`."""
        room = LONGEST + 1
        for field, part in self._parts(row):
            if field == self._value_at:
                beside.append(part[:room])
                room -= len(beside[-1])
            if field == self._at[0]:
                yield part

    def _parts(self, row: GiantRecord) -> Iterator[tuple[int, str]]:
        """(number of the field, a part of it); raises MalformedError for a field that is too large, and a row that has
        too few or too many."""
        number, size = -1, 0
        for field, part in row.parts():
            number, size = field, size + len(part) if field == number else len(part)
            if size > LARGEST_FIELD:
                raise MalformedError("bad_row", f"field larger than field limit ({LARGEST_FIELD})")
            yield field, part
        self._require_width(number + 1)

    def whole(self, row: GiantRecord) -> Iterator[pa.RecordBatch]:
        """A giant record put together, where there is room for it."""
        reading = self._reading
        fields = {at: LargeRow(reading.room, reading.places, TextWeight) for at in self._at}
        for field, part in self._parts(row):
            if field in fields:
                fields[field].add(part.encode("utf-8", "surrogateescape"))
        columns = []
        for at, name in zip(self._at, self._wanted, strict=True):
            raw = fields.pop(at).whole()
            text, problem = decode_array(raw, reading.rules, raw[:HEAD_BYTES])
            if text is None:
                raise MalformedError("not_utf8", f'"{name}": {problem}')
            columns.append(text)
        yield pa.record_batch(columns, names=self._wanted)


def _pass_over(header: Record | GiantRecord) -> None:
    if isinstance(header, GiantRecord):
        header.heads()
