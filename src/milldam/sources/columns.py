"""Which field holds the text: the one named "text", else the one candidate there is; and why there is none in a file.

Fields are found in the first records of a file. Bytes are text only where nothing else is, or where they are asked for.
Nothing here decides what is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.arrays import kept_columns, other_encoding
from milldam.sources.batch import listed_names, no_such_column
from milldam.sources.compression import DamagedError, read_head
from milldam.sources.jsonl import first_records
from milldam.sources.units import Slice

WITHOUT_FIELDS = ("txt",)
"""Formats that hold text alone."""
_FILES, _RECORDS, _RECORDS_SEARCHED, _FIELDS_SHOWN = 100, 100, 10_000, 8
_USUAL = ("text", "content", "body", "raw_content", "document", "article", "passage", "story")
_CHATS = ("messages", "conversations", "conversation", "turns", "chosen")
_CONVERSATIONS = [
    *({"prompt", "completion"}, {"prompt", "response"}, {"prompt", "answer"}),
    *({"instruction", "output"}, {"chosen", "rejected"}),
]
"""Fields of conversations that are no lists."""
_TURNS = re.compile(r"(large_)?list<.*struct<")
_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
}
_EMPTY = "it is empty."
_TABLES, _JSON = ("parquet", "arrow"), ("jsonl", "json")


def find_text_column(slices: Iterable[Slice], wanted: str | None, setting: str = "text_column") -> str | None:
    """The text column by the head of the first file that has records; None for plain text.

    Raises InputError when the wanted column is missing, or when it is not clear which one is meant, with `setting`.
    """
    # A .json file may describe the data beside it: others are asked first.
    heads = itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES)
    files = sorted(heads, key=lambda head: head.format == "json")
    conversations = False
    for slice in files:
        sizes, in_a_list = _text_fields(slice)
        if wanted is not None and sizes:
            if wanted not in sizes:
                raise no_such_column(slice.path, wanted, sizes, setting)
            return wanted
        has_usual = any(name.lower() in _USUAL for name in sizes)
        if sizes and not has_usual and in_a_list:
            conversations = True
        # Beside conversations, a field that only happens to be text (an id, a hash) is not what is meant.
        elif sizes and (not conversations or has_usual):
            usual = [name for name in sizes if name.split(".")[-1].lower() in _USUAL]
            exact = ["text"] if "text" in sizes else []
            only = next((few[0] for few in (exact, usual, list(sizes)) if len(few) == 1), None)
            return only or _refuse_to_guess(slice.path, sizes, usual or list(sizes), setting)
    if not files:
        return None
    # Of the first file that is not just empty.
    path, why = next(
        ((one.path, why) for one in files if (why := _why_no_text(one)) != _EMPTY), (files[0].path, _EMPTY)
    )
    others = f" Nor has any of {len(files) - 1:,} more files." if len(files) > 1 else ""
    raise InputError(f"{path}: no text in it: {why}{others}")


def _refuse_to_guess(path: str, sizes: dict[str, int], candidates: list[str], setting: str) -> NoReturn:
    several = f"{path}: several fields hold text: {listed_names(candidates)}. Say which one, such as: "
    advice: list[str | Setting] = [Setting(setting, max(candidates, key=lambda name: sizes[name]))]
    if any(names <= sizes.keys() for names in _CONVERSATIONS):
        advice += ["\nTo keep them all, as conversations by a chat template: ", Setting("chat", True)]
    raise InputError(several, *advice)


def head_values(slices: Iterable[Slice], wanted: str, setting: str) -> tuple[str, pa.Array]:
    """The first values of a field, and the path of the file they are from: the first that has any, of several.

    Raises InputError, with the fields there are, when no head has it.
    """
    from milldam.sources import tables

    there: dict[str, None] = {}
    heads = [one for one in itertools.islice(slices, _FILES) if one.format not in WITHOUT_FIELDS]
    if not heads:
        raise InputError(f"Plain text has no fields to choose by. Leave out {setting}.")
    values = pa.nulls(0)
    for slice in heads:
        batch = None
        if slice.format in _TABLES:
            with suppress(DamagedError):  # it is set aside when it is read
                names = tables.leaf_types(tables.open_schema(slice))
                there |= dict.fromkeys(names)
                batch = tables.head_values(slice, [wanted]) if wanted in names else None
        else:
            # As many as there are in the first block: not every record need have it.
            records = _first_records(slice, _RECORDS_SEARCHED)
            there |= dict.fromkeys(name for record in records for name, _ in _leaves(record, ""))
            batch = kept_columns((wanted,), records)
        if batch is not None and any(value not in (None, "", b"") for value in batch.column(0).to_pylist()):
            return slice.path, batch.column(0)
        values = batch.column(0) if batch is not None and batch.num_rows else values
    if wanted in there:
        return heads[0].path, values
    advice = did_you_mean(wanted, there) or f" Set {setting} to one of them."
    raise InputError(f'{heads[0].path}: no field "{wanted}" in the first records; found {listed_names(there)}.{advice}')


# ---- the fields of a file's head ----


def _first_records(slice: Slice, limit: int) -> list[dict[str, Any]]:
    """Of JSON or CSV."""
    if slice.format in _JSON:
        return first_records(slice, limit)
    from milldam.sources.csv_records import csv_head

    header, *rows = csv_head(slice, limit) or [[]]
    return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)] or [
        dict.fromkeys(header, "")
    ]


def _text_fields(slice: Slice) -> tuple[dict[str, int], bool]:
    """The fields that hold text, with their characters in the first records; and whether a list holds the turns of
    conversations, or the real records."""
    sizes: dict[str, int] = {}
    if slice.format in _TABLES:
        from milldam.sources.tables import head_values, holds_bytes, open_schema, text_columns

        with suppress(DamagedError):  # set aside when it is read
            schema = open_schema(slice)
            kinds = text_columns(schema)
            # Bytes are text only where nothing else is.
            texts = [name for name, kind in kinds.items() if not holds_bytes(kind)] or list(kinds)
            head = head_values(slice, texts)
            sizes = {name: column.nbytes for name, column in zip(head.schema.names, head.columns, strict=True)}
            in_a_list = any(_TURNS.match(str(one.type)) for one in schema if one.name in _CHATS)
            return dict.fromkeys(texts, 0) | sizes, in_a_list
        return {}, False
    records = _first_records(slice, _RECORDS)
    leaves = [pair for record in records for pair in _leaves(record, "")]
    for name, value in leaves:
        if name and isinstance(value, str):
            sizes[name] = sizes.get(name, 0) + len(value)
    if slice.format == "csv" and len(sizes) == 1 and re.search(r"[;\t|]", next(iter(sizes))):
        return {}, False  # a file of another separator
    lists = {name for name, value in leaves if isinstance(value, list) and value and isinstance(value[0], dict)}
    is_one_object = slice.format == "json" and len(records) == 1
    return sizes, bool(lists) if is_one_object else not lists.isdisjoint(_CHATS)


def _leaves(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _why_no_text(slice: Slice) -> str:
    """The reason, and what to do: a sentence or two."""
    try:
        if slice.format in _TABLES:
            from milldam.sources.tables import open_schema

            kinds = {field.name: str(field.type) for field in open_schema(slice)}
        else:
            head = read_head(slice.path, slice.compression)
            records = first_records(slice, 1) if slice.format in _JSON else []
            kinds = {name: _KINDS.get(type(value), "text") for record in records for name, value in record.items()}
            line = head.strip().split(b"\n")[0][:60].decode("utf-8", "replace")
            if not line:
                return _EMPTY
            if encoding := other_encoding(head):
                return f"{encoding}."
            if not kinds:
                in_json = slice.format in _JSON
                needed = "records must be objects with a field of text" if in_json else "first line must name columns"
                return f"its {needed}; it begins with {json.dumps(line, ensure_ascii=False)}."
    except DamagedError as error:
        return f"{error}. Get or make it again."
    shown = ", ".join(f'"{name}" ({kind})' for name, kind in itertools.islice(kinds.items(), _FIELDS_SHOWN))
    chat = next((f' If "{name}" holds conversations, ask for chat.' for name in _CHATS if name in kinds), "")
    return f"none of its fields holds text: {shown}{', ...' if len(kinds) > _FIELDS_SHOWN else ''}.{chat}"
