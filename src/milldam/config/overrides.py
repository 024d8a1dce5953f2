"""`--set a.b=c`: single values put over those of the file, and the short forms that they reach into."""

from __future__ import annotations

from typing import Any

from milldam.config.checking import OVERRIDES, Given, KeyPath, Place, dotted
from milldam.config.yaml_values import read_yaml
from milldam.errors import ConfigError, Setting

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
