"""Chat templates: a conversation -> its text, and where in it each message and each `{% generation %}` block lies.

Templates are those that models ship (Jinja), with what transformers offers them. They are programs of strangers: they
run in Jinja's immutable sandbox, and every loop, call and joined text is counted, so that none runs for ever or eats
memory. Positions are taken while the text is written: one rendering, linear in the number of messages.
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
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from milldam.errors import ConfigError, MilldamError

MOST_STEPS = 1_000_000
"""Rounds of loops and calls of macros in one rendering."""
MOST_CHARACTERS = 64 << 20
"""Of a text, and of anything that a template puts together on the way."""
_LOOP, _TURN, _LOOP_END, _STEP, _JOIN = "__loop", "__turn", "__loop_end", "__step", "__join"

Message = dict[str, Any]
Stretch = tuple[int, int]


class TemplateRefusal(MilldamError):
    """A template failed on a conversation, or said no to it."""


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

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._track = _Track()
        environment = _Sandbox(self._track)
        try:
            tree = environment.parse(source)
            self.tagged = any(True for _ in tree.find_all(nodes.CallBlock)) and "generation" in source
            self._template = environment.from_string(_Counting().visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template can't be read: line {error.lineno}: {error.message}.") from None

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, generation_prompt: bool = False, **variables: Any
    ) -> Rendering:
        """The text, or TemplateRefusal with the template's own words."""
        track = self._track
        track.begin(messages)
        given = self._variables | variables
        parts: list[str] = []
        try:
            chunks = self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=generation_prompt, **given
            )
            for chunk in chunks:
                parts.append(chunk)
                track.advance(len(chunk))
        except TemplateRefusal:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            said = getattr(error, "message", None) or str(error) or type(error).__name__
            raise TemplateRefusal(f"{said}"[:300]) from None
        except AttributeError as error:
            raise TemplateRefusal(str(error)[:300]) from None
        return Rendering("".join(parts), track.generated, track.turns())


@dataclass(slots=True)
class _Track:
    """Where the rendering is, and how much it took."""

    position: int = 0
    steps: int = 0
    generated: list[Stretch] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _loops: list[tuple[int, int] | None] = field(default_factory=list)
    """For each loop that is open: the message it is at, and where its turn began."""
    _turns: list[tuple[int, int, int]] = field(default_factory=list)

    def begin(self, messages: Sequence[Message]) -> None:
        self.position = self.steps = 0
        self.generated, self._turns, self._loops = [], [], []
        self._numbers = {id(message): number for number, message in enumerate(messages)}

    def advance(self, characters: int) -> None:
        self.position += characters
        if self.position > MOST_CHARACTERS:
            raise TemplateRefusal(f"the text has more than {MOST_CHARACTERS:,} characters")

    def step(self) -> str:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TemplateRefusal(f"the template takes more than {MOST_STEPS:,} steps")
        return ""

    def loop(self) -> str:
        self._loops.append(None)
        return ""

    def turn(self, item: Any) -> str:
        """The innermost loop goes on with an item, which may be a message."""
        self.step()
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

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        written = str(caller())
        track = self.environment.track  # type: ignore[attr-defined]
        track.generated.append((track.position, track.position + len(written)))
        return written


class _Sandbox(ImmutableSandboxedEnvironment):
    """What transformers offers a template, and nothing that grows without bounds."""

    intercepted_binops = frozenset(("*", "**", "+"))

    def __init__(self, track: _Track) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], cache_size=0
        )
        self.track = track
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "format"):
            self.filters[name] = _narrow(self.filters[name])
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            _LOOP: track.loop,
            _TURN: track.turn,
            _LOOP_END: track.loop_end,
            _STEP: track.step,
            _JOIN: _join,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                return _short(left + right) if len(left) + len(right) > MOST_CHARACTERS else left + right
        elif operator == "*":
            _require_short((len(left) if hasattr(left, "__len__") else 1) * (right if _is_large(right) else 1))
            _require_short((len(right) if hasattr(right, "__len__") else 1) * (left if _is_large(left) else 1))
        elif _is_large(left) or abs(right) > 64:
            raise TemplateRefusal("the template raises numbers to large powers")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
        self.track.step()
        if any(_is_large(value) for value in (*arguments, *named.values())):
            raise TemplateRefusal("the template calls a function with a huge number")
        return super().call(context, obj, *arguments, **named)


class _Counting(NodeTransformer):
    """Has every loop and macro counted, joined texts measured, and messages noted where a loop comes to them."""

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        if isinstance(node.target, nodes.Name):
            mark = _output(_TURN, nodes.Name(node.target.name, "load"))
        else:
            mark = _output(_TURN, nodes.Const(None))
        node.body = [mark, *node.body]
        return [_output(_LOOP), node, _output(_LOOP_END)]

    def visit_Macro(self, node: nodes.Macro) -> Any:
        self.generic_visit(node)
        node.body = [_output(_STEP), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return _call(_JOIN, *node.nodes)


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


def _output(name: str, *arguments: nodes.Expr) -> nodes.Output:
    return nodes.Output([_call(name, *arguments)])


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateRefusal(str(message)[:300])


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _require_short(sum(map(len, texts)))
    return "".join(texts)


def _narrow(plain: Any) -> Any:
    def narrow(*arguments: Any, **named: Any) -> Any:
        if any(_is_large(value) for value in (*arguments, *named.values())):
            raise TemplateRefusal("the template asks for a huge width")
        return plain(*arguments, **named)

    for name in ("jinja_pass_arg",):
        if hasattr(plain, name):
            setattr(narrow, name, getattr(plain, name))
    return narrow


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > 1_000_000


def _require_short(length: int) -> None:
    if abs(length) > MOST_CHARACTERS:
        raise TemplateRefusal(f"the template puts together more than {MOST_CHARACTERS:,} characters")


def _short(text: str) -> str:
    _require_short(len(text))
    return text


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
