"""The one check of settings: plain values and where they stand -> an instance of a dataclass, or errors that say where.

Values come from YAML files, options or keyword arguments. pydantic checks them against the types of the fields, ranges
included; a dataclass finds its contradictions in `__post_init__` and raises a ConfigError that begins with the
`Setting`. All problems are reported at once, each with its file, line and key, or with the option or argument.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from milldam.errors import ConfigError, Setting, did_you_mean, nearest

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
MOST_PROBLEMS = 10


@dataclass(slots=True)
class Values:
    """Settings as they were given, before the check."""

    data: Any = field(default_factory=dict)
    source: str = ""
    """The file; empty for options and arguments."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """The line of each key; 0: it was put over the file."""
    options: set[str] = field(default_factory=set)
    """Keys that options gave."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user on how a file was read."""
    if_missing: str = ""
    """Advice for when a required key is missing."""

    def put(self, name: str, value: Any) -> None:
        """Put an option over the value of the file."""
        self.data[name] = value
        self.options.add(name)

    def message(self, path: KeyPath, *text: str | Setting) -> tuple[str | Setting, ...]:
        """A message with place and key in front: `config.yaml:12: dedup.treshold: no such key.`"""
        if not self.source or (path and path[0] in self.options):
            return (Setting(dotted(path)), ": ", *text) if path else text
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines[known] if known else 0
        return (f"{self.source}:{line}: " if line else f"{self.source}: ", f"{dotted(path)}: " if path else "", *text)


def dotted(path: KeyPath) -> str:
    """A path as people write it: datasets.0.path"""
    return ".".join(map(str, path))


def plain(value: Any) -> Any:
    """Python's mappings and sequences as YAML has them; paths as text, `~/` in the user's home."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def checked_settings(kind: type[T], given: Mapping[str, Any] | Values) -> T:
    """The settings of a job from options or arguments by name, where None means the default, or from a file.

    >>> from milldam.rules import CleanRules
    >>> checked_settings(CleanRules, {"strip": True, "unicode": "NFD"})
    Traceback (most recent call last):
    milldam.errors.ConfigError: unicode: must be NFC or NFKC, not "NFD". Did you mean "NFC"?
    """
    from pydantic import ValidationError

    values = given
    if not isinstance(values, Values):
        values = Values({name: one for name, one in values.items() if one is not None})
    values.data = plain(values.data)
    try:
        return cast("T", _adapter(cast("Any", kind)).validate_python(values.data))
    except ConfigError as error:
        setting, *text = error.args
        if not values.source or not isinstance(setting, Setting):
            raise
        path = tuple(int(part) if part.isdecimal() else part for part in setting.path.split("."))
        text[0] = text[0].removeprefix(":").lstrip()
        raise ConfigError(*values.message(path, *text)) from None
    except ValidationError as error:
        messages = list(_problems(kind, values, error))
        if len(messages) > MOST_PROBLEMS:
            messages[MOST_PROBLEMS:] = [(f"... and {len(messages) - MOST_PROBLEMS} more.",)]
        raise ConfigError(*messages[0], *(part for one in messages[1:] for part in ("\n", *one))) from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# ---- blocks ----


def blocks_of(block: Any, under: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of a block and all blocks below it."""
    yield under, block
    for name, hint in get_type_hints(block).items():
        inner = [hint]
        for one in inner:
            inner += get_args(one)
        for one in inner:
            if is_dataclass(one) and name != "validation":  # the same as datasets
                yield from blocks_of(one, f"{under}.{name}".removeprefix("."))


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def descriptions_of(block: type) -> dict[str, str]:
    """The docstrings of the fields, each in one line."""
    return {
        key.target.id: " ".join(text.value.value.split())
        for one in reversed(block.__mro__)
        if is_dataclass(one)
        for key, text in itertools.pairwise(_classes_of(one.__module__)[one.__name__].body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


# ---- pydantic's errors in our words ----

_RANGES = {
    "greater_than_equal": "must be at least {ge:g}.",
    "greater_than": "must be more than {gt:g}.",
    "less_than_equal": "must be at most {le:g}.",
    "less_than": "must be less than {lt:g}.",
    "string_too_short": "is empty.",
    "too_short": "is empty.",
    "value_error": "{error}",
}
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dataclass": "a block of keys",
    "dict": "a block of keys",
    "mapping": "a block of keys",
}
"""What is wanted, by the first word of the type of an error."""
_SHAPES: dict[type, str] = {dict: "a block of keys", list: "a list", type(None): "empty"}


def _problems(root: type, values: Values, error: ValidationError) -> Iterator[tuple[str | Setting, ...]]:
    """A message for each problem, in the order of the file. Errors of the branches of a union are one problem, unless
    one of them lies deeper: it says more."""
    blocks = dict(blocks_of(root))
    words_of: dict[str, Any] = {one.__name__: getattr(one, "words", {}) for one in blocks.values()}
    messages: dict[KeyPath, str] = {}
    wanted: dict[KeyPath, tuple[Any, list[str]]] = {}
    missing = []
    for one in error.errors(include_url=False):
        path: KeyPath = ()
        here = values.data
        for part in one["loc"]:  # without pydantic's names for the branches of unions
            if part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int):
                path, here = (*path, part), here[part]
        context, kind, what = one.get("ctx", {}), one["type"], one["type"].split("_")[0]
        if kind == "missing" and not path:
            missing.append(str(one["loc"][-1]))
        elif kind == "missing":
            messages[path] = f"the key {one['loc'][-1]} is missing."
        elif kind == "unexpected_keyword_argument":
            messages[path] = f"no such key.{_hint(path, blocks)}"
        elif kind in _RANGES:
            messages[path] = _RANGES[kind].format(**context)
        else:
            words = words_of.get(context.get("class_name", ""), {})
            parts = wanted.setdefault(path, (here, []))[1]
            parts += ["a text"] if words is None else words
            parts += re.findall("'([^']*)'", context["expected"]) if what == "literal" else [_KINDS.get(what, what)]
    for path, (here, parts) in wanted.items():
        kinds = f"{', '.join(parts[:-1])} or {parts[-1]}" if parts[1:] else parts[0]
        shown = here if isinstance(here, bool | int | float) else f'"{here}"'
        found = f"{_SHAPES.get(type(here), shown)}.{did_you_mean(str(here), parts)}"
        messages.setdefault(path, f"must be {kinds}, not {found}")
    inside = {path[:length] for path in messages for length in range(len(path))}
    order = sorted((path for path in messages if path not in inside), key=lambda path: values.lines.get(path, 0))
    yield from (values.message(path, messages[path]) for path in order)
    if missing:
        names: list[Any] = [name if values.source else Setting(name) for name in missing]
        listed = [part for name in names[:-1] for part in (", ", name)][1:]
        listed += [" and ", names[-1]] if listed else names
        text = f" {'are' if missing[1:] else 'is'} missing. {values.if_missing}".rstrip()
        yield (f"{values.source}: " if values.source else "", *listed, text)


def _hint(path: KeyPath, blocks: dict[str, type]) -> str:
    """The nearest key, of this block or else of any."""
    own = dotted(tuple(part for part in path[:-1] if isinstance(part, str))).replace("validation", "datasets")
    for under in sorted(blocks, key=lambda name: name != own):
        if near := nearest(str(path[-1]), get_type_hints(blocks[under])):
            where = "" if under == own else f" under {under}" if under else " at the top level"
            return f' Did you mean "{near}"{where}?'
    return ""
