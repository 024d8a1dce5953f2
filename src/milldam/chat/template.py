"""Chat templates: a conversation -> its text, and where in it messages, `{% generation %}` blocks and words lie.

Templates are those that models ship (Jinja), with what transformers offers them; they run within bounds (sandbox.py),
and, if asked, on words that know who said them (words.py). Positions are taken while the text is written: one
rendering, linear in the number of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context

from milldam.chat.sandbox import MOST_CHARACTERS, Counting, Effort, Sandbox, TemplateRefusedError, statement
from milldam.chat.words import Source, joined_words, marked, pieces_of
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
    words: list[tuple[int, int, Source]]
    """Where words of the conversation lie, and whose they are, in order; empty unless they were followed."""


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
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        generation_prompt: bool = False,
        follow: bool = False,
        **variables: Any,
    ) -> Rendering:
        """The text, or TemplateRefusedError with the template's own words. `follow`: tell whose words it writes."""
        # Each message is an object of its own: where the template is with it is told by that.
        track, given = self._track, ([message.copy() for message in messages], tools)
        if follow:
            given = marked(given[0], ("messages",)), marked(tools, ("tools",))
        track.begin(given[0])
        track.effort.begin([*messages, tools])
        template = self._template
        # As `Template.generate` does it, which takes twice the time.
        names = self._variables | variables | dict(zip(GIVEN, (*given, generation_prompt), strict=True))
        chunks: list[str] = []
        try:
            context = Context(template.environment, names, template.name, template.blocks)
            for chunk in template.root_render_func(context):
                chunks.append(chunk)
                track.position += len(chunk)
                if track.position > MOST_CHARACTERS:
                    raise TemplateRefusedError(f"the text has more than {MOST_CHARACTERS:,} characters")
        except TemplateRefusedError:
            raise
        except _FAILURES as error:
            raise TemplateRefusedError(_words_of(error)) from None
        text = "".join(chunks)
        words: list[tuple[int, int, Source]] = []
        at = 0
        for piece, source in pieces_of(joined_words(chunks)) if follow else ():
            if source is not None:
                words.append((at, at + len(piece), source))
            at += len(piece)
        return Rendering(text, track.generated_in(text), track.turns(), words)


class Track:
    """Where the rendering is, and how much it took."""

    def __init__(self) -> None:
        self.effort = Effort()
        self.begin(())

    def begin(self, messages: Sequence[Message]) -> None:
        self.position = 0
        self._count = len(messages)
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._generated: list[tuple[int, str]] = []
        self._loops: list[tuple[int | None, int, Any]] = []
        """For each loop that is open: the message it is at, where its turn began, and its item."""
        self._turns: list[tuple[int, int, int]] = []

    def note(self, written: str) -> str:
        """What a `{% generation %}` block wrote."""
        self.effort.step()
        self.effort.charge(len(written))
        self._generated.append((self.position, written))
        return written

    def generated_in(self, text: str) -> list[Stretch]:
        """Where the blocks lie; a block whose place is unknown is refused: transformers would misplace it."""
        for begin, written in self._generated:
            if not text.startswith(written, begin):
                raise TemplateRefusedError(
                    "a {% generation %} block is inside a macro or a {% set %} block, where its place is unknown"
                )
        return [(begin, begin + len(written)) for begin, written in self._generated]

    def loop(self) -> None:
        self._loops.append((None, 0, None))

    def turn(self, item: Any) -> None:
        """The innermost loop goes on with an item, which may be a message or the place of one."""
        self.effort.step()
        self.loop_end()
        self._loops.append((self._numbers.get(id(item)), self.position, item))

    def looked_up(self, place: int, value: Any) -> None:
        """A loop over places looks up what is there, which may be a message."""
        if self._loops:
            number, begin, item = self._loops[-1]
            if number is None and type(item) is int and item == place:
                self._loops[-1] = (self._numbers.get(id(value)), begin, item)

    def loop_end(self) -> None:
        number, begin, _ = self._loops.pop()
        if number is not None and self.position > begin:
            self._turns.append((number, begin, self.position))

    def turns(self) -> dict[int, list[Stretch]]:
        """What was written for each message. The last one may be written behind the loop."""
        turns: dict[int, list[Stretch]] = {}
        for number, begin, end in self._turns:
            turns.setdefault(number, []).append((begin, end))
        end = max((end for _, _, end in self._turns), default=0)
        if turns and self._count - 1 not in turns and end < self.position:
            turns[self._count - 1] = [(end, self.position)]
        return turns


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
        self.loop, self.turn, self.loop_end, self._track = track.loop, track.turn, track.loop_end, track
        self.globals |= {"raise_exception": _raise, "strftime_now": date.strftime}
        self.filters[_GENERATION] = track.note

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        if type(argument) is int:
            self._track.looked_up(argument, value)
        return value


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
    raise TemplateRefusedError(str.__str__(str(message))[:300])


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
