"""A unit of files -> its texts, or its rows, by the format of each slice; the same ones however often it is read.

    txt             what a document is, `documents` and `separator` say      plain_text.py
    jsonl, json     an object a line, or the items of an array               jsonl.py
    csv, tsv        as the header names its columns                          csv_records.py
    parquet, arrow  record batches                                           tables.py

Texts are those of one column, rows are Arrow record batches, of JSON dicts of lists; both in batches of about two
megabytes, a larger one alone. What can't be read, and what is larger than `max_document_bytes`, goes to the rejects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.input_files import is_address, without_secrets
from milldam.sources.batch import NUMBER_BITS, Batch, OnReject, Reading, TextRules
from milldam.sources.compression import STDIN, read_head
from milldam.sources.units import InputFile, Slice, Unit, whole

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


def reader_of(format: str) -> Any:
    return import_module(f"milldam.sources.{_READERS[format]}")


def slice_file(file: InputFile, shard_size: int, rules: TextRules) -> Iterator[Slice]:
    """Cut one file as its format allows. A .json file that is large enough to be cut, and holds JSON lines, is taken
    for such."""
    can_cut = file.compression is None and file.path != STDIN and file.size > shard_size * 1.25
    if file.format == "json" and can_cut:
        from milldam.sources.records import is_json_lines

        file = replace(file, format="jsonl") if is_json_lines(read_head(file.path, None)) else file
    if file.format in TABLES:
        yield from reader_of(file.format).slice_table(file, shard_size, rules.text_column)
    elif can_cut and (file.format == "jsonl" or (file.format == "txt" and not rules.one_document)):
        # Byte ranges that begin at multiples of `shard_size`; the reader aligns them to records. What is appended to a
        # file changes the last one alone.
        starts = range(0, file.size - shard_size // 4, shard_size)
        for start, stop in itertools.zip_longest(starts, starts[1:]):
            yield replace(whole(file), start=start, stop=stop, size=(stop or file.size) - start)
    else:
        yield whole(file)


def columns_of(slice: Slice) -> list[str]:
    """The columns that the rows of a file have; of JSON, as far as its first records show."""
    columns: list[str] = reader_of(slice.format).columns_of(slice)
    return columns


def read_unit(unit: Unit, rules: TextRules, on_reject: OnReject, keep: tuple[str, ...] = ()) -> Iterator[Batch]:
    """All documents of a unit. `keep`: as in `Reading`."""
    reading, whole_files = Reading(rules, on_reject, keep=keep), unit.slices[0].format == "txt" and rules.one_document
    # Many small files of a document each make one batch.
    parts = [unit.slices] if whole_files else unit.slices
    try:
        for number, part in enumerate(parts):
            reader, count = reader_of(unit.slices[0].format), 0
            for batch in reader.read_whole_files(part, reading) if whole_files else reader.read_texts(part, reading):
                numbers = count + np.arange(len(batch.texts)) if batch.origins is None else batch.origins
                batch.origins, count = number << NUMBER_BITS | numbers, count + len(batch.texts)
                if keep and batch.columns is None:  # plain text has no fields
                    nulls = [pa.nulls(len(batch.texts))] * len(keep)
                    batch.columns = pa.record_batch(nulls, names=list(keep))
                yield batch
    except FileNotFoundError as error:
        gone = [one.path for one in unit.slices if is_address(one.path) or not Path(one.path).exists()]
        if not gone:
            raise
        raise InputError(f"{without_secrets(gone[0])}: gone since the input was listed.") from error
