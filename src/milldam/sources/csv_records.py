"""CSV and TSV -> records, as Python's csv module reads them, from the start of a file to its end.

A field may hold line ends, so a file is not cut; blank lines are skipped. A row with too few or too many fields is
rejected with its line, as is one that is too large. Holds one batch, and a record.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.sources.arrays import BATCH_BYTES, Int64s, decode_text
from milldam.sources.batch import (
    TOO_LARGE,
    Batch,
    Reading,
    Reject,
    no_such_column,
    require_columns,
    too_large,
)
from milldam.sources.compression import DamagedError, read_head
from milldam.sources.records import record_blocks
from milldam.sources.units import Slice

_LOST = 8
_ROW_BYTES = 100
DELIMITERS = {"csv": ",", "tsv": "\t"}
Record = tuple[int, list[str], str, str]
"""Its first line, its fields, and the reason and detail of a reject, where it is none."""


@contextlib.contextmanager
def _field_limit(most: int) -> Iterator[None]:
    """The csv module has one limit for the whole process: the program that uses milldam gets its own back."""
    before = csv.field_size_limit(most)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _records(slice: Slice, reading: Reading) -> Iterator[Record]:
    """The records of a file, in order, with those that can't be read."""
    most, number, size, damaged = reading.rules.max_document_bytes, 0, 0, False
    lost = list[Reject]()

    def note(reject: Reject) -> None:
        nonlocal damaged
        damaged = reject.damaged
        reading.on_reject(reject) if damaged else lost.append(reject)

    def read_lines() -> Iterator[str]:
        nonlocal number, size
        for data, line, _, _ in record_blocks(slice, replace(reading, on_reject=note)):
            number = line - 1
            for one in io.StringIO(data.decode("utf-8", "surrogateescape"), newline="\n"):
                number, size = number + 1, size + len(one)
                yield one

    lines = read_lines()
    reader = csv.reader(lines, delimiter=DELIMITERS[slice.format])
    with _field_limit(most):
        while True:
            line, lines_read, size = number + 1, reader.line_num, 0
            try:
                row = next(reader, None)
            except csv.Error as error:
                if "field limit" not in str(error):
                    yield line, [], "bad_row", str(error)
                    continue
                # On to the end of its quotes; a quote that is open for that long was lost.
                for rest in lines if reader.line_num > lines_read + 1 else ():
                    if rest.count('"') % 2 or size > _LOST * most:
                        break
                yield line, [], TOO_LARGE, too_large(size, most)
                continue
            yield from ((one.line or 0, [one.record], one.reason, one.detail) for one in lost)
            lost.clear()
            if row is None or damaged:  # the record that was cut off is none
                return
            if row:
                yield (line, row, "", "") if size <= most else (line, [], TOO_LARGE, too_large(size, most))


def csv_head(slice: Slice, limit: int = 1) -> list[list[str]]:
    """The first records, column names first: of standard input only what can be seen without using it up."""
    head, rows = b"", list[list[str]]()
    with contextlib.suppress(DamagedError):  # it is set aside when it is read
        head = read_head(slice.path, slice.compression)
    text = head.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    with _field_limit(len(text)):
        reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=DELIMITERS[slice.format])
        try:
            rows += itertools.islice(filter(None, reader), limit)
        except csv.Error as error:
            if not rows:
                raise InputError(
                    f"{slice.path}: its first record, which names the columns, can't be read: {error}."
                ) from None
    return rows


def columns_of(slice: Slice) -> list[str]:
    """The column names in the first record; raises InputError where a name stands twice."""
    names = next(iter(csv_head(slice)), [])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{slice.path}: two columns are called "{twice}". Give each a name of its own.')
    return names


# ---- texts and rows ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one column, and the columns that are kept."""
    wanted, names = str(reading.rules.text_column), next(iter(csv_head(slice)), [])
    if names and wanted not in names:
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
    at = [names.index(name) if name in names else None for name in wanted]
    held, size, first = list[Record](), 0, 0
    records = itertools.chain(_records(slice, reading), [None])
    next(records)  # the header
    for record in records:
        if record is not None:
            held.append(record)
            # A row counts for something even without text: neither texts nor rejects may pile up.
            size += sum(map(len, record[1])) + _ROW_BYTES
        if record is None or size >= BATCH_BYTES // 2:
            rows, numbers = list[list[str]](), list[int]()
            for number, (line, row, reason, detail) in enumerate(held, start=first):
                fields, wrong = _sound(row, reading, names, at) if not reason else (row, (reason, detail))
                if wrong is None:
                    rows.append(fields)
                    numbers.append(number)
                else:
                    shown = DELIMITERS[slice.format].join(row).encode("utf-8", "surrogateescape")
                    text = shown.decode("utf-8", "backslashreplace")
                    reading.reject(Reject(slice.path, *wrong, text, line=line))
            text, none = pa.large_string(), pa.nulls(len(rows), pa.large_string())
            columns = [none if k is None else pa.array([row[k] for row in rows], text) for k in at]
            yield pa.record_batch(columns, names=list(wanted)), np.array(numbers, np.int64)
            held, size, first = [], 0, first + len(held)


def _sound(
    row: list[str], reading: Reading, names: list[str], at: list[int | None]
) -> tuple[list[str], tuple[str, str] | None]:
    """The fields of a record, as text those that are wanted; or the reason and the detail of a reject."""
    if len(row) != len(names):
        return row, ("bad_row", f"{len(row)} fields where the header has {len(names)}")
    for k in at:
        if k is not None and not row[k].isascii():
            text, problem = decode_text(row[k].encode("utf-8", "surrogateescape"), reading.rules)
            if text is None:
                return row, ("not_utf8", f'"{names[k]}": {problem}' if len(at) > 1 else problem)
            row[k] = text
    return row, None
