"""Settings in messages as the options of a command, and text that is safe to print. Light: every command needs it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from milldam.errors import Setting

DESCRIBED = "milldam.described"
"""Where the context of `run-units` and `slurm` keeps the command that they describe."""
TRAINED_MARKS = "⟦", "⟧"
"""Around text that is trained on where there are no colours."""


def as_option(command: click.Command, setting: Setting) -> str:
    """A setting as the command takes it: --text-column body, or --set datasets.0.text_column=body."""
    options = {str(option.name): option for option in command.params if isinstance(option, click.Option)}
    # Options of a block are named for it: chat.template is --chat-template.
    option = options.get(setting.path.replace(".", "_")) or options.get(setting.name)
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
    if "overrides" not in options:
        return str(setting)
    equals = "." if isinstance(setting.value, dict) else "="
    return f"--set {shlex.quote(f'{setting.path}{equals}{value}')}" if value else setting.path


_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code != 0x0A} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures, except line ends: printed text must not steer the terminal."""
    return text.translate(_VISIBLE)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Indented lines of a table: names to the left, figures to the right.

    >>> columns([("", "start", "peak"), ("tokenize", "71 MB", "296 MB")])
    ['            start    peak', '  tokenize  71 MB  296 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        figures = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join(["", first.ljust(widths[0]), *figures]))
    return lines
