"""YAML with its lines: a text -> plain values, and the place of every key and value in it.

Scalars are read as people mean them: 100_000 and 1e-3 are numbers, 12:30 and 2024-01-01 are text. What is written
without quotes keeps its text, so that `off` can still be a word where a word is wanted. Nothing in a file can run
code. Small files only: a value is counted each time an alias repeats it, and past `MOST_VALUES` the file is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from milldam.config.checking import OVERRIDES, Given, KeyPath, Place, dotted
from milldam.errors import ConfigError

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
