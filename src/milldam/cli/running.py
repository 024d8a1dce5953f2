"""Running a job from the command line: progress while it runs, then its summary, or how to resume it.

The function of a job's command tells what is asked for; that is run here, or by `run-units` task by task, or queued by
`slurm`.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import click

from milldam.errors import ConfigError, Setting

if TYPE_CHECKING:
    from milldam.run.job import ArrayWork
    from milldam.run.summary import Observer, Summary

EXIT_INTERRUPTED = 130
DESCRIBED = "milldam.described"
"""Where the context of `run-units` and `slurm` keeps the command that they were given."""
_SHOWING = ("as_json", "quiet")

S = TypeVar("S", bound="Summary[Any]")


@dataclass(frozen=True, slots=True)
class Request(Generic[S]):
    """What a command asks for."""

    run: Callable[[Observer], S]
    array: Callable[[], ArrayWork[S]]
    """The same for tasks of a job array; raises ConfigError where they can't do it."""
    then: Callable[[S], None] = lambda summary: None
    """What somebody at a terminal sees after the summary."""


class JobCommand(click.Command):
    """A command whose function returns what is asked for: a request, one for each split, or None: it is answered."""

    def request(self, ctx: click.Context) -> Request[Any] | dict[str, Request[Any]] | None:
        options = {name: value for name, value in ctx.params.items() if name not in _SHOWING}
        assert self.callback is not None
        found: Request[Any] | dict[str, Request[Any]] | None = ctx.invoke(self.callback, **options)
        return found

    def invoke(self, ctx: click.Context) -> None:
        asked, as_json, quiet = self.request(ctx), ctx.params["as_json"], ctx.params["quiet"]
        if isinstance(asked, dict):
            told = {
                name: run_and_show(one.run, as_json=False, quiet=quiet or as_json).as_json()
                for name, one in asked.items()
            }
            if as_json:
                click.echo(json.dumps(told))
        elif asked is not None:
            summary = run_and_show(asked.run, as_json=as_json, quiet=quiet)
            if sys.stdout.isatty() and not (as_json or quiet or summary.up_to_date):
                asked.then(summary)


def array_of_command(words: Sequence[str]) -> tuple[ArrayWork[Any], dict[str, Any]]:
    """The job of a command line, for array tasks, and how it is to be shown."""
    here = click.get_current_context()
    root = here.find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, words[0])
    if not isinstance(command, JobCommand):
        jobs = [name for name, one in root.command.commands.items() if isinstance(one, JobCommand)]
        raise ConfigError(f"{words[0]}: not a job that array tasks can do; name one of {', '.join(jobs)}.")
    here.meta[DESCRIBED] = command
    with command.make_context(words[0], list(words[1:]), parent=root) as ctx:
        asked = command.request(ctx)
    if isinstance(asked, dict):
        raise ConfigError(Setting("split"), f": name one of {', '.join(asked)}: each is a job of its own.")
    if asked is None:
        raise ConfigError(f"{shlex.join(words)}: runs no job.")
    work = asked.array()
    work.check()
    return work, {name: ctx.params[name] for name in _SHOWING}


def run_and_show(job: Callable[[Observer], S], *, as_json: bool, quiet: bool) -> S:
    """Run a job, show its progress and its summary; interrupted, say how to resume and exit."""
    from milldam.cli.summaries import make_observer, show_summary

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
