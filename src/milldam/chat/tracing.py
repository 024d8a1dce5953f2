"""A rendering in which nobody knows what is said: a template is run with unknowns where the messages' words are.

What comes out is what the template writes around the words, which words it writes where, and what it asked about them:

    {% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}      user, assistant
    -> "<user>" + trim(words 0) + "<assistant>" + trim(words 1), and nothing was asked

An unknown can be written, put together with other texts, stripped, written as JSON, and asked whether it is empty,
equal to, begins with, ends with or holds a text that is known. The answers are those of the conversation at hand, and
are noted. All else ends the trace: an unknown is no `str`, so that no function gets at its words without being seen.
Hence any other conversation of the same form that gives the same answers makes the template take the same steps, and
write the same but for the words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2.runtime import Context

from milldam.chat.bounds import Code
from milldam.chat.template import GIVEN, ChatTemplate, Message, Position, Sandbox, Track, to_json

Span = tuple[Position, Position]
Path = tuple[Any, ...]

MOST_USES = 16
"""Of the words of a message in one rendering: all that a template makes of them is within its bounds."""
_IS_TEXT = {
    **dict.fromkeys(("defined", "iterable", "sequence", "string"), True),
    **dict.fromkeys(("boolean", "false", "float", "integer", "mapping", "none", "number", "true", "undefined"), False),
}
"""What tests say of any text."""
_IS_OBJECT = _IS_TEXT | {"mapping": True, "string": False}
_STRIPS = ("strip", "lstrip", "rstrip")
_WIDEST = 64

ASKED: dict[str, Callable[[Any, Any], bool]] = {
    "true": lambda value, _: bool(value),
    "equals": lambda value, other: bool(value == other),
    "holds": lambda value, other: other in value,
    "startswith": lambda value, other: bool(value.startswith(other)),
    "endswith": lambda value, other: bool(value.endswith(other)),
}


class UntraceableError(BaseException):
    """The template looks at what is said. No `except Exception` of Jinja's may take it for something else."""


@dataclass(frozen=True, slots=True)
class Words:
    """What is said at a place of a conversation, as the template writes it."""

    path: Path
    """("messages", 3, "content")"""
    made: tuple[Any, ...] = ()
    """How it is changed: (), ("strip", None), ("json", (("indent", 4),))."""

    def of(self, value: Any) -> Any:
        """What becomes of the value at the place."""
        if not self.made:
            return value
        how, given = self.made
        return to_json(value, **dict(given)) if how == "json" else getattr(value, how)(given)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a template asked of words, and was told."""

    words: Words
    asked: str
    other: str | None
    said: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """What a template wrote: literals[0], words[0], literals[1], ... literals[-1]."""

    literals: tuple[str, ...]
    words: tuple[Words, ...]
    answers: tuple[Answer, ...]
    generated: list[Span]
    turns: dict[int, list[Span]]


def _give_up(*_: Any, **__: Any) -> Any:
    raise UntraceableError


class _Unknown:
    """Whatever is done to it that has no meaning of its own here ends the trace."""

    __slots__ = ()
    __getattr__ = __str__ = __repr__ = __format__ = __hash__ = __len__ = __iter__ = __getitem__ = _give_up
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _give_up
    __int__ = __float__ = __index__ = __add__ = __radd__ = __mod__ = __rmod__ = __mul__ = __rmul__ = _give_up
    __call__ = __reversed__ = __round__ = __copy__ = __deepcopy__ = __reduce_ex__ = _give_up


class UnknownObject(_Unknown):
    """What is known to be an object of JSON, such as the arguments of a call."""

    __slots__ = ("asking", "words")

    def __init__(self, asking: _Asking, words: Words) -> None:
        self.asking, self.words = asking, words

    def __bool__(self) -> bool:
        return self.asking.ask(self.words, "true", None)


class UnknownText(_Unknown):
    """Literals with words between them."""

    __slots__ = ("asking", "literals", "words")

    def __init__(self, asking: _Asking, literals: tuple[str, ...], words: tuple[Words, ...]) -> None:
        self.asking, self.literals, self.words = asking, literals, words
        asking.use(words)

    def alone(self) -> Words:
        if len(self.words) != 1 or any(self.literals):
            raise UntraceableError
        return self.words[0]

    def _ask(self, asked: str, other: Any) -> bool:
        if type(other) is not str:
            raise UntraceableError
        return self.asking.ask(self.alone(), asked, other)

    __hash__ = _Unknown.__hash__

    def __bool__(self) -> bool:
        return any(self.literals) or any(self.asking.ask(one, "true", None) for one in self.words)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UnknownText):
            if (self.literals, self.words) != (other.literals, other.words):
                raise UntraceableError
            return True
        return isinstance(other, str) and self._ask("equals", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, other: Any) -> bool:
        return self._ask("holds", other)

    def startswith(self, other: Any) -> bool:
        return self._ask("startswith", other)

    def endswith(self, other: Any) -> bool:
        return self._ask("endswith", other)

    def strip(self, letters: Any = None) -> UnknownText:
        return self._stripped("strip", letters)

    def lstrip(self, letters: Any = None) -> UnknownText:
        return self._stripped("lstrip", letters)

    def rstrip(self, letters: Any = None) -> UnknownText:
        return self._stripped("rstrip", letters)

    def _stripped(self, how: str, letters: Any) -> UnknownText:
        words, made = self.alone(), (how, letters)
        if not (letters is None or type(letters) is str) or words.made not in ((), made):
            raise UntraceableError
        return UnknownText(self.asking, self.literals, (Words(words.path, made),))

    def __add__(self, other: Any) -> Any:
        return self.asking.put_together([self, other])

    def __radd__(self, other: Any) -> Any:
        return self.asking.put_together([other, self])


@dataclass(slots=True)
class _Asking:
    """The conversation at hand: answers what is asked of its words."""

    values: dict[Path, Any] = field(default_factory=dict)
    answers: dict[tuple[Words, str, str | None], bool] = field(default_factory=dict)
    uses: Counter[Path] = field(default_factory=Counter)

    def ask(self, words: Words, asked: str, other: str | None) -> bool:
        key = words, asked, other
        if key not in self.answers:
            self.answers[key] = ASKED[asked](words.of(self.values[words.path]), other)
        return self.answers[key]

    def use(self, words: tuple[Words, ...]) -> None:
        for one in words:
            self.uses[one.path] += 1
            if self.uses[one.path] > MOST_USES:
                raise UntraceableError

    def put_together(self, parts: Sequence[Any]) -> Any:
        """Texts, of which some may be unknown, as one."""
        literals, words = [""], list[Words]()
        for part in parts:
            if isinstance(part, UnknownText):
                literals[-1] += part.literals[0]
                literals += part.literals[1:]
                words += part.words
            elif type(part) is str:
                literals[-1] += part
            else:
                raise UntraceableError
        return UnknownText(self, tuple(literals), tuple(words)) if words else literals[0]

    def unknown(self, value: Any, path: Path) -> Any:
        """A value with unknowns for its texts, and for the arguments of calls; roles and empty texts are known."""
        if isinstance(value, str):
            if not value or is_role(path):
                return value
            self.values[path] = value
            return UnknownText(self, ("", ""), (Words(path),))
        if isinstance(value, list):
            return [self.unknown(one, (*path, number)) for number, one in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if is_object(path):
            self.values[path] = value
            return UnknownObject(self, Words(path))
        return {key: self.unknown(one, (*path, key)) for key, one in value.items()}


def is_role(path: Path) -> bool:
    return len(path) == 3 and path[0] == "messages" and path[-1] == "role"


def is_object(path: Path) -> bool:
    """Whether what is there is taken as a whole: the arguments of a call, a tool."""
    return bool(path[-1] == "arguments") or (path[0] == "tools" and len(path) == 2)


class _TracedTrack(Track):
    """Positions are those of literals and words."""

    def note(self, written: Any) -> Any:
        self._generated.append((self.position, written))
        return written


class _TracedCode(Code):
    """Writes unknowns as they are."""

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.written(")


class _TracedSandbox(Sandbox):
    """What knows of unknowns goes before what Jinja has; the rest gives up by itself."""

    code_generator_class = _TracedCode

    def __init__(self, track: Track, date: datetime) -> None:
        super().__init__(track, date)
        self.asking = _Asking()
        self.filters["tojson"] = _traced_json(self.filters["tojson"])
        self.filters["trim"] = _traced_trim(self.filters["trim"])
        plain: dict[str, Any] = self.tests
        self.tests = {name: _traced_test(name, test) for name, test in plain.items()}

    def concat(self, parts: Any) -> Any:
        return self.asking.put_together(list(parts))

    def join(self, *parts: Any) -> Any:
        return self.asking.put_together([self.written(part) for part in parts])

    def add(self, *parts: Any) -> Any:
        texts = all(type(part) in (str, UnknownText) for part in parts)
        return self.asking.put_together(parts) if texts else super().add(*parts)

    def written(self, value: Any) -> Any:
        return value if isinstance(value, UnknownText) else str(value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, _Unknown):
            if not isinstance(obj, UnknownText) or attribute not in (*_STRIPS, "startswith", "endswith"):
                raise UntraceableError
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _traced_json(plain: Callable[..., Any]) -> Callable[..., Any]:
    def traced(value: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(value, (UnknownObject, UnknownText)):
            return plain(value, *arguments, **named)
        words = value.words if isinstance(value, UnknownObject) else value.alone()
        widths = [one for one in named.values() if isinstance(one, int)]
        if arguments or max(widths, default=0) > _WIDEST or not {*map(type, named.values())} <= {int, bool, type(None)}:
            raise UntraceableError
        if words.made:
            raise UntraceableError
        return UnknownText(value.asking, ("", ""), (Words(words.path, ("json", tuple(named.items()))),))

    return traced


def _traced_trim(plain: Callable[..., Any]) -> Callable[..., Any]:
    def traced(value: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(value, UnknownText) and not arguments and not named:
            return value.strip()
        return plain(value, *arguments, **named)

    return traced


def _traced_test(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(plain, "jinja_pass_arg") else 0

    def traced(*arguments: Any, **named: Any) -> Any:
        if not any(isinstance(one, _Unknown) for one in (*arguments, *named.values())):
            return plain(*arguments, **named)
        if len(arguments) > at + 1 or named:
            raise UntraceableError
        known = _IS_TEXT if isinstance(arguments[at], UnknownText) else _IS_OBJECT
        if name not in known:
            raise UntraceableError
        return known[name]

    if at:
        traced.jinja_pass_arg = plain.jinja_pass_arg  # type: ignore[attr-defined]
    return traced


class Tracer:
    """Traces one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._track = _TracedTrack()
        self._sandbox = _TracedSandbox(self._track, template.date)
        self._template, self._variables = template.compiled(self._sandbox)

    def trace(self, messages: Sequence[Message], tools: Any) -> Trace | None:
        """None where the template looks at what is said in a way that can't be followed, or fails."""
        asking = self._sandbox.asking = _Asking()
        unknown = asking.unknown(list(messages), ("messages",))
        self._track.begin(unknown)
        self._track.position = (0, 0)
        self._track.effort.begin(())
        given = dict(zip(GIVEN, (unknown, asking.unknown(tools, ("tools",)), False), strict=True))
        context = Context(self._sandbox, self._variables | given, self._template.name, self._template.blocks)
        chunks = []
        try:
            for chunk in self._template.root_render_func(context):
                chunks.append(chunk)
                self._track.position = _plus(self._track.position, _end(chunk))
            return self._traced(asking.put_together(chunks))
        except (UntraceableError, Exception):
            return None

    def _traced(self, text: Any) -> Trace | None:
        if not isinstance(text, UnknownText):
            return None
        generated = []
        for begin, written in self._track.blocks:
            end = _plus(begin, _end(written))
            if _between(text, (begin, end)) != _between(written, ((0, 0), _end(written))):
                return None
            generated.append((begin, end))
        answers = tuple(Answer(*key, said) for key, said in self._sandbox.asking.answers.items())
        return Trace(text.literals, text.words, answers, generated, self._track.turns())


def _end(text: Any) -> Position:
    return (len(text), 0) if isinstance(text, str) else (sum(map(len, text.literals)), len(text.words))


def _plus(begin: Position, size: Position) -> Position:
    return begin[0] + size[0], begin[1] + size[1]


def _between(text: Any, span: Span) -> tuple[str, tuple[Words, ...], list[int]]:
    """What is written there: literals end to end, the words, and where in the literals these are."""
    literals, words = (("",), ()) if isinstance(text, str) else (text.literals, text.words)
    whole = text if isinstance(text, str) else "".join(literals)
    (begin, first), (end, last) = span
    places = starts(literals)[first:last]
    return whole[begin:end], tuple(words[first:last]), [place - begin for place in places]


def starts(literals: Sequence[str]) -> list[int]:
    """How many characters of literals come before each of the words.

    >>> starts(("<a>", "", "</a>"))
    [3, 3]
    """
    found, at = [], 0
    for literal in literals[:-1]:
        at += len(literal)
        found.append(at)
    return found
