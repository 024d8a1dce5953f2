"""Where chat templates run: what they may take is bounded, and what they make of words stays theirs.

Templates are programs of strangers. Jinja's immutable sandbox keeps them from files and attributes; it does not keep
them from running forever (`range` in `range` in `range`) or from eating memory (`'x' * 10**9`). Here each step and each
text, list or dict that a template makes counts against an `Effort`, before it is made where its size is known. What
exceeds the bounds raises TemplateRefusedError. They grow with the conversation, so that none is refused for its length.

Texts of the conversation may be words that know who said them (words.py). What a filter, a call or an operator makes of
them is marked as theirs.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from milldam.chat.words import Words, blurred, joined_words, pieces_of
from milldam.errors import ConfigError, MilldamError

try:
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension
    from jinja2.filters import make_attrgetter
    from jinja2.runtime import LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer
    from markupsafe import escape
except ImportError:
    raise ConfigError('Chat templates need jinja2: pip install "milldam[chat]".') from None

MOST_STEPS = 1_000_000
"""Rounds of loops, calls and filters in one rendering."""
MOST_CHARACTERS = 64 << 20
"""Of a text."""
MOST_SECONDS = 20.0
"""Of the processor: a bound for what the other bounds do not see, twenty times beyond the longest honest rendering."""
_FREE = 8 << 20
"""Characters that a rendering may put together however short the conversation is."""
_MOST_MADE = 1 << 30
_CLOCK_EVERY = 256
_LARGE = 100_000
"""No width or count is larger."""
_NODE = 32
"""What an item of a list counts, besides its text."""
_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_WIDTH = re.compile(r"\d+")
_LEFT_OUT = ("wordwrap", "urlize", "xmlattr", "pprint", "random", "sum")
"""Filters of Jinja that take quadratic time or give something else every time. No template of a model uses them."""
_NUMBERED = frozenset(("batch", "center", "indent", "round", "slice", "tojson", "truncate"))
"""Filters that make as much as a number says."""
_GROWING = frozenset(("center", "expandtabs", "indent", "ljust", "replace", "rjust", "tojson", "zfill"))
"""Filters and methods that make of a text at most so many times as a number or a text that they are given is large."""
_GENERATION = "generation block"
"""A filter that no template can name."""
_TEXTS = frozenset((str, Words))
_KEEPING = frozenset(("d", "default", "first", "join", "last", "max", "min", "string", "trim"))
"""Filters that keep what is known of words in mixed texts."""
_JSON = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for every call."""


class TemplateRefusedError(MilldamError):
    """A template failed on a conversation, or said no to it."""


# ---- bounds ----


class Effort:
    """Counts what a rendering takes."""

    def __init__(self) -> None:
        self._conversation: Any = ()
        self.begin(())

    def begin(self, conversation: Any) -> None:
        self.steps = self.made = 0
        self._limit, self._conversation = _FREE, conversation
        self._until = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.steps % _CLOCK_EVERY:
            return
        now = time.thread_time()
        self._until = self._until or now + MOST_SECONDS
        if self.steps > MOST_STEPS:
            raise TemplateRefusedError(f"the template takes more than {MOST_STEPS:,} steps")
        if now > self._until:
            raise TemplateRefusedError(f"the template takes more than {MOST_SECONDS:.0f} seconds")

    def charge(self, characters: int) -> None:
        """Raise if this many more are too many."""
        self.made += characters
        if self.made <= self._limit:
            return
        if self._conversation is not None:
            # As much again for each message: a template may put the text together message by message.
            size, count = tree_size(self._conversation, _MOST_MADE), len(self._conversation)
            self._limit = min(_FREE + 4 * size * (count + 8), _MOST_MADE)
            self._conversation = None
        if self.made > self._limit:
            raise TemplateRefusedError(f"the template puts together more than {self._limit:,} characters")

    def charge_value(self, value: Any) -> None:
        """What was made, whatever it is."""
        if isinstance(value, (str, bytes)):
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.charge(tree_size(value, self._limit * 2))

    def charge_before(self, name: str, value: Any, given: list[Any]) -> None:
        """What a filter or method is about to make of a value."""
        numbers = [abs(one) for one in given if isinstance(one, int)]
        if max(numbers, default=0) > _LARGE:
            raise TemplateRefusedError("the template asks for a huge width or count")
        times = 1
        if name in _GROWING:
            times = max([8, *numbers, *(len(one) for one in given if isinstance(one, str))])
        self.charge(
            times * (len(value) if isinstance(value, str) else tree_size(value, _MOST_MADE) if times > 1 else 0)
        )

    def charge_format(self, form: str, sign: str, given: Iterable[Any]) -> None:
        widths = [int(width[:9]) for width in _WIDTH.findall(form)]
        if max(widths, default=0) > _LARGE or "*" in form or (sign == "{" and re.search(r"\{[^}]*\{[^{]", form)):
            raise TemplateRefusedError("the template formats a text with a huge or variable width")
        longest = max((tree_size(one, _MOST_MADE) for one in given), default=0)
        self.charge(len(form) + form.count(sign) * (longest + max(widths, default=0)))


def tree_size(value: Any, enough: int) -> int:
    """Characters of a value and of all that it holds, however often; looks no further than `enough`."""
    size, left = 0, [value]
    while left and size <= enough:
        one = left.pop()
        size += _NODE
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, dict):
            for item in dict.items(one):
                left += item
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
    return size


class Track(Effort):
    """Where the rendering is, too."""

    def begin(self, conversation: Any, messages: Any = ()) -> None:
        super().begin(conversation)
        self.position = 0
        self._count = len(messages)
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._generated: list[tuple[int, str]] = []
        self._loops: list[tuple[int | None, int, Any]] = []
        """For each loop that is open: the message it is at, where its turn began, and its item."""
        self._turns: list[tuple[int, int, int]] = []

    def note(self, written: str) -> str:
        """What a `{% generation %}` block wrote."""
        self.step()
        self.charge(len(written))
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
        self.step()
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

    def turns(self) -> dict[int, list[tuple[int, int]]]:
        """What was written for each message. The last one may be written behind the loop."""
        turns: dict[int, list[tuple[int, int]]] = {}
        for number, begin, end in self._turns:
            turns.setdefault(number, []).append((begin, end))
        end = max((end for _, _, end in self._turns), default=0)
        if turns and self._count - 1 not in turns and end < self.position:
            turns[self._count - 1] = [(end, self.position)]
        return turns


# ---- what a template becomes in Python ----


class _Code(CodeGenerator):
    """What templates do most often goes through no function of the sandbox; words are written as they are."""

    def visit_Call(self, node: nodes.Call, frame: Any, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):
            # Our own, which no template can name.
            self.visit(node.node, frame)
            self._arguments(node.args, frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        """A chain of sums at once: most are texts, of which none but the last is wanted."""
        parts, left = [node.right], node.left
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        self.write("environment.add")
        self._arguments([left, *reversed(parts)], frame)

    def visit_Getattr(self, node: nodes.Getattr, frame: Any) -> None:  # noqa: N802
        if node.attr in _OF_DICTS:
            super().visit_Getattr(node, frame)
        else:
            self._look_up("getattr", node.node, node.attr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            self._look_up("getitem", node.node, node.arg.value, frame)
        else:
            super().visit_Getitem(node, frame)

    def _look_up(self, way: str, of: nodes.Expr, name: str, frame: Any) -> None:
        self.write(f"(_of[{name!r}] if type(_of := ")
        self.visit(of, frame)
        self.write(f") is dict and {name!r} in _of else environment.{way}(_of, {name!r}))")

    def _arguments(self, given: Iterable[nodes.Expr], frame: Any) -> None:
        self.write("(")
        for one in given:
            self.visit(one, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.written(context.eval_ctx.autoescape, " if escapes else "environment.written(False, ")


class Counting(NodeTransformer):
    """Has macros, joined texts and what is put together from variables counted, and messages noted where loops come."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        node = super().generic_visit(node, *arguments, **named)
        if isinstance(node, nodes.Macro):
            node.body = [_statement("step"), *node.body]
        elif isinstance(node, nodes.Concat):
            return _call("join", *node.nodes)
        elif isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return node if _is_constant(node) else _call("made", node)
        elif isinstance(node, nodes.For):
            # A recursive loop is within several rounds of itself: it is counted, and nothing is said of its messages.
            named_item = isinstance(node.target, nodes.Name) and not node.recursive
            item = nodes.Name(node.target.name, "load") if named_item else nodes.Const(None)  # type: ignore[attr-defined]
            node.body = [_statement("turn", item), *node.body]
            return [_statement("loop"), node, _statement("loop_end")]
        return node


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(one, (nodes.Const, nodes.Pair)) and _is_constant(one) for one in node.iter_child_nodes())


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    """Of a method of the sandbox."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def _statement(name: str, *arguments: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(_call(name, *arguments))


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


# ---- the sandbox ----


class Sandbox(ImmutableSandboxedEnvironment):
    """What transformers offers a template; in it nothing grows without being counted, and nobody's words are lost."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _Code

    def __init__(self, track: Track, date: datetime) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, cache_size=0, extensions=extensions)
        self.concat = joined_words  # type: ignore[method-assign]
        self.track, self.tagged = track, False
        self.step, self.loop, self.turn, self.loop_end = track.step, track.loop, track.turn, track.loop_end
        self.filters |= {"tojson": to_json, "join": self._join}
        self.filters = {name: self._filter(name, one) for name, one in self.filters.items() if name not in _LEFT_OUT}
        self.globals.pop("lipsum", None)
        self.filters[_GENERATION] = track.note
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        self.globals |= {"raise_exception": _raise, "strftime_now": date.strftime}

    def _filter(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted, and whose result is marked as words if words went in."""
        at = 1 if hasattr(plain, "jinja_pass_arg") else 0

        @functools.wraps(plain)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.track.step()
            given = [*arguments[at:], *named.values()]
            self.track.charge_before(
                name, given[0] if given else None, given[1:] if name in _NUMBERED | _GROWING else []
            )
            if name == "format":
                self.track.charge_format(str(given[0]), "%", given[1:])
            result = plain(*arguments, **named)
            self.track.charge_value(result)
            if not isinstance(result, str) or (name in _KEEPING and isinstance(result, Words)):
                return result
            is_mixed = any(source is None for _, source in pieces_of(result))
            return blurred(str.__str__(result), given) if is_mixed else result

        return counted

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        self.track.step()
        function = getattr(called, "__wrapped__", called)  # Jinja puts one of its own in front of `str.format`
        receiver = getattr(function, "__self__", None)
        # What Jinja hands to functions of its own besides is not given by the template.
        given = [*arguments, *(value for name, value in named.items() if name not in ("_loop_vars", "_block_vars"))]
        if isinstance(receiver, (str, bytes)):
            self.track.charge_before(called.__name__, receiver, given)
            if called.__name__ == "join" and arguments and isinstance(receiver, str):
                return self._join(arguments[0], receiver)
            if called.__name__ in ("format", "format_map"):
                self.track.charge_format(str(receiver), "{", given)
        result = super().call(context, called, *arguments, **named)
        self.track.charge_value(result)
        is_made = isinstance(result, str) and not isinstance(called, Macro)
        return blurred(result, receiver, given) if is_made else result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (list, tuple)):
            # What the left one holds was counted when it was made: a list that grows by one message at a time is
            # not walked through for each.
            self.track.charge(_NODE * len(left))
            self.track.charge_value(right)
        elif operator == "%" and isinstance(left, str):
            self.track.charge_format(left, "%", right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            times, of = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(of, int):
                _require_small_number(times.bit_length() + of.bit_length())
            elif isinstance(times, int) and isinstance(of, (str, bytes, list, tuple)):
                self.track.charge(max(times, 0) * tree_size(of, _MOST_MADE))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_small_number(left.bit_length() * abs(right))
        result = super().call_binop(context, operator, left, right)
        return blurred(result, left, right) if isinstance(result, str) else result

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            # Jinja's answer, without asking for an attribute that a dict can't have.
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        if type(argument) is int:
            self.track.looked_up(argument, value)
        return value

    # ---- what templates call without a name for it ----

    def add(self, *parts: Any) -> Any:
        """What `+` makes of them, from left to right."""
        if _TEXTS.issuperset(map(type, parts)):
            self.track.charge(sum(map(len, parts)))
            return joined_words(parts)
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)

    def join(self, *parts: Any) -> str:
        """What `~` makes of them."""
        texts = [self.written(False, part) for part in parts]
        self.track.charge(sum(map(len, texts)))
        return joined_words(texts)

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """The filter, as Jinja has it where nothing is escaped."""
        items = list(value if attribute is None else map(make_attrgetter(self, attribute), value))
        self.track.charge(len(items) * len(str(d)))
        return self.join(*[part for item in items for part in (d, item)][1:])

    def made(self, value: Any) -> Any:
        self.track.charge_value(value)
        return value

    def written(self, escapes: bool, value: Any) -> str:
        """A value as text."""
        if isinstance(value, str) and not escapes:
            return value
        return blurred(str(escape(value) if escapes else value), value)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers writes it: HTML is not escaped."""
    if (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
        return _JSON.encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateRefusedError(str.__str__(str(message))[:300])


def _require_small_number(bits: int) -> None:
    if bits > _LARGE:
        raise TemplateRefusedError("the template makes a huge number")


class _Dict:
    """`dict` without its attributes, as transformers offers it."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """Jinja's, without names of Python's insides."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, given = arguments[0], dict(*arguments[1:], **named)
        for name in given:
            _require_plain(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: Any) -> None:
    if str(name).startswith("_"):
        raise TemplateRefusedError(f"the template gives a namespace the attribute {name!r}")
