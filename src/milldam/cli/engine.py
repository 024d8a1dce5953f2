"""`--engine` and `--address`: where a job is worked, the same for every command that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENGINES = ("local", "ray")
# What `milldam tokenize --engine` meant first: now --encoder.
_OLDER = ("auto", "gigatoken", "huggingface")


class _Engine(click.Choice):  # type: ignore[type-arg]
    """Shows the engines; takes the older values too, where a command knows what they meant."""

    def __init__(self, older: tuple[str, ...] = ()) -> None:
        super().__init__([*_ENGINES, *older])

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(_ENGINES)}]"


def engine_options(command: _Command) -> _Command:
    older = _OLDER if command.__name__ == "tokenize" else ()
    add = click.option(
        "--engine", type=_Engine(older), help="Where it is worked: this machine, or a Ray cluster. [default: local]"
    )
    address = click.option("--address", metavar="HOST:PORT", help="The Ray cluster. [default: the one that runs here]")
    return add(address(command))
