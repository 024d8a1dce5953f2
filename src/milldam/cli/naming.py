"""Settings in messages as the options of a command, and what an option that does not exist may have meant.

Text made fit to be printed: harmless whatever its origin, and in columns.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from milldam.errors import Setting, nearest

if TYPE_CHECKING:
    from rich.console import Console

_SET = "overrides"
DESCRIBED = "milldam.described"
"""Where the context of `run-units` and `slurm` keeps the command that they were given."""


def as_option(command: click.Command, setting: Setting, within: click.Command | None = None) -> str:
    """A setting as the command takes it: --text-column body, or --set datasets.0.text_column=body.

    `within`: a command that was given the other one.
    """
    known = {**({} if within is None else _options(within)), **_options(command)}
    # Of what has several options, such as chat.template, these are named for it: --chat-template.
    option = known.get(setting.path.replace(".", "_")) or known.get(setting.name)
    value = _text(setting.value)
    if option is not None:
        long = max(option.opts, key=len)
        return long if option.is_flag or not value else f"{long} {shlex.quote(value)}"
    if any(isinstance(one, click.Argument) and one.name == setting.name for one in command.params):
        return setting.name.upper()
    if _SET not in _options(command):
        return str(setting)
    if isinstance(setting.value, dict):
        return f"--set {shlex.quote(f'{setting.path}.{value}')}"
    return f"--set {shlex.quote(f'{setting.path}={value}')}" if value else setting.path


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def explained(error: click.NoSuchOption) -> click.NoSuchOption:
    """The same error with a hint that helps, or none."""
    hint = "" if error.ctx is None else _hint(error.option_name, error.ctx.command)
    return click.NoSuchOption(error.option_name, f"No such option: {error.option_name}.{hint}", ctx=error.ctx)


def _hint(word: str, command: click.Command) -> str:
    from milldam.config.checking import meant_setting

    options = _options(command)
    meant = meant_setting(word)
    if meant is not None and Setting(meant).name in options:
        return f" Did you mean {as_option(command, Setting(meant))}?"
    hint = _of_a_job(word, meant, by_file=_SET in options) if _SET in options or command.name == "tokenize" else ""
    known = [max(option.opts, key=len).lstrip("-") for option in options.values()]
    near = nearest(word.lstrip("-").replace("_", "-"), known)
    return hint or (f" Did you mean --{near}?" if near else "")


def _of_a_job(word: str, meant: str | None, *, by_file: bool) -> str:
    """Of what a job that makes tokens does, but has no option for: it is elsewhere, or in a file."""
    from milldam.config.checking import keys_of
    from milldam.config.settings import Config

    key = word.lstrip("-").replace("-", "_")
    path = meant or (key if key in keys_of(Config) else None)
    if path == "datasets.0.path":
        return " Name the input without an option."
    if path is None:
        return ""
    return f" Did you mean --set {path}=...?" if by_file else f" It is {path} in a file for `milldam preprocess`."


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by the settings that they give."""
    return {str(option.name): option for option in command.params if isinstance(option, click.Option)}


_PICTURES = {code: 0x2400 + code for code in range(0x20) if code != 0x0A} | {0x7F: 0x2421}
_VISIBLE = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures, line ends apart: what we print must not steer the terminal."""
    return text.translate(_VISIBLE)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Indented lines of a table: names to the left, figures to the right.

    >>> columns([("", "start", "peak"), ("tokenize", "71 MB", "296 MB")])
    ['            start    peak', '  tokenize  71 MB  296 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", *(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(cells))])
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


TRAINED_MARKS = "⟦", "⟧"
"""Around what is trained on where there are no colours."""


def has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color
