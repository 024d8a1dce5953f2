"""Where a chat template comes from: a file of the user's, or the files beside a tokenizer, as models ship them.

    chat_template.jinja                    the template
    additional_chat_templates/NAME.jinja   others, by name
    tokenizer_config.json                  `chat_template`: a text, or a list of named ones; and the special tokens

Without a name, `default` is taken, and `tool_use` for conversations with tools where there is one: transformers' rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, Setting, nearest
from milldam.input_files import nearby
from milldam.tokenizers.loading import hub_file

_CONFIG, _JINJA, _MORE = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"


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
        named = _templates_in(_files_beside(template)) if path.is_dir() else {"default": _text(path)}
    if not named:
        raise ConfigError(
            f"{origin}: the tokenizer comes without a chat template (no {_JINJA}, no chat_template in {_CONFIG}). "
            "Give one, a Jinja file: ",
            Setting("chat.template"),
            ".",
        )
    wanted = name or (next(iter(named)) if len(named) == 1 else "default")
    if wanted not in named:
        message = f'{origin}: no chat template "{wanted}"; there are {", ".join(sorted(named))}. Say which one: '
        raise ConfigError(message, Setting("chat.named_template", nearest(wanted, named) or min(named)), ".")
    tool_text = named.get("tool_use") if name is None else None
    return TemplateSource(named[wanted], origin if name is None else f"{origin} ({name})", tool_text, tokens)


def _files_beside(tokenizer: str) -> dict[str, Path]:
    """Those files of a tokenizer that are there, by name."""
    path = Path(tokenizer).expanduser()
    if path.exists():
        folder = path if path.is_dir() else path.parent
        more = sorted((folder / _MORE).glob("*.jinja"))
        return {file: folder / file for file in (_JINJA, _CONFIG) if (folder / file).is_file()} | {
            f"{_MORE}/{one.name}": one for one in more
        }
    files = {}
    for file in (_JINJA, _CONFIG):
        try:
            files[file] = hub_file(tokenizer, file)
        except ConnectionError:
            break  # what is cached has to do
        except (OSError, ValueError, ImportError):
            continue
    return files


def _templates_in(files: Mapping[str, Path]) -> dict[str, str]:
    """Templates by name; a configuration has one, or several."""
    value = _config(files).get("chat_template")
    several = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    named = {"default": value} if isinstance(value, str) else {one.get("name"): one.get("template") for one in several}
    named |= {path.stem: _text(path) for file, path in files.items() if file.startswith(_MORE)}
    named |= {"default": _text(files[_JINJA])} if _JINJA in files else {}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _special_tokens(files: Mapping[str, Path]) -> dict[str, Any]:
    """Every `..._token` that has a text, as transformers gives them to a template."""
    tokens: dict[str, Any] = {}
    for name, value in _config(files).items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _config(files: Mapping[str, Path]) -> dict[str, Any]:
    try:
        value = json.loads(files[_CONFIG].read_bytes()) if _CONFIG in files else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{files[_CONFIG]}: can't be read ({error}).") from None
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as a chat template ({error}).") from None
