"""CSV and TSV -> texts of one column, or rows.

A row with too few or too many fields is rejected with its line. Holds one batch; a giant record is read in parts, and
put together where rows are wanted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from milldam.sources.arrays import BATCH_BYTES, decode_array, gathered, open_batches, require_array
from milldam.sources.batch import Batch, MalformedError, Reading, Reject, no_such_column, require_columns
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.csv_records import (
    DELIMITERS,
    LARGEST_FIELD,
    Record,
    csv_columns,
    csv_header,
    limited,
    records,
)
from milldam.sources.decoding import HEAD_BYTES, decode_text
from milldam.sources.giant_record import GiantRecord
from milldam.sources.large_rows import LargeRow, TextWeight
from milldam.sources.opening import open_bytes
from milldam.sources.plain_text import make_damage_reject
from milldam.sources.records import BLOCK_BYTES
from milldam.sources.units import Slice

_ROW_BYTES = 100
Made = TypeVar("Made")


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column; a giant one in parts."""
    wanted = str(reading.rules.text_column)
    names = csv_header(slice.path, slice.compression, slice.format)
    if wanted not in names:
        raise no_such_column(slice.path, wanted, names)
    reader = _Reader(slice, reading, names, (wanted,))
    for found in reader.read(lambda giant: open_batches(reader.text_in_parts(giant))):
        yield found if isinstance(found, Batch) else Batch(found.column(0), bytes_read=found.nbytes)


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
            rows = self._sound_rows(held)
            columns = [pa.array([row[k] for row in rows], pa.large_string()) for k in range(len(self._at))]
        return pa.record_batch(columns, names=self._wanted)

    def _sound_rows(self, held: list[Record]) -> list[list[str]]:
        """The wanted fields of each record that has nothing wrong with it; the others are rejected."""
        rows: list[list[str]] = []
        for record in held:
            row: list[str] = []
            try:
                self._require_width(len(record.fields), record.problem)
                row = [self._text(record.fields[at], name) for at, name in zip(self._at, self._wanted, strict=True)]
            except MalformedError as error:
                self._reject(record.line, error, DELIMITERS[self._slice.format].join(record.fields), len(rows))
            else:
                rows.append(row)
        return rows

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
        wanted = (part for field, part in self._parts(row) if field == self._at[0])
        for part in gathered(wanted):
            raw = part.encode("utf-8", "surrogateescape")
            head = raw[:HEAD_BYTES] if head is None else head
            yield require_array(raw, self._reading.rules, head)

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
