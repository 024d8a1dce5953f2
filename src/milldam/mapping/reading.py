"""A unit of files -> its rows, by the format of each slice. Can be read again and again with the same result.

    txt             text, file (Arrow); what a document is, `documents` and `separator` say
    jsonl, json     dicts as they are, a column that a row lacks is None
    csv, tsv        text columns as the header names them (Arrow)
    parquet, arrow  record batches as they are (mapping/table_rows.py)

Holds a few megabytes; of a larger row of JSON twice its size while it is read (nine times, with characters that take
Python four bytes each), of others once, and nothing of it while it is worked on: `Room` is asked before. What can't be
read goes to the rejects.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.input_files import version_of, without_secrets
from milldam.mapping.places import Places
from milldam.mapping.room import JsonWeight, Room, TextWeight
from milldam.mapping.rows import Rows, from_records, row_count, take
from milldam.mapping.table_rows import count_table_rows, read_table, require_columns
from milldam.mapping.units import RowUnit
from milldam.sources import lines
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    Batch,
    MalformedError,
    OnReject,
    Reject,
    TextRules,
    stop_or_reject,
)
from milldam.sources.compression import DamagedError
from milldam.sources.decoding import decode_json, decode_text, mended, parse_json
from milldam.sources.jsonl import json_blocks, uncut
from milldam.sources.lines import BOM, make_damage_reject, make_line_reject
from milldam.sources.opening import open_bytes, open_head
from milldam.sources.records import PART, WHOLE, Block
from milldam.sources.table_text import DELIMITERS, csv_header, csv_records, row_problem, text_lines
from milldam.sources.units import Slice

TEXT_COLUMNS = ("text", "file")
_ROWS_BYTES = 1 << 20
_ROW_BYTES = 100
_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads slices of files; it pickles as a few settings."""

    rules: TextRules
    columns: tuple[str, ...] | None
    spool: str
    """A folder for what must go through the disk."""
    names: tuple[tuple[str, str], ...] = ()
    """(path, what it is called instead) of input that was spooled."""

    def read(
        self, unit: RowUnit, on_reject: OnReject, places: Places | None = None, room: Room | None = None
    ) -> Iterator[Rows]:
        places = places if places is not None else Places()
        rows = self._read_all(slices_of(unit), self._named(on_reject), _Context(places, room))
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else _between(rows, *chosen)

    def count(self, unit: RowUnit, most: int | None = None, room: Room | None = None) -> int:
        """How many rows a unit has, `most` if there are more. Files of lines are read for it, tables only looked at."""
        found = 0
        for slice in slices_of(unit):
            if slice.format in ("parquet", "arrow"):
                found += count_table_rows(slice, self.spool)
            else:
                places = Places()
                places.begin(self._name(slice.path), origin=slice.start)
                for rows in self._read_slice(slice, _ignore, _Context(places, room)):
                    places.count(row_count(rows))
                    found += row_count(rows)
                    if most is not None and found >= most:
                        return most
        return found if most is None else min(found, most)

    def _read_all(self, slices: Iterator[Slice], on_reject: OnReject, context: _Context) -> Iterator[Rows]:
        before: Slice | None = None
        places = context.places
        for slice in slices:
            is_next = before is not None and (before.path, before.stop) == (slice.path, slice.start)
            if not is_next and slice.format not in ("parquet", "arrow"):
                places.begin(self._name(slice.path), origin=slice.start)
            before = slice
            for rows in self._read_slice(slice, on_reject, context):
                # Counted before they are handed on: who gets them asks where they are from.
                places.count(row_count(rows))
                ready = [rows]
                del rows  # not held here while they are worked on
                yield ready.pop()

    def _read_slice(self, slice: Slice, on_reject: OnReject, context: _Context) -> Iterator[Rows]:
        places = context.places
        if slice.format == "txt":
            yield from self._with_file(slice, _texts(slice, self.rules, on_reject, context))
        elif slice.format in ("jsonl", "json"):
            yield from _JsonReader(slice, self.rules, on_reject, self.columns, context).read()
        elif slice.format in ("csv", "tsv"):
            yield from _CsvReader(slice, self.rules, on_reject, self.columns, places).read()
        else:
            name = self._name(slice.path)

            def at(row: int) -> None:
                places.begin(name, row)

            yield from read_table(slice, self.rules, on_reject, self.columns, self.spool, at, context.room)

    def _name(self, path: str) -> str:
        """What a file is called in rows and messages."""
        return without_secrets(dict(self.names).get(path, path))

    def _with_file(self, slice: Slice, texts: Iterator[pa.LargeStringArray]) -> Iterator[Rows]:
        wanted = self.columns if self.columns is not None else TEXT_COLUMNS
        # a file's name need not be UTF-8
        name = self._name(slice.path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        for text in texts:
            made = {"text": text, "file": pa.repeat(name, len(text)) if "file" in wanted else None}
            yield pa.record_batch([made[column] for column in wanted], names=list(wanted))

    def _named(self, on_reject: OnReject) -> OnReject:
        return lambda reject: on_reject(replace(reject, file=self._name(reject.file)))


def slices_of(unit: RowUnit) -> Iterator[Slice]:
    return (Slice(*slice) for slice in unit.place["slices"])


def can_be_checked(unit: RowUnit) -> bool:
    """Whether `require_unchanged` sees every file that it reads."""
    versions = unit.place.get("versions", ())
    return bool(versions) and None not in versions


def require_unchanged(unit: RowUnit) -> None:
    """After a unit is read: whether its files are still those that its key was made of. A stat for each."""
    for slice, version in zip(unit.place.get("slices", ()), unit.place.get("versions", ()), strict=False):
        if version is None:
            continue
        try:
            now = version_of(os.stat(slice[0]))
        except OSError:
            now = None
        if now != version:
            raise InputError(
                f"{slice[0]}: changed while it was mapped. Run the same call again: finished units of files that did "
                "not change are reused."
            )


def _ignore(reject: Reject) -> None:
    """Rejects are for who reads the rows, not for who counts them."""


def _between(rows: Iterator[Rows], first: int, stop: int) -> Iterator[Rows]:
    """The rows from number `first` to `stop` of those that come."""
    position = 0
    for piece in rows:
        count = row_count(piece)
        start, end = max(0, first - position), min(count, stop - position)
        position += count
        ready = [take(piece, start, end)] if start < end else []
        del piece  # not held here while it is worked on
        if ready:
            yield ready.pop()
        if position >= stop:
            return


@dataclass(frozen=True, slots=True)
class _Context:
    """Where the rows come from, and what may be held of a large one."""

    places: Places
    room: Room | None = None


class _LargeRow:
    """A row that comes in parts, put together where there is room for it. Of others only the size is kept."""

    def __init__(self, context: _Context, kind: type[TextWeight]) -> None:
        self._context, self._weight = context, kind(context.room.format if context.room is not None else "python")
        self._held = io.BytesIO()
        self._fits = True

    def add(self, part: bytes | memoryview) -> None:
        room = self._context.room
        if room is not None:
            self._weight.add(part)
            self._fits = self._fits and room.fits(self._weight.needed - self._held.tell())
        if self._fits:
            self._held.write(part)
        elif self._held.tell():
            self._held = io.BytesIO()

    def whole(self) -> bytes:
        """The bytes of all parts, without a copy. Raises ResourceError when there is no room for them."""
        if not self._fits and self._context.room is not None:
            weight, place = self._weight, self._context.places.next
            raise self._context.room.refusal(weight.needed, weight.bytes, str(place))
        return self._held.getvalue()


# ---- plain text ----


def _texts(slice: Slice, rules: TextRules, on_reject: OnReject, context: _Context) -> Iterator[pa.LargeStringArray]:
    if lines.boundary_of(rules) is None:
        batches = lines.read_whole_files((slice,), rules, on_reject)
    else:
        batches = lines.read_separated(slice, rules, on_reject)
    return _whole_documents(batches, context)


def _whole_documents(batches: Iterator[Batch], context: _Context) -> Iterator[pa.LargeStringArray]:
    """Documents that come in parts put together."""
    large: _LargeRow | None = None
    for batch in batches:
        if batch.cancel:
            large = None
            continue
        if batch.open or large is not None:
            large = large or _LargeRow(context, TextWeight)
            large.add(_bytes_of(batch.texts))
        if not batch.open:
            texts = batch.texts if large is None else _one_text(large.whole())
            large = None
            if len(texts):
                yield texts


def _one_text(data: bytes) -> pa.LargeStringArray:
    """A single string of these bytes, without a Python string of it."""
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int64))
    return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data))


def _bytes_of(part: pa.LargeStringArray) -> memoryview:
    offsets = np.frombuffer(part.buffers()[1], dtype=np.int64)[part.offset : part.offset + len(part) + 1]
    return memoryview(part.buffers()[2])[int(offsets[0]) : int(offsets[-1])] if len(part) else memoryview(b"")


# ---- JSON lines ----


class _JsonReader:
    def __init__(
        self, slice: Slice, rules: TextRules, on_reject: OnReject, columns: tuple[str, ...] | None, context: _Context
    ) -> None:
        self._slice, self._rules, self._on_reject, self._columns = slice, rules, on_reject, columns
        self._context = context

    def read(self) -> Iterator[Rows]:
        slice = self._slice
        with open_bytes(slice.path) as file:
            try:
                for records in self._all_records(json_blocks(file, slice)):
                    ready = [records] if records else []
                    # Nothing of a giant is held here while it is worked on.
                    del records
                    if ready:
                        yield from_records(ready.pop(), self._columns)
            except DamagedError as error:
                for block in uncut(error):
                    yield from_records(self._records(block), self._columns)
                stop_or_reject(make_damage_reject(slice, error), self._rules, self._on_reject)

    def _all_records(self, blocks: Iterator[Block]) -> Iterator[list[dict[str, Any]]]:
        giant: _LargeRow | None = None
        for number, block in enumerate(blocks):
            if number == 0 and self._slice.start == 0:
                block = replace(block, data=block.data.removeprefix(BOM))
            if block.kind == WHOLE:
                yield self._records(block)
                continue
            giant = giant or _LargeRow(self._context, JsonWeight)
            giant.add(block.data.removesuffix(b"\n"))
            if block.kind != PART:
                ready, giant = [giant.whole()], None
                yield self._giant_records(replace(block, data=b""), ready)

    def _records(self, block: Block) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for number, line in enumerate(block.data.split(b"\n"), start=block.line):
            if not line.strip():
                continue
            try:
                records.append(record_of_line(line, self._rules))
            except MalformedError as error:
                self._reject(block, number, error, line, len(records))
        return records

    def _giant_records(self, block: Block, lines: list[bytes]) -> list[dict[str, Any]]:
        """The record of a giant line, which is taken out of `lines`: its bytes are gone when its value is made."""
        line, rules = lines.pop(), self._rules
        if line.isspace():
            return []
        head = line[: 4 * KEPT_RECORD_CHARS + 1]
        try:
            text, has_halves = decode_json(line, rules), _may_have_halves(line, rules)
            del line
            try:
                return [_as_record(json.loads(text), rules, has_halves=has_halves)]
            except (ValueError, RecursionError) as error:
                if rules.invalid_utf8 == "drop" and (told := decode_text(head, rules))[0] is None:
                    raise MalformedError("not_utf8", told[1]) from None
                raise MalformedError("bad_json", str(error)) from None
        except MalformedError as error:
            self._reject(block, block.line, error, head, 0)
            return []

    def _reject(self, block: Block, number: int, error: MalformedError, line: bytes, ahead: int) -> None:
        """A line that can't be read, behind so many more records of its block."""
        reject = make_line_reject(self._slice, block, number, error.reason, error.detail, line)
        stop_or_reject(reject, self._rules, self._on_reject)
        self._context.places.skip(ahead)


def record_of_line(line: bytes, rules: TextRules) -> dict[str, Any]:
    """The object on one line; raises MalformedError with what is wrong."""
    return _as_record(parse_json(line, rules), rules, has_halves=_may_have_halves(line, rules))


def _may_have_halves(line: bytes, rules: TextRules) -> bool:
    """Only bytes that are no UTF-8, and escapes, leave halves of surrogate pairs: look for them no further."""
    return rules.invalid_utf8 == "drop" or _SURROGATE.search(line) is not None


def _as_record(record: Any, rules: TextRules, *, has_halves: bool) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise MalformedError("no_object", f"{type(record).__name__} where an object should be: a row is {{...}}")
    if has_halves:
        return {mended(name, rules): _mended(value, rules) for name, value in record.items()}
    return record


def _mended(value: Any, rules: TextRules) -> Any:
    if isinstance(value, str):
        return mended(value, rules)
    if isinstance(value, list):
        return [_mended(one, rules) for one in value]
    if isinstance(value, dict):
        return {mended(name, rules): _mended(one, rules) for name, one in value.items()}
    return value


def json_columns(slice: Slice) -> list[str]:
    """The fields of the records at a file's head; empty when there are none, or the first is larger than a block."""
    try:
        with open_head(slice.path) as file:
            first = next(json_blocks(file, slice), None)
    except DamagedError:
        return []
    if first is None or first.kind != WHOLE:
        return []
    names: dict[str, None] = {}
    for line in islice((line for line in first.data.removeprefix(BOM).split(b"\n") if line.strip()), 10_000):
        try:
            names |= dict.fromkeys(record_of_line(line, TextRules(invalid_utf8="replace")))
        except MalformedError:
            continue
    return list(names)


# ---- CSV ----


class _CsvReader:
    """Fields as text. A row with too few or too many is rejected with its line, as is one that is no UTF-8."""

    def __init__(
        self, slice: Slice, rules: TextRules, on_reject: OnReject, columns: tuple[str, ...] | None, places: Places
    ) -> None:
        self._slice, self._rules, self._on_reject, self._places = slice, rules, on_reject, places
        names = csv_columns(slice.path, slice.compression, slice.format)
        self._width = len(names)
        require_columns(columns, names, without_secrets(slice.path))
        self._names = list(columns) if columns is not None else names
        self._at = [names.index(name) for name in self._names]

    def read(self) -> Iterator[Rows]:
        slice = self._slice
        with open_bytes(slice.path) as file:
            if slice.start:
                file.seek(slice.start)
            size = None if slice.stop is None else slice.stop - slice.start
            records = csv_records(text_lines(file, slice.compression, size, slice.path), DELIMITERS[slice.format])
            held: list[list[str]] = []
            try:
                if slice.start == 0:
                    next(records, None)
                bytes_held = 0
                for line, record, problem in records:
                    row = self._row(line, record, problem)
                    if row is None:
                        self._places.skip(len(held))
                    else:
                        held.append(row)
                        bytes_held += sum(map(len, row)) + _ROW_BYTES
                    if bytes_held >= _ROWS_BYTES:
                        yield self._rows(held)
                        held, bytes_held = [], 0
            except DamagedError as error:
                stop_or_reject(make_damage_reject(slice, error), self._rules, self._on_reject)
            if held:
                yield self._rows(held)

    def _rows(self, held: list[list[str]]) -> pa.RecordBatch:
        columns = [pa.array([row[k] for row in held], pa.large_string()) for k in range(len(self._names))]
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(held), pa.struct([])))
        return pa.record_batch(columns, names=self._names)

    def _row(self, line: int, record: list[str], problem: str) -> list[str] | None:
        """The wanted fields of a record; None when it was rejected."""
        wrong = row_problem(record, problem, self._width)
        if wrong:
            self._reject(line, "bad_row", wrong, record)
            return None
        row = [record[at] for at in self._at]
        if all(field.isascii() for field in row):
            return row
        for number, field in enumerate(row):
            decoded, problem = decode_text(field.encode("utf-8", "surrogateescape"), self._rules)
            if decoded is None:
                self._reject(line, "not_utf8", f'"{self._names[number]}": {problem}', record)
                return None
            row[number] = decoded
        return row

    def _reject(self, line: int, reason: str, detail: str, record: list[str]) -> None:
        shown = DELIMITERS[self._slice.format].join(record)
        shown = shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        reject = Reject(self._slice.path, reason, detail, shown, line=line, origin=self._slice.start)
        stop_or_reject(reject, self._rules, self._on_reject)


def csv_columns(path: str, compression: str | None, format: str) -> list[str]:
    """The names in the header; raises InputError where a name stands twice."""
    names = csv_header(path, compression, format)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{path}: two columns are called "{twice}". Give each a name of its own.')
    return names
