"""`--engine` and `--address`: where a job is worked, the same for every command that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def engine_options(command: _Command) -> _Command:
    add = click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        help="Where to run: this machine or a Ray cluster. [default: local]",
    )
    address = click.option("--address", metavar="HOST:PORT", help="The Ray cluster. [default: the one that runs here]")
    return add(address(command))
