"""Which field holds the text: the one named "text", else the one candidate there is; and why there is none in a file.

Fields are found in the first records of a file. Numbers, dates and bytes are text only where they are asked for.
Nothing here decides what is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.arrays import kept_columns
from milldam.sources.batch import listed_names, no_such_column
from milldam.sources.compression import DamagedError, describe_head, open_head, read_blocks
from milldam.sources.decoding import other_encoding
from milldam.sources.jsonl import first_records
from milldam.sources.units import Slice

WITHOUT_FIELDS = ("txt",)
"""Formats that hold text alone."""
_FILES, _RECORDS, _RECORDS_SEARCHED = 100, 100, 10_000
_HEAD_BYTES, _HEAD_CHARACTERS, _CHARACTERS_TRIED = 1 << 16, 1 << 20, 1000
_USUAL = ("text", "content", "body", "raw_content", "document", "article", "passage", "story")
_CHATS = ("messages", "conversations", "conversation", "turns", "chosen")
_CONVERSATIONS = [
    *({"prompt", "completion"}, {"prompt", "response"}, {"prompt", "answer"}),
    *({"instruction", "output"}, {"chosen", "rejected"}),
]
"""Fields of conversations that are no lists."""
# Digits and what stands between them; T, Z and E where a date, a time or a number has them.
_NUMBERS = re.compile(r"(?:[\d\s.,:/+%-]|(?<=\d)[TZE](?![^\d\s+-]))*", re.IGNORECASE)
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
_OBJECTS = "a list of objects"
_FIELDS_SHOWN = 8
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
        sizes, unlikely = _text_fields(slice)
        if wanted is not None and sizes:
            if wanted not in sizes:
                raise no_such_column(slice.path, wanted, sizes, setting)
            return wanted
        has_usual = any(name.lower() in _USUAL for name in sizes)
        if sizes and not has_usual and _text_is_in_a_list(slice):
            conversations = True
        # Beside conversations, a field that only happens to be text (an id, a hash) is not what is meant.
        elif sizes and (not conversations or has_usual):
            return _obvious(sizes, unlikely, slice.path, setting)
    if not files:
        return None
    path = why = ""
    for slice in files:  # of the first file that is not just empty
        path, why = slice.path, _why_no_text(slice)
        if not why.startswith("it is empty"):
            break
    others = f" Nor has any of {len(files) - 1:,} more files." if len(files) > 1 else ""
    raise InputError(f"{path}: no text in it: {why}{others}")


def _obvious(sizes: dict[str, int], unlikely: set[str], path: str, setting: str) -> str:
    if "text" in sizes:
        return "text"
    candidates = [name for name in sizes if name not in unlikely]
    usual = [name for name in candidates if name.split(".")[-1].lower() in _USUAL]
    for few in (usual, candidates):
        if len(few) == 1:
            return few[0]
    advice = Setting(setting, max(usual or candidates or sizes, key=lambda name: sizes[name]))
    if not candidates:
        names = listed_names(sizes)
        raise InputError(
            f"{path}: no field holds text; found numbers, dates or bytes in {names}. To take one all the same: ", advice
        )
    several = f"{path}: several fields hold text: {listed_names(candidates)}. Say which one, such as: "
    if any(names <= sizes.keys() for names in _CONVERSATIONS):
        raise InputError(
            several, advice, "\nTo keep them all, as conversations by a chat template: ", Setting("chat", True)
        )
    raise InputError(several, advice)


def head_values(slices: Iterable[Slice], wanted: str, setting: str) -> tuple[str, pa.Array]:
    """The first values of a field, and the path of the file they are from: the first that has any, of several.

    Raises InputError, with the fields there are, when no head has it.
    """
    import pyarrow.compute as pc

    from milldam.sources import tables

    there: dict[str, None] = {}
    path, values, batch = "", pa.nulls(0), None
    for slice in itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES):
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
        path = path or slice.path
        column = pa.nulls(0) if batch is None else batch.column(0)
        is_text = column.type in tables.AS_BYTES or tables.holds_bytes(column.type)
        is_there = pc.binary_length(column) if is_text else pc.is_valid(column)
        if pc.any(is_there.cast(pa.bool_())).as_py():
            return slice.path, column
        values = column if len(column) else values
    if wanted in there:
        return path, values
    if not path:
        raise InputError(f"Plain text has no fields to choose by. Leave out {setting}.")
    advice = did_you_mean(wanted, there) or f" Set {setting} to one of them."
    raise InputError(f'{path}: no field "{wanted}" in the first records; found {listed_names(there)}.{advice}')


# ---- the fields of a file's head ----


def _first_records(slice: Slice, limit: int = _RECORDS) -> list[dict[str, Any]]:
    """Of JSON or CSV."""
    if slice.format in _JSON:
        return first_records(slice, limit)
    from milldam.sources.csv_records import csv_head

    rows = csv_head(slice)
    header, characters, records = next(rows, []), 0, list[dict[str, Any]]()
    for row in itertools.islice(rows, limit):
        records += [dict(zip(header, row, strict=True))] if len(row) == len(header) else []
        characters += sum(map(len, row))
        if characters > _HEAD_CHARACTERS:
            break
    return records or [dict.fromkeys(header, "")]


def _text_fields(slice: Slice) -> tuple[dict[str, int], set[str]]:
    """The fields that can be read as text, with their characters of text in the first records; and which of them hold
    nothing but numbers, dates or bytes."""
    sizes: Counter[str] = Counter()
    numbers, in_bytes = set[str](), set[str]()
    if slice.format in _TABLES:
        texts, in_bytes = _table_texts(slice)
    else:
        leaves = (pair for record in _first_records(slice) for pair in _leaves(record, ""))
        texts = [(name, value) for name, value in leaves if name and isinstance(value, str)]
    for name, text in texts:
        is_text = _NUMBERS.fullmatch(text, 0, _CHARACTERS_TRIED) is None
        sizes[name] += len(text) if is_text else 0
        if text.strip() and not is_text:
            numbers.add(name)
    if slice.format == "csv" and len(sizes) == 1 and re.search(r"[;\t|]", next(iter(sizes))):
        return {}, set()  # a file of another separator
    return dict(sizes), {name for name in numbers if not sizes[name]} | (in_bytes if in_bytes < set(sizes) else set())


def _table_texts(slice: Slice) -> tuple[list[tuple[str, str]], set[str]]:
    """The first texts of a table by column, an empty one for each beside; and which columns are of bytes."""
    from milldam.sources.tables import head_values, holds_bytes, open_schema, text_columns

    with suppress(DamagedError):  # set aside when it is read
        kinds = text_columns(open_schema(slice))
        in_bytes = {name for name, kind in kinds.items() if holds_bytes(kind)}
        head = head_values(slice, [name for name in kinds if name not in in_bytes])
        texts = [(name, "") for name in kinds]
        for name, column in zip(head.schema.names, head.columns, strict=True):
            beginnings = (value[:_CHARACTERS_TRIED] for value in column.cast(pa.large_binary()).to_pylist() if value)
            texts += [(name, value.decode("utf-8", "replace")) for value in beginnings]
        return texts, in_bytes
    return [], set()


def _leaves(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _kinds(slice: Slice) -> list[dict[str, str]]:
    """What the fields of the first records are, of a table those of any; none of CSV."""

    def kind(value: Any) -> str:
        if isinstance(value, list):
            return _OBJECTS if value and isinstance(value[0], dict) else "a list"
        return _KINDS.get(type(value), "text")

    if slice.format in _JSON:
        records = first_records(slice, _RECORDS)
        return [{name: kind(value) for name, value in record.items()} for record in records]
    if slice.format not in _TABLES:
        return []
    from milldam.sources.tables import open_schema

    types = {field.name: str(field.type) for field in open_schema(slice)}
    is_turns = re.compile(r"(large_)?list<.*struct<")
    return [{name: _OBJECTS if is_turns.match(shown) else shown for name, shown in types.items()}]


def _text_is_in_a_list(slice: Slice) -> bool:
    """Whether the text is in a list, turns of a conversation or the real records, and what else is text (an id, a list
    of tools) is beside it."""
    kinds = _kinds(slice)
    return any(one.get(name) == _OBJECTS for one in kinds for name in _CHATS) or _list_of_records(kinds) is not None


def _list_of_records(kinds: list[dict[str, str]]) -> str | None:
    """In a .json file that is one object: the field that holds the real records."""
    only = kinds[0] if len(kinds) == 1 and not any(kinds[0].get(name) == _OBJECTS for name in _CHATS) else {}
    return next((name for name, kind in only.items() if kind == _OBJECTS), None)


# ---- why there is no text ----


def _why_no_text(slice: Slice) -> str:
    """The reason, and what to do: a sentence or two."""
    head, kinds = b"", list[dict[str, str]]()
    try:
        kinds = _kinds(slice)
        with open_head(slice.path) as file:
            blocks = iter(()) if slice.format in _TABLES else read_blocks(file, slice.compression, _HEAD_BYTES)
            while len(head) < _HEAD_BYTES and (block := next(blocks, b"")):
                head += block
    except DamagedError as error:
        if not kinds:
            return f"{error}. Get or make it again."
    if kinds:
        return _of_fields(kinds, slice.format)
    if slice.format in _TABLES or not head.strip():
        return "it holds nothing but white space." if head else "it is empty."
    if encoding := other_encoding(head):
        return f"{encoding}."
    line = head.lstrip().split(b"\n")[0].decode("utf-8", "replace").strip()
    shown = json.dumps(line[:60] + ("..." if len(line) > 60 else ""), ensure_ascii=False)
    if slice.format in ("csv", "tsv"):
        return f"its first line, {shown}, names no column of text. If it has other separators, convert it."
    try:
        if json.loads(line) == []:
            return "it is an empty array."
    except (ValueError, RecursionError) as error:
        if head.lstrip().startswith((b"{", b"[")):
            return f"{describe_head(head)}. If it is JSON over several lines, set input_format to json."
        return f"no record in its head is JSON. Its first line is {shown}: {error}."
    advice = "Make objects of them: jq -c '(.[]? // .) | {text: .}' OLD > NEW.jsonl"
    return f"its records must be objects with a field of text; its first line is {shown}. {advice}"


def _of_fields(records: list[dict[str, str]], format: str) -> str:
    """No field is text: what they are instead."""
    kinds, what = records[0], "columns" if format in _TABLES else "fields"
    listed = _list_of_records(records) if format == "json" else None
    if listed is not None:
        take_out = f"jq -c '.{listed}[]' OLD > NEW.jsonl"
        return f'it is one object, and its records are in the list "{listed}". Take them out: {take_out}'
    chat = next((name for name in _CHATS if kinds.get(name) == _OBJECTS), None)
    if chat is not None:
        return (
            f'its records are conversations: "{chat}" is a list of turns. Ask for chat, which renders them '
            "by a chat template; or name another field with text_column."
        )
    shown = ", ".join(f'"{name}" ({kind})' for name, kind in list(kinds.items())[:_FIELDS_SHOWN])
    more = ", ..." if len(kinds) > _FIELDS_SHOWN else ""
    return f"none of its {what} holds text: {shown}{more}." if kinds else f"its records have no {what}."
