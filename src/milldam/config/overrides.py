"""`--set a.b=c`: single values put over those of the file."""

from __future__ import annotations

from typing import Any

from milldam.config.lines import SET, Document, KeyPath, Place, dotted, read_yaml
from milldam.config.short_forms import spelled_out
from milldam.errors import ConfigError


def parse_override(given: str) -> tuple[KeyPath, Document]:
    """`datasets.0.path=x` as a path and the value, read as YAML.

    A text that is no YAML, such as *.jsonl, is taken as it is.
    """
    name, equals, text = given.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
    if not equals or "" in path or isinstance(path[0], int):
        raise ConfigError(f"{SET} {given}: write it as key=value, such as {SET} dedup.index=seen/ or {SET} seed=1.")
    try:
        document = read_yaml(text, SET, at=path)
    except ConfigError:
        if text.lstrip()[:1] in ("[", "{", '"', "'"):
            raise
        document = Document(SET, text, {path: Place(SET)})
    # `--set limit=` takes the value of the file away.
    document.places.setdefault(path, Place(SET, text=""))
    return path, document


def apply_override(document: Document, path: KeyPath, value: Document) -> None:
    """Put the value in its place, making the blocks above it and spelling out short forms on the way."""
    _put(document.data, (), path, value.data)
    for old in [old for old in document.places if old[: len(path)] == path]:
        del document.places[old]
    document.places.update(value.places)
    for length in range(1, len(path)):
        document.places.setdefault(path[:length], Place(SET))
    document.problems += value.problems


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
        raise ConfigError(f"{SET} {dotted(inside + rest)}: {dotted(inside)} is {present!r}, which has no keys below.")
    _put(here[key], inside, rest, value)


def _opened(value: Any, path: KeyPath, below: str | int) -> Any:
    """What can hold a key or a number below: a path alone is also a list of one, and a short form is a block."""
    if isinstance(below, int):
        return value if isinstance(value, list) else [] if value is None else [value]
    name = next(str(part) for part in reversed(path) if isinstance(part, str))
    return {} if value is None else spelled_out(name, value)


def _check_number(items: list[Any], path: KeyPath, part: str | int) -> None:
    if not isinstance(part, int) or part > len(items):
        raise ConfigError(
            f"{SET} {dotted((*path, part))}: {dotted(path)} is a list of {len(items)}. "
            f"Write {dotted(path)}.0 for the first, {dotted(path)}.{len(items)} for a new one."
        )
