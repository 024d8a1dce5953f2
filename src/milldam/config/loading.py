"""A YAML file or a dict -> a Config. Every problem is told at once, with file, line, key and the nearest right word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from milldam.config.legacy import convert, drop_superseded, is_legacy
from milldam.config.lines import Document, KeyPath, read_yaml
from milldam.config.overrides import apply_override, parse_override
from milldam.config.schema import adapter
from milldam.config.settings import Config
from milldam.config.shape import defaults_of, fit, keys_of
from milldam.errors import ConfigError

LARGEST_FILE = 1 << 20
_REQUIRED = [key for key in keys_of(Config) if key not in defaults_of(Config)]
_EXAMPLE = """A configuration needs at least:
  datasets: corpus.jsonl
  tokenizer: gpt2/
  out: corpus.milldam"""
_RANGES = {
    "greater_than_equal": "must be at least {ge}.",
    "greater_than": "must be more than {gt}.",
    "less_than_equal": "must be at most {le}.",
    "less_than": "must be less than {lt}.",
}
_LEGACY_NAMES = {"tokenizer": "hub_tokenizer_id", "datasets": "datasets"}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and how it came about."""

    config: Config
    source: dict[str, Any]
    """What the file and the overrides say, in today's form, plain values only."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what of an old file was read how, and what was ignored."""
    comments: dict[KeyPath, str] = field(default_factory=dict)
    """For keys of an old file: what they were. Empty when the file is in today's form."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a file for `milldam preprocess`, with values such as `datasets.0.path=x` put over it.

    Files of Krill are converted on the way; the notes say how. Raises ConfigError.
    """
    document = read_yaml(_text_of(Path(path)), str(path))
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path}: {_not_a_block(document.data)}. {_EXAMPLE}")
    return _load(document, overrides)


def parse_config(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """The same from a dict, which may hold whatever a file may: `{"datasets": "books/", ...}`."""
    return _load(Document("config", _plain(given)), overrides)


def _plain(value: Any) -> Any:
    """Python's values as YAML would have given them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _load(document: Document, overrides: Sequence[str]) -> LoadedConfig:
    legacy = is_legacy(document.data)
    paths = [_override(document, one, legacy) for one in overrides]
    notes, comments = _convert(document) if legacy else ([], {})
    if legacy:
        comments |= dict.fromkeys(paths, "given by --set")
    source = fit(document, Config)
    document.problems += _missing(document, legacy)
    document.raise_problems()
    ordered = {key: source[key] for key in keys_of(Config) if key in source}
    return LoadedConfig(_validated(document, ordered), ordered, notes, comments)


def _text_of(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{path}: too large for a configuration, which is a small YAML file.\n"
                "To tokenize data without one: milldam tokenize INPUT -o OUT --tokenizer TOKENIZER."
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; name the YAML file in it.") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.") from None


def _not_a_block(data: Any) -> str:
    if data is None:
        return "empty"
    return "a list; keys are wanted" if isinstance(data, list) else "a single value; keys are wanted"


def _override(document: Document, given: str, legacy: bool) -> KeyPath:
    path, value = parse_override(given)
    if legacy:
        drop_superseded(document.data, path)
    apply_override(document, path, value)
    return path


def _convert(document: Document) -> tuple[list[str], dict[KeyPath, str]]:
    conversion = convert(document.data)
    for path, message in conversion.problems:
        document.add_problem(path, message, at_key=True)
    document.data, document.origins = conversion.config, conversion.origins
    return conversion.notes, conversion.comments


def _missing(document: Document, legacy: bool) -> list[str]:
    names = [name for name in _REQUIRED if name not in document.data]
    if not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    what = (
        f"{document.source}: {' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)} {verb} missing."
    )
    if not legacy:
        return [f"{what} {_EXAMPLE}"]
    ways = [f"{_LEGACY_NAMES.get(name, name)} in the file or --set {name}=PATH" for name in names]
    return [f"{what} Use {'; '.join(ways)}."]


def _validated(document: Document, source: dict[str, Any]) -> Config:
    try:
        return adapter().validate_python(source)
    except ConfigError as error:
        raise ConfigError(_placed(document, source, str(error))) from None
    except ValidationError as error:
        for path, message in _limits_broken(error, source):
            document.add_problem(path, message)
        document.raise_problems()
        raise


def _limits_broken(error: ValidationError, source: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What is left for pydantic to find: numbers out of range. Its names for branches of unions are no keys."""
    for one in error.errors(include_url=False):
        path: KeyPath = ()
        here: Any = source
        for part in one["loc"]:
            if part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int):
                path, here = (*path, part), here[part]
        limits = {name: f"{limit:g}" for name, limit in one.get("ctx", {}).items() if isinstance(limit, int | float)}
        if not isinstance(here, dict | list):
            yield path, _RANGES.get(one["type"], f"{one['msg']}.").format(**limits)


def _placed(document: Document, source: dict[str, Any], message: str) -> str:
    """A sentence of Config's own, with the line of the key it begins with, or of the value that it quotes first."""
    word = re.match(r"(\w+)\b", message)
    quoted = re.match(r'"([^"]*)"', message)
    found = []
    for path, value in _walk(source):
        if (word and path[-1] == word[1]) or (quoted and value == quoted[1]):
            found.append(path)
    if found and word and len(found[0]) == 1:
        found = found[:1]
    if len(found) != 1:
        return f"{document.source}: {message}"
    said = message
    if word:
        said = message.removeprefix(word[1]).removeprefix(":").lstrip()
    return document.located(found[0], said)


def _walk(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Every key and list item, those at the top first."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    here = [((*path, key), inner) for key, inner in pairs]
    return here + [below for at, inner in here for below in _walk(inner, at)]
