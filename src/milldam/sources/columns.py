"""Which field holds the text: the one named "text", else the one candidate there is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from milldam.errors import InputError, did_you_mean
from milldam.sources.batch import TextRules
from milldam.sources.compression import DamagedError
from milldam.sources.giant import GiantLine, parts_of_line
from milldam.sources.jsonl import json_blocks
from milldam.sources.lines import BOM
from milldam.sources.no_text import OTHER_SEPARATORS, is_in_a_list, why_no_text
from milldam.sources.opening import open_head
from milldam.sources.records import WHOLE
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
    # A .json file may describe the data beside it: others are asked first.
    heads = itertools.islice((slice for slice in slices if slice.format != "txt"), _FILES)
    looked_at = sorted(heads, key=lambda head: head.format == "json")
    for slice in looked_at:
        fields = list(dict.fromkeys(_text_fields(slice, spool)))
        if fields and not (wanted is None and _is_in_a_list(slice, fields, spool)):
            return _obvious(fields, slice.path) if wanted is None else _require(wanted, fields, slice.path)
    if not looked_at:
        return None
    raise InputError(_no_text(looked_at, spool))


def _is_in_a_list(slice: Slice, fields: list[str], spool: str | None) -> bool:
    """Whether the text is in a list of turns, and what else is text (an id, a list of tools) is only beside it."""
    if slice.format in ("csv", "tsv") or any(name.lower() in _USUAL for name in fields):
        return False
    if slice.format in ("jsonl", "json"):
        return is_in_a_list(list(_first_records(slice, spool)), slice)
    return is_in_a_list([{field.name: str(field.type) for field in open_schema(slice, spool)}], slice)


def _no_text(slices: list[Slice], spool: str | None) -> str:
    """Of the first file that is not just empty."""
    path = why = ""
    for slice in slices:
        records = list(_first_records(slice, spool)) if slice.format in ("jsonl", "json") else []
        path, why = slice.path, why_no_text(slice, records, spool)
        if not why.startswith("it is empty"):
            break
    others = f" Nor has any of {len(slices) - 1:,} more files." if len(slices) > 1 else ""
    return f"{path}: no text in it: {why}{others}"


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
        names = csv_header(slice.path, slice.compression, slice.format)
        alone = len(names) == 1 and any(separator in names[0] for separator in OTHER_SEPARATORS)
        return [] if alone else [name for name in names if name]
    if slice.format in ("jsonl", "json"):
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
            blocks = json_blocks(file, slice)
            first = next(blocks, None)
            if first is None:
                return
            first = replace(first, data=first.data.removeprefix(BOM))
            if first.kind == WHOLE:
                yield from _parsed(first.data)
                return
            outline = GiantLine(parts_of_line(first, blocks), TextRules(invalid_utf8="replace")).outline()
            yield from [outline] if isinstance(outline, dict) else []
    except (DamagedError, ValueError, RecursionError):
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
            record = json.loads(line.decode())  # of bytes, it would take other encodings too
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
