"""A YAML file or a dict, with options and `--set key=value` put over it -> plain values with their lines.

Words and numbers are as in YAML 1.2: `off` and `no` are texts, 1e6 is a number, 010 is ten. Nothing in a file can run
code. Small files only: a value is counted each time an alias repeats it, and past `MOST_VALUES` the file is refused.
Files of Krill are converted on the way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from milldam.config.checking import KeyPath, Values, blocks_of, checked_settings, dotted, plain
from milldam.config.legacy import converted, is_legacy
from milldam.config.settings import Config
from milldam.errors import ConfigError, os_error
from milldam.files import in_home

LARGEST_FILE = 1 << 20
MOST_VALUES = 100_000
DEEPEST = 50
_EXAMPLE = """A configuration needs at least:
  datasets: corpus.jsonl
  tokenizer: gpt2/
  out: corpus.milldam"""


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a file for `milldam preprocess`, or of a dict with the same keys; raises ConfigError."""
    return checked_settings(Config, read_config(source, overrides, options))


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Values:
    """The same before it is checked, with notes on keys of Krill."""
    if isinstance(source, Mapping):
        values = Values(plain(source), "config")
    else:
        values = read_file(Path(in_home(str(source))), str(source))
    values.if_missing = _EXAMPLE
    if is_legacy(values.data):
        values.data = converted(values)
    for override in overrides:
        _override(values, override)
    for name, value in (options or {}).items():
        values.put(name, value)
    return values


def read_file(path: Path, name: str) -> Values:
    """A YAML file with keys; `name`: the file in messages."""
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path}: too large for a configuration. To tokenize data, use `milldam tokenize`.")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except OSError as error:
        raise os_error(error, path) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    data, lines = read_yaml(text, name)
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: {'empty' if data is None else 'keys are wanted'}. {_EXAMPLE}")
    return Values(data, name, lines)


# ---- YAML ----


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - those of YAML 1.1 replaced

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern, _first in (
    ("merge", "<<", "<"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?\d+(_\d+)*", "-+0123456789"),
    ("float", r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """The values of a YAML text, and the line of each. Raises ConfigError with the line if it is not valid."""
    lines: dict[KeyPath, int] = {}

    def read(node: yaml.Node, path: KeyPath, line: int) -> Any:
        lines[path] = line
        if len(lines) > MOST_VALUES or len(path) > DEEPEST:
            raise ConfigError(f"{source}: too large or nested too deep for a configuration.")
        if isinstance(node, yaml.SequenceNode):
            return [read(one, (*path, number), one.start_mark.line + 1) for number, one in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for number, key in enumerate(keys):
            if not isinstance(key, str) or key in keys[:number]:
                problem = "a key must be a word." if not isinstance(key, str) else f"{key}: given twice."
                raise ConfigError(f"{source}:{node.value[number][0].start_mark.line + 1}: {problem}")
        loader.flatten_mapping(node)  # merges what `<<: *name` brings in
        return {key.value: read(one, (*path, key.value), key.start_mark.line + 1) for key, one in node.value}

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else read(node, (), 1), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


# ---- `--set` ----


def _override(values: Values, text: str) -> None:
    """Put `datasets.0.path=x` over the values; blocks above it are made, and words spelled out as blocks."""
    name, equals, written = text.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
    if not equals or "" in path or isinstance(path[0], int):
        raise ConfigError(f"{text}: write it as key=value, such as dedup.index=seen/ or seed=1.")
    try:
        value, _ = read_yaml(written, text)
    except ConfigError:
        if written.lstrip()[:1] in ("[", "{", '"', "'"):
            raise
        value = written  # such as *.jsonl
    blocks: dict[str, Any] = dict(blocks_of(Config))
    here: Any = values.data
    for length, (part, following) in enumerate(pairwise((*path, None)), 1):
        if isinstance(here, list) and part == len(here):
            here.append(None)
        is_item = isinstance(here, list) and part in range(len(here))
        inside = here.get(part) if isinstance(here, dict) else here[part] if is_item else here
        if inside is here:
            raise ConfigError(f"{text}: {dotted(path[: length - 1])} is {here!r}, where {part} can't be set.")
        if following is None:
            inside = value
        elif isinstance(following, int):
            inside = inside if isinstance(inside, list) else [] if inside is None else [inside]
        else:
            block = blocks.get(dotted(tuple(one for one in path[:length] if isinstance(one, str))))
            inside = {} if inside is None else block.spelled_out(inside) if block is not None else inside
        here[part] = inside
        here = inside
    for old in [old for old in values.lines if old[: len(path)] == path]:
        del values.lines[old]
    values.lines[path] = 0
