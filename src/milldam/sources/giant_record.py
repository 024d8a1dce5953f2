"""One CSV record of any size -> its fields in parts, as Python's csv module reads them. Memory: a piece of text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from milldam.sources.batch import KEPT_RECORD_CHARS, MalformedError
from milldam.sources.compression import DamagedError

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
