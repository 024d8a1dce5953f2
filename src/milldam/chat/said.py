"""Words that know who said them: a template runs on them as on any text, and what it writes tells whose words it is.

    {% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}     user, assistant
    -> "<user>", words 0 stripped, "<assistant>", words 1 stripped

`Said` is a text with the words in it: the message and field that they are from, and by which methods they were made. It
may be put together with other texts, cut, changed and asked like any; a filter or a function that makes a plain text
of it gives one of which only the messages are known (`Words.ops` is None).

Everything that a template asks of words is noted with the answer (`Log`). While all it did can be told so, any other
conversation of the same form that gives the same answers makes the template take the same steps, and write the same
but for the words; else the log is `lost`, and each such conversation is rendered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

Path = tuple[Any, ...]
"""("messages", 3, "content")"""

MOST_USES = 16
"""Of the words at a place in one rendering: all that a template makes of them is within its bounds."""
SEVERAL: Path = ("several",)
"""In place of a path: words of more than one message."""
_DEEPEST = 8
_JSON = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for every call."""


class Op(NamedTuple):
    """A method, what it was given, and which of its results."""

    name: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    at: int | None = None

    def of(self, value: Any) -> Any:
        if self.name == "tojson":
            return to_json(value, **dict(self.named))
        if self.name == "true":
            return bool(value)
        if self.name == "slice":
            return value[slice(*self.arguments)]
        if self.name == "parts":
            return len(self.arguments[0].of(value))
        result = getattr(value, self.name)(*self.arguments, **dict(self.named))
        return result if self.at is None else result[self.at]


@dataclass(frozen=True, slots=True)
class Words:
    """What is said at a place of a conversation, and how it was changed."""

    path: Path
    ops: tuple[Op, ...] | None = ()
    """None: in a way that can't be repeated."""

    def of(self, value: Any) -> Any:
        """What becomes of the value at the place."""
        for op in self.ops or ():
            value = op.of(value)
        return value

    @property
    def message(self) -> int | None:
        """Whose they are; None: nobody's alone."""
        return self.path[1] if self.path[0] == "messages" else None


Piece = tuple[str, Words | None]
"""A text, and whose words it is; None: the template's own."""


class Log:
    """What a template asked in one rendering."""

    def __init__(self) -> None:
        self.answers: dict[tuple[Words, Op], Any] = {}
        self.lost = False
        self._uses: Counter[Path] = Counter()

    def told(self, value: Any, path: Path) -> Any:
        """A value of a conversation with its texts as words; roles, and texts that are empty, are known."""
        if isinstance(value, str):
            return value if not value or is_role(path) else self.text([(value, Words(path))])
        if isinstance(value, list) and len(value):
            return [self.told(one, (*path, number)) for number, one in enumerate(value)]
        if not isinstance(value, dict):
            return value
        told = {key: self.told(one, (*path, key)) for key, one in value.items()}
        return SaidObject(told, value, path, self) if is_object(path) else told

    def text(self, pieces: Iterable[Piece]) -> str:
        """Pieces as one text: plain where nobody's words are in it."""
        joined: list[Piece] = []
        for text, words in pieces:
            if words is None and joined and joined[-1][1] is None:
                joined[-1] = joined[-1][0] + text, None
            elif text:
                joined.append((text, words))
            if words is not None:
                self._uses[words.path] += 1
                self.lost |= words.ops is None or self._uses[words.path] > MOST_USES
                if not text:
                    # They are no piece; the same made of other words may be one.
                    self.ask(words, Op("true"), False)
        if not any(words for _, words in joined):
            return joined[0][0] if joined else ""
        said: str = Said(joined, self)
        return said

    def put_together(self, parts: Iterable[Any]) -> str:
        """Texts as one."""
        return self.text(piece for part in parts for piece in pieces_of(part))

    def blurred(self, text: str, *sources: Any) -> str:
        """A text that was made of words in a way that nobody followed."""
        paths = [words.path for one in sources for words in words_in(one)]
        same = takewhile(lambda keys: len(set(keys)) == 1, zip(*paths, strict=False))
        path = tuple(keys[0] for keys in same)
        self.lost = True
        path = path if len(path) > 1 else SEVERAL
        return self.text([(text, Words(path, None))]) if text else ""

    def ask(self, words: Words, op: Op, answer: Any) -> Any:
        """Note what a template asked, and was told."""
        if self.answers.setdefault((words, op), answer) != answer:
            self.lost = True
        return answer

    def result(self, said: Said, op: Op, result: Any) -> Any:
        """What a method gave: words again, several of them, or an answer."""
        alone = said.alone if all(type(one) in _PLAIN for one in _given(op)) else None
        if isinstance(result, str):
            if op.name in _GROWS:
                alone = None
            made = [(result, Words(alone.path, (*(alone.ops or ()), op)))] if alone else _cut(said, op, result)
            return self.blurred(result, said, *_given(op)) if made is None else self.text(made)
        if isinstance(result, bytes):
            raise TypeError("the template takes words for bytes")
        if isinstance(result, (list, tuple)) and all(isinstance(one, str) for one in result):
            if alone is None:
                return type(result)(self.blurred(one, said, *_given(op)) for one in result)
            self.ask(alone, Op("parts", (op,)), len(result))
            texts = (
                (one, Words(alone.path, (*(alone.ops or ()), op._replace(at=at)))) for at, one in enumerate(result)
            )
            return type(result)(self.text([piece]) for piece in texts)
        if alone is not None:
            return self.ask(alone, op, result)
        self.lost = True
        return result


def is_role(path: Path) -> bool:
    return len(path) == 3 and path[0] == "messages" and path[-1] == "role"


def is_object(path: Path) -> bool:
    """Whether what is there is taken as a whole: the arguments of a call, a tool."""
    return bool(path[-1] == "arguments") or (path[0] == "tools" and len(path) == 2)


class Said(str):
    """A text with words in it."""

    __slots__ = ("log", "pieces")
    pieces: list[Piece]
    log: Log

    def __new__(cls, pieces: Any, log: Log | None = None) -> Any:
        if log is None:  # by Jinja's functions, which make one of the type that they are given
            return str(pieces)
        made = str.__new__(cls, "".join([text for text, _ in pieces]))
        made.pieces, made.log = pieces, log
        return made

    @property
    def alone(self) -> Words | None:
        """The words, where nothing else is in the text and it is known how they were made."""
        words = self.pieces[0][1] if len(self.pieces) == 1 else None
        return words if words is not None and words.ops is not None else None

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        if any(text and words is None for text, words in self.pieces):
            return True
        return bool(self.log.result(self, Op("true"), True))

    def __hash__(self) -> int:
        # Who looks something up by words asks what nobody sees.
        self.log.lost = True
        return str.__hash__(self)

    def __add__(self, other: Any) -> Any:
        return self.log.put_together([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return self.log.put_together([other, self]) if isinstance(other, str) else NotImplemented

    def __getitem__(self, at: Any) -> Any:
        result = str.__getitem__(self, at)
        op = Op("slice", (at.start, at.stop, at.step)) if isinstance(at, slice) else Op("__getitem__", (at,))
        return self.log.result(self, op, result)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.log.blurred(letter, self) for letter in str.__iter__(self)])

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))


def _followed(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Said, *arguments: Any, **named: Any) -> Any:
        result = plain(self, *arguments, **named)
        if result is NotImplemented:
            return result
        return self.log.result(self, Op(name, arguments, tuple(named.items())), result)

    return method


_OWN = {name for name in vars(Said) if callable(getattr(Said, name))}
_LEFT = {
    "__class__",
    "__init__",
    "__getattribute__",
    "__len__",
    "__repr__",
    "__sizeof__",
    "__getnewargs__",
    "maketrans",
}
_LEFT |= {"format", "format_map"}
"""`len` is asked by what counts a template's effort; the filter `length` is followed. Formats are for the sandbox."""
for _name in dir(str):
    if _name not in _OWN | _LEFT | set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}:
        setattr(Said, _name, _followed(_name))

_PLAIN = (str, int, bool, type(None))
_STRIPS = ("strip", "lstrip", "rstrip")
_GROWS = frozenset(
    {"__mod__", "__mul__", "__rmod__", "__rmul__", "center", "expandtabs", "join", "ljust", "replace", "rjust"}
    | {"translate", "zfill"}
)
"""Methods that make more of a text: only a rendering counts what they take."""


def _given(op: Op) -> list[Any]:
    return [*op.arguments, *(value for _, value in op.named)]


def _cut(said: Said, op: Op, result: str) -> list[Piece] | None:
    """The pieces that are left of a text that was stripped or sliced; None: it was changed in another way."""
    plain, first, last = raw(said), said.pieces[0], said.pieces[-1]
    if op.name in _STRIPS and not any(isinstance(one, Said) for one in _given(op)):
        begin = 0 if op.name == "rstrip" else len(plain) - len(plain.lstrip(*op.arguments))
        # Where a cut ends within the template's own text, no words decide on it.
        at_begin = op.name == "rstrip" or (first[1] is None and first[0].lstrip(*op.arguments))
        at_end = op.name == "lstrip" or (last[1] is None and last[0].rstrip(*op.arguments))
        said.log.lost |= not (at_begin and at_end)
    elif op.name == "slice" and op.arguments[2] in (None, 1):
        begin = slice(*op.arguments).indices(len(plain))[0]
        said.log.lost = True
    else:
        return None
    end, at, left = begin + len(result), 0, list[Piece]()
    for text, words in said.pieces:
        start, stop = max(begin - at, 0), min(end - at, len(text))
        if start < stop:
            if words is not None and stop - start < len(text):
                words = Words(words.path, None)
            left.append((text[start:stop], words))
        at += len(text)
    return left


raw = str.__str__
"""A text without its words."""


class SaidObject(dict[str, Any]):
    """An object of JSON, such as the arguments of a call: taken as a whole, or looked into."""

    def __init__(self, told: dict[str, Any], plain: dict[str, Any], path: Path, log: Log) -> None:
        super().__init__(told)
        self.plain, self.path, self.log = plain, path, log

    def __bool__(self) -> bool:
        return bool(self.log.ask(Words(self.path), Op("true"), len(self.plain) > 0))

    def __iter__(self) -> Iterator[Any]:
        self.log.lost = True
        return iter([self._key(key) for key in self.plain])

    def _key(self, key: str) -> str:
        return self.log.text([(key, Words((*self.path, key), None))])

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(key, super(SaidObject, self).__getitem__(raw(key))) for key in self]

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def __getitem__(self, key: Any) -> Any:
        self.log.lost = True
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.log.lost = True
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.log.lost = True
        return super().__contains__(key)

    def __eq__(self, other: object) -> bool:
        self.log.lost = True
        return super().__eq__(other)

    __hash__ = None


def pieces_of(text: Any) -> list[Piece]:
    return text.pieces if isinstance(text, Said) else [(text, None)]


def words_in(value: Any, depth: int = 0) -> Iterator[Words]:
    """All words that a value holds."""
    if isinstance(value, Said):
        yield from (words for _, words in value.pieces if words is not None)
    elif isinstance(value, SaidObject):
        yield Words(value.path)
    elif depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from words_in(one, depth + 1)
    elif depth < _DEEPEST and isinstance(value, dict):
        for key, one in dict.items(value):
            yield from words_in(key, depth + 1)
            yield from words_in(one, depth + 1)


def said_json(value: Any, log: Log, **how: Any) -> str:
    """As `to_json`, of words too."""
    op = Op("tojson", (), tuple(sorted(how.items())))
    if isinstance(value, SaidObject):
        return log.text([(to_json(value.plain, **how), Words(value.path, (op,)))])
    alone = value.alone if isinstance(value, Said) else None
    if alone is not None:
        return log.text([(to_json(raw(value), **how), Words(alone.path, (*(alone.ops or ()), op)))])
    text = to_json(_unsaid(value), **how)
    return log.blurred(text, value) if next(words_in(value), None) is not None else text


def _unsaid(value: Any) -> Any:
    """A value without its words, as JSON has it."""
    if isinstance(value, Said):
        return raw(value)
    if isinstance(value, SaidObject):
        return value.plain
    if isinstance(value, dict):
        return {_unsaid(key): _unsaid(one) for key, one in value.items()}
    return [_unsaid(one) for one in value] if isinstance(value, (list, tuple)) else value


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    if (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
        return _JSON.encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
