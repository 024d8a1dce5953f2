"""Ctrl-C and SIGTERM: a command ends with what is safe and how to go on."""

from __future__ import annotations

import shlex
import sys
from types import FrameType
from typing import NoReturn

import click

EXIT_INTERRUPTED = 130


def as_interrupt(number: int, frame: FrameType | None) -> None:
    """For `signal.signal`: SIGTERM means what Ctrl-C does."""
    raise KeyboardInterrupt


def end_interrupted(safe: str) -> NoReturn:
    """Say what is safe and the command that goes on; exit."""
    click.echo(f"\nInterrupted. {safe} To go on, run the same command again:", err=True)
    click.echo(f"  milldam {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(EXIT_INTERRUPTED)
