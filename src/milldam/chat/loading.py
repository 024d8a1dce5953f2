"""Where a chat template comes from: a file of the user's, or the files beside a tokenizer, as models ship them.

    chat_template.jinja                    the template
    additional_chat_templates/NAME.jinja   others, by name
    tokenizer_config.json                  `chat_template`: a text, or a list of named ones; and the special tokens
    special_tokens_map.json                more special tokens

Without a name, `default` is taken, and `tool_use` for conversations with tools where there is one: transformers' rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, Setting, did_you_mean
from milldam.input_files import nearby
from milldam.tokenizers.loading import hub_file

_CONFIG, _JINJA, _MORE = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_FILES = (_JINJA, _CONFIG, "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a template, and what it may name."""

    text: str
    origin: str
    tool_text: str | None = None
    """For conversations with tools, if it is another one."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Special tokens (bos_token, eos_token, ...) and what the user sets."""
    date: datetime | None = None
    """What a template that writes the date is given; None: now."""

    @property
    def writes_date(self) -> bool:
        return "strftime_now" in self.text + (self.tool_text or "")


def find_template(
    tokenizer: str,
    *,
    template: str | None = None,
    name: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> TemplateSource:
    """The user's template, else that of the tokenizer; ConfigError or InputError if there is none."""
    beside = _files_beside(tokenizer)
    tokens = _special_tokens(beside) | dict(variables or {})
    if template is None:
        origin, named = tokenizer, _templates_in(beside)
    else:
        origin, path = template, Path(template).expanduser()
        if not path.exists():
            raise InputError(f"{template}: no such chat template.{nearby(template)}")
        if path.is_dir():
            named = _templates_in(_files_beside(template))
        elif path.suffix == ".json":
            named = _templates_of(_object(path))
            if not named:
                raise InputError(f"{path}: no chat template in it.")
        else:
            named = {"default": _text(path)}
    listed = ", ".join(sorted(named))
    if not named:
        raise ConfigError(
            f"{origin}: the tokenizer comes without a chat template (no {_JINJA}, no chat_template in {_CONFIG}). "
            "Give one, a Jinja file: ",
            Setting("chat.template"),
            ".",
        )
    if name is not None:
        if name not in named:
            raise ConfigError(f'{origin}: no chat template "{name}"; there are {listed}.{did_you_mean(name, named)}')
        return TemplateSource(named[name], f"{origin} ({name})", None, tokens)
    if "default" in named:
        return TemplateSource(named["default"], origin, named.get("tool_use"), tokens)
    if len(named) > 1:
        message = f"{origin}: which chat template? There are {listed}. Say which one: "
        raise ConfigError(message, Setting("chat.named_template", min(named)), ".")
    return TemplateSource(next(iter(named.values())), origin, None, tokens)


def _files_beside(tokenizer: str) -> dict[str, Path]:
    """Those files of a tokenizer that are there, by name."""
    path = Path(tokenizer).expanduser()
    if path.exists():
        folder = path if path.is_dir() else path.parent
        more = sorted((folder / _MORE).glob("*.jinja"))
        return {file: folder / file for file in _FILES if (folder / file).is_file()} | {
            f"{_MORE}/{one.name}": one for one in more
        }
    files = {}
    for file in _FILES:
        try:
            files[file] = hub_file(tokenizer, file)
        except ConnectionError:
            break  # what is cached has to do
        except (OSError, ValueError, ImportError):
            continue
    return files


def _templates_in(files: Mapping[str, Path]) -> dict[str, str]:
    named = _templates_of(_object(files[_CONFIG])) if _CONFIG in files else {}
    named |= {path.stem: _text(path) for file, path in files.items() if file.startswith(_MORE)}
    return named | ({"default": _text(files[_JINJA])} if _JINJA in files else {})


def _templates_of(config: dict[str, Any]) -> dict[str, str]:
    """The templates of a configuration: one, or several by name."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    several = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    return {
        str(one["name"]): one["template"] for one in several if isinstance(one.get("template"), str) and "name" in one
    }


def _special_tokens(files: Mapping[str, Path]) -> dict[str, Any]:
    """Every `..._token` that has a text, as transformers gives them to a template."""
    tokens: dict[str, Any] = {}
    for file in ("special_tokens_map.json", _CONFIG):
        for name, value in (_object(files[file]) if file in files else {}).items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                tokens[name] = token
    return tokens


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as a chat template ({error}).") from None
