"""Which field holds the text: the one named "text", else the one candidate there is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from milldam.errors import InputError, did_you_mean
from milldam.sources.batch import TextRules
from milldam.sources.compression import TruncatedError
from milldam.sources.giant import GiantLine, parts_of_line
from milldam.sources.lines import BOM, LINE
from milldam.sources.opening import open_head
from milldam.sources.records import WHOLE, record_blocks
from milldam.sources.table_text import csv_header
from milldam.sources.tables import open_schema, text_columns
from milldam.sources.units import Slice

_USUAL = ("text", "content", "body", "raw_content", "document", "article", "passage", "story", "completion")
_FILES = 100
_RECORDS = 100


def find_text_column(slices: Iterable[Slice], wanted: str | None, spool: str | None) -> str | None:
    """The text column by the head of the first file that has records; None for plain text.

    Raises InputError when the wanted column is missing, or when it can't be told which one is meant.
    """
    path = None
    for slice in itertools.islice((slice for slice in slices if slice.format != "txt"), _FILES):
        path = slice.path
        fields = list(dict.fromkeys(_text_fields(slice, spool)))
        if fields:
            return _obvious(fields, path) if wanted is None else _require(wanted, fields, path)
    if path is None:
        return None
    raise InputError(f"{path}: no record with text in it: is it empty, or cut off? Look at its first line.")


def _require(wanted: str, fields: list[str], path: str) -> str:
    if wanted not in fields:
        names = ", ".join(f'"{name}"' for name in fields)
        hint = did_you_mean(wanted, fields)
        raise InputError(f'{path}: no text in a field "{wanted}"; found text in {names}.{hint} Set text_column.')
    return wanted


def _obvious(fields: list[str], path: str) -> str:
    if "text" in fields:
        return "text"
    usual = [name for name in fields if name.split(".")[-1].lower() in _USUAL]
    for candidates in (usual, fields):
        if len(candidates) == 1:
            return candidates[0]
    names = ", ".join(f'"{name}"' for name in fields)
    raise InputError(
        f"{path}: several fields hold text: {names}. Say which one: set text_column, for example to {fields[0]}"
    )


def _text_fields(slice: Slice, spool: str | None) -> Iterable[str]:
    if slice.format in ("csv", "tsv"):
        return csv_header(slice.path, slice.compression, slice.format)
    if slice.format == "jsonl":
        return _json_fields(slice, spool)
    return [name for name, _ in text_columns(open_schema(slice, spool))]


def _json_fields(slice: Slice, spool: str | None) -> list[str]:
    fields: dict[str, None] = {}
    for record in _first_records(slice, spool):
        fields |= dict.fromkeys(_string_fields(record, ""))
    return list(fields)


def _first_records(slice: Slice, spool: str | None) -> Iterator[Any]:
    try:
        with open_head(slice.path) as file:
            blocks = record_blocks(file, slice.compression, LINE, 0, None)
            first = next(blocks, None)
            if first is None:
                return
            first = replace(first, data=first.data.removeprefix(BOM))
            if first.kind == WHOLE:
                yield from _parsed(first.data)
            else:
                yield GiantLine(parts_of_line(first, blocks), TextRules(invalid_utf8="replace")).outline()
    except (TruncatedError, ValueError, RecursionError):
        return


def _parsed(data: bytes) -> list[dict[str, Any]]:
    """The records at the head; only when there are no others, those with bytes that are no UTF-8."""
    lines = data.split(b"\n")[:_RECORDS]
    sound = _objects(lines)
    return sound or _objects([line.decode("utf-8", "replace").encode() for line in lines])


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _string_fields(record: Any, prefix: str) -> list[str]:
    if not isinstance(record, dict):
        return []
    found = []
    for name, value in record.items():
        if isinstance(value, str):
            found.append(prefix + name)
        elif isinstance(value, dict):
            found += _string_fields(value, f"{prefix}{name}.")
    return found
