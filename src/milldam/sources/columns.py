"""Which field holds the text: the one named "text", else the one candidate there is.

Fields are told from the first records of a file. Numbers, dates and bytes are text only where they are asked for.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from milldam.errors import InputError, Setting
from milldam.sources.batch import listed_names, no_such_column
from milldam.sources.csv_records import csv_head
from milldam.sources.jsonl import first_records
from milldam.sources.no_text import OTHER_SEPARATORS, is_in_a_list, why_no_text
from milldam.sources.tables import column_sizes, holds_bytes, open_schema, text_columns
from milldam.sources.units import Slice

_USUAL = ("text", "content", "body", "raw_content", "document", "article", "passage", "story")
_FILES = 100
_RECORDS = 100
_HEAD_CHARACTERS = 1 << 20
_CHARACTERS_TRIED = 1000
# Digits and what stands between them; T, Z and E where a date, a time or a number has them.
_NUMBERS = re.compile(r"(?:[\d\s.,:/+%-]|(?<=\d)[TZE](?![^\d\s+-]))*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a file that can be read as text."""

    sizes: dict[str, int]
    """Characters of text in the first records, by field, where they were looked at."""
    unlikely: frozenset[str] = frozenset()
    """Those that hold nothing but numbers, dates or bytes."""

    @property
    def candidates(self) -> list[str]:
        return [name for name in self.sizes if name not in self.unlikely]


def find_text_column(
    slices: Iterable[Slice], wanted: str | None, spool: str | None, setting: str = "text_column"
) -> str | None:
    """The text column by the head of the first file that has records; None for plain text.

    Raises InputError when the wanted column is missing, or when it can't be told which one is meant: then it says so
    of `setting`.
    """
    # A .json file may describe the data beside it: others are asked first.
    heads = itertools.islice((slice for slice in slices if slice.format != "txt"), _FILES)
    looked_at = sorted(heads, key=lambda head: head.format == "json")
    conversations = False
    for slice in looked_at:
        fields = _text_fields(slice, spool)
        if wanted is not None and fields.sizes:
            return _require(wanted, fields, slice.path, setting)
        if fields.sizes and _is_in_a_list(slice, fields, spool):
            conversations = True
        # Beside conversations, a field that only happens to be text (an id, a hash) is not what is meant.
        elif fields.sizes and (not conversations or _has_usual(fields)):
            return _obvious(fields, slice, spool, setting)
    if not looked_at:
        return None
    raise InputError(_no_text(looked_at, spool))


def _is_in_a_list(slice: Slice, fields: _Fields, spool: str | None) -> bool:
    """Whether the text is in a list of turns, and what else is text (an id, a list of tools) is only beside it."""
    if slice.format in ("csv", "tsv") or _has_usual(fields):
        return False
    if slice.format in ("jsonl", "json"):
        return is_in_a_list(first_records(slice, _RECORDS), slice)
    return is_in_a_list([{field.name: str(field.type) for field in open_schema(slice, spool)}], slice)


def _has_usual(fields: _Fields) -> bool:
    return any(name.lower() in _USUAL for name in fields.sizes)


def _no_text(slices: list[Slice], spool: str | None) -> str:
    """Of the first file that is not just empty."""
    path = why = ""
    for slice in slices:
        records = first_records(slice, _RECORDS) if slice.format in ("jsonl", "json") else []
        path, why = slice.path, why_no_text(slice, records, spool)
        if not why.startswith("it is empty"):
            break
    others = f" Nor has any of {len(slices) - 1:,} more files." if len(slices) > 1 else ""
    return f"{path}: no text in it: {why}{others}"


def _require(wanted: str, fields: _Fields, path: str, setting: str) -> str:
    if wanted not in fields.sizes:
        raise no_such_column(path, wanted, fields.sizes, setting)
    return wanted


def _obvious(fields: _Fields, slice: Slice, spool: str | None, setting: str) -> str:
    if "text" in fields.sizes:
        return "text"
    candidates = fields.candidates
    usual = [name for name in candidates if name.split(".")[-1].lower() in _USUAL]
    for few in (usual, candidates):
        if len(few) == 1:
            return few[0]
    sizes = column_sizes(slice, spool) if slice.format in ("parquet", "arrow") else fields.sizes
    advice = Setting(setting, max(usual or candidates or fields.sizes, key=lambda name: sizes.get(name, 0)))
    if not candidates:
        names = listed_names(fields.sizes)
        raise InputError(
            f"{slice.path}: no field holds text; found numbers, dates or bytes in {names}. To take one all the same: ",
            advice,
        )
    raise InputError(
        f"{slice.path}: several fields hold text: {listed_names(candidates)}. Say which one, such as: ", advice
    )


def _text_fields(slice: Slice, spool: str | None) -> _Fields:
    if slice.format in ("csv", "tsv"):
        return _csv_fields(slice)
    if slice.format in ("jsonl", "json"):
        return _looked_at(pair for record in first_records(slice, _RECORDS) for pair in _string_fields(record, ""))
    columns = dict(text_columns(open_schema(slice, spool)))
    in_bytes = frozenset(name for name, kind in columns.items() if holds_bytes(kind))
    return _Fields(dict.fromkeys(columns, 0), in_bytes if len(in_bytes) < len(columns) else frozenset())


def _csv_fields(slice: Slice) -> _Fields:
    rows = csv_head(slice.path, slice.compression, slice.format)
    header = next(rows, [])
    if len(header) == 1 and any(separator in header[0] for separator in OTHER_SEPARATORS):
        return _Fields({})
    named = itertools.chain(((name, "") for name in header), _cells(header, rows))
    return _looked_at((name, text) for name, text in named if name)


def _cells(header: list[str], rows: Iterator[list[str]]) -> Iterator[tuple[str, str]]:
    """The fields of the first rows, with their names."""
    characters = 0
    for row in itertools.islice(rows, _RECORDS):
        if len(row) == len(header):
            yield from zip(header, row, strict=True)
        characters += sum(map(len, row))
        if characters > _HEAD_CHARACTERS:
            return


def _looked_at(values: Iterable[tuple[str, str]]) -> _Fields:
    sizes: Counter[str] = Counter()
    numbers = set()
    for name, text in values:
        is_text = _NUMBERS.fullmatch(text, 0, _CHARACTERS_TRIED) is None
        sizes[name] += len(text) if is_text else 0
        if text.strip() and not is_text:
            numbers.add(name)
    return _Fields(dict(sizes), frozenset(name for name in numbers if not sizes[name]))


def _string_fields(record: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if not isinstance(record, dict):
        return
    for name, value in record.items():
        if isinstance(value, str):
            yield prefix + name, value
        elif isinstance(value, dict):
            yield from _string_fields(value, f"{prefix}{name}.")
