"""Settings as they were given: plain values, and where each of them comes from, for messages about it.

YAML with its lines: a text -> plain values, and the place of every key and value in it.

Scalars are read as people mean them: 100_000 and 1e-3 are numbers, 12:30 and 2024-01-01 are text. What is written
without quotes keeps its text, so that `off` can still be a word where a word is wanted. Nothing in a file can run
code. Small files only: a value is counted each time an alias repeats it, and past `MOST_VALUES` the file is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from milldam.errors import ConfigError, Setting

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


MOST_VALUES = 100_000
DEEPEST = 50
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_TAGS = {_TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value", "merge")}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?")
_TRUE = ("true", "yes", "on")
# What YAML complains of -> what the author most likely did.
_HINTS = {
    "'\\t'": " Indent with spaces, not with tabs.",
    "mapping values are not allowed": " A text with a colon in it needs quotes, and keys of one block the same indent.",
    "alias": ' A text that begins with * needs quotes: "*.jsonl".',
    "expected a single document": " Remove the line ---: one file holds one configuration.",
}


def read_yaml(text: str, source: str, *, at: KeyPath = ()) -> Given:
    """The values of a YAML text. Raises ConfigError with the line when it is no YAML; keys given twice are problems."""
    given = Given(source, None)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            given.data = _Walk(given).value(node, at, node.start_mark.line + 1, 0)
    except yaml.YAMLError as error:
        raise ConfigError(_explained(error, text, source)) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep.") from None
    return given


class _Walk:
    """Turns the nodes of one text into values, noting places."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._values = 0

    def value(self, node: yaml.Node, path: KeyPath, key_line: int, depth: int) -> Any:
        self._values += 1
        if self._values > MOST_VALUES or depth > DEEPEST:
            raise ConfigError(f"{self._given.source}: too large or nested too deep for a configuration.")
        line = node.start_mark.line + 1
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        written = node.value if plain else None
        source = self._given.source
        self._given.places[path] = Place(source, key_line, line, written)
        if node.tag not in _TAGS:
            self._given.add_problem(path, f"the tag {node.tag.replace(_TAG, '!!')} has no meaning here.")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self.value(item, (*path, k), item.start_mark.line + 1, depth + 1) for k, item in items]
        return plain_value(node.value, node.tag) if plain else node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._given.add_problem(path, "a key must be a word.")
            elif key.value in own and key.tag != _MERGE:
                where, name = f"{self._given.source}:{line}", dotted((*path, key.value))
                said = f"{where}: {name}: given twice; first in line {own[key.value]}."
                self._given.problems.append((line, (said,)))
            elif key.tag != _MERGE:
                own[key.value] = line
                made[key.value] = self.value(value, (*path, key.value), line, depth + 1)
        for key, value in self._merged(node, depth):
            if key.value not in made:
                made[key.value] = self.value(value, (*path, key.value), key.start_mark.line + 1, depth + 1)
        return made

    def _merged(self, node: yaml.MappingNode, depth: int) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """Keys that `<<: *name` brings in; the first one of a name counts."""
        if depth > DEEPEST:
            raise RecursionError
        for key, value in node.value:
            if key.tag != _MERGE:
                continue
            for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(one, yaml.MappingNode):
                    pairs = one.value
                    yield from ((k, v) for k, v in pairs if isinstance(k, yaml.ScalarNode) and k.tag != _MERGE)
                    yield from self._merged(one, depth + 1)


def plain_value(text: str, tag: str) -> Any:
    """A scalar without quotes.

    >>> plain_value("1e-3", "tag:yaml.org,2002:str"), plain_value("off", "tag:yaml.org,2002:bool")
    (0.001, False)
    """
    if tag == f"{_TAG}null":
        return None
    if tag == f"{_TAG}bool":
        return text.lower() in _TRUE
    return text if tag == f"{_TAG}merge" else number_in(text)


def number_in(text: str) -> str | int | float:
    """The number that a text is, else the text itself."""
    if _NUMBER.fullmatch(text) is None or len(text) > 40:
        return text
    digits = text.replace("_", "")
    if re.fullmatch(r"[-+]?\d+", digits):
        return int(digits)
    number = float(digits)
    return number if math.isfinite(number) else text


def _explained(error: yaml.YAMLError, text: str, source: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{source}:{line}: a character that YAML does not allow (U+{ord(text[error.position]):04X})."
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{source}: not valid YAML: {error}"
    mark = error.problem_mark or error.context_mark
    what = ": ".join(part for part in (error.context, error.problem) if part)
    hint = next((hint for sign, hint in _HINTS.items() if sign in what), "")
    where = f"{source}:{mark.line + 1}" if mark and source != OVERRIDES else source
    return f"{where}: not valid YAML: {what}.{hint}"
