"""A YAML file or a dict, with options and single values put over it -> settings. Files of Krill are converted.

A configuration as a YAML file, with comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from milldam.config.checking import Given, KeyPath, as_meant, checked_settings, keys_of
from milldam.config.legacy import convert, drop_superseded, is_legacy
from milldam.config.settings import Config
from milldam.config.yaml_values import apply_override, number_in, parse_override, read_yaml
from milldam.errors import ConfigError

T = TypeVar("T")
LARGEST_FILE = 1 << 20
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
    source: dict[str, Any]
    """What the file and the overrides say, in today's form, plain values only."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what of an old file was read how, and what was ignored."""
    comments: dict[KeyPath, str] = field(default_factory=dict)
    """For keys of an old file: what they were. Empty when the file is in today's form."""


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
    comments: dict[KeyPath, str]

    def checked(self) -> LoadedConfig:
        config = checked_settings(Config, self.given, if_missing=_KRILLS if self.legacy else _EXAMPLE)
        meant = as_meant(Config, self.given)
        source = {key: meant[key] for key in keys_of(Config) if key in meant}
        return LoadedConfig(config, source, self.notes, self.comments)


def read_config(
    given: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> ReadConfig:
    """As `load_config`, unchecked: what can't be read alone raises ConfigError."""
    plain = _plain(given) if isinstance(given, Mapping) else None
    text = repr(plain) if plain is not None else _text_of(Path(str(given)))
    read = Given("config", plain) if plain is not None else _read(text, str(given), _EXAMPLE)
    legacy = is_legacy(read.data)
    paths = [_override(read, one, legacy) for one in overrides]
    for name, value in (options or {}).items():
        if legacy:
            drop_superseded(read.data, (name,))
        read.put(name, value)
    notes, comments = _convert(read) if legacy else ([], {})
    if legacy:
        comments |= dict.fromkeys(paths, "given by --set")
    return ReadConfig(read, (text, tuple(overrides), dict(options or {})), legacy, notes, comments)


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


def _override(given: Given, text: str, legacy: bool) -> KeyPath:
    path, value = parse_override(text)
    if legacy:
        drop_superseded(given.data, path)
    apply_override(given, path, value)
    return path


def _convert(given: Given) -> tuple[list[str], dict[KeyPath, str]]:
    conversion = convert(given.data)
    for path, message in conversion.problems:
        given.add_problem(path, message, at_key=True)
    given.data, given.origins = conversion.config, conversion.origins
    return conversion.notes, conversion.comments


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
        raise ConfigError(f"{path}: can't be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text.") from None


def as_yaml(config: dict[str, Any], comments: dict[KeyPath, str], header: list[str]) -> str:
    """A configuration as YAML, with what each key was beside it."""
    top = [f"# {line}".rstrip() for text in header for line in text.splitlines()]
    return "\n".join([*top, "", *_block_lines(config, (), comments)]) + "\n"


def _block_lines(block: dict[str, Any], path: KeyPath, comments: dict[KeyPath, str]) -> Iterator[str]:
    for key, value in block.items():
        here = (*path, key)
        said = f"  # {comments[here]}" if here in comments else ""
        if isinstance(value, dict) and value:
            yield f"{_scalar(key)}:{said}"
            yield from (f"  {line}" for line in _block_lines(value, here, comments))
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            yield f"{_scalar(key)}:{said}"
            for number, one in enumerate(value):
                yield from _item_lines(one, (*here, number), comments)
        else:
            yield f"{_scalar(key)}: {_scalar(value)}{said}"


def _item_lines(item: Any, path: KeyPath, comments: dict[KeyPath, str]) -> Iterator[str]:
    lines = _block_lines(item, path, comments) if isinstance(item, dict) and item else iter([_scalar(item)])
    yield f"  - {next(lines)}"
    yield from (f"    {line}" for line in lines)


def _in_list(value: Any) -> str:
    """The same between brackets, where a comma means something."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_list(key)}: {_in_list(one)}' for key, one in value.items())}}}"
    written = _scalar(value)
    plain = not isinstance(value, str) or written.startswith(("'", '"')) or re.fullmatch(r"[\w./-]+", written)
    return written if plain else json.dumps(value)


def _scalar(value: Any) -> str:
    """A value on one line. Text that could be read as something else gets quotes."""
    if isinstance(value, str) and (not value.isprintable() or not isinstance(number_in(value), str)):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_in_list(one) for one in value)}]"
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return written.removesuffix("\n").removesuffix("\n...")
