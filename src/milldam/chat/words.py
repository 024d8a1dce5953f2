"""Words that know who said them: a template runs on them as on any text, and what it writes tells whose words it is.

    {% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}
    -> "<user>", words of ("messages", 0, "content"), "<assistant>", words of ("messages", 1, "content")

`Words` is a text in pieces, each with its place in the conversation, or None where the template wrote it. It may be
joined with other texts, cut, changed and compared like any text. What a filter or a function makes of words is theirs
as a whole (`blurred`), so that nobody's words are taken for the template's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

Source = tuple[Any, ...]
"""A place in a conversation: ("messages", 3, "content"), ("tools", 0)."""
Piece = tuple[str, Source | None]

SEVERAL: Source = ("several", None)
"""In place of a source: words of more than one message."""


class Words(str):
    """A text with words of the conversation in it."""

    __slots__ = ("_pieces",)  # no template can name it
    _pieces: list[Piece]

    def __new__(cls, text: str, pieces: list[Piece] | None = None) -> Any:
        if pieces is None:  # Jinja's functions make a text of the type that they get
            return str(text)
        words = str.__new__(cls, text)
        words._pieces = pieces
        return words

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return joined_words([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return joined_words([other, self]) if isinstance(other, str) else NotImplemented

    def __getitem__(self, at: Any) -> Any:
        result = str.__getitem__(self, at)
        if isinstance(at, slice) and at.step in (None, 1):
            return _cut(self, at.indices(len(self))[0], result)
        return blurred(result, self)

    def __iter__(self) -> Iterator[Any]:
        return iter([blurred(letter, self) for letter in str.__iter__(self)])


class WordsObject(dict[str, Any]):
    """An object of JSON in a conversation, such as the arguments of a call: as JSON, it is words as a whole."""

    __slots__ = ("_source",)

    def __init__(self, values: dict[str, Any], source: Source) -> None:
        super().__init__(values)
        self._source = source


def marked(value: Any, source: Source) -> Any:
    """A value of a conversation with its texts as words, but for roles and empty texts."""
    if isinstance(value, str):
        return Words(value, [(value, source)]) if value else value
    if isinstance(value, list) and len(value):
        return [marked(one, (*source, number)) for number, one in enumerate(value)]
    if isinstance(value, dict):
        values = {
            # As for a text alone, without a call for each.
            key: Words(one, [(one, (*source, key))]) if type(one) is str and one else marked(one, (*source, key))
            for key, one in value.items()
        }
        if len(source) == 2 and source[0] == "messages" and "role" in value:
            values["role"] = value["role"]
        is_object = source[-1] == "arguments" or (source[0] == "tools" and len(source) == 2)
        return WordsObject(values, source) if is_object else values
    return value


def pieces_of(text: str) -> list[Piece]:
    return text._pieces if isinstance(text, Words) else [(text, None)]


def joined_words(parts: Iterable[str]) -> str:
    """Texts as one."""
    parts = list(parts)
    text = "".join(parts)
    if Words not in map(type, parts):
        return text
    words: str = Words(text, [piece for part in parts if part for piece in pieces_of(part)])
    return words


def blurred(text: str, *made_of: Any) -> str:
    """A text that was made of values: where there are words in them, it is theirs as a whole."""
    if not text or isinstance(text, Words):
        return text
    sources = list(sources_in(made_of))
    if not sources:
        return text
    same = takewhile(lambda keys: len(set(keys)) == 1, zip(*sources, strict=False))
    source = tuple(keys[0] for keys in same)
    words: str = Words(text, [(text, source if len(source) > 1 else SEVERAL)])
    return words


def sources_in(value: Any) -> Iterator[Source]:
    """Where all words that a value holds are from."""
    if isinstance(value, Words):
        yield from (source for _, source in value._pieces if source is not None)
    elif isinstance(value, WordsObject):
        yield value._source
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from sources_in(one)
    elif isinstance(value, dict):
        yield from sources_in(list(value.items()))


def _cut(words: Words, begin: int, result: str) -> Any:
    """What is left of words that were stripped or sliced, from a position on."""
    at, end, left = 0, begin + len(result), list[Piece]()
    for text, source in words._pieces:
        left.append((text[max(begin - at, 0) : max(end - at, 0)], source))
        at += len(text)
    left = [piece for piece in left if piece[0]]
    return Words(str.__str__(result), left) if any(source for _, source in left) else result


def _followed(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Words, *arguments: Any, **named: Any) -> Any:
        result = plain(self, *arguments, **named)
        if isinstance(result, bytes):
            raise TypeError("the template takes words for bytes")
        if isinstance(result, str):
            if name in ("strip", "lstrip", "rstrip"):
                return _cut(self, 0 if name == "rstrip" else len(self) - len(str.lstrip(self, *arguments)), result)
            return blurred(result, self, arguments, named)
        if isinstance(result, (list, tuple)):
            return type(result)(blurred(str(one), self) for one in result)
        return result

    return method


_AS_THEY_ARE = {"__class__", "__init__", "__getattribute__", "__len__", "__repr__", "__sizeof__", "__getnewargs__"}
_AS_THEY_ARE |= {"__contains__", "__hash__", "maketrans", "format", "format_map"} | set(dir(object)) | set(vars(Words))
"""Formats are for the sandbox."""
for _name in set(dir(str)) - _AS_THEY_ARE:
    setattr(Words, _name, _followed(_name))
