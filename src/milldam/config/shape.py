"""Plain values -> values of the shape that a block's dataclass wants, with an error for each that does not fit.

A union is decided by the shape of the value, so that a mistake inside a block is told as that one mistake. Words that
YAML takes for booleans or null are understood where a word is wanted: `dedup: off`, `packing: null`, `near: on`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from milldam.config.lines import Document, KeyPath
from milldam.config.other_words import meant_setting, said_of
from milldam.errors import did_you_mean, nearest

_OFF = ("off", "none")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_LEFT_OUT: Any = object()


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a key may hold."""

    choices: tuple[str, ...] = ()
    scalars: frozenset[type] = frozenset()
    item: Any = None
    """Of a list."""
    entry: Any = None
    """Of a block with names of the user's own."""
    block: type | None = None
    optional: bool = False

    @property
    def off(self) -> str | None:
        """The choice that means off, else None."""
        return next((word for word in _OFF if word in self.choices), None)


@cache
def kinds_of(annotation: Any) -> Kinds:
    """The parts of a type: `Literal["off"] | DedupRules | None` has choices and a block and is optional."""
    union = get_origin(annotation) in (Union, types.UnionType)
    choices: tuple[str, ...] = ()
    scalars: set[type] = set()
    item = entry = block = None
    members = get_args(annotation) if union else (annotation,)
    for member in members:
        if get_origin(member) is Literal:
            choices += get_args(member)
        elif get_origin(member) in (tuple, list):
            item = get_args(member)[0]
        elif get_origin(member) is dict:
            entry = get_args(member)[1]
        elif isinstance(member, type) and is_dataclass(member):
            block = member
        elif member in _NAMES:
            scalars.add(member)
    return Kinds(choices, frozenset(scalars), item, entry, block, optional=type(None) in members)


@cache
def keys_of(block: type) -> dict[str, Any]:
    """The keys of a block, with their types."""
    hints = get_type_hints(block)
    return {one.name: hints[one.name] for one in fields(block)}


@cache
def defaults_of(block: type) -> dict[str, Any]:
    """Defaults by key; required keys are not in it."""
    found = {}
    for one in fields(block):
        if one.default is not MISSING:
            found[one.name] = one.default
        elif one.default_factory is not MISSING:
            found[one.name] = one.default_factory()
    return found


def all_keys(block: type, under: str = "") -> Iterator[tuple[str, str]]:
    """(key, dotted name of the block it is in), from the top to the bottom."""
    inner = []
    for key, annotation in keys_of(block).items():
        yield key, under
        kinds = kinds_of(annotation)
        below = kinds.block or (kinds_of(kinds.item).block if kinds.item else None)
        if below:
            inner.append((below, f"{under}.{key}".removeprefix(".")))
    for below, name in inner:
        yield from all_keys(below, name)


def fit(document: Document, root: type) -> dict[str, Any]:
    """The document's values, ready for the dataclass; what does not fit is added to the document's problems.

    Missing required keys of the root are left to the caller.
    """
    return _Fitting(document, root).block(root, document.data, ())


class _Fitting:
    def __init__(self, document: Document, root: type) -> None:
        self._document = document
        self._root = root

    def block(self, block: type, data: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        keys, defaults = keys_of(block), defaults_of(block)
        made = {}
        for key, value in data.items():
            here = (*path, key)
            if key not in keys:
                self._document.add_problem(here, f"no such key.{self._hint(key, keys)}", at_key=True)
                continue
            fitted = self._value(kinds_of(keys[key]), value, here, defaults.get(key, MISSING))
            if fitted is not _LEFT_OUT:
                made[key] = fitted
        for key in keys:
            if path and key not in defaults and key not in data:
                self._document.add_problem(path, f"the key {key} is missing.", at_key=True)
        return made

    def _hint(self, key: str, keys: dict[str, Any]) -> str:
        """A key of another block, what other tools call so, or the nearest key, here or else in any block."""
        blocks = dict(reversed(list(all_keys(self._root))))
        said, meant = said_of(key), meant_setting(key)
        if key not in blocks and said is not None:
            return f" {said}"
        if key not in blocks and meant is not None:
            *above, near = (part for part in meant.split(".") if not part.isdecimal())
            return _meant(near, ".".join(above), keys)
        found = key if key in blocks else nearest(key, keys) or nearest(key, blocks)
        return "" if found is None else _meant(found, blocks[found], keys)

    def _value(self, kinds: Kinds, value: Any, path: KeyPath, default: Any) -> Any:
        """The value as it must be. After a problem anything will do, since the whole is refused."""
        if isinstance(value, dict) and kinds.block:
            return self.block(kinds.block, value, path)
        if isinstance(value, dict) and kinds.entry:
            return self._values(kinds.entry, value, path)
        if isinstance(value, list) and kinds.item:
            fitted = self._values(kinds.item, dict(enumerate(value)), path)
            return list(fitted.values())
        if isinstance(value, dict | list):
            return self._wrong(kinds, "a list" if isinstance(value, list) else "a block of keys", path)
        if value is None:
            return self._nothing(kinds, path, default)
        return self._scalar(kinds, value, path, default)

    def _values(self, annotation: Any, values: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
        kinds = kinds_of(annotation)
        return {key: self._value(kinds, value, (*path, key), MISSING) for key, value in values.items()}

    def _nothing(self, kinds: Kinds, path: KeyPath, default: Any) -> Any:
        """`dedup: null` is off; `dedup:` with nothing after it, as when all below is a comment, is the default."""
        if default is MISSING:
            return self._wrong(kinds, "empty", path)
        if self._document.text_of(path) == "":
            return _LEFT_OUT
        return kinds.off if kinds.off or kinds.optional else _LEFT_OUT

    def _scalar(self, kinds: Kinds, value: Any, path: KeyPath, default: Any) -> Any:
        written = self._document.text_of(path)
        text = value if isinstance(value, str) else written if written is not None else str(value)
        choice = {one.lower(): one for one in kinds.choices}.get(text.lower())
        if choice is not None:
            return choice
        if kinds.scalars:
            fitted = _fitted_scalar(kinds.scalars, value, text)
            if fitted is not _LEFT_OUT:
                return fitted
        if (value is False or text.lower() in _OFF) and (kinds.off or kinds.optional):
            return kinds.off
        if value is True and (kinds.choices or kinds.block):
            return self._on(kinds, path, default)
        if kinds.item and not kinds.scalars:
            return [self._value(kinds_of(kinds.item), value, path, MISSING)]
        shown = text if isinstance(value, bool | int | float) else f'"{text}"'
        return self._wrong(kinds, shown, path, did_you_mean(text, kinds.choices))

    def _on(self, kinds: Kinds, path: KeyPath, default: Any) -> Any:
        """`on` is what is done by default; where that is nothing, the block with its defaults."""
        if isinstance(default, str) and default not in _OFF:
            return default
        if kinds.block and defaults_of(kinds.block).keys() == keys_of(kinds.block).keys():
            return {}
        return self._wrong(kinds, "on", path)

    def _wrong(self, kinds: Kinds, value: str, path: KeyPath, hint: str = "") -> Any:
        self._document.add_problem(path, f"must be {_described(kinds)}, not {value}.{hint}")
        return _LEFT_OUT


def _meant(key: str, under: str, keys: dict[str, Any]) -> str:
    """A hint at a key, with the block that it is in unless that has these keys."""
    where = "" if key in keys else f" under {under}" if under else " at the top level"
    return f' Did you mean "{key}"{where}?'


def _fitted_scalar(scalars: frozenset[type], value: Any, text: str) -> Any:
    """The value as one of the types, the narrowest first."""
    if isinstance(value, bool):
        return value if bool in scalars else text if str in scalars else _LEFT_OUT
    if isinstance(value, int | float):
        if int in scalars and (isinstance(value, int) or value.is_integer()):
            return int(value)
        if float in scalars:
            return value
    return text if str in scalars else _LEFT_OUT


def _described(kinds: Kinds) -> str:
    """What a key may hold, for a message: off, exact or a block of keys."""
    parts = [*kinds.choices, *(name for kind, name in _NAMES.items() if kind in kinds.scalars)]
    parts += ["a list"] if kinds.item else []
    parts += ["a block of keys"] if kinds.block or kinds.entry else []
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
