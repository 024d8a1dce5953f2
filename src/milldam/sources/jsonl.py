"""JSON Lines, and the items of a JSON array -> texts of one field, or rows.

Texts: a kernel in C takes a block of lines at once, without a Python object per document. When it finds anything but
valid objects that have the field once, as a string, the block is parsed by Arrow; when anything is not as it should be
(a broken line, a missing or null text, bytes that are no UTF-8, two objects on a line) it is read again line by line,
and what is wrong is rejected with its line. Rows are dicts, a line each. Blocks have a fixed size, so the result does
not depend on workers or memory. A giant line goes through giant_line.py, or is put together where there is room.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.json

from milldam.native import kernel
from milldam.sources.arrays import batches_of
from milldam.sources.batch import KEPT_RECORD_CHARS, Batch, MalformedError, Reading, TextRules
from milldam.sources.compression import DamagedError, open_bytes, open_head, read_blocks
from milldam.sources.decoding import decode_json, decode_text, mended, parse_json
from milldam.sources.records import (
    BLOCK_BYTES,
    BOM,
    LINE,
    WHOLE,
    Block,
    make_damage_reject,
    make_line_reject,
    record_blocks,
    split_records,
)
from milldam.sources.units import Slice

if TYPE_CHECKING:
    from milldam.sources.values import Floats, ValueField

_MISSING = object()
_LINE_END, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_CASE, _MOST_BRACKETS = 0x20, 500
"""By this bit square brackets and braces differ; so many that open on a line are surely not nested too deeply."""
_LINES_SEEN = 10_000
_LARGEST_LOOKED_AT = 8 << 20
"""Of a record at a file's head."""
_TEXTS_KERNEL = (np.uint8, np.uint8, np.uint8, np.int64)
_NULL_BEHIND_OBJECT = re.compile(rb"\}\s*null")
_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
_DECODER = json.JSONDecoder()
Value = TypeVar("Value")
_TextsAndValues = tuple[pa.LargeStringArray | None, "Floats | None"]


# ---- lines ----


def json_blocks(file: IO[bytes], slice: Slice) -> Iterator[Block]:
    """Blocks of records, one a line: those of JSON lines, or of whatever a .json file holds.

    Where the file is damaged, DamagedError comes behind every whole record before the damage.
    """
    if slice.format == "json":
        from milldam.sources.json_items import as_json_lines

        blocks = split_records(as_json_lines(read_blocks(file, slice.compression, BLOCK_BYTES)), LINE)
    else:
        blocks = record_blocks(file, slice.compression, LINE, slice.start, slice.stop)
    try:
        for number, block in enumerate(blocks):
            is_first = number == 0 and slice.start == 0 and block.data.startswith(BOM)
            yield replace(block, data=block.data.removeprefix(BOM)) if is_first else block
    except DamagedError as error:
        if _is_json(error.cut):
            assert error.cut is not None and error.line is not None
            last, error.cut, error.line = Block(error.cut, error.line, 0, 0), None, None
            yield last
        raise


def _is_json(cut: bytes | None) -> bool:
    """Whether the record before the damage is whole, and only its line end is missing."""
    try:
        json.loads((cut or b"").decode())
    except (ValueError, RecursionError):
        return False
    return True


def lines_of(block: Block) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each that is not blank."""
    return ((number, line) for number, line in enumerate(block.data.split(b"\n"), start=block.line) if line.strip())


class _Lines:
    """The blocks of a slice, and what is wrong with them."""

    def __init__(self, slice: Slice, reading: Reading) -> None:
        self._slice, self._reading = slice, reading

    def read(self, of_block: Callable[[Block, Iterator[Block]], Iterator[Value]]) -> Iterator[Value]:
        with open_bytes(self._slice.path) as file:
            blocks = json_blocks(file, self._slice)
            try:
                for block in blocks:
                    ready = [block]
                    del block  # nothing of a giant is held here while it is worked on
                    yield from of_block(ready.pop(), blocks)
            except DamagedError as error:
                self._reading.reject(make_damage_reject(self._slice, error))

    def parsed(self, block: Block, parse: Callable[[bytes], Value]) -> list[Value]:
        """What `parse` makes of each line; those of which it makes nothing are rejected."""
        values: list[Value] = []
        lines = block.data.split(b"\n")
        for number, line in enumerate(lines, start=block.line):
            if not line.strip():
                if self._reading.places.lines and number < block.line + len(lines) - 1:
                    self._reading.places.skip(len(values))
                continue
            try:
                values.append(parse(line))
            except MalformedError as error:
                self.reject(block, number, error, line, ahead=len(values))
        return values

    def reject(self, block: Block, line: int, error: MalformedError, raw: bytes = b"", ahead: int = 0) -> None:
        reject = make_line_reject(self._slice, block, line, error.reason, error.detail, raw)
        self._reading.reject(reject, ahead)


# ---- texts ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    lines = _Lines(slice, reading)
    return lines.read(_Texts(lines, reading).of_block)


class _Texts:
    def __init__(self, lines: _Lines, reading: Reading) -> None:
        rules, self._value = reading.rules, reading.value
        assert rules.text_column is not None
        self._lines, self._rules, self._path = lines, rules, rules.text_column.split(".")
        fields = _fields(self._path, self._value)
        schema = None if fields is None else pa.schema(_typed(fields))
        self._options = schema and pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        # A lone surrogate from the command line: no line has such a name.
        self._name = np.frombuffer(self._path[0].encode("utf-8", "surrogatepass"), np.uint8)
        alone = len(self._path) == 1 and self._value is None
        self._kernel = kernel("json_texts", *_TEXTS_KERNEL) if alone else None

    def of_block(self, block: Block, blocks: Iterator[Block]) -> Iterator[Batch]:
        if block.kind != WHOLE:
            yield from self._giant(block, blocks)
            return
        texts, values = (self._take_block(block), None) if self._kernel else self._parse_block(block)
        if texts is None:
            texts, values = self._read_lines(block)
        yield from batches_of(texts, len(block.data), values)

    def _read_lines(self, block: Block) -> _TextsAndValues:
        value = self._value
        if value is None:
            found = self._lines.parsed(block, lambda line: text_of_line(line, self._path, self._rules))
            return pa.array(found, pa.large_string()), None

        def parse(line: bytes) -> tuple[str, float]:
            record = parse_json(line, self._rules)
            return text_of(record, self._path, self._rules), value.of_record(record)

        pairs = self._lines.parsed(block, parse)
        texts = pa.array([text for text, _ in pairs], pa.large_string())
        return texts, np.array([number for _, number in pairs], np.float64)

    def _take_block(self, block: Block) -> pa.LargeStringArray | None:
        """All texts of a block as most are; None when anything in it is odd."""
        assert self._kernel is not None
        data, lines = np.frombuffer(block.data, np.uint8), _count_lines(block)
        texts, offsets = pa.allocate_buffer(len(data), resizable=True), pa.allocate_buffer(8 * (lines + 1))
        ends, room = np.frombuffer(offsets, np.int64), np.frombuffer(texts, np.uint8)
        if self._kernel(data, self._name, room, ends) < 0:
            return None
        del room  # numpy holds the buffer until then
        texts.resize(int(ends[-1]), shrink_to_fit=True)
        return pa.LargeStringArray.from_buffers(lines, offsets, texts)

    def _parse_block(self, block: Block) -> _TextsAndValues:
        """All texts of a flawless block; None when any line needs a closer look."""
        data, lines, values = block.data, _count_lines(block), None
        if self._options is None or not _is_plain(data, lines):
            return None, None
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pyarrow.json.read_json(pa.BufferReader(data), read_options=options, parse_options=self._options)
            texts = _leaf(table, self._path)
            texts.validate(full=True)
            if self._value is not None:
                values = self._value.of_column(_leaf(table, self._value.path))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None, None
        return (texts, values) if texts.null_count == 0 and len(texts) == lines else (None, None)

    def _giant(self, block: Block, blocks: Iterator[Block]) -> Iterator[Batch]:
        from milldam.sources.giant_line import GiantLine, parts_of_line

        line = GiantLine(parts_of_line(block, blocks), self._rules, self._value)
        try:
            yield from line.batches(self._path)
        except MalformedError as error:
            self._lines.reject(block, block.line, error)
            yield Batch(pa.array([], pa.large_string()), bytes_read=line.bytes_read())


def _count_lines(block: Block) -> int:
    return block.line_ends + (not block.data.endswith(b"\n"))


def _is_plain(data: bytes, lines: int) -> bool:
    """Whether Arrow may have a block: what it makes of it is then what is made of it line by line.

    Every line must begin and end with a brace: then no object goes over several, and there are as many as lines only
    if each has one. Arrow skips fields without checking their UTF-8, takes what is nested deeper than Python's json
    does, and a null outside of all objects ends the process (pyarrow 26).
    """
    if not data:
        return False
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == _LINE_END)
    begins = np.concatenate(([0], ends + 1))[:lines]
    ends = np.append(ends, len(array))[:lines] - 1
    ends -= array[ends] == _RETURN
    if not (array[begins] == _OPEN).all() or not (array[ends] == _CLOSE).all() or _NULL_BEHIND_OBJECT.search(data):
        return False
    brackets = np.flatnonzero(array | _CASE == _OPEN)
    if (np.diff(np.searchsorted(brackets, np.append(begins, len(array)))) > _MOST_BRACKETS).any():
        return False
    try:
        buffers = pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data)
        pa.LargeStringArray.from_buffers(1, *buffers).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _fields(path: list[str], value: ValueField | None) -> dict[str, Any] | None:
    """What Arrow is to look for: the text, and a field beside it; None where one is within the other."""
    wanted = [(path, pa.large_string())]
    if value is not None:
        shorter = min(len(path), len(value.path))
        if path[:shorter] == value.path[:shorter]:
            return None
        wanted.append((value.path, pa.float64() if value.kind == "number" else pa.large_string()))
    fields: dict[str, Any] = {}
    for names, kind in wanted:
        here = fields
        for name in names[:-1]:
            here = here.setdefault(name, {})
        here[names[-1]] = kind
    return fields


def _typed(fields: dict[str, Any]) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.struct(_typed(kind)) if isinstance(kind, dict) else kind) for name, kind in fields.items()]


def _leaf(table: pa.Table, path: list[str]) -> pa.Array:
    column = table.column(path[0])
    if path[1:]:
        import pyarrow.compute as pc

        column = pc.struct_field(column, path[1:])
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def text_of_line(line: bytes, path: list[str], rules: TextRules) -> str:
    """The document on one line; raises MalformedError with what is wrong."""
    return text_of(parse_json(line, rules), path, rules)


def text_of(record: Any, path: list[str], rules: TextRules) -> str:
    text = record
    for name in path:
        text = text.get(name, _MISSING) if isinstance(text, dict) else _MISSING
    if text is _MISSING:
        found = ", ".join(f'"{key}"' for key in record) if isinstance(record, dict) else type(record).__name__
        raise MalformedError("no_field", f'no field "{".".join(path)}"; found {found or "none"}')
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise MalformedError("no_text", f'"{".".join(path)}" is {kind}, not text')
    return mended(text, rules)


# ---- rows ----


def read_rows(slice: Slice, reading: Reading) -> Iterator[dict[str, list[Any]]]:
    """Dicts as they are, a list for each column; a column that a row lacks is None."""
    from milldam.sources.rows import from_records

    lines = _Lines(slice, reading)
    for records in lines.read(_Records(lines, reading).of_block):
        ready = [records] if records else []
        del records  # nothing of a giant is held here while it is worked on
        if ready:
            yield from_records(ready.pop(), reading.columns)


class _Records:
    def __init__(self, lines: _Lines, reading: Reading) -> None:
        self._lines, self._reading, self._rules = lines, reading, reading.rules

    def of_block(self, block: Block, blocks: Iterator[Block]) -> Iterator[list[dict[str, Any]]]:
        if block.kind == WHOLE:
            yield self._lines.parsed(block, lambda line: record_of_line(line, self._rules))
            return
        from milldam.sources.giant_line import parts_of_line
        from milldam.sources.rows import JsonWeight, LargeRow

        giant = LargeRow(self._reading.room, self._reading.places, JsonWeight)
        parts, block = parts_of_line(block, blocks), replace(block, data=b"")
        for part in parts:
            giant.add(part.removesuffix(b"\n"))
            del part
        try:
            ready = [giant.whole()]
        except MalformedError as error:
            self._lines.reject(block, block.line, error)
            return
        del giant
        yield self._giant(block, ready)

    def _giant(self, block: Block, lines: list[bytes]) -> list[dict[str, Any]]:
        """The record of a giant line, which is taken out of `lines`: its bytes are gone when its value is made."""
        line, rules = lines.pop(), self._rules
        if line.isspace():
            return []
        head = line[: 4 * KEPT_RECORD_CHARS + 1]
        try:
            text, has_halves = decode_json(line, rules), _may_have_halves(line, rules)
            del line
            try:
                return [_as_record(json.loads(text), rules, has_halves=has_halves)]
            except (ValueError, RecursionError) as error:
                if rules.invalid_utf8 == "drop" and (told := decode_text(head, rules))[0] is None:
                    raise MalformedError("not_utf8", told[1]) from None
                raise MalformedError("bad_json", str(error)) from None
        except MalformedError as error:
            self._lines.reject(block, block.line, error, head)
            return []


def record_of_line(line: bytes, rules: TextRules) -> dict[str, Any]:
    """The object on one line; raises MalformedError with what is wrong."""
    if line[:1] == b"{" and b"\\u" not in line and rules.invalid_utf8 != "drop":
        # As most are: there is nothing to look for. What is wrong with others is told below.
        try:
            text = line.decode()
            record: dict[str, Any]
            record, end = _DECODER.raw_decode(text)
            if end == len(text):
                return record
        except (ValueError, RecursionError):
            pass
    return _as_record(parse_json(line, rules), rules, has_halves=_may_have_halves(line, rules))


def _may_have_halves(line: bytes, rules: TextRules) -> bool:
    """Only bytes that are no UTF-8, and escapes, leave halves of surrogate pairs: look for them no further."""
    return rules.invalid_utf8 == "drop" or _SURROGATE.search(line) is not None


def _as_record(record: Any, rules: TextRules, *, has_halves: bool) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise MalformedError("no_object", f"{type(record).__name__} where an object should be: a row is {{...}}")
    sound: dict[str, Any] = _mended(record, rules) if has_halves else record
    return sound


def _mended(value: Any, rules: TextRules) -> Any:
    if isinstance(value, str):
        return mended(value, rules)
    if isinstance(value, list):
        return [_mended(one, rules) for one in value]
    if isinstance(value, dict):
        return {mended(name, rules): _mended(one, rules) for name, one in value.items()}
    return value


# ---- fields ----


def first_records(slice: Slice, limit: int, *, outlines: bool = True) -> list[dict[str, Any]]:
    """The records at a file's head; those with bytes that are no UTF-8 only where there are no others.

    `outlines`: of a giant record, its fields and what their texts begin with; else all of it, and where it is larger
    than `_LARGEST_LOOKED_AT`, the records after it.
    """
    try:
        with open_head(slice.path) as file:
            blocks = json_blocks(file, slice)
            for block in blocks:
                if block.kind == WHOLE:
                    return _objects([line for _, line in islice(lines_of(block), limit)])
                if outlines:
                    from milldam.sources.giant_line import GiantLine, parts_of_line

                    return [GiantLine(parts_of_line(block, blocks), TextRules(invalid_utf8="replace")).outline()]
                if found := _objects(_of_bounded_size(block, blocks)):
                    return found
    except (DamagedError, ValueError, RecursionError):
        pass
    return []


def _of_bounded_size(block: Block, blocks: Iterator[Block]) -> list[bytes]:
    """The giant line that a block begins; nothing if it is larger than `_LARGEST_LOOKED_AT`."""
    from milldam.sources.giant_line import parts_of_line

    line: list[bytes] = []
    size = 0
    for part in parts_of_line(block, blocks):
        size += len(part)
        line = [*line, part] if size <= _LARGEST_LOOKED_AT else []
    return [b"".join(line)] if line else []


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rules in (TextRules(), TextRules(invalid_utf8="replace")):
        for line in lines if not found else ():
            try:
                found.append(record_of_line(line, rules))
            except MalformedError:
                continue
    return found


def json_columns(slice: Slice) -> list[str]:
    """The fields of the records at a file's head; empty when there are none."""
    return list(dict.fromkeys(name for record in first_records(slice, _LINES_SEEN, outlines=False) for name in record))
