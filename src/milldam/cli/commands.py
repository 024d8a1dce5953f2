"""What commands share: options that several have, each written once, and how a job is run.

The function of a job's command tells what is asked for; that is run here, with progress while it runs, then its
summary, or how to resume it; or by `run-units` task by task, or queued by `slurm`.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_args

import click

from milldam.choices import Action, Documents, Executor, InputFormat, InvalidUtf8
from milldam.cli.naming import DESCRIBED
from milldam.errors import EXIT_INTERRUPTED, ConfigError, Setting

if TYPE_CHECKING:
    from milldam.run.engine import ArrayWork
    from milldam.run.summary import Observer, Summary

_SHOWING = ("as_json", "quiet")
_SAMPLE_TOKENS = 120
S = TypeVar("S", bound="Summary[Any]")


@dataclass(frozen=True, slots=True)
class Request(Generic[S]):
    """What a command asks for."""

    run: Callable[[Observer], S]
    array: Callable[[], ArrayWork[S]]
    """The same for tasks of a job array; raises ConfigError where they can't do it."""


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
            if summary.job == "preprocess" and sys.stdout.isatty() and not (as_json or quiet or summary.up_to_date):
                # What a model will see first.
                from milldam.cli.inspect import show_tokens
                from milldam.stores.tokens.reader import Store

                show_tokens(Store(summary.out), 0, _SAMPLE_TOKENS)


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


# ---- options ----

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
        help="What to do with a document that contains an item: drop it, or only report it. [default: drop]",
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
    click.option(
        "--max-document-bytes",
        metavar="SIZE",
        help="Reject larger records. A .txt file that is one document may be of any size. [default: 32MiB]",
    ),
    click.option("--strict", is_flag=True, help="Stop at the first record that can't be read."),
)
"""How text files are read."""
