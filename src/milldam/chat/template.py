"""Chat templates: a conversation -> its text, and where in it messages, `{% generation %}` blocks and words lie.

Templates are those that models ship. They run in Jinja's immutable sandbox with what transformers offers them: they
reach no files and nothing of Python's insides, and can't change the conversation; otherwise a template may take what it
asks for. Positions are taken while the text is written: one rendering, linear in the number of messages. If asked, it
runs on words that know who said them (words.py): what a filter, a call or an operator makes of them is theirs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import escape

from milldam.chat.forms import REASONING, BadRowError, Message, parsed
from milldam.chat.words import Source, Words, blurred, joined_words, marked, pieces_of
from milldam.errors import ConfigError

_GIVEN = ("messages", "tools", "add_generation_prompt")
_OF_DICTS = frozenset(dir(dict))
_GENERATION = "generation block"
"""A filter that no template can name."""
_EXACT = frozenset(("d", "default", "first", "join", "last", "max", "min", "string", "trim"))
"""Filters that keep what is the template's own in a text with words."""
_TEXTS = frozenset((str, Words))
_JSON = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for every call."""
_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What a template's own mistakes raise."""

Stretch = tuple[int, int]


class TemplateRefusedError(BadRowError):
    """A template failed on a conversation, or said no to it."""

    def __init__(self, message: str) -> None:
        super().__init__("template_refused", message)


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
    environment: ChatTemplate

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.tagged = True
        noted = nodes.Filter(None, _GENERATION, [], [], None, None)
        return nodes.FilterBlock(body, noted).set_lineno(line)


class ChatTemplate(ImmutableSandboxedEnvironment):
    """A compiled template with the tokenizer's special tokens and the user's variables.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}]).text
    '<user>Hello'
    """

    intercepted_binops = frozenset(("%",))
    code_generator_class = _Code
    tagged = False
    """Whether the template has `{% generation %}` blocks."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, date: datetime | None = None) -> None:
        """`date`: what `strftime_now` gives; None: the time at which the template is made."""
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, cache_size=0, extensions=extensions)
        self.concat = joined_words  # type: ignore[method-assign]
        del self.filters["random"], self.globals["lipsum"]  # they give something else every time
        self.filters |= {"tojson": _to_json, "join": self._join}
        self.filters = {name: _marking(name, one) for name, one in self.filters.items()} | {_GENERATION: self._note}
        self.globals |= {"raise_exception": _raise, "strftime_now": (date or datetime.now()).strftime}
        for name in _GIVEN:
            if name in (variables or {}):
                raise ConfigError(f"{name} is not a template variable that can be set: it comes from the conversation.")
        try:
            self._template = self.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template can't be read: line {error.lineno}: {error.message}.") from None
        except RecursionError:
            raise ConfigError("The chat template can't be read: it is nested too deeply.") from None
        self._variables = {**self._template.globals, "documents": None, **(variables or {})}

        def writes(word: str, *messages: Message) -> bool:
            try:
                return word in self.render(messages).text
            except TemplateRefusedError:
                return False

        self._takes_parts = self._parses = False
        said = {"role": "user", "content": "Aq7"}
        takes_parts = not writes("Aq7", said) and writes("Aq7", _in_parts(said))
        """As some templates do that know of images: texts in parts alone."""
        call = {"type": "function", "function": {"name": "f", "arguments": '{"k9": 1}'}}
        self._parses = not writes('{"k9": 1}', said, {"role": "assistant", "content": "", "tool_calls": [call]})
        """A template that writes arguments by `tojson` would quote those that are JSON already."""
        self._takes_parts = takes_parts

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
        messages = self._fitting(messages)
        # Each message is an object of its own: where the template is with it is told by that.
        if follow:
            given = marked(list(messages), ("messages",)), marked(tools, ("tools",))
        else:
            given = [message.copy() for message in messages], tools
        self._numbers = {id(message): number for number, message in enumerate(given[0])}
        self._position, self._generated = 0, list[tuple[int, str]]()
        self._turns: list[tuple[int, int, int]] = []
        self._loops: list[tuple[int | None, int, Any]] = []
        """For each loop that is open: the message it is at, where its turn began, and its item."""
        # As `Template.generate` does it, which takes twice the time.
        names = self._variables | variables | dict(zip(_GIVEN, (*given, generation_prompt), strict=True))
        chunks: list[str] = []
        try:
            for chunk in self._template.root_render_func(Context(self, names, None, self._template.blocks)):
                chunks.append(chunk)
                self._position += len(chunk)
        except TemplateRefusedError:
            raise
        except _FAILURES as error:
            raise TemplateRefusedError(_words_of(error)) from None
        text, at = "".join(chunks), 0
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise BadRowError("bad_unicode", f"half a character: {error}") from None
        words: list[tuple[int, int, Source]] = []
        for piece, source in pieces_of(joined_words(chunks)) if follow else ():
            if source is not None:
                words.append((at, at + len(piece), source))
            at += len(piece)
        if not all(text.startswith(written, begin) for begin, written in self._generated):
            # transformers would misplace it.
            raise TemplateRefusedError(
                "a {% generation %} block is inside a macro or a {% set %} block, where its place is unknown"
            )
        turns: dict[int, list[Stretch]] = {}
        for number, begin, end in self._turns:
            turns.setdefault(number, []).append((begin, end))
        end, last = max((end for _, _, end in self._turns), default=0), len(messages) - 1
        if turns and last not in turns and end < len(text):
            turns[last] = [(end, len(text))]  # written behind the loop
        return Rendering(text, [(begin, begin + len(written)) for begin, written in self._generated], turns, words)

    def _fitting(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the template takes them."""
        fields = set().union(*messages)
        if not fields.isdisjoint(REASONING):
            messages = [_with_reasoning(message) for message in messages]
        if self._takes_parts:
            messages = [_in_parts(one) if isinstance(one.get("content"), str) else one for one in messages]
        if self._parses and "tool_calls" in fields:
            messages = [_with_parsed_arguments(one) if len(one.get("tool_calls", ())) else one for one in messages]
        return messages

    # ---- where the rendering is: called by the template's code ----

    def _note(self, written: str) -> str:
        """Keep what a `{% generation %}` block wrote."""
        self._generated.append((self._position, written))
        return written

    def loop(self) -> None:
        self._loops.append((None, 0, None))

    def turn(self, item: Any) -> None:
        """The innermost loop goes on with an item, which may be a message or the place of one."""
        self.loop_end()
        self._loops.append((self._numbers.get(id(item)), self._position, item))

    def loop_end(self) -> None:
        number, begin, _ = self._loops.pop()
        if number is not None and self._position > begin:
            self._turns.append((number, begin, self._position))

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


def _in_parts(message: Message) -> Message:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _with_reasoning(message: Message) -> Message:
    """Under all names that templates have for it, as transformers gives it to them."""
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said} | message | {"reasoning_content": said}


def _with_parsed_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = parsed(function["arguments"], "bad_tool_call", "the arguments of a tool call")
            call = call | {"function": function | {"arguments": arguments}}
        calls.append(call)
    return message | {"tool_calls": calls}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    if (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
        return _JSON.encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateRefusedError(str.__str__(str(message))[:300])


def _words_of(error: BaseException) -> str:
    words = str(getattr(error, "message", None) or error or type(error).__name__)[:300]
    words = words.replace("'WordsObject'", "'dict'").replace("'Words'", "'str'")
    if words.endswith("_token' is undefined"):
        words += ": the tokenizer's files name none; set it as a variable of the template"
    return words
