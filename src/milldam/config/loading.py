"""A YAML file or a dict, with options and `--set key=value` put over it -> plain values with their places.

Scalars without quotes keep their text until their key says what they mean (`checking.py`). Nothing in a file can run
code. Small files only: a value is counted each time an alias repeats it, and past `MOST_VALUES` the file is refused.
Files of Krill are converted on the way.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from milldam.config.checking import OVERRIDES, KeyPath, Plain, Values, checked_settings, dotted, is_null
from milldam.config.legacy import convert, drop_superseded, is_legacy
from milldam.config.settings import Config, spelled_out
from milldam.errors import ConfigError, Setting, os_error
from milldam.files import in_home

LARGEST_FILE = 1 << 20
MOST_VALUES = 100_000
DEEPEST = 50
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value", "merge")}
_INPUTS = {
    *("datasets", "validation", "decontaminate", "path", "template", "function"),
    *("tokenizer", "hub_tokenizer_id", "hub_id"),
}
"""Keys whose values name files that are read."""
_EXAMPLE = """A configuration needs at least:
  datasets: corpus.jsonl
  tokenizer: gpt2/
  out: corpus.milldam"""
_KRILLS = """A configuration of Krill needs at least:
  datasets: [{path: roneneldan/TinyStories}]
  hub_tokenizer_id: gpt2"""
_HINTS = {
    "'\\t'": " Indent with spaces, not with tabs.",
    "mapping values are not allowed": " A text with a colon in it needs quotes, and keys of one block the same indent.",
    "alias": ' A text that begins with * needs quotes: "*.jsonl".',
    "expected a single document": " Remove the line ---: one file holds one configuration.",
}
"""What the author most likely did, by the complaint of the YAML parser."""


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a file for `milldam preprocess`, or of a dict with the same keys; raises ConfigError."""
    return checked_settings(Config, read_config(source, overrides, options))


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Values:
    """The same before it is checked, with notes on files found beside it and on keys of Krill."""
    if isinstance(source, Mapping):
        values = Values(_plain(source), "config")
    else:
        values = read_file(Path(in_home(str(source))), str(source), _EXAMPLE)
        values.notes += _find_beside(values.data, Path(str(source)).parent)
    legacy = is_legacy(values.data)
    values.if_missing = _KRILLS if legacy else _EXAMPLE
    for override in overrides:
        _override(values, override, legacy=legacy)
    for name, value in (options or {}).items():
        if legacy:
            drop_superseded(values.data, (name,))
        values.put(name, value)
    if legacy:
        convert(values)
    return values


def read_file(path: Path, name: str, advice: str = "Its keys are those of the options.") -> Values:
    """A YAML file with keys; `name`: the file in messages."""
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{path}: too large for a configuration, which is a small YAML file.\n"
                "To tokenize data without one, use `milldam tokenize`."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; name the YAML file in it.") from None
    except OSError as error:
        raise os_error(error, path) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.") from None
    values = read_yaml(text, name)
    if not isinstance(values.data, dict):
        shape = "a list" if isinstance(values.data, list) else "a single value"
        problem = "empty" if values.data in (None, "") else f"{shape}; keys are wanted"
        raise ConfigError(f"{name}: {problem}. {advice}")
    return values


def _plain(value: Any) -> Any:
    """Python's mappings and sequences as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _find_beside(data: Any, folder: Path, key: str = "") -> Iterator[str]:
    """Looks for relative paths of input in the file's folder if they are not in the working directory.

    Replaces those it finds in the data, with a note on each.
    """
    for inner, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        name = inner if isinstance(inner, str) else key
        if isinstance(value, dict | list):
            yield from _find_beside(value, folder, name)
        elif isinstance(value, str) and name in _INPUTS:
            path, colon, function = value.rpartition(":") if name == "function" else (value, "", "")
            beside = folder / path
            if path and "://" not in path and not _exists(path) and _exists(str(beside)):
                data[inner] = f"{beside}{colon}{function}"
                yield f"{path}: not in the working directory, but beside the configuration: {beside} is used."


def _exists(path: str) -> bool:
    home = os.path.expanduser(path)
    return Path(home).exists() or any(glob.iglob(home, recursive=True))


# ---- YAML ----


def read_yaml(text: str, source: str, path: KeyPath = ()) -> Values:
    """The values of a YAML text; `path`: their place. Raises ConfigError with the line if it is not valid."""
    values, count = Values(None, source), 0

    def place(line: int, path: KeyPath) -> str:
        where = source if source == OVERRIDES else f"{source}:{line}"
        return f"{where}: {dotted(path)}: " if path else f"{where}: "

    def read(node: yaml.Node, path: KeyPath, line: int) -> Any:
        nonlocal count
        count += 1
        if count > MOST_VALUES or len(path) > DEEPEST:
            raise ConfigError(f"{source}: too large or nested too deep for a configuration.")
        values.places[path] = (source, None if source == OVERRIDES else line)
        if node.tag not in _TAGS:
            raise ConfigError(f"{place(line, path)}the tag {node.tag.replace(_TAG, '!!')} has no meaning here.")
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else Plain(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [read(one, (*path, number), one.start_mark.line + 1) for number, one in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{place(line, path)}a key must be a word.")
            if key.value in lines and key.value != "<<":
                twice = f"given twice; first in line {lines[key.value]}."
                raise ConfigError(f"{place(line, (*path, key.value))}{twice}")
            lines[key.value] = line
        loader.flatten_mapping(node)  # merges what `<<: *name` brings in
        return {
            key.value: read(one, (*path, key.value), key.start_mark.line + 1)
            for key, one in {key.value: (key, one) for key, one in node.value}.values()
        }

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            values.data = read(node, path, node.start_mark.line + 1)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise ConfigError(f"{source}:{line}: a character that YAML does not allow ({character}).") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        hint = next((hint for sign, hint in _HINTS.items() if sign in problem), "")
        where = f"{source}:{mark.line + 1}" if mark and source != OVERRIDES else source
        raise ConfigError(f"{where}: not valid YAML: {problem}.{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep.") from None
    return values


# ---- `--set` ----


def _override(values: Values, text: str, *, legacy: bool) -> None:
    """Put `datasets.0.path=x` over the values; blocks above it are made, and words spelled out as blocks."""
    name, equals, written = text.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
    if not equals or "" in path or isinstance(path[0], int):
        raise _wrong(f"{text}: write it as key=value, such as dedup.index=seen/ or seed=1.")
    try:
        new = read_yaml(written, OVERRIDES, path)
    except ConfigError:
        if written.lstrip()[:1] in ("[", "{", '"', "'"):
            raise _wrong(f"{text}: not valid YAML.") from None
        new = Values(written, OVERRIDES)  # such as *.jsonl
    new.places.setdefault(path, (OVERRIDES, None))
    if legacy:
        drop_superseded(values.data, path)
    here = values.data
    for length, part in enumerate(path):
        above, rest = path[:length], path[length:]
        if isinstance(here, list) and (not isinstance(part, int) or part > len(here)):
            raise _wrong(
                f"{dotted((*above, part))}: {dotted(above)} is a list of {len(here)}. "
                f"Write {dotted(above)}.0 for the first, {dotted(above)}.{len(here)} for a new one."
            )
        if not isinstance(here, dict | list):
            raise _wrong(f"{dotted((*above, part))}: {dotted(above)} is '{here}', which has no keys below.")
        key: Any = part if isinstance(here, list) else str(part)
        if isinstance(here, list) and key == len(here):
            here.append(None)
        if not rest[1:]:
            here[key] = Plain("") if new.data is None else new.data
            break
        inside = here[key] if isinstance(here, list) else here.get(key)
        inside = None if is_null(inside) else inside
        if isinstance(rest[1], int):
            here[key] = inside if isinstance(inside, list) else [] if inside is None else [inside]
        else:
            block = next(str(one) for one in reversed(path[: length + 1]) if isinstance(one, str))
            here[key] = {} if inside is None else spelled_out(block, inside)
        here = here[key]
    values.forget_places(path)
    values.places.update(new.places)
    for length in range(1, len(path)):
        values.places.setdefault(path[:length], (OVERRIDES, None))


def _wrong(problem: str) -> ConfigError:
    return ConfigError(Setting(OVERRIDES), f" {problem}")
