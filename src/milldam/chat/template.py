"""Chat templates: a conversation -> its text, and where in it messages, `{% generation %}` blocks and words lie.

Templates are those that models ship (Jinja), with what transformers offers them; they run within bounds (sandbox.py),
on words that know who said them (said.py). Positions are taken while the text is written: one rendering, linear in the
number of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context

from milldam.chat.said import Log, Piece, Words, pieces_of, raw
from milldam.chat.sandbox import MOST_CHARACTERS, Counting, Effort, Sandbox, TemplateRefusedError, statement
from milldam.errors import ConfigError

GIVEN = ("messages", "tools", "add_generation_prompt")
_GENERATION = "generation block"
"""A filter that no template can name."""
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
    pieces: list[Piece]
    """The text in pieces: whose words each is."""
    log: Log
    """What the template asked."""

    def said(self) -> Iterator[tuple[int, int, Words]]:
        """Where words lie: begin, end, and whose they are."""
        at = 0
        for piece, words in self.pieces:
            if words is not None:
                yield at, at + len(piece), words
            at += len(piece)


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens and the user's variables.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}]).text
    '<user>Hello'
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, date: datetime | None = None) -> None:
        """`date`: what `strftime_now` gives; None: the time at which the template is made."""
        for name in GIVEN:
            if name in (variables or {}):
                raise ConfigError(f"{name} is not a template variable that can be set: it comes from the conversation.")
        self._track = Track()
        self._sandbox = _Sandbox(self._track, date or datetime.now())
        try:
            self._template = self._sandbox.from_string(_Marking().visit(self._sandbox.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template can't be read: line {error.lineno}: {error.message}.") from None
        except RecursionError:
            raise ConfigError("The chat template can't be read: it is nested too deeply.") from None
        self._variables = {**self._template.globals, "documents": None, **(variables or {})}
        self.tagged = self._sandbox.tagged
        """Whether it has `{% generation %}` blocks."""

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, generation_prompt: bool = False, **variables: Any
    ) -> Rendering:
        """The text, or TemplateRefusedError with the template's own words."""
        track, log = self._track, Log()
        said, said_tools = log.told(list(messages), ("messages",)), log.told(tools, ("tools",))
        self._sandbox.log = log
        track.begin(said)
        track.effort.begin([*messages, tools])
        given = dict(zip(GIVEN, (said, said_tools, generation_prompt), strict=True))
        template = self._template
        # As `Template.generate` does it, which takes twice the time.
        context = Context(template.environment, self._variables | variables | given, template.name, template.blocks)
        pieces: list[Piece] = []
        try:
            for chunk in template.root_render_func(context):
                pieces += pieces_of(chunk)
                track.position += len(chunk)
                if track.position > MOST_CHARACTERS:
                    raise TemplateRefusedError(f"the text has more than {MOST_CHARACTERS:,} characters")
        except TemplateRefusedError:
            raise
        except _FAILURES as error:
            raise TemplateRefusedError(_words_of(error)) from None
        text = "".join([piece for piece, _ in pieces])
        return Rendering(text, track.generated_in(text), track.turns(), pieces, log)


@dataclass(slots=True)
class Track:
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

    def note(self, written: str) -> str:
        """What a `{% generation %}` block wrote."""
        self.effort.step()
        self.effort.charge(len(written))
        self._generated.append((self.position, raw(written)))
        return written

    def generated_in(self, text: str) -> list[Stretch]:
        """Where the blocks lie; a block of which the place can't be told is refused: transformers would misplace it."""
        for begin, written in self._generated:
            if not text.startswith(written, begin):
                raise TemplateRefusedError(
                    "a {% generation %} block is inside a macro or a {% set %} block, where its place is unknown"
                )
        return [(begin, begin + len(written)) for begin, written in self._generated]

    def loop(self) -> None:
        self._loops.append(None)

    def turn(self, item: Any) -> None:
        """The innermost loop goes on with an item, which may be a message."""
        self.effort.step()
        self.loop_end()
        number = self._numbers.get(id(item))
        self._loops.append(None if number is None else (number, self.position))

    def loop_end(self) -> None:
        at = self._loops.pop()
        if at is not None and self.position > at[1]:
            self._turns.append((*at, self.position))

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
        noted = nodes.Filter(None, _GENERATION, [], [], None, None)
        return nodes.FilterBlock(body, noted).set_lineno(line)


class _Sandbox(Sandbox):
    """What transformers offers a template."""

    def __init__(self, track: Track, date: datetime) -> None:
        super().__init__(track.effort, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.tagged = False
        self.loop, self.turn, self.loop_end = track.loop, track.turn, track.loop_end
        self.globals |= {"raise_exception": _raise, "strftime_now": date.strftime}
        self.filters[_GENERATION] = track.note


class _Marking(Counting):
    """Also has messages noted where a loop comes to them."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        node = super().generic_visit(node, *arguments, **named)
        if not isinstance(node, nodes.For):
            return node
        # A recursive loop is within several rounds of itself: it is counted, and nothing is said of its messages.
        named_item = isinstance(node.target, nodes.Name) and not node.recursive
        item = nodes.Name(node.target.name, "load") if named_item else nodes.Const(None)  # type: ignore[attr-defined]
        node.body = [statement("turn", item), *node.body]
        return [statement("loop"), node, statement("loop_end")]


def _words_of(error: BaseException) -> str:
    said = str(getattr(error, "message", None) or error or type(error).__name__)[:300]
    if said.endswith("_token' is undefined"):
        said += ": the tokenizer's files name none; set it as a variable of the template"
    return said


def _raise(message: str) -> str:
    raise TemplateRefusedError(raw(str(message))[:300])


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
