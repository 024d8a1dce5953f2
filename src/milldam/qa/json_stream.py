"""A JSON text of any size -> its values, cut out of the stream one at a time.

Holds the value that is being read and a block beside it. Values are decoded by the standard library at its full speed;
what encloses them (the list of articles, an article's list of paragraphs) is walked through and never held.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

BLOCK_BYTES = 1 << 18
LARGEST_VALUE = 1 << 25
"""Characters of a single value: a paragraph with all its questions, not the file."""

_SPACE = re.compile(r"[ \t\n\r]*")
_GOES_ON = ("", ".", "e", "E")
_CUT_MARGIN = 16
"""An error this close to the end of what was read may come from the cut alone."""


class JsonError(ValueError):
    """The text is not JSON; the message says where."""


class JsonStream:
    """Reads forward through the text that `read(size)` gives, which must be UTF-8.

    Bytes that are not become lone surrogates, so that whoever uses a text finds them. `items` and `fields` walk through
    an array and an object; the value at hand must be read, or walked through, before the next one is asked for.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder(strict=False)
        self._text, self._at, self._before = "", 0, 0
        self._ended = False
        if self.peek() == "\ufeff":
            self._at += 1

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def value(self) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                value, stop = self._json.raw_decode(self._text, self._at)
                # A number that reaches to the end of the block, or whose fraction is cut, goes on in the next one.
                if self._ended or self._text[stop : stop + 1] not in _GOES_ON:
                    self._at = stop
                    return value
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise JsonError(f"{error.msg} at character {self._before + error.pos:,}") from None
            except RecursionError:
                raise self._wrong("nested too deep") from None
            self._more()

    def items(self) -> Iterator[int]:
        """Walk through an array: the number of each item, when it is its turn to be read."""
        yield from (number for number, _ in enumerate(self._members("[", "]")))

    def fields(self) -> Iterator[str]:
        """Walk through an object: each key, when its value is the next to be read."""
        for _ in self._members("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise self._wrong("a key must be a string")
            self._take(":")
            yield key

    def _members(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        if self.peek() == closing:
            self._take(closing)
            return
        while True:
            yield
            if self.peek() == closing:
                self._take(closing)
                return
            self._take(",")

    def _take(self, character: str) -> None:
        found = self.peek()
        if found != character:
            raise self._wrong(f'"{character}" expected, not {json.dumps(found) if found else "the end"}')
        self._at += 1

    def _more(self) -> None:
        """Read on, as much again as is held: a long value is not decoded more than twice over."""
        held = len(self._text) - self._at
        if held > LARGEST_VALUE:
            raise self._wrong(f"a single value of more than {LARGEST_VALUE:,} characters")
        block = self._read(max(BLOCK_BYTES, held))
        self._ended = not block
        self._before += self._at
        self._text = self._text[self._at :] + self._bytes.decode(block, final=self._ended)
        self._at = 0

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _CUT_MARGIN

    def _wrong(self, what: str) -> JsonError:
        return JsonError(f"{what} at character {self._before + self._at:,}")
