"""A unit of files -> its rows, by the format of each slice. Can be read again and again with the same result.

    txt             text, file (Arrow); what a document is, `documents` and `separator` say
    jsonl, json     dicts as they are, a column that a row lacks is None
    csv, tsv        text columns as the header names them (Arrow)
    parquet, arrow  record batches as they are (mapping/table_rows.py)

Holds a few megabytes; of a larger row three times its size while it is read (nine times, with characters that take
Python four bytes each), and nothing of it while it is worked on. What can't be read goes to the rejects.
"""

from __future__ import annotations

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
from milldam.mapping.rows import Rows, from_records, row_count, take
from milldam.mapping.table_rows import count_table_rows, read_table, require_columns
from milldam.mapping.units import RowUnit
from milldam.sources import lines
from milldam.sources.batch import Batch, MalformedError, OnReject, Reject, TextRules, stop_or_reject
from milldam.sources.compression import DamagedError
from milldam.sources.decoding import decode_text, mended, parse_json
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

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places | None = None) -> Iterator[Rows]:
        places = places if places is not None else Places()
        rows = self._read_all(slices_of(unit), self._named(on_reject), places)
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else _between(rows, *chosen)

    def count(self, unit: RowUnit, most: int | None = None) -> int:
        """How many rows a unit has, `most` if there are more. Files of lines are read for it, tables only looked at."""
        found = 0
        for slice in slices_of(unit):
            if slice.format in ("parquet", "arrow"):
                found += count_table_rows(slice, self.spool)
            else:
                for rows in self._read_slice(slice, _ignore, Places()):
                    found += row_count(rows)
                    if most is not None and found >= most:
                        return most
        return found if most is None else min(found, most)

    def _read_all(self, slices: Iterator[Slice], on_reject: OnReject, places: Places) -> Iterator[Rows]:
        before: Slice | None = None
        for slice in slices:
            is_next = before is not None and (before.path, before.stop) == (slice.path, slice.start)
            if not is_next and slice.format not in ("parquet", "arrow"):
                places.begin(self._name(slice.path), origin=slice.start)
            before = slice
            for rows in self._read_slice(slice, on_reject, places):
                # Counted before they are handed on: who gets them asks where they are from.
                places.count(row_count(rows))
                ready = [rows]
                del rows  # not held here while they are worked on
                yield ready.pop()

    def _read_slice(self, slice: Slice, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        if slice.format == "txt":
            yield from self._with_file(slice, _texts(slice, self.rules, on_reject))
        elif slice.format in ("jsonl", "json"):
            yield from _JsonReader(slice, self.rules, on_reject, self.columns, places).read()
        elif slice.format in ("csv", "tsv"):
            yield from _CsvReader(slice, self.rules, on_reject, self.columns, places).read()
        else:
            name = self._name(slice.path)

            def at(row: int) -> None:
                places.begin(name, row)

            yield from read_table(slice, self.rules, on_reject, self.columns, self.spool, at)

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


# ---- plain text ----


def _texts(slice: Slice, rules: TextRules, on_reject: OnReject) -> Iterator[pa.LargeStringArray]:
    if lines.boundary_of(rules) is None:
        batches = lines.read_whole_files((slice,), rules, on_reject)
    else:
        batches = lines.read_separated(slice, rules, on_reject)
    return _whole_documents(batches)


def _whole_documents(batches: Iterator[Batch]) -> Iterator[pa.LargeStringArray]:
    """Documents that come in parts put together."""
    parts: list[pa.LargeStringArray] = []
    for batch in batches:
        if batch.cancel:
            parts = []
        elif batch.open:
            parts.append(batch.texts)
        else:
            texts = _one_text([*parts, batch.texts]) if parts else batch.texts
            parts = []
            if len(texts):
                yield texts


def _one_text(parts: list[pa.LargeStringArray]) -> pa.LargeStringArray:
    """A single string from the bytes of all, without a Python string of it."""
    data = b"".join(_bytes_of(part) for part in parts)
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int64))
    return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data))


def _bytes_of(part: pa.LargeStringArray) -> memoryview:
    offsets = np.frombuffer(part.buffers()[1], dtype=np.int64)[part.offset : part.offset + len(part) + 1]
    return memoryview(part.buffers()[2])[int(offsets[0]) : int(offsets[-1])] if len(part) else memoryview(b"")


# ---- JSON lines ----


class _JsonReader:
    def __init__(
        self, slice: Slice, rules: TextRules, on_reject: OnReject, columns: tuple[str, ...] | None, places: Places
    ) -> None:
        self._slice, self._rules, self._on_reject, self._columns = slice, rules, on_reject, columns
        self._places = places

    def read(self) -> Iterator[Rows]:
        slice = self._slice
        with open_bytes(slice.path) as file:
            try:
                for block in self._whole_blocks(json_blocks(file, slice)):
                    ready = [records] if (records := self._records(block)) else []
                    # Nothing of a giant is held here while it is worked on.
                    del block, records
                    if ready:
                        yield from_records(ready.pop(), self._columns)
            except DamagedError as error:
                for block in uncut(error):
                    yield from_records(self._records(block), self._columns)
                stop_or_reject(make_damage_reject(slice, error), self._rules, self._on_reject)

    def _whole_blocks(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """Giants put together."""
        parts: list[bytes] = []
        for number, block in enumerate(blocks):
            is_first = number == 0 and self._slice.start == 0
            parts.append(block.data.removeprefix(BOM) if is_first else block.data)
            if block.kind != PART:
                yield replace(block, data=_take_all(parts), kind=WHOLE)

    def _records(self, block: Block) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for number, line in enumerate(block.data.split(b"\n"), start=block.line):
            if not line.strip():
                continue
            try:
                records.append(record_of_line(line, self._rules))
            except MalformedError as error:
                reject = make_line_reject(self._slice, block, number, error.reason, error.detail, line)
                stop_or_reject(reject, self._rules, self._on_reject)
                self._places.skip(len(records))
        return records


def _take_all(parts: list[bytes]) -> bytes:
    """All of them as one, and none is kept; without the last line's end, so that a single line is not copied again."""
    parts[-1] = parts[-1].removesuffix(b"\n")
    joined = b"".join(parts)
    parts.clear()
    return joined


def record_of_line(line: bytes, rules: TextRules) -> dict[str, Any]:
    """The object on one line; raises MalformedError with what is wrong."""
    record = parse_json(line, rules)
    if not isinstance(record, dict):
        raise MalformedError("no_object", f"{type(record).__name__} where an object should be: a row is {{...}}")
    # Only bytes that are no UTF-8, and escapes, leave halves of surrogate pairs: look for them no further.
    if rules.invalid_utf8 == "drop" or _SURROGATE.search(line) is not None:
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
