"""Settings in messages as the options of a command, the likely meaning of an unknown option, and text that is safe to
print.
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
"""Where the context of `run-units` and `slurm` keeps the command that they describe."""


def as_option(command: click.Command, setting: Setting, within: click.Command | None = None) -> str:
    """A setting as the command takes it: --text-column body, or --set datasets.0.text_column=body.

    `within`: the command that describes it.
    """
    known = {**({} if within is None else _options(within)), **_options(command)}
    # Options of a block are named for it: chat.template is --chat-template.
    option = known.get(setting.path.replace(".", "_")) or known.get(setting.name)
    value = "" if setting.value is None else str(setting.value)
    if isinstance(setting.value, dict):
        value = ",".join(f"{name}={one}" for name, one in setting.value.items())
    elif isinstance(setting.value, list | tuple):
        value = ",".join(map(str, setting.value))
    if option is not None:
        long = max(option.opts, key=len)
        return long if option.is_flag or not value else f"{long} {shlex.quote(value)}"
    if any(isinstance(one, click.Argument) and one.name == setting.name for one in command.params):
        return setting.name.upper()
    if _SET not in _options(command):
        return str(setting)
    equals = "." if isinstance(setting.value, dict) else "="
    return f"--set {shlex.quote(f'{setting.path}{equals}{value}')}" if value else setting.path


def explained(error: click.NoSuchOption) -> click.NoSuchOption:
    """The same error with a hint: the option that means it, or where its setting is."""
    from milldam.config.checking import keys_of, meant_setting

    hint = ""
    if error.ctx is not None:
        command, word = error.ctx.command, error.option_name.lstrip("-")
        options, place, by_file = _options(command), meant_setting(word), False
        by_file = _SET in options
        names = [max(option.opts, key=len).lstrip("-") for option in options.values()]
        near = nearest(word.replace("_", "-"), names)
        if (by_file or command.name == "tokenize") and place is None:
            from milldam.config.settings import Config

            key = word.replace("-", "_")
            place = key if key in keys_of(Config) else None
        if place is not None and Setting(place).name in options:
            hint = f" Did you mean {as_option(command, Setting(place))}?"
        elif place == "datasets.0.path" and (by_file or command.name == "tokenize"):
            hint = " Name the input without an option."
        elif place is not None and by_file:
            hint = f" Did you mean --set {place}=...?"
        elif place is not None and command.name == "tokenize":
            hint = f" It is {place} in a file for `milldam preprocess`."
        elif near:
            hint = f" Did you mean --{near}?"
    return click.NoSuchOption(error.option_name, f"No such option: {error.option_name}.{hint}", ctx=error.ctx)


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their settings."""
    return {str(option.name): option for option in command.params if isinstance(option, click.Option)}


_PICTURES = {code: 0x2400 + code for code in range(0x20) if code != 0x0A} | {0x7F: 0x2421}
_VISIBLE = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures, except line ends: printed text must not steer the terminal."""
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
"""Around text that is trained on where there are no colours."""


def has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color
