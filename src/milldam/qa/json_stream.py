"""A JSON text of any size -> its values, cut out of the stream one at a time.

Holds the value that is being read and a block beside it. Values are decoded by the standard library at its full speed;
what encloses them (the list of articles, an article's list of paragraphs) is walked through and never held. Of a value
that is larger than it may be, the strings and lists that make it so are passed over, and `TooLarge` stands for them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 1 << 18
LARGEST_VALUE = 1 << 25
"""Characters of a single value, unless told otherwise: a paragraph with all its questions, not the file."""

_SPACE = re.compile(r"[ \t\n\r]*")
_GOES_ON = ("", ".", "e", "E")
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT = rf'[^][{{}}"]++|"{_IN_STRING.pattern}"'
_WHOLE = re.compile(rf"(?:{_FLAT}|\{{(?:{_FLAT})*+\}}|\[(?:{_FLAT})*+\])*+", re.DOTALL)
"""What ends in the text at hand, inside a list or an object: numbers, strings, lists and objects of these."""
_CUT_MARGIN = 16
"""An error this close to the end of what was read may come from the cut alone."""


class JsonError(ValueError):
    """The text is not JSON; the message says where."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Stands for a string or a list that was passed over."""

    bytes: int
    """Of its JSON."""

    def __str__(self) -> str:
        return f"({self.bytes:,} bytes, left out)"


class JsonStream:
    """Reads forward through the text that `read(size)` gives, which must be UTF-8.

    Bytes that are not become lone surrogates, so that whoever uses a text finds them. `items` and `fields` walk through
    an array and an object; the value at hand must be read, skipped or walked through before the next one is asked for.

    largest   characters of a value that is read whole; in a larger one, those of each string and each list
    wanted    the fields that are read of a larger one; None: all
    """

    def __init__(
        self, read: Callable[[int], bytes], largest: int = LARGEST_VALUE, wanted: Container[str] | None = None
    ) -> None:
        self._read, self._largest, self._wanted = read, largest, wanted
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder(strict=False)
        self._text, self._at, self._before, self._bytes_read, self._passed = "", 0, 0, 0, 0
        self._ended = False
        if self.peek() == "\ufeff":
            self._at += 1

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._at = _end(_SPACE, self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def value(self) -> Any:
        """The next value, whole; or without what makes it larger than it may be."""
        self.peek()
        while True:
            value, stop, whole = None, self._at, False
            try:
                value, stop = self._json.raw_decode(self._text, self._at)
                # A number that reaches to the end of the block, or whose fraction is cut, goes on in the next one.
                whole = self._ended or self._text[stop : stop + 1] not in _GOES_ON
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise JsonError(f"{error.msg} at character {self._before + error.pos:,}") from None
            except RecursionError:
                raise self._wrong("nested too deep") from None
            except ValueError as error:
                raise self._wrong(str(error)) from None
            if (stop if whole else len(self._text)) - self._at > self._largest:
                return self._value_in_parts()
            if whole:
                self._at = stop
                return value
            self._more()

    def _value_in_parts(self) -> Any:
        """A value that is larger than it may be, without the strings and lists that make it so."""
        kind, begun = self.peek(), self._byte_place()
        if kind == "{":
            return {key: self.value() for key in self._wanted_fields()}
        items = None
        if kind == "[":
            items = self._items_in_parts()
        elif kind == '"':
            self.skip()
        else:
            raise self._wrong(f"a number of more than {self._largest:,} characters")
        return TooLarge(self._byte_place() - begun) if items is None else items

    def _wanted_fields(self) -> Iterator[str]:
        for key in self.fields():
            if self._wanted is None or key in self._wanted:
                yield key
            else:
                self.skip()

    def _items_in_parts(self) -> list[Any] | None:
        """The items of a list; None: what is kept of them is larger than it may be."""
        begun, passed = self._place, self._passed
        items = []
        for _ in self.items():
            items.append(self.value())
            if self._place - begun > self._largest + self._passed - passed:
                self._pass(1)
                self._passed = passed + self._place - begun
                return None
        return items

    def skip(self) -> None:
        """Pass over the next value without holding it; its brackets and strings alone are looked at."""
        begun = self._place
        if self.peek() in ("[", "{", '"'):
            self._pass(0)
        else:
            self.value()
        self._passed += self._place - begun

    def _pass(self, depth: int) -> None:
        """Go on to the end of so many lists and objects around this place; 0: of the value at hand."""
        while True:
            kind = self.peek()
            if depth and (stop := _end(_WHOLE, self._text, self._at)) > self._at:
                self._at = stop
            elif kind == '"':
                self._skip_string()
            elif kind:
                depth += 1 if kind in ("[", "{") else -1
                self._at += 1
            else:
                raise self._wrong("the end, inside a value")
            if not depth:
                return

    def _skip_string(self) -> None:
        self._at += 1
        while True:
            self._at = _end(_IN_STRING, self._text, self._at)
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return
            if self._ended:
                raise self._wrong("the end, inside a string")
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
        block = self._read(max(BLOCK_BYTES, len(self._text) - self._at))
        self._bytes_read += len(block)
        self._ended = not block
        self._before += self._at
        self._text = self._text[self._at :] + self._bytes.decode(block, final=self._ended)
        self._at = 0

    @property
    def _place(self) -> int:
        """In characters."""
        return self._before + self._at

    def _byte_place(self) -> int:
        return self._bytes_read - len(self._text[self._at :].encode("utf-8", "surrogateescape"))

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _CUT_MARGIN

    def _wrong(self, what: str) -> JsonError:
        return JsonError(f"{what} at character {self._place:,}")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None
    return match.end()
