"""Options that several commands have, each written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from milldam.config.fields import Documents, Executor, InputFormat, InvalidUtf8
from milldam.decontamination.rules import Action
from milldam.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])
Add = Callable[[_Command], _Command]


def _together(*options: Add[Any]) -> Add[Any]:
    """Options in the order in which the help shows them."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def given(options: dict[str, Any]) -> dict[str, Any]:
    """What was said; by identity, since 0 is a value, if a wrong one."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != ()}


def named_values(pairs: Sequence[str], option: str) -> dict[str, str]:
    """What was given as NAME=VALUE, any number of times."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--{option} {pair}: write NAME=VALUE.")
        found[name] = value
    return found


def json_values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """The same; what is JSON (true, 3, "a") is taken as such, anything else as text."""
    found: dict[str, Any] = {}
    for name, text in named_values(pairs, option).items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def choice(kind: Any) -> click.Choice[str]:
    """What a setting of this type may be."""
    return click.Choice(get_args(kind))


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

config_file = _together(
    click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG"),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a key of the file: --set dedup.near.rows=8.",
    ),
)
"""CONFIG and `--set`, for commands that read a configuration."""


described_job = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
"""A job as the words that follow `milldam`, for commands that start its parts; their own options come before it."""


def machine_options(*, in_file: bool = False) -> Add[Any]:
    """`--memory` and `--workers`; `in_file`: a configuration has them too."""
    memory, cores = ("memory of the file", "workers of the file") if in_file else ("half of what is free", "all")
    return _together(
        click.option(
            "--memory", metavar="SIZE", help=f"Limit for the whole process tree, such as 512MB. [default: {memory}]"
        ),
        click.option("--workers", type=int, metavar="N", help=f"Cores to use. [default: {cores}]"),
    )


def job_options(*, in_file: bool = False) -> Add[Any]:
    """How a job runs and what it tells: the same for every command that runs one."""
    return _together(
        machine_options(in_file=in_file),
        click.option(
            "--executor", type=choice(Executor), help="Where to run: this machine or a Ray cluster. [default: local]"
        ),
        click.option("--address", metavar="HOST:PORT", help="The Ray cluster. [default: the one running here]"),
        click.option("--overwrite", is_flag=True, help="Replace a result that was made with other settings or input."),
        json_option,
        click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary."),
    )


evaluation_options = _together(
    click.option(
        "--decontaminate",
        multiple=True,
        metavar="PATH",
        help="Keep the items of this evaluation set out of the data; may be repeated.",
    ),
    click.option(
        "--decontaminate-columns",
        metavar="NAMES",
        help="Its fields, separated by commas. [default: every field with text]",
    ),
    click.option(
        "--decontaminate-action",
        type=choice(Action),
        help="What to do with a document that holds an item: drop it, cut the passage out, or only report it. "
        "[default: drop]",
    ),
)
"""Which evaluation sets are kept out of the data."""


def evaluation_sets(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those of evaluation sets, and the sets as a configuration has them."""
    paths, columns, action = (options.pop(f"decontaminate{name}") for name in ("", "_columns", "_action"))
    if not paths:
        if columns or action:
            raise ConfigError("--decontaminate-columns and --decontaminate-action go with --decontaminate PATH.")
        return options
    names = columns.split(",") if columns else None
    rules = {name: value for name, value in (("columns", names), ("action", action)) if value}
    return options | {"decontaminate": [{"path": path, **rules} for path in paths]}


def _unescaped(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    return None if text is None else text.replace("\\n", "\n").replace("\\t", "\t")


text_options = _together(
    click.option(
        "--documents", type=choice(Documents), help="In .txt files: what one document or row is. [default: file]"
    ),
    click.option(
        "--separator",
        metavar="TEXT",
        callback=_unescaped,
        help="In .txt files: text between two documents. \\n and \\t are understood.",
    ),
    click.option("--input-format", type=choice(InputFormat), help="Format of the input, if its name does not say."),
    click.option(
        "--invalid-utf8",
        type=choice(InvalidUtf8),
        help="Bytes that are not UTF-8: drop them, reject the record, replace them with U+FFFD, or stop. "
        "[default: reject]",
    ),
    click.option("--strict", is_flag=True, help="Stop at the first record that can't be read."),
)
"""How text files are read."""
