"""YAML with its lines: a text -> plain values, and the place of every key and value in it.

Scalars are read as people mean them: 100_000 and 1e-3 are numbers, 12:30 and 2024-01-01 are text. What is written
without quotes keeps its text, so that `off` can still be a word where a word is wanted. Nothing in a file can run
code. Small files only: a value is counted each time an alias repeats it, and past `MOST_VALUES` the file is refused.

`--set a.b=c`: single values put over those of the file, and the short forms that they reach into.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from milldam.config.checking import OVERRIDES, Given, KeyPath, Place, dotted
from milldam.errors import ConfigError, Setting

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


# ---- overrides ----

_BLOCKS: dict[str, dict[str, dict[str, Any]]] = {
    "dedup": {"exact": {}, "bloom": {"method": "bloom"}, "near": {"near": {}}},
    "packing": {"wrapped": {"strategy": "wrapped"}, "best_fit": {"strategy": "best_fit"}},
    "clean": {"default": {}},
}
_PATHS = ("tokenizer", "datasets", "validation")


def spelled_out(name: str, value: Any) -> Any:
    """The block that a word stands for, so that more can be said in it; anything else as it is.

    >>> spelled_out("dedup", "near"), spelled_out("tokenizer", "gpt2/"), spelled_out("dedup", "off")
    ({'near': {}}, {'path': 'gpt2/'}, 'off')
    """
    if not isinstance(value, str):
        return value
    if name in _PATHS:
        return {"path": value}
    return dict(_BLOCKS.get(name, {}).get(value, {})) if value in _BLOCKS.get(name, {}) else value


def parse_override(text: str) -> tuple[KeyPath, Given]:
    """`datasets.0.path=x` as a path and the value, read as YAML.

    A text that is no YAML, such as *.jsonl, is taken as it is.
    """
    name, equals, written = text.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
    if not equals or "" in path or isinstance(path[0], int):
        raise _wrong(f"{text}: write it as key=value, such as dedup.index=seen/ or seed=1.")
    try:
        value = read_yaml(written, OVERRIDES, at=path)
    except ConfigError:
        if written.lstrip()[:1] in ("[", "{", '"', "'"):
            raise _wrong(f"{text}: not valid YAML.") from None
        value = Given(OVERRIDES, written, {path: Place(OVERRIDES)})
    # `--set limit=` takes the value of the file away.
    value.places.setdefault(path, Place(OVERRIDES, text=""))
    return path, value


def apply_override(given: Given, path: KeyPath, value: Given) -> None:
    """Put the value in its place, making the blocks above it and spelling out short forms on the way."""
    _put(given.data, (), path, value.data)
    given.forget_places(path)
    given.places.update(value.places)
    for length in range(1, len(path)):
        given.places.setdefault(path[:length], Place(OVERRIDES))
    given.problems += value.problems


def _put(here: Any, above: KeyPath, path: KeyPath, value: Any) -> None:
    part, rest = path[0], path[1:]
    if isinstance(here, list):
        _check_number(here, above, part)
        here += [None] if part == len(here) else []
    key: Any = part if isinstance(here, list) else str(part)
    if not rest:
        here[key] = value
        return
    inside = (*above, part)
    present = here[key] if isinstance(here, list) else here.get(key)
    here[key] = _opened(present, inside, rest[0])
    if not isinstance(here[key], dict | list):
        raise _wrong(f"{dotted(inside + rest)}: {dotted(inside)} is {present!r}, which has no keys below.")
    _put(here[key], inside, rest, value)


def _opened(value: Any, path: KeyPath, below: str | int) -> Any:
    """What can hold a key or a number below: a path alone is also a list of one, and a short form is a block."""
    if isinstance(below, int):
        return value if isinstance(value, list) else [] if value is None else [value]
    name = next(str(part) for part in reversed(path) if isinstance(part, str))
    return {} if value is None else spelled_out(name, value)


def _check_number(items: list[Any], path: KeyPath, part: str | int) -> None:
    if not isinstance(part, int) or part > len(items):
        raise _wrong(
            f"{dotted((*path, part))}: {dotted(path)} is a list of {len(items)}. "
            f"Write {dotted(path)}.0 for the first, {dotted(path)}.{len(items)} for a new one."
        )


def _wrong(said: str) -> ConfigError:
    return ConfigError(Setting(OVERRIDES), f" {said}")
