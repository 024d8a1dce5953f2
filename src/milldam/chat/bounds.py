"""What a chat template may take: a sandbox in which every loop, call and text that is put together is counted.

Templates are programs of strangers. Jinja's immutable sandbox keeps them from files and attributes; it does not keep
them from running for ever (`range` in `range` in `range`) or from eating memory (`'x' * 10**9`). Here each step and
each text, list or dict that a template makes counts against an `Effort`, before it is made where its size can be told.
What goes beyond raises TemplateRefusedError. The bounds grow with the conversation, so that none is refused for
being long.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from milldam.errors import ConfigError, MilldamError

try:
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer
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
_JOIN, _MADE, _STEP = "join", "made", "step"

_LEFT_OUT = ("wordwrap", "urlize", "xmlattr", "pprint", "random")
"""Filters of Jinja that take quadratic time or give something else every time. No template of a model uses them."""
_NUMBERED = ("batch", "center", "indent", "round", "slice", "tojson", "truncate")
"""Filters that make as much as a number says."""
_WIDTH = re.compile(r"\d+")


class TemplateRefusedError(MilldamError):
    """A template failed on a conversation, or said no to it."""


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
        if self.steps % _CLOCK_EVERY == 0:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        now = time.thread_time()
        self._until = self._until or now + MOST_SECONDS
        if self.steps > MOST_STEPS:
            raise TemplateRefusedError(f"the template takes more than {MOST_STEPS:,} steps")
        if now > self._until:
            raise TemplateRefusedError(f"the template takes more than {MOST_SECONDS:.0f} seconds")

    def charge(self, characters: int) -> None:
        """Raise if this many more are too many."""
        self.made += characters
        if self.made > self._limit:
            self._widen()

    def _widen(self) -> None:
        """As much again for each message: a template may put the text together message by message."""
        if self._conversation is not None:
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


def tree_size(value: Any, enough: int) -> int:
    """Characters of a value and of all that it holds, however often; looks no further than `enough`."""
    size, left = 0, [value]
    while left and size <= enough:
        one = left.pop()
        size += _NODE
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
    return size


class Code(CodeGenerator):
    """What a template becomes in Python: what most of them do most often goes through no function of the sandbox."""

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


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox in which nothing grows without being counted."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = Code

    def __init__(self, effort: Effort, **options: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, cache_size=0, **options)
        self.effort, self.step = effort, effort.step
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}

    def bound_filters(self) -> None:
        """Has every filter counted; to be called when all are there."""
        for name, plain in self.filters.items():
            self.filters[name] = self._bounded(name, plain)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self._charge_sum(left, right)
        elif operator == "%":
            if isinstance(left, str):
                self._charge_format(left, "%", right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            self._charge_product(left, right)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _LARGE:
            raise TemplateRefusedError("the template raises a number to a large power")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            # Jinja's answer, without asking for an attribute that a dict can't have.
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        self.effort.step()
        receiver = getattr(called, "__self__", None)
        if receiver is None:
            # Jinja puts a function of its own in front of `str.format`.
            receiver = getattr(getattr(called, "__wrapped__", None), "__self__", None)
        if isinstance(receiver, (str, bytes)):
            arguments = self._charge_method(receiver, called.__name__, arguments, named)
        result = super().call(context, called, *arguments, **named)
        self.effort.charge_value(result)
        return result

    def _charge_sum(self, left: Any, right: Any) -> None:
        if isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
            self.effort.charge(len(left) + len(right))
        elif isinstance(left, (list, tuple)):
            # What the left one holds was counted when it was made: a list that grows by one message at a time is
            # not walked through for each.
            self.effort.charge(_NODE * len(left))
            self.effort.charge_value(right)

    def _charge_product(self, left: Any, right: Any) -> None:
        times, of = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(times, int):
            return
        if isinstance(of, int):
            if times.bit_length() + of.bit_length() > _LARGE:
                raise TemplateRefusedError("the template multiplies huge numbers")
        elif isinstance(of, (str, bytes, list, tuple)):
            self.effort.charge(max(times, 0) * tree_size(of, _MOST_MADE))

    def _charge_method(
        self, text: str | bytes, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What a method of a text will make, before it does. -> Its arguments, streams among them as lists."""
        charge = self.effort.charge
        charge(len(text))
        _require_small(arguments)
        _require_small(named.values())
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            times = len(text) if name == "expandtabs" else 1
            charge(times * max((value for value in (*arguments, *named.values()) if isinstance(value, int)), default=8))
        elif name == "replace" and len(arguments) > 1:
            old, new = arguments[:2]
            charge(text.count(old) * len(new))
        elif name == "join" and arguments:
            parts = list(arguments[0])
            charge(len(text) * len(parts) + tree_size(parts, _MOST_MADE))
            arguments = (parts, *arguments[1:])
        elif name in ("format", "format_map") and isinstance(text, str):
            self._charge_format(text, "{", (*arguments, *named.values()))
        return arguments

    def _charge_format(self, form: str, sign: str, arguments: Iterable[Any]) -> None:
        widths = [int(width[:9]) for width in _WIDTH.findall(form)]
        if max(widths, default=0) > _LARGE or "*" in form or (sign == "{" and re.search(r"\{[^}]*\{[^{]", form)):
            raise TemplateRefusedError("the template formats a text with a huge or variable width")
        longest = max((tree_size(one, _MOST_MADE) for one in arguments), default=0)
        self.effort.charge(len(form) + form.count(sign) * (longest + max(widths, default=0)))

    def _bounded(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted. Streams come as lists where the filter joins or sums them up."""
        at = 1 if hasattr(plain, "jinja_pass_arg") else 0
        before = _BEFORE.get(name)

        @functools.wraps(plain)
        def bounded(*arguments: Any, **named: Any) -> Any:
            self.effort.step()
            given = list(arguments)
            if name in _NUMBERED:
                _require_small(given[at + 1 :])
                _require_small(named.values())
            value = given[at] if len(given) > at else None
            if isinstance(value, str):
                self.effort.charge(len(value))
            if before is not None:
                given[at] = before(self, value, given[at + 1 :], named)
            result = plain(*given, **named)
            self.effort.charge_value(result)
            return result

        return bounded

    def add(self, *parts: Any) -> Any:
        """What `+` makes of them, from left to right."""
        if {*map(type, parts)} == {str}:
            self.effort.charge(sum(map(len, parts)))
            return "".join(parts)
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)

    def join(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.effort.charge(sum(map(len, texts)))
        return "".join(texts)

    def made(self, value: Any) -> Any:
        self.effort.charge_value(value)
        return value


def _before_width(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    widths = [one for one in (*arguments, *named.values()) if isinstance(one, int)]
    texts = [one for one in (*arguments, *named.values()) if isinstance(one, str)]
    lines = str(value).count("\n") + 1
    sandbox.effort.charge(lines * max([80, *widths, *map(len, texts)]))
    return value


def _before_replace(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    old, new = [*arguments, named.get("old", ""), named.get("new", "")][:2]
    text = str(value)
    sandbox.effort.charge(text.count(str(old)) * len(str(new)))
    return text


def _before_join(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    parts = list(value)
    between = str(arguments[0] if arguments else named.get("d", ""))
    sandbox.effort.charge(len(parts) * len(between) + tree_size(parts, _MOST_MADE))
    return parts


def _before_sum(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    start = [*arguments, named.get("start", 0)][1 if len(arguments) > 1 else -1]
    if not isinstance(start, (int, float)):
        raise TemplateRefusedError("the template adds up what is not a number")
    return value


def _before_format(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    sandbox._charge_format(str(value), "%", (*arguments, *named.values()))
    return value


def _before_json(sandbox: BoundedSandbox, value: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    wide = [one for one in (*arguments, *named.values()) if isinstance(one, int) and one > 64]
    if wide or any(isinstance(one, str) and len(one) > 64 for one in (*arguments, *named.values())):
        raise TemplateRefusedError("the template indents JSON by a huge width")
    return value


_BEFORE: dict[str, Callable[[BoundedSandbox, Any, list[Any], dict[str, Any]], Any]] = {
    "center": _before_width,
    "indent": _before_width,
    "replace": _before_replace,
    "join": _before_join,
    "sum": _before_sum,
    "format": _before_format,
    "tojson": _before_json,
}


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


class Counting(NodeTransformer):
    """Has macros, joined texts and what is put together from variables counted."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        node = super().generic_visit(node, *arguments, **named)
        if isinstance(node, nodes.Macro):
            node.body = [statement(_STEP), *node.body]
        elif isinstance(node, nodes.Concat):
            return call(_JOIN, *node.nodes)
        elif isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return node if _is_constant(node) else call(_MADE, node)
        return node


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(one, (nodes.Const, nodes.Pair)) and _is_constant(one) for one in node.iter_child_nodes())


def call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    """Of a method of the sandbox."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def statement(name: str, *arguments: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(call(name, *arguments))


def _require_small(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGE:
            raise TemplateRefusedError("the template asks for a huge width or count")
