"""Which field holds the text: the one named "text", else the one candidate there is; and why there is none in a file.

Fields are told from the first records of a file. Numbers, dates and bytes are text only where they are asked for.
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
import pyarrow.compute as pc

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.arrays import kept_columns
from milldam.sources.batch import listed_names, no_such_column
from milldam.sources.compression import DamagedError, compression_of, describe_head, open_head, read_blocks
from milldam.sources.csv_records import csv_head
from milldam.sources.decoding import other_encoding
from milldam.sources.json_items import is_json_lines
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
_MAGIC = {
    b"PAR1": "it is parquet by its first bytes. Name it .parquet, or set input_format to parquet.",
    b"ARROW1": "it is arrow by its first bytes. Name it .arrow, or set input_format to arrow.",
    b"PK\x03\x04": "it is a zip archive by its first bytes. Unpack or convert it first.",
    b"%PDF": "it is a PDF by its first bytes. Unpack or convert it first.",
    b"SQLite format 3": "it is an SQLite data base by its first bytes. Unpack or convert it first.",
}
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
_OBJECTS = "a list of objects"
_OTHER_SEPARATORS = (";", "\t", "|")
"""Of columns, in files that are called CSV."""
_FIELDS_SHOWN = 8
_TABLES = ("parquet", "arrow")


def find_text_column(
    slices: Iterable[Slice], wanted: str | None, spool: str | None, setting: str = "text_column"
) -> str | None:
    """The text column by the head of the first file that has records; None for plain text.

    Raises InputError when the wanted column is missing, or when it can't be told which one is meant: then it says so
    of `setting`.
    """
    # A .json file may describe the data beside it: others are asked first.
    heads = itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES)
    looked_at = sorted(heads, key=lambda head: head.format == "json")
    if not looked_at:
        return None
    conversations = False
    for slice in looked_at:
        sizes, unlikely = _text_fields(slice, spool)
        if wanted is not None and sizes:
            if wanted not in sizes:
                raise no_such_column(slice.path, wanted, sizes, setting)
            return wanted
        has_usual = any(name.lower() in _USUAL for name in sizes)
        if sizes and not has_usual and _is_in_a_list(_kinds(slice, spool), slice.format):
            conversations = True
        # Beside conversations, a field that only happens to be text (an id, a hash) is not what is meant.
        elif sizes and (not conversations or has_usual):
            return _obvious(sizes, unlikely, slice.path, setting)
    path = why = ""
    for slice in looked_at:  # of the first file that is not just empty
        path, why = slice.path, _why_no_text(slice, spool)
        if not why.startswith("it is empty"):
            break
    others = f" Nor has any of {len(looked_at) - 1:,} more files." if len(looked_at) > 1 else ""
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


def head_values(slices: Iterable[Slice], wanted: str, spool: str | None, setting: str) -> tuple[str, pa.Array]:
    """The first values of a field, and the path of the file they are from: the first that has any, of several.

    Raises InputError, with the fields there are, when no head has it.
    """
    from milldam.sources import tables

    there: dict[str, None] = {}
    path, found, batch = "", pa.nulls(0), None
    for slice in itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES):
        if slice.format in ("jsonl", "json", "csv", "tsv"):
            # As many as there are in the first block: not every record need have it.
            records = _first_records(slice, _RECORDS_SEARCHED)
            there |= dict.fromkeys(name for record in records for name, _ in _leaves(record, ""))
            batch = kept_columns((wanted,), records)
        else:
            with suppress(DamagedError):  # it is set aside when it is read
                names = tables.leaf_types(tables.open_schema(slice, spool))
                there |= dict.fromkeys(names)
                batch = tables.head_values(slice, [wanted], spool) if wanted in names else None
        path = path or slice.path
        values = pa.nulls(0) if batch is None else batch.column(0)
        is_text = values.type in tables.AS_BYTES or tables.holds_bytes(values.type)
        is_there = pc.binary_length(values) if is_text else pc.is_valid(values)
        if pc.any(is_there.cast(pa.bool_())).as_py():
            return slice.path, values
        found = values if len(values) else found
    if wanted in there:
        return path, found
    if not path:
        raise InputError(f"Plain text has no fields to choose by. Leave out {setting}.")
    advice = did_you_mean(wanted, there) or f" Set {setting} to one of them."
    raise InputError(f'{path}: no field "{wanted}" in the first records; found {listed_names(there)}.{advice}')


# ---- the fields of a file's head ----


def _first_records(slice: Slice, limit: int = _RECORDS) -> list[dict[str, Any]]:
    """Of JSON or CSV."""
    if slice.format in ("jsonl", "json"):
        return first_records(slice, limit)
    rows = csv_head(slice)
    header, characters, records = next(rows, []), 0, list[dict[str, Any]]()
    for row in itertools.islice(rows, limit):
        records += [dict(zip(header, row, strict=True))] if len(row) == len(header) else []
        characters += sum(map(len, row))
        if characters > _HEAD_CHARACTERS:
            break
    return records or [dict.fromkeys(header, "")]


def _text_fields(slice: Slice, spool: str | None) -> tuple[dict[str, int], set[str]]:
    """The fields that can be read as text, with their characters of text in the first records; and which of them hold
    nothing but numbers, dates or bytes."""
    sizes: Counter[str] = Counter()
    numbers: set[str] = set()
    in_bytes: set[str] = set()
    if slice.format in ("jsonl", "json", "csv", "tsv"):
        found = (pair for record in _first_records(slice) for pair in _leaves(record, ""))
        texts = [(name, value) for name, value in found if name and isinstance(value, str)]
    else:
        texts, in_bytes = _table_texts(slice, spool)
    for name, text in texts:
        is_text = _NUMBERS.fullmatch(text, 0, _CHARACTERS_TRIED) is None
        sizes[name] += len(text) if is_text else 0
        if text.strip() and not is_text:
            numbers.add(name)
    if slice.format == "csv" and len(sizes) == 1 and any(one in next(iter(sizes)) for one in _OTHER_SEPARATORS):
        return {}, set()
    return dict(sizes), {name for name in numbers if not sizes[name]} | (in_bytes if in_bytes < set(sizes) else set())


def _table_texts(slice: Slice, spool: str | None) -> tuple[list[tuple[str, str]], set[str]]:
    """The first texts of a table by column, an empty one for each beside; and which columns are of bytes."""
    from milldam.sources.tables import head_values, holds_bytes, open_schema, text_columns

    with suppress(DamagedError):  # set aside when it is read
        kinds = text_columns(open_schema(slice, spool))
        in_bytes = {name for name, kind in kinds.items() if holds_bytes(kind)}
        head = head_values(slice, [name for name in kinds if name not in in_bytes], spool)
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


def _kinds(slice: Slice, spool: str | None) -> list[dict[str, str]]:
    """What the fields of the first records are, of a table those of any; none of CSV."""
    if slice.format in ("jsonl", "json"):
        return [{name: _kind(value) for name, value in record.items()} for record in first_records(slice, _RECORDS)]
    if slice.format in ("csv", "tsv"):
        return []
    from milldam.sources.tables import open_schema

    shown = {field.name: str(field.type) for field in open_schema(slice, spool)}
    turns = ("list<", "large_list<")
    return [{name: _OBJECTS if kind.startswith(turns) and "struct<" in kind else kind for name, kind in shown.items()}]


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return _OBJECTS if value and isinstance(value[0], dict) else "a list"
    return _KINDS.get(type(value), "text")


def _is_in_a_list(records: list[dict[str, str]], format: str) -> bool:
    """Whether the text is in a list, turns of a conversation or the real records, and what else is text (an id, a list
    of tools) is beside it."""
    return any(map(_is_conversation, records)) or (format == "json" and _list_of_records(records) is not None)


def _is_conversation(kinds: dict[str, str]) -> bool:
    return any(kinds.get(name) == _OBJECTS for name in _CHATS)


def _list_of_records(records: list[dict[str, str]]) -> str | None:
    """In a .json file that is one object: the field that holds the real records."""
    only = records[0] if len(records) == 1 and not _is_conversation(records[0]) else {}
    return next((name for name, kind in only.items() if kind == _OBJECTS), None)


# ---- why there is no text ----


def _why_no_text(slice: Slice, spool: str | None) -> str:
    """The reason, and what to do: a sentence or two."""
    head, kinds = b"", list[dict[str, str]]()
    try:
        kinds = _kinds(slice, spool)
        with open_head(slice.path) as file:
            for block in read_blocks(file, slice.compression, _HEAD_BYTES) if slice.format not in _TABLES else ():
                head += block
                if len(head) >= _HEAD_BYTES:
                    break
    except DamagedError as error:
        if not kinds:
            advice = {"not_compressed": " Name it for what it is.", "too_large_window": ""}
            return f"{error}.{advice.get(error.reason, ' Get or make it again.')}"
    if slice.format in _TABLES:
        return _of_fields(kinds[0], "columns")
    of_bytes = _of_bytes(head, "" if slice.compression is None else " once it is decompressed")
    if of_bytes:
        return of_bytes
    if slice.format in ("csv", "tsv"):
        return _of_header(head)
    if not kinds:
        return _of_lines(head, slice.format)
    listed = _list_of_records(kinds) if slice.format == "json" else None
    if listed is not None:
        take_out = f"jq -c '.{listed}[]' OLD > NEW.jsonl"
        return f'it is one object, and its records are in the list "{listed}". Take them out: {take_out}'
    return _of_fields(kinds[0], "fields")


def _of_bytes(head: bytes, unpacked: str) -> str:
    """What can be told without reading lines; empty: nothing."""
    known = next((said for magic, said in _MAGIC.items() if head.startswith(magic)), None)
    if known is not None:
        return known
    if not head.strip():
        return f"it holds nothing but white space{unpacked}." if head else f"it is empty{unpacked}."
    packed, encoding = compression_of(head), other_encoding(head)
    if packed is not None:
        advice = "Decompress it" if unpacked else f"Add the ending .{packed} to its name"
        return f"{describe_head(head)}{unpacked}. {advice}."
    if encoding is not None:
        return f"{encoding}."
    if b"\r" in head and b"\n" not in head:
        return "its lines end with a carriage return alone. Convert it: tr '\\r' '\\n' < OLD > NEW"
    return ""


def _of_header(head: bytes) -> str:
    line = head.split(b"\n")[0].decode("utf-8", "replace").strip()
    separator = next((name for name in _OTHER_SEPARATORS if name in line), None)
    if separator is None:
        return "its first line names no columns."
    advice = "set input_format to tsv" if separator == "\t" else f"convert it: tr '{separator}' ',' < OLD > NEW"
    return f"its first line, {json.dumps(line[:60])}, is one column. If {separator!r} separates columns, {advice}."


def _of_lines(head: bytes, format: str) -> str:
    """JSON of which no record is an object."""
    if format == "jsonl" and not is_json_lines(head):
        return "its JSON goes over several lines, not one record a line. Name it .json, or set input_format to json."
    text = head.lstrip().split(b"\n")[0].decode("utf-8", "replace").strip()
    shown = json.dumps(text[:60] + ("..." if len(text) > 60 else ""), ensure_ascii=False)
    try:
        if json.loads(text) == []:
            return "it is an empty array."
    except (ValueError, RecursionError) as error:
        return f"no record in its head is JSON. Its first line is {shown}: {error}."
    advice = "Make objects of them: jq -c '(.[]? // .) | {text: .}' OLD > NEW.jsonl"
    return f"its records must be objects with a field of text; its first line is {shown}. {advice}"


def _of_fields(kinds: dict[str, str], what: str) -> str:
    """No field is text: what they are instead."""
    chat = next((name for name in _CHATS if kinds.get(name) == _OBJECTS), None)
    if chat is not None:
        return (
            f'its records are conversations: "{chat}" is a list of turns. Ask for chat, which renders them '
            "by a chat template; or name another field with text_column."
        )
    shown = ", ".join(f'"{name}" ({kind})' for name, kind in list(kinds.items())[:_FIELDS_SHOWN])
    more = ", ..." if len(kinds) > _FIELDS_SHOWN else ""
    return f"none of its {what} holds text: {shown}{more}." if kinds else f"its records have no {what}."
