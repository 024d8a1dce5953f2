"""A YAML file or a dict, with options and single values put over it -> settings. Files of Krill are converted."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milldam.config.checking import Given, checked_settings
from milldam.config.legacy import convert, drop_superseded, is_legacy
from milldam.config.settings import Config
from milldam.config.yaml_values import apply_override, parse_override, read_yaml
from milldam.errors import ConfigError, os_error
from milldam.files import in_home

T = TypeVar("T")
LARGEST_FILE = 1 << 20
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


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and how it came about."""

    config: Config
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: which files were found beside it; what of an old file was read how, or ignored."""


def load_config(
    given: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """The configuration of a file for `milldam preprocess`, or of a dict that says the same; raises ConfigError.

    Overrides such as `datasets.0.path=x` and options are put over it. Files of Krill are converted on the way; the
    notes say how.
    """
    return read_config(given, overrides, options).checked()


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """What a file says, with options put over it, before it is checked."""

    given: Given
    said: tuple[Any, ...]
    """File, overrides and options to the letter: YAML has words for one value that mean different things."""
    legacy: bool
    notes: list[str]

    def checked(self) -> LoadedConfig:
        config = checked_settings(Config, self.given, if_missing=_KRILLS if self.legacy else _EXAMPLE)
        return LoadedConfig(config, self.notes)


def read_config(
    given: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> ReadConfig:
    """As `load_config`, unchecked: what can't be read alone raises ConfigError."""
    plain = _plain(given) if isinstance(given, Mapping) else None
    text = repr(plain) if plain is not None else _text_of(Path(in_home(str(given))))
    read = Given("config", plain) if plain is not None else _read(text, str(given), _EXAMPLE)
    legacy = is_legacy(read.data)
    notes = [] if plain is not None else list(_find_beside(read.data, Path(str(given)).parent))
    for one in overrides:
        _override(read, one, legacy)
    for name, value in (options or {}).items():
        if legacy:
            drop_superseded(read.data, (name,))
        read.put(name, value)
    notes += _convert(read) if legacy else []
    # What may hold secrets is not remembered, not as a hash either.
    secret = "storage_options" in read.data
    said = ("",) if secret else (text, tuple(overrides), dict(options or {}))
    return ReadConfig(read, said, legacy, notes)


def _find_beside(data: Any, folder: Path, key: str = "") -> Iterator[str]:
    """Relative paths of input that lead nowhere from the working directory are looked for in the file's folder.

    They are replaced in its data; a note tells of each.
    """
    for inner, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        name = inner if isinstance(inner, str) else key
        if isinstance(value, dict | list):
            yield from _find_beside(value, folder, name)
        elif isinstance(value, str) and name in _INPUTS:
            path, colon, function = value.rpartition(":") if name == "function" else (value, "", "")
            beside = folder / path
            if path and "://" not in path and not _is_there(path) and _is_there(str(beside)):
                data[inner] = f"{beside}{colon}{function}"
                yield f"{path}: not in the working directory, but beside the configuration: {beside} is used."


def _is_there(path: str) -> bool:
    home = os.path.expanduser(path)
    return Path(home).exists() or any(glob.iglob(home, recursive=True))


def load_settings(kind: type[T], path: Path, options: Mapping[str, Any]) -> T:
    """The settings of another job from its file, with options put over them."""
    given = _read(_text_of(path), str(path), "Its keys are those of the options.")
    for name, value in options.items():
        given.put(name, value)
    return checked_settings(kind, given)


def _plain(value: Any) -> Any:
    """Python's values as YAML would have given them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _override(given: Given, text: str, legacy: bool) -> None:
    path, value = parse_override(text)
    if legacy:
        drop_superseded(given.data, path)
    apply_override(given, path, value)


def _convert(given: Given) -> list[str]:
    conversion = convert(given.data)
    given.data, given.origins = conversion.config, conversion.origins
    return conversion.notes


def _read(text: str, path: str, advice: str) -> Given:
    given = read_yaml(text, path)
    if not isinstance(given.data, dict):
        found = {type(None): "empty", list: "a list; keys are wanted"}.get(
            type(given.data), "a single value; keys are wanted"
        )
        raise ConfigError(f"{path}: {found}. {advice}")
    return given


def _text_of(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{path}: too large for a configuration, which is a small YAML file.\n"
                "To tokenize data without one, use `milldam tokenize`."
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; name the YAML file in it.") from None
    except OSError as error:
        raise os_error(error, path) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.") from None
