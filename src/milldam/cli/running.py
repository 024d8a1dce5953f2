"""Running a job from the command line: progress while it runs, then its summary, or how to resume it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from milldam.run.progress import Observer
    from milldam.run.summary import Summary

EXIT_INTERRUPTED = 130

S = TypeVar("S", bound="Summary[Any]")


def run_and_show(job: Callable[[Observer], S], *, as_json: bool, quiet: bool) -> S:
    """Run a job, show its progress and its summary; interrupted, say how to resume and exit."""
    from milldam.cli.progress import make_observer
    from milldam.cli.summaries import show_summary

    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            summary = job(observer)
    except KeyboardInterrupt:
        end_interrupted()
    show_summary(summary, as_json=as_json, quiet=quiet)
    return summary


def as_interrupt(number: int, frame: FrameType | None) -> None:
    """For `signal.signal`: SIGTERM means what Ctrl-C does."""
    raise KeyboardInterrupt


def end_interrupted() -> NoReturn:
    click.echo("\nInterrupted. Everything finished is safe. To resume, run the same command again:", err=True)
    click.echo(f"  milldam {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(EXIT_INTERRUPTED)
