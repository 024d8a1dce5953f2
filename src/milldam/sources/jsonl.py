"""JSON Lines, and the items of a JSON array -> texts of one field, or rows.

Texts: a kernel in C takes a block of lines at once, without a Python object per document. When it finds anything but
valid objects that have the field once, as a string, the block is read line by line, and what is wrong is rejected with
its line. Rows are dicts, a line each. Blocks have a fixed size, so the result does not depend on workers or memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from milldam.native import kernel
from milldam.sources.arrays import Int64s, batches_of, kept_columns, mended, parse_json
from milldam.sources.batch import TOO_LARGE, Batch, Reading, TextRules, too_large
from milldam.sources.compression import DamagedError, read_head
from milldam.sources.records import BOM, as_json_lines, make_reject, record_blocks
from milldam.sources.units import Slice
from milldam.text.arrays import is_utf8

_MISSING = object()
_LINES_SEEN = 10_000
_TEXTS_KERNEL = (np.uint8, np.uint8, np.uint8, np.int64)
_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
Value = TypeVar("Value")


def _parsed(
    data: bytes, line: int, slice: Slice, reading: Reading, parse: Callable[[bytes], Value]
) -> tuple[list[Value], Int64s]:
    """What `parse` makes of each line, and the lines' numbers from 0; those of which it makes nothing are rejected."""
    values, numbers, most = list[Value](), list[int](), reading.rules.max_document_bytes
    for number, raw in enumerate(data.split(b"\n"), start=line):
        try:
            if len(raw) > most:
                raise DamagedError(TOO_LARGE, too_large(len(raw), most))
            if raw.strip():
                values.append(parse(raw))
                numbers.append(number - 1)
        except DamagedError as error:
            reading.reject(make_reject(slice, number, error.reason, str(error), raw))
    return values, np.array(numbers, np.int64)


# ---- texts ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one field, by the kernel or line by line; line by line where fields are kept beside them."""
    rules, keep = reading.rules, reading.keep
    path = str(rules.text_column).split(".")
    # A lone surrogate from the command line: no line has such a name.
    name = np.frombuffer(path[0].encode("utf-8", "surrogatepass"), np.uint8)
    take = kernel("json_texts", *_TEXTS_KERNEL) if len(path) == 1 and not keep else None

    def parse(raw: bytes) -> tuple[str, Any]:
        record = parse_json(raw, rules)
        return _text_of(record, path, rules), record

    for data, line, line_ends, size in record_blocks(slice, reading):
        taken = False
        if take is not None and 0 < len(data) <= rules.max_document_bytes and is_utf8(data):
            lines = line_ends + (not data.endswith(b"\n"))
            buffer, offsets = pa.allocate_buffer(len(data), resizable=True), pa.allocate_buffer(8 * (lines + 1))
            ends, room = np.frombuffer(offsets, np.int64), np.frombuffer(buffer, np.uint8)
            taken = take(np.frombuffer(data, np.uint8), name, room, ends) >= 0
            del room  # numpy holds the buffer until then
        if taken:
            buffer.resize(int(ends[-1]), shrink_to_fit=True)
            texts, columns = pa.LargeStringArray.from_buffers(lines, offsets, buffer), None
            numbers = line - 1 + np.arange(lines)
        else:
            pairs, numbers = _parsed(data, line, slice, reading, parse)
            texts = pa.array([text for text, _ in pairs], pa.large_string())
            columns = kept_columns(keep, [record for _, record in pairs])
        yield from batches_of(Batch(texts, bytes_read=size, columns=columns, origins=numbers))


def _text_of(record: Any, path: list[str], rules: TextRules) -> str:
    """The document of a record; raises DamagedError with what is wrong."""
    text = record
    for name in path:
        text = text.get(name, _MISSING) if isinstance(text, dict) else _MISSING
    if text is _MISSING:
        fields = ", ".join(f'"{key}"' for key in record) if isinstance(record, dict) else type(record).__name__
        raise DamagedError("no_field", f'no field "{".".join(path)}"; found {fields or "none"}')
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise DamagedError("no_text", f'"{".".join(path)}" is {kind}, not text')
    return mended(text, rules)


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[tuple[dict[str, list[Any]], Int64s]]:
    """Dicts as they are, a list for each column; a column that a row lacks is None."""
    from milldam.sources.rows import from_records

    for data, line, _, _ in record_blocks(slice, reading):
        records, numbers = _parsed(data, line, slice, reading, lambda raw: _record_of(raw, reading.rules))
        if records:
            yield from_records(records, reading.columns), numbers


def _record_of(raw: bytes, rules: TextRules) -> dict[str, Any]:
    """The object on one line; raises DamagedError with what is wrong."""
    record = parse_json(raw, rules)
    if not isinstance(record, dict):
        raise DamagedError("no_object", f"{type(record).__name__} where an object should be: a row is {{...}}")
    # Only escapes leave halves of surrogate pairs: look for them no further.
    has_half = _SURROGATE.search(raw) is not None
    return dict(json.loads(mended(json.dumps(record, ensure_ascii=False), rules))) if has_half else record


# ---- fields ----


def first_records(slice: Slice, limit: int = _LINES_SEEN) -> list[dict[str, Any]]:
    """The records at a file's head."""
    head, records = b"", list[Any]()
    with suppress(DamagedError):  # it is set aside when it is read
        head = read_head(slice.path, slice.compression, as_json_lines if slice.format == "json" else None)
    for line in head.removeprefix(BOM).split(b"\n")[:limit]:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line.decode("utf-8", "replace")))
    return [record for record in records if isinstance(record, dict)]


def columns_of(slice: Slice) -> list[str]:
    """The fields of the records at a file's head; empty when there are none."""
    return list(dict.fromkeys(name for record in first_records(slice) for name in record))
