"""JSON Lines, and the items of a JSON array -> documents. A block of lines is parsed by Arrow at once, without a Python
object per document.

When anything in a block is not as it should be (a broken line, a missing or null text, bytes that are no UTF-8, two
objects on a line) that block is read again line by line, and what is wrong is rejected with its line. Blocks have a
fixed size, so the result does not depend on workers or memory. A giant line goes through giant.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from milldam.sources.arrays import batches_of
from milldam.sources.batch import Batch, MalformedError, OnReject, TextRules, stop_or_reject
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.decoding import mended, parse_json
from milldam.sources.giant import GiantLine, parts_of_line
from milldam.sources.json_items import as_json_lines
from milldam.sources.lines import BOM, LINE, make_damage_reject, make_line_reject
from milldam.sources.opening import open_bytes
from milldam.sources.records import BLOCK_BYTES, WHOLE, Block, record_blocks, split_records
from milldam.sources.units import Slice

_MISSING = object()
_LINE_END, _BRACE = 10, 123


def json_blocks(file: IO[bytes], slice: Slice) -> Iterator[Block]:
    """Blocks of records, one a line: those of JSON lines, or of whatever a .json file holds."""
    if slice.format == "json":
        return split_records(as_json_lines(read_blocks(file, slice.compression, BLOCK_BYTES)), LINE)
    return record_blocks(file, slice.compression, LINE, slice.start, slice.stop)


def uncut(error: DamagedError) -> Iterator[Block]:
    """The record before the damage, where it is whole and only its line end is missing."""
    try:
        json.loads((error.cut or b"").decode())
    except (ValueError, RecursionError):
        return
    assert error.cut is not None and error.line is not None
    yield Block(error.cut, error.line, 0, 0)
    error.cut = error.line = None


def read_jsonl(slice: Slice, rules: TextRules, on_reject: OnReject) -> Iterator[Batch]:
    reader = _Reader(slice, rules, on_reject)
    with open_bytes(slice.path) as file:
        blocks = json_blocks(file, slice)
        try:
            for number, block in enumerate(blocks):
                if number == 0 and slice.start == 0 and block.data.startswith(BOM):
                    block = replace(block, data=block.data.removeprefix(BOM))
                if block.kind == WHOLE:
                    yield from reader.read_block(block)
                else:
                    yield from reader.read_giant(block, blocks)
        except DamagedError as error:
            for block in uncut(error):
                yield from reader.read_block(block)
            stop_or_reject(make_damage_reject(slice, error), rules, on_reject)


class _Reader:
    def __init__(self, slice: Slice, rules: TextRules, on_reject: OnReject) -> None:
        assert rules.text_column is not None
        self.path = rules.text_column.split(".")
        self._slice, self._rules, self._on_reject = slice, rules, on_reject
        schema = pa.schema([(self.path[0], _nested_type(self.path[1:]))])
        self._options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def read_block(self, block: Block) -> Iterator[Batch]:
        texts = self._parse_block(block)
        if texts is None:
            texts = self._parse_lines(block)
        yield from batches_of(texts, len(block.data))

    def _parse_block(self, block: Block) -> pa.LargeStringArray | None:
        """All texts of a flawless block; None when any line needs a closer look."""
        data = block.data
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pyarrow.json.read_json(pa.BufferReader(data), read_options=options, parse_options=self._options)
            column = table.column(0)
            for name in self.path[1:]:
                column = pc.struct_field(column, name)
            texts = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
            texts.validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        # One object a line, and nothing else: neither blank lines nor an object over several.
        lines = block.line_ends + (not data.endswith(b"\n"))
        return texts if texts.null_count == 0 and len(texts) == lines == _count_objects(data) else None

    def _parse_lines(self, block: Block) -> pa.LargeStringArray:
        texts = []
        for number, line in enumerate(block.data.split(b"\n"), start=block.line):
            if not line.strip():
                continue
            try:
                texts.append(text_of_line(line, self.path, self._rules))
            except MalformedError as error:
                self._reject(block, number, error, line)
        return pa.array(texts, pa.large_string())

    def read_giant(self, block: Block, blocks: Iterator[Block]) -> Iterator[Batch]:
        line = GiantLine(parts_of_line(block, blocks), self._rules)
        try:
            yield from line.batches(self.path)
        except MalformedError as error:
            self._reject(block, block.line, error, b"")
            yield Batch(pa.array([], pa.large_string()), bytes_read=line.bytes_read())

    def _reject(self, block: Block, line: int, error: MalformedError, raw: bytes) -> None:
        reject = make_line_reject(self._slice, block, line, error.reason, error.detail, raw)
        stop_or_reject(reject, self._rules, self._on_reject)


def _count_objects(data: bytes) -> int:
    """Lines that begin with a brace."""
    array = np.frombuffer(data, dtype=np.uint8)
    begins = np.flatnonzero(array[:-1] == _LINE_END) + 1
    return int(np.count_nonzero(array[begins] == _BRACE)) + data.startswith(b"{")


def _nested_type(path: list[str]) -> pa.DataType:
    return pa.struct([(path[0], _nested_type(path[1:]))]) if path else pa.large_string()


def text_of_line(line: bytes, path: list[str], rules: TextRules) -> str:
    """The document on one line; raises MalformedError with what is wrong."""
    record = parse_json(line, rules)
    text = find_field(record, path)
    if text is _MISSING:
        found = ", ".join(f'"{key}"' for key in record) if isinstance(record, dict) else type(record).__name__
        raise MalformedError("no_field", f'no field "{".".join(path)}"; found {found or "none"}')
    if not isinstance(text, str):
        raise MalformedError(
            "no_text", f'"{".".join(path)}" is {"null" if text is None else type(text).__name__}, not text'
        )
    return mended(text, rules)


def find_field(record: Any, path: list[str]) -> Any:
    """The value at a dotted path, or a marker that there is none."""
    for name in path:
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
    return record
