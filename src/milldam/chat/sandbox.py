"""Runs chat templates in Jinja's immutable sandbox, with what transformers offers them, and follows what they write.

The sandbox keeps templates from files, from Python's insides, and from changing the conversation. Loops are bounded in
sum; otherwise a template may take what it asks for. While it runs, the sandbox notes what is written for each message.
Texts of the conversation may be words that know who said them (words.py): what a filter, a call or an operator makes of
them is marked as theirs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import escape

from milldam.chat.forms import BadRowError
from milldam.chat.words import Words, blurred, joined_words, pieces_of

MOST_ROUNDS = 1_000_000
"""Rounds of loops in one rendering."""
_OF_DICTS = frozenset(dir(dict))
_GENERATION = "generation block"
"""A filter that no template can name."""
_EXACT = frozenset(("d", "default", "first", "join", "last", "max", "min", "string", "trim"))
"""Filters that keep what is the template's own in a text with words."""
_TEXTS = frozenset((str, Words))
_JSON = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for every call."""


class TemplateRefusedError(BadRowError):
    """A template failed on a conversation, or said no to it."""

    def __init__(self, message: str) -> None:
        super().__init__("template_refused", message)


class _Code(CodeGenerator):
    """Writes loops that note their messages, and texts without losing words."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802
        # A recursive loop is within several rounds of itself: its messages are not noted.
        is_named = isinstance(node.target, nodes.Name) and not node.recursive
        item = nodes.Name(node.target.name, "load") if is_named else nodes.Const(None)  # type: ignore[attr-defined]
        turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [item], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn))
        self.writeline("environment.loop()")
        super().visit_For(node, frame)
        self.writeline("environment.loop_end()")

    def visit_Call(self, node: nodes.Call, frame: Any, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):  # the one above: no template can name any
            self._call(node.node.name, node.args, frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        """A chain of sums at once: most are texts, of which none but the last is wanted."""
        parts, left = [node.right], node.left
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        self._call("add", [left, *reversed(parts)], frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self._call("join", node.nodes, frame)

    def _call(self, name: str, arguments: Iterable[nodes.Expr], frame: Any) -> None:
        self.write(f"environment.{name}(")
        for one in arguments:
            self.visit(one, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.written(context.eval_ctx.autoescape, " if escapes else "environment.written(False, ")


class _Generation(Extension):
    """`{% generation %}`: what is in it was written by the assistant."""

    tags = {"generation"}  # noqa: RUF012
    environment: Sandbox

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.tagged = True
        noted = nodes.Filter(None, _GENERATION, [], [], None, None)
        return nodes.FilterBlock(body, noted).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Nobody's words are lost in it; `position` is how much of the text has been written."""

    intercepted_binops = frozenset(("%",))
    code_generator_class = _Code

    def __init__(self, date: datetime) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, cache_size=0, extensions=extensions)
        self.concat = joined_words  # type: ignore[method-assign]
        self.tagged = False
        del self.filters["random"], self.globals["lipsum"]  # they give something else every time
        self.filters |= {"tojson": _to_json, "join": self._join}
        self.filters = {name: _marking(name, one) for name, one in self.filters.items()} | {_GENERATION: self._note}
        self.globals |= {"raise_exception": _raise, "strftime_now": date.strftime}
        self.begin([])

    # ---- where the rendering is ----

    def begin(self, messages: list[Any]) -> None:
        self.position = self._rounds = 0
        self._count = len(messages)
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._generated: list[tuple[int, str]] = []
        self._loops: list[tuple[int | None, int, Any]] = []
        """For each loop that is open: the message it is at, where its turn began, and its item."""
        self._turns: list[tuple[int, int, int]] = []

    def _note(self, written: str) -> str:
        """Keep what a `{% generation %}` block wrote."""
        self._generated.append((self.position, written))
        return written

    def generated_in(self, text: str) -> list[tuple[int, int]]:
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
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            raise TemplateRefusedError(f"the template's loops take more than {MOST_ROUNDS:,} rounds")
        self.loop_end()
        self._loops.append((self._numbers.get(id(item)), self.position, item))

    def loop_end(self) -> None:
        number, begin, _ = self._loops.pop()
        if number is not None and self.position > begin:
            self._turns.append((number, begin, self.position))

    def turns(self) -> dict[int, list[tuple[int, int]]]:
        """The stretches written for each message. The last one may be written behind the loop."""
        turns: dict[int, list[tuple[int, int]]] = {}
        for number, begin, end in self._turns:
            turns.setdefault(number, []).append((begin, end))
        end = max((end for _, _, end in self._turns), default=0)
        if turns and self._count - 1 not in turns and end < self.position:
            turns[self._count - 1] = [(end, self.position)]
        return turns

    # ---- what templates do ----

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        function = getattr(called, "__wrapped__", called)  # Jinja puts one of its own in front of `str.format`
        receiver = getattr(function, "__self__", None)
        if isinstance(receiver, str) and called.__name__ == "join" and arguments:
            return self._join(arguments[0], receiver)
        result = super().call(context, called, *arguments, **named)
        if isinstance(result, str) and not isinstance(called, Macro):
            # Jinja's own `_loop_vars` and `_block_vars` are no arguments of the template's.
            given = [value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")]
            return blurred(result, receiver, arguments, given)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        result = super().call_binop(context, operator, left, right)
        return blurred(result, left, right) if isinstance(result, str) else result

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            # Jinja's answer, without asking for an attribute that a dict can't have.
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        if type(argument) is int and self._loops:
            number, begin, item = self._loops[-1]
            if number is None and type(item) is int and item == argument:
                # A loop over places looks up what is there, which may be a message.
                self._loops[-1] = (self._numbers.get(id(value)), begin, item)
        return value

    def add(self, *parts: Any) -> Any:
        """Parts with `+` between them, from left to right."""
        if _TEXTS.issuperset(map(type, parts)):
            return joined_words(parts)
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)

    def join(self, *parts: Any) -> str:
        """Parts with `~` between them."""
        return joined_words([self.written(False, part) for part in parts])

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """The filter, as Jinja has it where nothing is escaped."""
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return self.join(*[part for item in items for part in (d, item)][1:])

    def written(self, escapes: bool, value: Any) -> str:
        """A value as text."""
        if isinstance(value, str) and not escapes:
            return value
        return blurred(str(escape(value) if escapes else value), value)


def _marking(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is marked as words if words went in."""
    is_exact = name in _EXACT

    @functools.wraps(plain)
    def marking(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        if not isinstance(result, str):
            return result
        if isinstance(result, Words) and (is_exact or all(source for _, source in pieces_of(result))):
            return result
        return blurred(str.__str__(result), arguments, named)

    return marking


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    if (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
        return _JSON.encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateRefusedError(str.__str__(str(message))[:300])
