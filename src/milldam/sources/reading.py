"""A unit of files -> its texts, or its rows, by the format of each slice; the same ones however often it is read.

    txt             what a document is, `documents` and `separator` say      plain_text.py
    jsonl, json     an object a line, or the items of an array               jsonl.py
    csv, tsv        as the header names its columns                          csv_records.py
    parquet, arrow  record batches                                           tables.py

Texts are those of one column, rows are Arrow record batches, of JSON dicts of lists; both in batches of about two
megabytes, a larger one alone. What can't be read, and what is larger than `max_document_bytes`, goes to the rejects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.input_files import is_address, without_secrets
from milldam.sources.batch import NUMBER_BITS, Batch, OnReject, Places, Reading, TextRules
from milldam.sources.compression import STDIN, open_bytes
from milldam.sources.units import InputFile, Slice, Unit, by_bytes, whole

if TYPE_CHECKING:
    from milldam.sources.rows import Rows

TABLES = ("parquet", "arrow")
_READERS = {
    "txt": "plain_text",
    "jsonl": "jsonl",
    "json": "jsonl",
    "csv": "csv_records",
    "tsv": "csv_records",
    "parquet": "tables",
    "arrow": "tables",
}
"""Modules, loaded when a file of their format comes. Each has `read_texts(slice, reading)`, which gives batches,
`read_rows(slice, reading)`, which gives rows and their numbers in the slice, and `columns_of(slice)`."""


def _reader(format: str) -> Any:
    return import_module(f"milldam.sources.{_READERS[format]}")


def slice_file(file: InputFile, shard_size: int, rules: TextRules) -> Iterator[Slice]:
    """Cut one file as its format allows. A .json file that is large enough to be cut, and holds JSON lines, is taken
    for such."""
    can_cut = file.compression is None and file.path != STDIN
    if file.format == "json" and can_cut and file.size > shard_size:
        from milldam.sources.json_items import HEAD_BYTES, is_json_lines

        with open_bytes(file.path) as opened:
            file = replace(file, format="jsonl") if is_json_lines(opened.read(HEAD_BYTES)) else file
    if file.format in TABLES:
        yield from _reader(file.format).slice_table(file, shard_size, rules.text_column)
    elif file.format in ("csv", "tsv"):
        yield from _reader("csv").slice_csv(file, shard_size)
    elif can_cut and file.format != "json" and (file.format != "txt" or _reader("txt").can_cut(rules)):
        yield from by_bytes(file, shard_size)
    else:
        yield whole(file)


def columns_of(slice: Slice) -> list[str]:
    """The columns that the rows of a file have; of JSON, as far as its first records show."""
    columns: list[str] = _reader(slice.format).columns_of(slice)
    return columns


def read_unit(unit: Unit, rules: TextRules, on_reject: OnReject, keep: tuple[str, ...] = ()) -> Iterator[Batch]:
    """All documents of a unit. `keep`: as in `Reading`."""
    reading = Reading(rules, on_reject, keep=keep)
    try:
        for batch in _batches(unit, reading):
            if keep and batch.columns is None:  # plain text has no fields
                nulls = [pa.nulls(len(batch.texts))] * len(keep)
                batch.columns = pa.record_batch(nulls, names=list(keep))
            yield batch
    except FileNotFoundError as error:
        gone = [one.path for one in unit.slices if is_address(one.path) or not Path(one.path).exists()]
        if not gone:
            raise
        raise InputError(f"{without_secrets(gone[0])}: gone since the input was listed.") from error


def _batches(unit: Unit, reading: Reading) -> Iterator[Batch]:
    if unit.slices[0].format == "txt" and _reader("txt").boundary_of(reading.rules) is None:
        yield from _reader("txt").read_whole_files(unit.slices, reading)
        return
    for number, slice in enumerate(unit.slices):
        count = 0
        for batch in _reader(slice.format).read_texts(slice, reading):
            numbers = count + np.arange(len(batch.texts)) if batch.origins is None else batch.origins
            batch.origins, count = number << NUMBER_BITS | numbers, count + len(batch.texts)
            yield batch


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads the rows of slices; it pickles as a few settings."""

    rules: TextRules
    columns: tuple[str, ...] | None
    names: tuple[tuple[str, str], ...] = ()
    """(path, what it is called instead) of input that was spooled."""

    def rows(self, slices: Iterable[Slice], on_reject: OnReject, places: Places) -> Iterator[Rows]:
        """`places` gets where they come from."""
        reading = Reading(self.rules, on_reject, self.columns, self._name)
        for slice in slices:
            origin = 0 if slice.format in TABLES else slice.start
            for rows, numbers in _reader(slice.format).read_rows(slice, reading):
                # Before they are handed on: who gets them asks where they are from.
                places.add(self._name(slice.path), origin, numbers)
                yield rows

    def count(self, slices: Iterable[Slice]) -> int:
        """How many rows slices have. Files of lines are read for it, tables only looked at."""
        from milldam.sources.rows import row_count

        count = 0
        for slice in slices:
            if slice.format in TABLES:
                count += _reader(slice.format).count_rows(slice)
            else:
                count += sum(map(row_count, self.rows([slice], lambda reject: None, Places())))
        return count

    def _name(self, path: str) -> str:
        """What a file is called in rows and messages."""
        return without_secrets(dict(self.names).get(path, path))


def rows_between(rows: Iterator[Rows], first: int, stop: int) -> Iterator[Rows]:
    """The rows from number `first` to `stop` of those that come."""
    from milldam.sources.rows import row_count, take

    position = 0
    for piece in rows:
        count = row_count(piece)
        start, end = max(0, first - position), min(count, stop - position)
        position += count
        if start < end:
            yield take(piece, start, end)
        if position >= stop:
            return
