"""Chat templates: a conversation -> its text, and where in it each message and each `{% generation %}` block lies.

Templates are those that models ship (Jinja), with what transformers offers them; they run within bounds (bounds.py).
Positions are taken while the text is written: one rendering, linear in the number of messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes

from milldam.chat.bounds import MOST_CHARACTERS, BoundedSandbox, Counting, Effort, TemplateRefusedError, output
from milldam.errors import ConfigError

_LOOP, _TURN, _LOOP_END = "__loop", "__turn", "__loop_end"

_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What a template's own mistakes raise."""

Message = dict[str, Any]
Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation. Positions count characters; ends are exclusive."""

    text: str
    generated: list[Stretch]
    """What stands in `{% generation %}` blocks."""
    turns: dict[int, list[Stretch]]
    """What was written for each message: one stretch, or several where a template goes over the messages again."""


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens and the user's variables.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}]).text
    '<user>Hello'
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, date: datetime | None = None) -> None:
        """`date`: what `strftime_now` gives; None: the time at which the template is made."""
        self.source = source
        self._variables = {"documents": None} | dict(variables or {})
        self._track = _Track()
        environment = _Sandbox(self._track, date)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(_Marking().visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template can't be read: line {error.lineno}: {error.message}.") from None
        except RecursionError:
            raise ConfigError("The chat template can't be read: it is nested too deeply.") from None
        self.tagged = environment.tagged
        """Whether it has `{% generation %}` blocks."""

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, generation_prompt: bool = False, **variables: Any
    ) -> Rendering:
        """The text, or TemplateRefusedError with the template's own words."""
        track = self._track
        track.begin(messages)
        track.effort.begin([*messages, tools])
        given = self._variables | variables
        parts: list[str] = []
        try:
            chunks = self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=generation_prompt, **given
            )
            for chunk in chunks:
                parts.append(chunk)
                track.advance(len(chunk))
        except TemplateRefusedError:
            raise
        except _FAILURES as error:
            raise TemplateRefusedError(_words_of(error)) from None
        text = "".join(parts)
        return Rendering(text, track.generated_in(text), track.turns())


@dataclass(slots=True)
class _Track:
    """Where the rendering is, and how much it took."""

    position: int = 0
    effort: Effort = field(default_factory=Effort)
    _generated: list[tuple[int, str]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _loops: list[tuple[int, int] | None] = field(default_factory=list)
    """For each loop that is open: the message it is at, and where its turn began."""
    _turns: list[tuple[int, int, int]] = field(default_factory=list)

    def begin(self, messages: Sequence[Message]) -> None:
        self.position = 0
        self._generated, self._turns, self._loops = [], [], []
        self._numbers = {id(message): number for number, message in enumerate(messages)}

    def advance(self, characters: int) -> None:
        self.position += characters
        if self.position > MOST_CHARACTERS:
            raise TemplateRefusedError(f"the text has more than {MOST_CHARACTERS:,} characters")

    def note(self, written: str) -> None:
        """What a `{% generation %}` block wrote."""
        self._generated.append((self.position, written))

    def generated_in(self, text: str) -> list[Stretch]:
        """Where the blocks lie; a block of which the place can't be told is refused: transformers would misplace it."""
        for begin, written in self._generated:
            if not text.startswith(written, begin):
                raise TemplateRefusedError(
                    "a {% generation %} block lies within a macro or a {% set %} block, where nobody can tell its place"
                )
        return [(begin, begin + len(written)) for begin, written in self._generated]

    def loop(self) -> str:
        self._loops.append(None)
        return ""

    def turn(self, item: Any) -> str:
        """The innermost loop goes on with an item, which may be a message."""
        self.effort.step()
        self.loop_end()
        number = self._numbers.get(id(item))
        self._loops.append(None if number is None else (number, self.position))
        return ""

    def loop_end(self) -> str:
        at = self._loops.pop()
        if at is not None and self.position > at[1]:
            self._turns.append((*at, self.position))
        return ""

    def turns(self) -> dict[int, list[Stretch]]:
        found: dict[int, list[Stretch]] = {}
        for number, begin, end in self._turns:
            found.setdefault(number, []).append((begin, end))
        return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what is in it was written by the assistant."""

    tags = {"generation"}  # noqa: RUF012
    environment: _Sandbox

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.tagged = True
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        written = str(caller())
        self.environment.track.note(written)
        return written


class _Sandbox(BoundedSandbox):
    """What transformers offers a template."""

    def __init__(self, track: _Track, date: datetime | None) -> None:
        super().__init__(track.effort, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.track, self.tagged = track, False
        self.trusted = (*self.trusted, track)
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": (date or datetime.now()).strftime,
            _LOOP: track.loop,
            _TURN: track.turn,
            _LOOP_END: track.loop_end,
        }
        self.bound_filters()


class _Marking(Counting):
    """Also has messages noted where a loop comes to them."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        node = super().generic_visit(node, *arguments, **named)
        if not isinstance(node, nodes.For):
            return node
        # A recursive loop is within several rounds of itself: it is counted, and nothing is said of its messages.
        named_item = isinstance(node.target, nodes.Name) and not node.recursive
        item = nodes.Name(node.target.name, "load") if named_item else nodes.Const(None)  # type: ignore[attr-defined]
        node.body = [output(_TURN, item), *node.body]
        return [output(_LOOP), node, output(_LOOP_END)]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _words_of(error: BaseException) -> str:
    said = str(getattr(error, "message", None) or error or type(error).__name__)[:300]
    if said.endswith("_token' is undefined"):
        said += ": the tokenizer's files name none; set it as a variable of the template"
    return said


def _raise(message: str) -> str:
    raise TemplateRefusedError(str(message)[:300])


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Stretches in order, those that touch or overlap as one, empty ones left out."""
    found: list[Stretch] = []
    for begin, end in sorted(stretches):
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
