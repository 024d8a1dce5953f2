"""A JSON text of any size -> its values, cut out of the stream one at a time.

Holds the value that is being read and a block beside it. Values are decoded by the standard library at its full speed;
what encloses them (the list of articles, an article's list of paragraphs) is walked through and never held. A string
can be read in parts, and any value be passed over, both in the memory of a block; what is passed over is checked as
strictly as what is read. Of a value that is larger than it may be, the strings and lists that make it so are passed
over, and `TooLarge` stands for them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from milldam.sources.decoding import number_or_digits

BLOCK_BYTES = 1 << 18
LARGEST_VALUE = 1 << 25
"""Characters of a single value, unless told otherwise: a paragraph with all its questions, not the file."""
LONGEST_KEY = 1 << 16
"""Characters of a key; what a longer one has beyond them is left out."""

_GOES_ON = ("", ".", "e", "E")
_CUT_MARGIN = 16
"""An error this close to the end of what was read may come from the cut alone."""
_FIRST_PART = 1 << 12
"""Of most strings this is more than the whole, so that little is copied to look for their end."""
_DEEPEST = 1 << 20
_CLOSING = {"[": "]", "{": "}"}


def _grammar() -> tuple[str, str, str]:
    """Patterns of white space, of a string, and of a value with two levels below it.

    They match what is short: a regular expression holds on to every repetition. What is longer goes the slower way.
    """
    space = r"[ \t\n\r]*+"
    string = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+){0,64}"'
    number = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
    scalar = value = rf"(?:{number}|{string}|true|false|null|NaN|-?Infinity)"
    for _ in range(3):
        items = rf"(?:{value}{space}(?:,{space}(?!\])|(?=\]))){{0,64}}"
        fields = rf"(?:{string}{space}:{space}{value}{space}(?:,{space}(?!\}})|(?=\}}))){{0,64}}"
        value = rf"(?:{scalar}|\[{space}{items}\]|\{{{space}{fields}\}})"
    return space, string, value


_SPACE = re.compile(_grammar()[0])
_PLAIN_STRING = re.compile(r'[^"\\\x00-\x1f]*+"')


@cache
def _container() -> re.Pattern[str]:
    """Compiled when it is first needed, as `_members`: that takes 20 ms."""
    return re.compile(rf"(?=[\[{{]){_grammar()[2]}")


@cache
def _members() -> dict[str, re.Pattern[str]]:
    """By what closes around them."""
    space, string, value = _grammar()
    return {
        "]": re.compile(rf"(?:{space}{value}{space},){{1,512}}"),
        "}": re.compile(rf"(?:{space}{string}{space}:{space}{value}{space},){{1,512}}"),
    }


# A cut must not fall into an escape, or between the halves of a surrogate pair.
_UNFINISHED = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|u[0-9a-fA-F]{0,3})?\Z")


class JsonError(ValueError):
    """The text is not JSON; the message says where."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Stands for a string or a list that was passed over."""

    bytes: int
    """Of its JSON."""

    def __str__(self) -> str:
        return f"({self.bytes:,} bytes, left out)"


class _Text:
    """What `read(size)` gives, decoded: from where the next character is, as much as was asked for."""

    def __init__(self, read: Callable[[int], bytes], errors: str) -> None:
        self._read = read
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors)
        self.held, self.at, self.ended = "", 0, False
        self._before, self._bytes_read = 0, 0

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _SPACE.match(self.held, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.held):
                return self.held[self.at]
            if self.ended:
                return ""
            self.more()

    def take(self, character: str) -> None:
        found = self.peek()
        if found != character:
            raise self.wrong(f'"{character}" expected, not {json.dumps(found) if found else "the end"}')
        self.at += 1

    def more(self) -> None:
        """Read on, as much again as is held: a long value is not decoded more than twice over."""
        block = self._read(max(BLOCK_BYTES, len(self.held) - self.at))
        self._bytes_read += len(block)
        self.ended = not block
        self._before += self.at
        self.held = self.held[self.at :] + self._bytes.decode(block, final=self.ended)
        self.at = 0

    def skip_rest(self) -> None:
        """Read to the end and look at nothing."""
        while not self.ended:
            self.at = len(self.held)
            self.more()

    @property
    def place(self) -> int:
        """In characters."""
        return self._before + self.at

    def byte_place(self) -> int:
        return self._bytes_read - len(self.held[self.at :].encode("utf-8", "surrogateescape"))

    def may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self.held) - _CUT_MARGIN

    def wrong(self, what: str, at: int | None = None) -> JsonError:
        """`at`: where in the text; None: at the next character."""
        return JsonError(f"{what} at character {self._before + (self.at if at is None else at):,}")


class JsonStream:
    """Reads forward through the text that `read(size)` gives, which must be UTF-8.

    Bytes that are not become lone surrogates, so that whoever uses a text finds them; `errors` names another way.
    `items` and `fields` walk through an array and an object; the value at hand must be read, passed over or walked
    through before the next one is asked for. `strict`: neither a byte order mark nor control characters in strings.

    largest   characters of a value that is read whole; in a larger one, those of each string and each list
    wanted    the fields that are read of a larger one; None: all
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        largest: int = LARGEST_VALUE,
        wanted: Container[str] | None = None,
        *,
        strict: bool = False,
        errors: str = "surrogateescape",
    ) -> None:
        self._text = text = _Text(read, errors)
        self._largest, self._wanted = largest, wanted
        self._strict = strict
        self._json = json.JSONDecoder(strict=strict, parse_int=number_or_digits)
        self._passed_over = 0
        if not strict and text.peek() == "\ufeff":
            text.at += 1

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        return self._text.peek()

    def value(self) -> Any:
        """The next value, whole; or without what makes it larger than it may be."""
        text = self._text
        text.peek()
        while True:
            value, stop, whole = None, text.at, False
            try:
                value, stop = self._json.raw_decode(text.held, text.at)
                # A number that reaches to the end of the block, or whose fraction is cut, goes on in the next one.
                whole = text.ended or text.held[stop : stop + 1] not in _GOES_ON
            except json.JSONDecodeError as error:
                if text.ended or not text.may_be_cut(error):
                    raise text.wrong(error.msg, error.pos) from None
            except RecursionError:
                raise text.wrong("nested too deep") from None
            except ValueError as error:
                raise text.wrong(str(error)) from None  # a number with thousands of digits
            if (stop if whole else len(text.held)) - text.at > self._largest:
                return self._value_in_parts()
            if whole:
                text.at = stop
                return value
            text.more()

    def _value_in_parts(self) -> Any:
        """A value that is larger than it may be, without the strings and lists that make it so."""
        text = self._text
        kind, begun = text.peek(), text.byte_place()
        if kind == "{":
            return {key: self.value() for key in self._wanted_fields()}
        items = None
        if kind == "[":
            items = self._items_in_parts()
        elif kind == '"':
            self._pass_over()
        else:
            raise text.wrong(f"a number of more than {self._largest:,} characters")
        return TooLarge(text.byte_place() - begun) if items is None else items

    def _wanted_fields(self) -> Iterator[str]:
        for key in self.fields():
            if self._wanted is None or key in self._wanted:
                yield key
            else:
                self._pass_over()

    def _items_in_parts(self) -> list[Any] | None:
        """The items of a list; None: what is kept of them is larger than it may be."""
        text = self._text
        begun, passed_over = text.place, self._passed_over
        items: list[Any] | None = []
        for _ in self.items():
            if items is None:
                self._skip_members(["]"])
                self.skip()
                continue
            items.append(self.value())
            if text.place - begun > self._largest + self._passed_over - passed_over:
                items = None
        if items is None:
            self._passed_over = passed_over + text.place - begun
        return items

    def _pass_over(self) -> None:
        text = self._text
        begun = text.place
        self.skip()
        self._passed_over += text.place - begun

    def string_parts(self) -> Iterator[str]:
        """The next value, which must be a string, in parts of about a block."""
        text = self._text
        text.take('"')
        short = _PLAIN_STRING.match(text.held, text.at)
        if short is not None:
            start, text.at = text.at, short.end()
            yield text.held[start : short.end() - 1]
            return
        size = _FIRST_PART
        while True:
            looked_at = min(len(text.held), text.at + size)
            all_there = text.ended and looked_at == len(text.held)
            stop = looked_at if all_there else _before_unfinished(text.held, text.at, looked_at)
            # With a quote put behind it, the string ends here or there.
            try:
                part, end = scanstring(text.held[text.at : stop] + '"', 0, self._strict)
            except json.JSONDecodeError as error:
                raise text.wrong(error.msg, text.at + error.pos) from None
            closed = text.at + end <= stop
            text.at = text.at + end if closed else stop
            yield part
            if closed:
                return
            if all_there:
                raise text.wrong("a string is not closed")
            if looked_at == len(text.held):
                text.more()
            size = len(text.held)

    def skip(self) -> None:
        """Pass over the next value, whatever its size, and see that it is JSON."""
        text = self._text
        around: list[str] = []  # what closes each array and object that was entered, from the outside in
        while True:
            self._skip_members(around)
            opening = text.peek()
            if opening == '"':
                for _ in self.string_parts():
                    pass
            elif opening not in _CLOSING:
                self.value()
            elif (whole := _container().match(text.held, text.at)) is not None:
                text.at = whole.end()
            else:
                text.at += 1
                around.append(_CLOSING[opening])
                if len(around) > _DEEPEST:
                    raise text.wrong(f"nested deeper than {_DEEPEST:,} levels")
                if text.peek() != around[-1]:
                    continue
            while around and text.peek() == around[-1]:
                text.take(around.pop())
            if not around:
                return
            text.take(",")

    def _skip_members(self, around: list[str]) -> None:
        """Go on to a value that is long, deep, cut off, or the last one of what is around it."""
        text = self._text
        if around:
            while (members := _members()[around[-1]].match(text.held, text.at)) is not None:
                text.at = members.end()
            if around[-1] == "}":
                self._key()

    def skip_rest(self) -> None:
        """Read to the end and look at nothing."""
        self._text.skip_rest()

    def items(self) -> Iterator[int]:
        """Walk through an array: the number of each item, when it is its turn to be read."""
        yield from (number for number, _ in enumerate(self._members("[", "]")))

    def fields(self) -> Iterator[str]:
        """Walk through an object: each key, when its value is the next to be read."""
        for _ in self._members("{", "}"):
            yield self._key()

    def _key(self) -> str:
        """A key and the colon behind it."""
        text = self._text
        if text.peek() != '"':
            raise text.wrong("a key in double quotes expected")
        key = ""
        for part in self.string_parts():
            key += part[: LONGEST_KEY - len(key)]
        text.take(":")
        return key

    def require_end(self) -> None:
        """Raises JsonError when there is more."""
        text = self._text
        if text.peek():
            raise text.wrong("something after the end of the JSON text")

    def _members(self, opening: str, closing: str) -> Iterator[None]:
        text = self._text
        text.take(opening)
        if text.peek() == closing:
            text.take(closing)
            return
        while True:
            yield
            if text.peek() == closing:
                text.take(closing)
                return
            text.take(",")


def _before_unfinished(text: str, at: int, stop: int) -> int:
    """The last place up to `stop` where a string may be cut."""
    match = _UNFINISHED.search(text, max(at, stop - _CUT_MARGIN), stop)
    if match is None:
        return stop
    # An escaped backslash before it would make the "escape" plain text: count them back.
    before = text[at : match.start()]
    return match.start() - (len(before) - len(before.rstrip("\\"))) % 2
