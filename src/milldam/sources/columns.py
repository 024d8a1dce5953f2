"""Which field holds the text: the one named "text", else the one candidate there is.

Fields are told from the first records of a file. Numbers, dates and bytes are text only where they are asked for.

A file in which no text was found -> the reason, and what to do: a sentence or two for a message.

Reads the head of the file once more. Nothing here decides what is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milldam.errors import InputError, Setting, did_you_mean
from milldam.sources.batch import listed_names, no_such_column
from milldam.sources.compression import DamagedError, compression_of, describe_head, open_head, read_blocks
from milldam.sources.decoding import other_encoding
from milldam.sources.units import Slice

if TYPE_CHECKING:
    from milldam.sources.values import ValueField, ValueKind

_HEAD_BYTES = 1 << 16
_TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_OTHERS = {b"PK\x03\x04": "a zip archive", b"%PDF": "a PDF", b"SQLite format 3": "an SQLite data base"}
_CHATS = ("messages", "conversations", "conversation", "turns", "chosen")
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"}
_OBJECTS = "a list of objects"
OTHER_SEPARATORS = (";", "\t", "|")
"""Of columns, in files that are called CSV."""
_FIELDS_SHOWN = 8
WITHOUT_FIELDS = ("txt",)
"""Formats that hold text alone."""


def why_no_text(slice: Slice, records: list[dict[str, Any]], spool: str | None) -> str:
    """`records`: the first ones of a JSON file, as far as they could be parsed."""
    if slice.format in ("parquet", "arrow"):
        try:
            return _of_fields({field.name: str(field.type) for field in _schema(slice, spool)}, "columns")
        except DamagedError as error:
            return f"{error}. Get or make it again."
    head, damage = _read_head(slice)
    if not head.strip() or (damage is not None and not records):
        if damage is None:
            packed = " once it is decompressed" if slice.compression is not None else ""
            return f"it holds nothing but white space{packed}." if head else f"it is empty{packed}."
        advice = {"not_compressed": " Name it for what it is.", "too_large_window": ""}
        return f"{damage}.{advice.get(damage.reason, ' Get the file again.')}"
    of_bytes = _of_bytes(head, slice)
    if of_bytes or slice.format in ("csv", "tsv"):
        return of_bytes or _of_header(head)
    if records:
        kinds = {name: _kind(value) for name, value in records[0].items()}
        return (_of_single(kinds) if len(records) == 1 else "") or _of_fields(kinds, "fields")
    return _of_lines(head, slice.format)


def _read_head(slice: Slice) -> tuple[bytes, DamagedError | None]:
    head = b""
    try:
        with open_head(slice.path) as file:
            for block in read_blocks(file, slice.compression, _HEAD_BYTES):
                head += block
                if len(head) >= _HEAD_BYTES:
                    break
    except DamagedError as error:
        return head, error
    return head, None


def _of_bytes(head: bytes, slice: Slice) -> str:
    """What can be told without reading lines; empty: nothing."""
    table = next((kind for magic, kind in _TABLES.items() if head.startswith(magic)), None)
    if table is not None:
        return f"it is {table} by its first bytes. Name it .{table}, or set input_format to {table}."
    other = next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), None)
    if other is not None:
        return f"it is {other} by its first bytes. Unpack or convert it first."
    packed = compression_of(head)
    if packed is not None and slice.compression is not None:
        return f"it is compressed twice: once it is decompressed, {describe_head(head)}. Decompress it once."
    if packed is not None:
        return f"{describe_head(head)}: add the ending .{packed} to its name."
    encoding = other_encoding(head)
    if encoding is not None:
        return f"{encoding}."
    if b"\r" in head and b"\n" not in head:
        return "its lines end with a carriage return alone. Convert it: tr '\\r' '\\n' < OLD > NEW"
    return ""


def _of_header(head: bytes) -> str:
    line = head.split(b"\n")[0].decode("utf-8", "replace").strip()
    separator = next((name for name in OTHER_SEPARATORS if name in line), None)
    if separator is None:
        return "its first line names no columns."
    advice = "set input_format to tsv" if separator == "\t" else f"convert it: tr '{separator}' ',' < OLD > NEW"
    return f"its first line, {json.dumps(line[:60])}, is one column. If {separator!r} separates columns, {advice}."


def _of_lines(head: bytes, format: str) -> str:
    """JSON of which no record is an object."""
    from milldam.sources.json_items import is_json_lines

    if format == "jsonl" and not is_json_lines(head):
        what = "a JSON array" if head.lstrip().startswith(b"[") else "JSON that goes over several lines"
        return f"it is {what}, not one record a line. Name it .json, or set input_format to json."
    line = next(line for line in head.split(b"\n") if line.strip())
    text = line.decode("utf-8", "replace").strip()
    shown = json.dumps(text[:60] + ("..." if len(text) > 60 else ""), ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"no record in its head is JSON. Its first line is {shown}: {error}."
    if value == []:
        return "it is an empty array."
    is_text = isinstance(value[0] if isinstance(value, list) else value, str)
    advice = " Make objects of them: jq -c '(.[]? // .) | {text: .}' OLD > NEW.jsonl" if is_text else ""
    return f"its records must be objects with a field of text; its first line is {shown}.{advice}"


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return _OBJECTS if value and isinstance(value[0], dict) else "a list"
    return "an object" if isinstance(value, dict) else _KINDS.get(type(value), "text")


def is_in_a_list(records: list[dict[str, Any]], slice: Slice) -> bool:
    """Whether the text of these records is in a list that they hold: turns of a conversation, or the real records.

    For a table, the one record has the types of the columns.
    """
    is_single = slice.format == "json" and len(records) == 1
    single = {name: _kind(value) for name, value in records[0].items()} if is_single else {}
    return any(map(_is_conversation, records)) or bool(_of_single(single))


def _is_conversation(record: dict[str, Any]) -> bool:
    return any(_is_turns(record.get(name)) for name in _CHATS)


def _is_turns(value: Any) -> bool:
    if isinstance(value, str):
        return value == _OBJECTS or (value.startswith(("list<", "large_list<")) and "struct<" in value)
    return _kind(value) == _OBJECTS


def _of_single(kinds: dict[str, str]) -> str:
    listed = next((name for name, kind in kinds.items() if kind == _OBJECTS), None)
    if listed is None or _is_conversation(kinds):
        return ""
    take_out = f"jq -c '.{listed}[]' OLD > NEW.jsonl"
    return f'it is one object, and its records are in the list "{listed}". Take them out: {take_out}'


def _of_fields(kinds: dict[str, str], what: str) -> str:
    """No field is text: what they are instead."""
    if _is_conversation(kinds):
        chat = next(name for name in _CHATS if _is_turns(kinds.get(name)))
        return (
            f'its records are conversations: "{chat}" is a list of turns. Ask for chat, which renders them '
            "by a chat template; or name another field with text_column."
        )
    shown = ", ".join(f'"{name}" ({kind})' for name, kind in list(kinds.items())[:_FIELDS_SHOWN])
    more = ", ..." if len(kinds) > _FIELDS_SHOWN else ""
    return f"none of its {what} holds text: {shown}{more}." if kinds else f"its records have no {what}."


_USUAL = ("text", "content", "body", "raw_content", "document", "article", "passage", "story")
_CONVERSATIONS = [
    *({"prompt", "completion"}, {"prompt", "response"}, {"prompt", "answer"}),
    *({"instruction", "output"}, {"chosen", "rejected"}),
]
"""Fields of conversations that are no lists."""
_FILES = 100
_RECORDS, _RECORDS_SEARCHED = 100, 10_000
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
    heads = itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES)
    looked_at = sorted(heads, key=lambda head: head.format == "json")
    conversations = False
    for slice in looked_at:
        fields = _text_fields(slice, spool)
        if wanted is not None and fields.sizes:
            if wanted not in fields.sizes:
                raise no_such_column(slice.path, wanted, fields.sizes, setting)
            return wanted
        if fields.sizes and _is_in_a_list(slice, fields, spool):
            conversations = True
        # Beside conversations, a field that only happens to be text (an id, a hash) is not what is meant.
        elif fields.sizes and (not conversations or _has_usual(fields)):
            return _obvious(fields, slice, spool, setting)
    if not looked_at:
        return None
    raise InputError(_no_text(looked_at, spool))


def find_value_field(slices: Iterable[Slice], wanted: str, spool: str | None, setting: str) -> ValueField:
    """A field that holds numbers or dates, and which of these, by the heads of the first files.

    Raises InputError, with the fields there are, when no head has it, or none holds anything of the kind.
    """
    from milldam.sources.values import ValueField, kind_of

    there: dict[str, None] = {}
    path, told = "", ""
    for slice in itertools.islice((slice for slice in slices if slice.format not in WITHOUT_FIELDS), _FILES):
        names, values = _values_of(slice, wanted, spool)
        there |= dict.fromkeys(names)
        kind = values if isinstance(values, str) else kind_of(values)
        if kind is not None:
            return ValueField(wanted, kind)
        other = next((value for value in values if value not in (None, "")), None)
        told = told or ("" if other is None else json.dumps(other, ensure_ascii=False, default=str)[:60])
        path = path if path and not told else slice.path
    if told:
        raise InputError(f'{path}: the field "{wanted}" holds neither numbers nor dates, but {told}. Change {setting}.')
    if wanted in there:
        return ValueField(wanted)  # nothing in it so far: numbers, then
    if not path:
        raise InputError(f"Plain text has no fields to choose by. Leave out {setting}.")
    advice = did_you_mean(wanted, there) or f" Set {setting} to one of them."
    raise InputError(f'{path}: no field "{wanted}" in the first records; found {listed_names(there)}.{advice}')


def _values_of(slice: Slice, wanted: str, spool: str | None) -> tuple[Iterable[str], ValueKind | list[Any]]:
    """The fields of a file; and what one of them holds by its type, or in the first records."""
    if slice.format in ("csv", "tsv"):
        from milldam.sources.csv_records import csv_head

        rows = csv_head(slice.path, slice.compression, slice.format)
        header = next(rows, [])
        return header, [value for name, value in _cells(header, rows) if name == wanted]
    if slice.format in ("jsonl", "json"):
        # As many as there are in the first block: not every record need have it.
        records = [dict(_leaves(record, "")) for record in _first_records(slice, _RECORDS_SEARCHED)]
        return [name for record in records for name in record], [record.get(wanted) for record in records]
    from milldam.sources.tables import first_values

    try:
        return first_values(slice, wanted, spool)
    except DamagedError:
        return [], []  # set aside when it is read


def _leaves(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_in_a_list(slice: Slice, fields: _Fields, spool: str | None) -> bool:
    """Whether the text is in a list of turns, and what else is text (an id, a list of tools) is only beside it."""
    if slice.format in ("csv", "tsv") or _has_usual(fields):
        return False
    if slice.format in ("jsonl", "json"):
        return is_in_a_list(_first_records(slice), slice)
    return is_in_a_list([{field.name: str(field.type) for field in _schema(slice, spool)}], slice)


def _has_usual(fields: _Fields) -> bool:
    return any(name.lower() in _USUAL for name in fields.sizes)


def _no_text(slices: list[Slice], spool: str | None) -> str:
    """Of the first file that is not just empty."""
    path = why = ""
    for slice in slices:
        records = _first_records(slice) if slice.format in ("jsonl", "json") else []
        path, why = slice.path, why_no_text(slice, records, spool)
        if not why.startswith("it is empty"):
            break
    others = f" Nor has any of {len(slices) - 1:,} more files." if len(slices) > 1 else ""
    return f"{path}: no text in it: {why}{others}"


def _obvious(fields: _Fields, slice: Slice, spool: str | None, setting: str) -> str:
    if "text" in fields.sizes:
        return "text"
    candidates = fields.candidates
    usual = [name for name in candidates if name.split(".")[-1].lower() in _USUAL]
    for few in (usual, candidates):
        if len(few) == 1:
            return few[0]
    sizes = fields.sizes
    if slice.format in ("parquet", "arrow"):
        from milldam.sources.tables import column_sizes

        with suppress(DamagedError):
            sizes = column_sizes(slice, spool)
    advice = Setting(setting, max(usual or candidates or fields.sizes, key=lambda name: sizes.get(name, 0)))
    if not candidates:
        names = listed_names(fields.sizes)
        raise InputError(
            f"{slice.path}: no field holds text; found numbers, dates or bytes in {names}. To take one all the same: ",
            advice,
        )
    several = f"{slice.path}: several fields hold text: {listed_names(candidates)}. Say which one, such as: "
    if any(names <= sizes.keys() for names in _CONVERSATIONS):
        raise InputError(
            several, advice, "\nTo keep them all, as conversations by a chat template: ", Setting("chat", True)
        )
    raise InputError(several, advice)


def _text_fields(slice: Slice, spool: str | None) -> _Fields:
    if slice.format in ("csv", "tsv"):
        from milldam.sources.csv_records import csv_head

        rows = csv_head(slice.path, slice.compression, slice.format)
        header = next(rows, [])
        if len(header) == 1 and any(separator in header[0] for separator in OTHER_SEPARATORS):
            return _Fields({})
        named = itertools.chain(((name, "") for name in header), _cells(header, rows))
        return _looked_at((name, text) for name, text in named if name)
    if slice.format in ("jsonl", "json"):
        return _looked_at(pair for record in _first_records(slice) for pair in _string_fields(record, ""))
    from milldam.sources.tables import holds_bytes, text_columns

    try:
        columns = dict(text_columns(_schema(slice, spool)))
    except DamagedError:
        return _Fields({})  # set aside when it is read
    in_bytes = frozenset(name for name, kind in columns.items() if holds_bytes(kind))
    return _Fields(dict.fromkeys(columns, 0), in_bytes if len(in_bytes) < len(columns) else frozenset())


def _first_records(slice: Slice, limit: int = _RECORDS) -> list[dict[str, Any]]:
    from milldam.sources.jsonl import first_records

    return first_records(slice, limit)


def _schema(slice: Slice, spool: str | None) -> Any:
    from milldam.sources.tables import open_schema

    return open_schema(slice, spool)


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
