"""JSON Lines, and the items of a JSON array -> texts of one field, or rows.

Texts: a kernel in C takes a block of lines at once, without a Python object per document. When it finds anything but
valid objects that have the field once, as a string, the block is read line by line, and what is wrong is rejected with
its line. Rows are dicts, a line each. Blocks have a fixed size, so the result does not depend on workers or memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa

from milldam.native import kernel
from milldam.sources.arrays import Bytes, Int64s, batches_of, kept_columns
from milldam.sources.batch import MAX_DOCUMENT_BYTES, Batch, MalformedError, Reading, TextRules
from milldam.sources.compression import DamagedError, open_bytes, open_head, read_blocks
from milldam.sources.decoding import mended, parse_json
from milldam.sources.records import (
    BLOCK_BYTES,
    BOM,
    LINE,
    Block,
    make_damage_reject,
    make_line_reject,
    record_blocks,
    reject_too_large,
    split_records,
)
from milldam.sources.units import Slice

_MISSING = object()
_LINES_SEEN = 10_000
_TEXTS_KERNEL = (np.uint8, np.uint8, np.uint8, np.int64)
_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
Value = TypeVar("Value")


# ---- lines ----


def _json_blocks(file: IO[bytes], slice: Slice, most: int = MAX_DOCUMENT_BYTES) -> Iterator[Block]:
    """Blocks of records, one a line: those of JSON lines, or of whatever a .json file holds.

    Where the file is damaged, DamagedError comes behind every whole record before the damage.
    """
    if slice.format == "json":
        from milldam.sources.json_items import as_json_lines

        blocks = split_records(as_json_lines(read_blocks(file, slice.compression, BLOCK_BYTES)), LINE, most)
    else:
        blocks = record_blocks(file, slice.compression, LINE, slice.start, slice.stop, most)
    for number, block in enumerate(blocks):
        is_first = number == 0 and slice.start == 0 and block.data.startswith(BOM)
        yield replace(block, data=block.data.removeprefix(BOM)) if is_first else block


def _blocks(slice: Slice, reading: Reading) -> Iterator[Block]:
    """The blocks of a slice; a record that is too large is rejected, and its block is empty but for its size."""
    with open_bytes(slice.path) as file:
        try:
            for block in _json_blocks(file, slice, reading.rules.max_document_bytes):
                if block.too_large:
                    reject_too_large(block, slice, reading)
                    block = replace(block, data=b"")
                yield block
        except DamagedError as error:
            reading.reject(make_damage_reject(slice, error))


def _parsed(
    block: Block, slice: Slice, reading: Reading, parse: Callable[[bytes], Value]
) -> tuple[list[Value], Int64s]:
    """What `parse` makes of each line, and the lines' numbers from 0; those of which it makes nothing are rejected."""
    values, numbers = list[Value](), list[int]()
    for number, line in enumerate(block.data.split(b"\n"), start=block.line):
        if line.strip():
            try:
                values.append(parse(line))
                numbers.append(number - 1)
            except MalformedError as error:
                reading.reject(make_line_reject(slice, block, number, error.reason, error.detail, line))
    return values, np.array(numbers, np.int64)


# ---- texts ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The texts of one field, by the kernel or line by line; line by line where fields are kept beside them."""
    rules, keep = reading.rules, reading.keep
    assert rules.text_column is not None
    path = rules.text_column.split(".")
    # A lone surrogate from the command line: no line has such a name.
    name = np.frombuffer(path[0].encode("utf-8", "surrogatepass"), np.uint8)
    take = kernel("json_texts", *_TEXTS_KERNEL) if len(path) == 1 and not keep else None

    def parse(line: bytes) -> tuple[str, Any]:
        record = parse_json(line, rules)
        return _text_of(record, path, rules), record

    for block in _blocks(slice, reading):
        texts = None if take is None or block.too_large else _take_block(block, name, take)
        if texts is not None:
            batch = Batch(texts, bytes_read=block.size, origins=block.line - 1 + np.arange(len(texts)))
        else:
            pairs, numbers = _parsed(block, slice, reading, parse)
            texts = pa.array([text for text, _ in pairs], pa.large_string())
            columns = kept_columns(keep, [record for _, record in pairs])
            batch = Batch(texts, bytes_read=block.size, columns=columns, origins=numbers)
        yield from batches_of(batch)


def _take_block(block: Block, name: Bytes, take: Callable[..., int]) -> pa.LargeStringArray | None:
    """All texts of a block as most are; None when anything in it is odd."""
    if not block.data.isascii():
        try:
            whole = pa.py_buffer(np.array([0, len(block.data)])), pa.py_buffer(block.data)
            pa.LargeStringArray.from_buffers(1, *whole).validate(full=True)
        except pa.ArrowInvalid:  # not UTF-8
            return None
    data, lines = np.frombuffer(block.data, np.uint8), block.line_ends + (not block.data.endswith(b"\n"))
    texts, offsets = pa.allocate_buffer(len(data), resizable=True), pa.allocate_buffer(8 * (lines + 1))
    ends, room = np.frombuffer(offsets, np.int64), np.frombuffer(texts, np.uint8)
    if take(data, name, room, ends) < 0:
        return None
    del room  # numpy holds the buffer until then
    texts.resize(int(ends[-1]), shrink_to_fit=True)
    return pa.LargeStringArray.from_buffers(lines, offsets, texts)


def _text_of(record: Any, path: list[str], rules: TextRules) -> str:
    """The document of a record; raises MalformedError with what is wrong."""
    text = record
    for name in path:
        text = text.get(name, _MISSING) if isinstance(text, dict) else _MISSING
    if text is _MISSING:
        fields = ", ".join(f'"{key}"' for key in record) if isinstance(record, dict) else type(record).__name__
        raise MalformedError("no_field", f'no field "{".".join(path)}"; found {fields or "none"}')
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise MalformedError("no_text", f'"{".".join(path)}" is {kind}, not text')
    return mended(text, rules)


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[tuple[dict[str, list[Any]], Int64s]]:
    """Dicts as they are, a list for each column; a column that a row lacks is None."""
    from milldam.sources.rows import from_records

    for block in _blocks(slice, reading):
        records, numbers = _parsed(block, slice, reading, lambda line: _record_of(line, reading.rules))
        if records:
            # Counted from the start of the slice, which may lie in the line before.
            yield from_records(records, reading.columns), numbers + (block.origin > slice.start)


def _record_of(line: bytes, rules: TextRules) -> dict[str, Any]:
    """The object on one line; raises MalformedError with what is wrong."""
    record = parse_json(line, rules)
    if not isinstance(record, dict):
        raise MalformedError("no_object", f"{type(record).__name__} where an object should be: a row is {{...}}")
    # Only bytes that are no UTF-8, and escapes, leave halves of surrogate pairs: look for them no further.
    if rules.invalid_utf8 == "drop" or _SURROGATE.search(line) is not None:
        record = _mended(record, rules)
    return record  # type: ignore[no-any-return]


def _mended(value: Any, rules: TextRules) -> Any:
    if isinstance(value, str):
        return mended(value, rules)
    if isinstance(value, list):
        return [_mended(one, rules) for one in value]
    if isinstance(value, dict):
        return {mended(name, rules): _mended(one, rules) for name, one in value.items()}
    return value


# ---- fields ----


def first_records(slice: Slice, limit: int = _LINES_SEEN) -> list[dict[str, Any]]:
    """The records at a file's head; those with bytes that are no UTF-8 only where there are no others."""
    try:
        with open_head(slice.path) as file:
            block = next((block for block in _json_blocks(file, slice) if not block.too_large), None)
    except (DamagedError, ValueError, RecursionError):
        block = None
    lines = [] if block is None else [line for line in block.data.split(b"\n") if line.strip()][:limit]
    records: list[dict[str, Any]] = []
    for rules in (TextRules(), TextRules(invalid_utf8="replace")):
        for line in lines if not records else ():
            with suppress(MalformedError):
                records.append(_record_of(line, rules))
    return records


def columns_of(slice: Slice) -> list[str]:
    """The fields of the records at a file's head; empty when there are none."""
    return list(dict.fromkeys(name for record in first_records(slice) for name in record))
