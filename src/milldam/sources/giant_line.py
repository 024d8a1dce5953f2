"""One JSON line of any size -> the text of one field, in batches of bounded size, and the number of another.

The line is read once, as it comes. Whatever is neither is checked and passed over. The text is handed on before
the end of the line is seen, and taken back when the line turns out to be no JSON, or to have the field once more: the
last one counts. Memory: a few blocks.

One CSV record of any size -> its fields in parts, as Python's csv module reads them. Memory: a piece of text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from milldam.sources.arrays import gathered, one_text, open_batches, whole_characters, with_value
from milldam.sources.batch import KEPT_RECORD_CHARS, Batch, MalformedError, TextRules
from milldam.sources.compression import DamagedError
from milldam.sources.decoding import (
    HEAD_BYTES,
    HEAD_CHARACTERS,
    describe_encoding,
    mend,
    require_encoding,
    require_mendable,
)
from milldam.sources.json_stream import JsonError, JsonStream
from milldam.sources.records import LAST, Block
from milldam.sources.values import LONGEST, NOTHING, ValueField

_OUTLINE, _SAMPLE, _LEVELS = 1 << 20, 1 << 12, 16
"""Characters of an outline and of each text in it; objects within objects."""
_ERRORS = {"drop": "surrogateescape", "replace": "replace"}
_Parts = Generator[pa.LargeStringArray | None, None, MalformedError | None]
"""Parts of the text, None where those before it don't count; then what is wrong with it."""


def parts_of_line(first: Block, blocks: Iterator[Block]) -> Iterator[bytes]:
    """The bytes of the giant line that a block begins; what follows it stays in `blocks`."""
    yield first.data
    del first
    for block in blocks:
        yield block.data
        if block.kind == LAST:
            return


class GiantLine:
    """Reads the parts of a line, to their end whatever is wrong with them."""

    def __init__(self, parts: Iterator[bytes], rules: TextRules, value: ValueField | None = None) -> None:
        self._parts, self._rules = parts, rules
        self._value, self._number = value, NOTHING
        self._head, self._size, self._told, self._room = b"", 0, 0, _OUTLINE
        errors = _ERRORS.get(rules.invalid_utf8, "strict")
        self._stream = JsonStream(self._next_part, strict=True, errors=errors)

    def _next_part(self, _: int = 0) -> bytes:
        part = next(self._parts, b"")
        self._head += part[: HEAD_BYTES - len(self._head)]
        self._size += len(part)
        return part

    def bytes_read(self) -> int:
        """How many since the last time, for progress."""
        before, self._told = self._told, self._size
        return self._size - before

    # ---- the text ----

    def batches(self, path: list[str]) -> Iterator[Batch]:
        """The text at a path, in open batches where it is long; raises MalformedError when there is none."""
        number = None if self._value is None else lambda: self._number
        for batch in with_value(open_batches(self._checked(path)), number):
            yield replace(batch, bytes_read=self.bytes_read())

    def _checked(self, path: list[str]) -> Iterator[pa.LargeStringArray | None]:
        try:
            try:
                fault = yield from self._find(path, None if self._value is None else self._value.path, ".".join(path))
                self._stream.require_end()
            except JsonError as error:
                # As in a small line: what is no UTF-8 further on says more.
                self._stream.skip_rest()
                require_encoding(self._head[: whole_characters(self._head)], self._rules)
                raise MalformedError("bad_json", str(error)) from None
        except UnicodeDecodeError as error:
            problem = describe_encoding(self._head, error, self._size - len(error.object))
            while self._next_part():
                pass
            raise MalformedError("not_utf8", problem) from None
        if fault is not None:
            raise fault

    def _find(self, path: list[str], beside: list[str] | None, field: str) -> _Parts:
        """The text at a path from the value that is next; on the way, the number at another."""
        if not path:
            return (yield from self._text(field))
        fault: MalformedError | None = MalformedError("no_field", f'no field "{field}"')
        if self._stream.peek() != "{":
            self._stream.skip()
            return fault
        for key in self._stream.fields():
            inside = None
            if beside and key == beside[0]:
                inside, self._number = beside[1:], NOTHING
            if key == path[0]:
                yield None
                fault = yield from self._find(path[1:], inside, field)
            elif inside is not None:
                self._find_number(inside)
            else:
                self._stream.skip()
        return fault

    def _find_number(self, path: list[str]) -> None:
        """What the number at a path from the value that is next is."""
        opening = self._stream.peek()
        if path and opening == "{":
            for key in self._stream.fields():
                if key == path[0]:
                    self._number = NOTHING
                    self._find_number(path[1:])
                else:
                    self._stream.skip()
        elif path or opening in ("[", "{"):
            self._stream.skip()
        else:
            assert self._value is not None
            self._number = self._value.of(self._short_text() if opening == '"' else self._stream.value())

    def _short_text(self) -> str:
        text = ""
        for part in self._stream.string_parts():
            text += part[: LONGEST + 1 - len(text)]
        return text

    def _text(self, field: str) -> _Parts:
        opening = self._stream.peek()
        if opening != '"':
            kind = {"[": "list", "{": "dict", "n": "null", "t": "bool", "f": "bool"}.get(opening, "a number")
            self._stream.skip()
            return MalformedError("no_text", f'"{field}" is {kind}, not text')
        fault, head = None, None
        for part in gathered(self._stream.string_parts()):
            head = part[:HEAD_CHARACTERS] if head is None else head
            if fault is None:
                try:
                    yield self._mended(part, head)
                except MalformedError as error:
                    fault = error
        return fault

    def _mended(self, part: str, head: str) -> pa.LargeStringArray:
        try:
            return one_text(part)
        except UnicodeEncodeError:
            require_mendable(head, self._rules)
            return one_text(mend(part, self._rules))

    # ---- the fields ----

    def outline(self) -> dict[str, Any]:
        """The line's fields and what their texts begin with, up to where it breaks off; of other values, None."""
        record: dict[str, Any] = {}
        with suppress(JsonError, DamagedError, UnicodeDecodeError):
            if self._stream.peek() == "{":
                self._outline(record, _LEVELS)
        return record

    def _outline(self, record: dict[str, Any], levels: int) -> None:
        for key in self._stream.fields():
            self._room -= len(key) + 1
            opening = self._stream.peek()
            if self._room < 0 or opening not in ('"', "{") or not levels:
                self._stream.skip()
                record |= {key: None} if self._room >= 0 else {}
            elif opening == "{":
                record[key] = {}
                self._outline(record[key], levels - 1)
            else:
                parts = self._stream.string_parts()
                record[key] = next(parts)[:_SAMPLE]
                self._room -= len(record[key])
                for _ in parts:
                    pass


_QUOTED = re.compile(r'[^"]*')
_HEAD, _HEADS = 1 << 12, 1 << 22
"""Characters of the head of a field, and of all heads."""
_LINE_END = re.compile(r"[^\n]*\n?")


class GiantRecord:
    """Reads one record that begins on `line` with `text`, and goes on in the pieces that follow."""

    def __init__(self, line: int, text: str, pieces: Iterator[str], delimiter: str) -> None:
        self.line, self.begin = line, text[: KEPT_RECORD_CHARS + 1]
        self._text, self._at, self._pieces = text, 0, pieces
        self._delimiter = delimiter
        self._plain = re.compile(rf"[^\r\n{re.escape(delimiter)}]*")
        self.line_ends = 0
        self._ended = False

    @property
    def rest(self) -> str:
        """What lies behind the record."""
        return self._text[self._at :]

    def parts(self) -> Iterator[tuple[int, str]]:
        """(number of the field, a part of it) to the end of the record; raises MalformedError."""
        field = 0
        while True:
            yield field, ""
            if self._peek() == '"':
                self._at += 1
                for part in self._quoted():
                    yield field, part
            # Not quoted, or behind the quote that closes it: as it stands, quotes included.
            for part in self._run(self._plain):
                yield field, part
            if self._peek() != self._delimiter:
                break
            self._at += 1
            field += 1
        if self._peek() == "\r":
            self._at += 1
            if self._peek() not in ("\n", ""):
                raise MalformedError("bad_row", "a carriage return in a field without quotes")
        self.end()

    def heads(self) -> list[str]:
        """What each field begins with, as many of them as there is room for."""
        heads: list[str] = []
        room = _HEADS
        for field, part in self.parts():
            if field == len(heads) and room > 0:
                heads.append("")
                room -= 1
            if field < len(heads):
                part = part[: min(room, _HEAD - len(heads[field]))]
                heads[field] += part
                room -= len(part)
        return heads

    def end(self) -> None:
        """Go on behind the next line end, when the record has not ended yet."""
        lines = self._run(_LINE_END) if not self._ended else iter(())
        self._ended = True
        for _ in lines:
            if self._text[self._at - 1] == "\n":
                return

    def _quoted(self) -> Iterator[str]:
        """A field up to the quote that closes it; one that is doubled stands for itself."""
        while True:
            yield from self._run(_QUOTED)
            self._at += 1
            if self._peek() != '"':
                return
            yield '"'
            self._at += 1

    def _run(self, pattern: re.Pattern[str]) -> Iterator[str]:
        """What matches from here on, a part for each piece."""
        while self._peek():
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if match[0]:
                self.line_ends += match[0].count("\n")
                yield match[0]
            if self._at < len(self._text):
                return

    def _peek(self) -> str:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            try:
                piece = next(self._pieces, None)
            except DamagedError as error:
                error.cut, error.line = self.begin.encode("utf-8", "surrogateescape"), self.line
                raise
            if piece is None:
                return ""
            self._text, self._at = piece, self._at - len(self._text)
        return self._text[self._at]
