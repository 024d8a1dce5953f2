"""The one check of everything that can be set: a dataclass and plain values -> an instance, or errors that say where.

The values may come from a YAML file, from options or from keyword arguments. pydantic checks them against the types of
the fields, with ranges beside them (`Annotated[int, Ge(1)]`); what fields must not contradict is checked by the
dataclass itself in `__post_init__`, by a ConfigError that begins with the `Setting`. Every problem is told at once,
where the value was given: file, line and key, or the option, or the argument; with the nearest right word.

Before that, values are taken as they are meant: words that YAML has for booleans and null where a word is wanted
(`dedup: off`, `packing: null`, `near: on`), one item for a list of one, a path as its text.

`Given` is what was said: plain values, and where each of them comes from, for messages about it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from milldam.config.other_words import meant_setting, said_of
from milldam.errors import ConfigError, Setting, did_you_mean, nearest
from milldam.files import in_home

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
Message = tuple[str | Setting, ...]
OVERRIDES = "overrides"
"""`--set` on the command line, `overrides=` in Python."""
MOST_PROBLEMS = 10


def dotted(path: KeyPath) -> str:
    """A path as people write it: datasets.0.path"""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key and its value stand."""

    source: str
    """The file, or `OVERRIDES`, or "" for an option or an argument."""
    key_line: int | None = None
    value_line: int | None = None
    text: str | None = None
    """A scalar as it was written, when it had no quotes."""


@dataclass(slots=True)
class Given:
    """What was given: plain values with their places; and what is wrong with them so far.

    Values without a place are options or arguments: what is said of one names it by a `Setting`.
    """

    source: str = ""
    data: Any = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """For keys that were moved: where they stood in the file."""
    problems: list[tuple[int, Message]] = field(default_factory=list)
    """With their lines."""

    def put(self, name: str, value: Any) -> None:
        """Put an option over what the file says."""
        self.forget_places((name,))
        self.data[name] = value
        self.places[name,] = Place("")

    def forget_places(self, path: KeyPath) -> None:
        for old in [old for old in self.places if old[: len(path)] == path]:
            del self.places[old]

    def text_of(self, path: KeyPath) -> str | None:
        place = self.places.get(self._original(path))
        return place.text if place else None

    def add_problem(self, path: KeyPath, *message: str | Setting, at_key: bool = False) -> None:
        line, _ = self._found(path, at_key=at_key)
        self.problems.append((line or 0, self.located(path, *message, at_key=at_key)))

    def located(self, path: KeyPath, *message: str | Setting, at_key: bool = False) -> Message:
        """The message with place and key in front: `config.yaml:12: dedup.treshold: no such key.`"""
        line, place = self._found(path, at_key=at_key)
        name = dotted(self._original(path))
        if place.source:
            where: str | Setting = f"{place.source}:{line}: " if line else f"{place.source}: "
            if place.source == OVERRIDES:
                return (Setting(OVERRIDES), f" {name}: ", *message)
            return (where, f"{name}: " if name else "", *message)
        return (Setting(name), ": ", *message) if name else message

    def raise_problems(self) -> None:
        """Tell all of them, in the order of the file."""
        if not self.problems:
            return
        shown = [message for _, message in sorted(self.problems, key=lambda problem: problem[0])[:MOST_PROBLEMS]]
        more = len(self.problems) - len(shown)
        shown += [(f"... and {more} more.",)] if more else []
        raise ConfigError(*(part for number, one in enumerate(shown) for part in (("\n", *one) if number else one)))

    def _found(self, path: KeyPath, *, at_key: bool) -> tuple[int | None, Place]:
        """The place of a key, or else of the block that it is in; with the line."""
        original = known = self._original(path)
        while known and known not in self.places:
            known = known[:-1]
        place = self.places.get(known, Place(self.source))
        return place.key_line if at_key or known != original else place.value_line, place

    def _original(self, path: KeyPath) -> KeyPath:
        """The path under which the author wrote it."""
        if path in self.places:
            return path
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]] + path[length:]
        return path


# ---- the check ----

T = TypeVar("T")
_OFF = ("off", "none")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_LEFT_OUT: Any = object()
_UNKNOWN, _MISSING = "unexpected_keyword_argument", "missing"
_RANGES = {
    "greater_than_equal": "must be at least {ge:g}.",
    "greater_than": "must be more than {gt:g}.",
    "less_than_equal": "must be at most {le:g}.",
    "less_than": "must be less than {lt:g}.",
    "string_too_short": "is empty.",
    "too_short": "is empty.",
    "value_error": "{error}",
}
"""What pydantic finds, in our words; anything else is of a kind that the key does not hold."""


def checked_settings(kind: type[T], given: Mapping[str, Any] | Given, *, if_missing: str = "") -> T:
    """The settings of a job from what was given; raises ConfigError.

    given        options or arguments by name, where None means the default; or what a file says (`read_yaml`)
    if_missing   what to say when a key that is needed is not there

    >>> from milldam.config.settings import TrainingRules
    >>> checked_settings(TrainingRules, {"vocab_size": 1000, "model": "bep"})
    Traceback (most recent call last):
    milldam.errors.ConfigError: model: must be bpe or unigram, not "bep". Did you mean "bpe"?
    """
    from pydantic import ValidationError

    given = given if isinstance(given, Given) else Given("", dict(given))
    values = as_meant(kind, given)
    try:
        made: T = _adapter(cast("Any", kind)).validate_python(values)
        given.raise_problems()
        return made
    except ConfigError as error:
        given.raise_problems()
        raise ConfigError(*_placed(given, error)) from None
    except ValidationError as error:
        _Problems(kind, given, values).add(error, if_missing)
        given.raise_problems()
        raise


def as_meant(kind: type, given: Given) -> dict[str, Any]:
    """The values as the dataclass wants them. What does not fit is left as it is."""
    return _Meaning(given).block(kind, given.data, ())


@cache
def _adapter(kind: Any) -> Any:
    """What pydantic makes of a dataclass."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# ---- what a key may hold ----


@dataclass(frozen=True, slots=True)
class Kinds:
    """The parts of a key's type; none of them where anything is taken as it is."""

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

    @property
    def inner(self) -> type | None:
        """The block that it holds, or that a list of it holds."""
        return self.block or (kinds_of(self.item).block if self.item else None)

    def __str__(self) -> str:
        """For a message: off, exact or a block of keys."""
        parts = [*self.choices, *(name for kind, name in _NAMES.items() if kind in self.scalars)]
        parts += ["a list"] if self.item else []
        parts += ["a block of keys"] if self.block or self.entry else []
        return "".join(_listed(parts, "or")) if parts else "something else"


@cache
def kinds_of(annotation: Any) -> Kinds:
    """The parts of a type: `Literal["off"] | DedupRules | None` has choices and a block and is optional."""
    union = get_origin(annotation) in (Union, types.UnionType)
    members = get_args(annotation) if union else (annotation,)
    choices: tuple[str, ...] = ()
    item: Any = None
    entry: Any = None
    block: Any = None
    for member in members:
        origin, inner = get_origin(member), get_args(member)
        if origin is Literal:
            choices += inner
        elif origin in (tuple, list):
            item = inner[0]
        elif inner and isinstance(origin, type) and issubclass(origin, Mapping):
            entry = inner[1]
        elif is_dataclass(member):
            block = member
    scalars = frozenset(member for member in members if member in _NAMES)
    return Kinds(choices, scalars, item, entry, block, optional=type(None) in members)


@cache
def keys_of(block: type) -> dict[str, Kinds]:
    """The keys of a block, and what they may hold."""
    hints = get_type_hints(block)
    return {one.name: kinds_of(hints[one.name]) for one in fields(block)}


@cache
def defaults_of(block: type) -> dict[str, Any]:
    """Defaults by key; required keys are not in it."""
    made = {one.name: one.default_factory() for one in fields(block) if one.default_factory is not MISSING}
    return made | {one.name: one.default for one in fields(block) if one.default is not MISSING}


def _all_keys(block: type, under: str = "") -> Iterator[tuple[str, str]]:
    """(key, dotted name of the block it is in), from the top to the bottom."""
    yield from ((key, under) for key in keys_of(block))
    for key, kinds in keys_of(block).items():
        if kinds.inner:
            yield from _all_keys(kinds.inner, f"{under}.{key}".removeprefix("."))


# ---- values as they are meant ----


@dataclass(frozen=True, slots=True)
class _Meaning:
    given: Given

    def block(self, block: type, data: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        keys, defaults = keys_of(block), defaults_of(block)
        meant = {
            key: self._value(keys[key], value, (*path, key), defaults.get(key, MISSING)) if key in keys else value
            for key, value in data.items()
        }
        return {key: value for key, value in meant.items() if value is not _LEFT_OUT}

    def _value(self, kinds: Kinds, value: Any, path: KeyPath, default: Any = MISSING) -> Any:
        if kinds == Kinds():
            return value
        if isinstance(value, Mapping):
            if kinds.inner:
                return self.block(kinds.inner, value, path)
            inner = kinds_of(kinds.entry)
            return {key: self._value(inner, one, (*path, key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            inner = kinds_of(kinds.item)
            return [self._value(inner, one, (*path, number)) for number, one in enumerate(value)]
        if value is None:
            # `dedup: null` is off; `dedup:` with nothing after it, as when all below is a comment, is the default.
            if default is MISSING:
                return None
            explicit = self.given.text_of(path) != "" and (kinds.off or kinds.optional)
            return kinds.off if explicit else _LEFT_OUT
        return self._scalar(kinds, value, path, default)

    def _scalar(self, kinds: Kinds, value: Any, path: KeyPath, default: Any) -> Any:
        text = shown_text(self.given, value, path)
        choice = {one.lower(): one for one in kinds.choices}.get(text.lower())
        if choice is not None:
            return choice
        fitted = _fitted(kinds.scalars, value, text)
        if fitted is not _LEFT_OUT:
            return fitted
        if (value is False or text.lower() in _OFF) and (kinds.off or kinds.optional):
            return kinds.off
        if value is True and isinstance(default, str) and default not in _OFF:
            return default  # `on` is what is done by default; where that is nothing, the block with its defaults
        if value is True and kinds.block and len(defaults_of(kinds.block)) == len(keys_of(kinds.block)):
            return {}
        if kinds.item and not kinds.scalars:
            return [self._value(kinds_of(kinds.item), value, path)]
        return text if isinstance(value, bool) else value


def _fitted(scalars: frozenset[type], value: Any, text: str) -> Any:
    """The value as one of the types, the narrowest first; left out when it is none."""
    if isinstance(value, bool) and bool in scalars:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if int in scalars and (isinstance(value, int) or value.is_integer()):
            return int(value)
        if float in scalars:
            return value
    if str in scalars and isinstance(value, str | bool | int | float | PurePath):
        return in_home(text) if text.startswith("~/") else text
    return _LEFT_OUT


def shown_text(given: Given, value: Any, path: KeyPath) -> str:
    """A scalar as it was written."""
    written = given.text_of(path)
    return value if isinstance(value, str) else written if written is not None else str(value)


# ---- what is wrong with them ----


@dataclass(frozen=True, slots=True)
class _Problems:
    """Tells what pydantic found, in the user's words."""

    root: type
    given: Given
    values: dict[str, Any]

    def add(self, error: ValidationError, if_missing: str) -> None:
        found: dict[KeyPath, ErrorDetails] = {}
        for one in error.errors(include_url=False):
            path = self._path(one)
            if path not in found or one["type"] in _RANGES:
                found[path] = one
        # Of the branches of a union, the one that comes furthest tells what is wrong.
        blocks = {path[:length] for path in found for length in range(1, len(path))}
        missing = {path: one for path, one in found.items() if one["type"] == _MISSING}
        for path, one in sorted(found.items(), key=lambda pair: pair[0] in missing):
            if path not in blocks and (path not in missing or path[1:]):
                self._add_one(path, one)
        self._add_missing([path[0] for path in missing if not path[1:]], if_missing)

    def _path(self, one: ErrorDetails) -> KeyPath:
        """The keys alone: pydantic's names for branches of unions are none."""
        path: KeyPath = ()
        here: Any = self.values
        for part in one["loc"]:
            if part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int):
                path, here = (*path, part), here[part]
        return (*path, one["loc"][-1]) if one["type"] == _MISSING else path

    def _add_missing(self, names: list[Any], advice: str) -> None:
        if names:
            source = self.given.source
            listed = _listed([str(name) if source else Setting(name) for name in names], "and")
            said = f" {'is' if len(names) == 1 else 'are'} missing. {advice}".rstrip()
            self.given.problems.append((sys.maxsize, (f"{source}: " if source else "", *listed, said)))

    def _add_one(self, path: KeyPath, one: ErrorDetails) -> None:
        block, kinds = self._expected(path)
        if one["type"] == _MISSING:
            self.given.add_problem(path[:-1], f"the key {path[-1]} is missing.", at_key=True)
        elif one["type"] == _UNKNOWN:
            self.given.add_problem(path, f"no such key.{self._hint(str(path[-1]), block)}", at_key=True)
        elif one["type"] in _RANGES:
            self.given.add_problem(path, _RANGES[one["type"]].format(**one.get("ctx", {})))
        else:
            value = _value_at(self.given.data, path)
            text = "" if isinstance(value, dict | list | tuple) else shown_text(self.given, value, path)
            shown = _CALLED.get(type(value)) or (text if isinstance(value, bool | int | float) else f'"{text}"')
            self.given.add_problem(path, f"must be {kinds}, not {shown}.{did_you_mean(text, kinds.choices)}")

    def _expected(self, path: KeyPath) -> tuple[type, Kinds]:
        """The block that a key is in, and what the key may hold."""
        block, kinds = self.root, Kinds(block=self.root)
        for part in path:
            if isinstance(part, int):
                kinds = kinds_of(kinds.item)
            elif kinds.inner:
                block, kinds = kinds.inner, keys_of(kinds.inner).get(part, Kinds())
            else:
                kinds = kinds_of(kinds.entry)
        return block, kinds

    def _hint(self, key: str, block: type) -> str:
        """A key of another block, what other tools call so, or the nearest key, here or else in any block."""
        blocks = dict(reversed(list(_all_keys(self.root))))
        said, meant = said_of(key), meant_setting(key)
        if key not in blocks and said is not None:
            return f" {said}"
        if key not in blocks and meant is not None and meant.split(".")[0] in blocks:
            *above, near = (part for part in meant.split(".") if not part.isdecimal())
            return _meant_key(near, ".".join(above), block)
        here = nearest(key, keys_of(block))
        found = key if key in blocks else here or nearest(key, blocks)
        hint = "" if found is None else _meant_key(found, blocks[found], block)
        return hint.replace("mean ", f'mean "{here}", or ', 1) if here and here != found else hint


_CALLED: dict[type, str] = {dict: "a block of keys", list: "a list", tuple: "a list", type(None): "empty"}


def _meant_key(key: str, under: str, block: type) -> str:
    """A hint at a key, with the block that it is in unless that is this one."""
    where = "" if key in keys_of(block) else f" under {under}" if under else " at the top level"
    return f' Did you mean "{key}"{where}?'


def _value_at(data: Any, path: KeyPath) -> Any:
    """What was given; for the only item of a list that was given without brackets, that item."""
    for part in path:
        if isinstance(data, dict | list):
            data = data[part]  # type: ignore[index]
    return data


def _listed(names: list[Any], word: str) -> list[Any]:
    """Names with commas and a last word between them."""
    between = [", "] * (len(names) - 2) + [f" {word} "]
    return [part for pair in zip(names, [*between[: len(names) - 1], ""], strict=True) for part in pair]


def _placed(given: Given, error: ConfigError) -> tuple[str | Setting, ...]:
    """What a dataclass itself found wrong, with the place of the setting that it begins with."""
    setting, *said = error.args
    if not given.source or not isinstance(setting, Setting):
        return (f"{given.source}: ", *error.args) if given.source else error.args
    path = tuple(int(part) if part.isdecimal() else part for part in setting.path.split("."))
    return given.located(path, said[0].removeprefix(":").lstrip(), *said[1:])
