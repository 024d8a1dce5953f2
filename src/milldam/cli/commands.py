"""Options that several commands have, each written once, and how a job is run, shown, interrupted and resumed.

The function of a job's command returns a `Request`, which runs here with progress and a summary, or in `run-units` task
by task. The help of an option that is a key of a configuration is the docstring of that key.
"""

from __future__ import annotations

import json
import re
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
    from milldam.run.array import ArrayWork
    from milldam.run.summary import Observer, Summary

_SHOWING = ("as_json", "quiet", "verbose")
S = TypeVar("S", bound="Summary[Any]")


# ---- options ----

_Command = TypeVar("_Command", bound=Callable[..., Any])
Add = Callable[[_Command], _Command]


class SettingOption(click.Option):
    """An option for a field of settings; the text of its help is read when it is shown."""

    def __init__(self, *names: Any, of: str | type, key: str = "", shown: str = "", **more: Any):
        super().__init__(*names, **more)
        self._of, self._key, self._shown = of, key, shown

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if self.help is None:
            from milldam.config import settings
            from milldam.config.checking import defaults_of, descriptions_of

            block = getattr(settings, self._of) if isinstance(self._of, str) else self._of
            key = self._key or str(self.name)
            default = self._shown or defaults_of(block).get(key)
            ends = f" [default: {default}]" if isinstance(default, str | int | float) and default else ""
            more = " May be repeated." if self.multiple else ""
            text = descriptions_of(block)[key]
            text = re.sub(r" Default: [^.]*\.", "", text) if self._shown else text
            self.help = f"{text}{more}{ends}"
        return super().get_help_record(ctx)


def setting(*names: str, of: str | type = "Config", **more: Any) -> Add[Any]:
    """An option for a field of `of`, a class or the name of a block of configurations; `shown`: another default."""
    return click.option(*names, cls=SettingOption, of=of, **more)


def settings(block: type, keys: str, *, in_file: bool = False) -> Add[Any]:
    """Options for fields of a job's settings, made from their types; a list is written a,b,c.

    `in_file`: a file may have the required ones.
    """
    from milldam.config.checking import defaults_of, keys_of

    options = []
    for key in keys.split():
        kinds, names = keys_of(block)[key], ["-o", "--out"] if key == "out" else [f"--{key.replace('_', '-')}"]
        more: dict[str, Any] = {"required": not in_file and key not in defaults_of(block)}
        if kinds.scalars == {bool}:
            more["is_flag"] = True
        elif kinds.item:
            more |= {"metavar": "NAMES", "callback": _listed}
        elif kinds.choices:
            more["type"] = click.Choice(kinds.choices)
        elif kinds.scalars == {int}:
            more |= {"type": int, "metavar": "N"}
        else:
            more["metavar"] = "SIZE" if int in kinds.scalars else "PATH" if key in ("out", "tokenizer") else "NAME"
        options.append(setting(*names, of=block, **more))
    return together("", *options)


def _listed(ctx: click.Context, param: click.Parameter, text: str | None) -> str | list[str] | None:
    return text if text is None or text == "all" else [name.strip() for name in text.split(",")]


def together(section: str, *options: Add[Any]) -> Add[Any]:
    """Options in the order in which the help shows them, under the name of a section."""

    def add(command: Any) -> Any:
        before = len(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__[before:]:
            param.section = getattr(param, "section", "") or section
        return command

    return add


def choice(kind: Any) -> click.Choice[str]:
    """The words of a type."""
    return click.Choice(get_args(kind))


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary.")
config_file = together(
    "",
    click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG"),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a key of the file, such as dedup.near.rows=8. May be repeated.",
    ),
)
"""CONFIG and `--set`, for commands that read a configuration."""
described_job = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
"""A job as the words that follow `milldam`; the options of the command that takes it come before it."""


def machine_options(*, in_file: bool = False) -> Add[Any]:
    """`--memory` and `--workers`; `in_file`: a configuration has them too."""
    shown = "that of the file" if in_file else ""
    return together(
        "Resources",
        setting("--memory", metavar="SIZE", shown=shown),
        setting("--workers", type=int, metavar="N", shown=shown),
    )


def job_options(*, in_file: bool = False) -> Add[Any]:
    """How a job runs and what it shows: the same for every job."""
    shown = "that of the file" if in_file else ""
    resources = together(
        "Resources",
        setting("--executor", type=choice(Executor), shown=shown),
        setting("--address", metavar="HOST:PORT", shown=shown),
        setting("--overwrite", is_flag=True),
    )
    display = together(
        "Display",
        click.option(
            "-v", "--verbose", is_flag=True, help="Also show time by step, memory by stage and a sample document."
        ),
        json_option,
        quiet_option,
    )
    return together("", machine_options(in_file=in_file), resources, display)


evaluation_options = together(
    "Evaluation sets",
    setting("--decontaminate", multiple=True, metavar="PATH"),
    click.option(
        "--decontaminate-columns", metavar="NAMES", help="Its fields: a,b,c. [default: every field that holds text]"
    ),
    setting("--decontaminate-action", of="EvaluationSet", key="action", type=choice(Action)),
)


def evaluation_sets(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the evaluation sets as a configuration has them."""
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


text_options = together(
    "Input",
    setting("--documents", of="DataSet", type=choice(Documents)),
    setting("--separator", of="DataSet", metavar="TEXT", callback=_unescaped),
    setting("--input-format", of="DataSet", type=choice(InputFormat)),
    setting("--invalid-utf8", type=choice(InvalidUtf8), shown="reject"),
    setting("--max-document-bytes", metavar="SIZE"),
    setting("--strict", is_flag=True),
)
"""How text files are read."""


def present(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were used; by identity, since 0 is a value, if a wrong one."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != ()}


def named_values(pairs: Sequence[str], option: str) -> dict[str, str]:
    """The values of an option NAME=VALUE that may be repeated."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--{option} {pair}: write it as NAME=VALUE.")
        found[name] = value
    return found


def json_values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """The same; values that are JSON (true, 3, "a") are taken as such, others as text."""
    found: dict[str, Any] = {}
    for name, text in named_values(pairs, option).items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


# ---- jobs ----


@dataclass(frozen=True, slots=True)
class Request(Generic[S]):
    """The job of a command: run here, or as tasks of a job array, which may raise ConfigError."""

    run: Callable[[Observer], S]
    array: Callable[[], ArrayWork[S]]


class JobCommand(click.Command):
    """A command whose function returns a request, or one for each split."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options under their sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", "") or "Display", []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def request(self, ctx: click.Context) -> Request[Any] | dict[str, Request[Any]]:
        options = {name: value for name, value in ctx.params.items() if name not in _SHOWING}
        assert self.callback is not None
        found: Request[Any] | dict[str, Request[Any]] = ctx.invoke(self.callback, **options)
        return found

    def invoke(self, ctx: click.Context) -> None:
        from milldam.cli.summaries import show_summary

        request, as_json, quiet = self.request(ctx), ctx.params["as_json"], ctx.params["quiet"]
        several = request if isinstance(request, dict) else {"": request}
        summaries = {}
        for name, one in several.items():
            summaries[name] = _run(one.run, quiet=quiet)
            if not as_json:
                show_summary(summaries[name], as_json=False, quiet=quiet, verbose=ctx.params["verbose"])
        if as_json:
            found = {name: summary.as_json() for name, summary in summaries.items()}
            click.echo(json.dumps(found if isinstance(request, dict) else found[""]))


def _run(job: Callable[[Observer], S], *, quiet: bool) -> S:
    """Run a job with progress; interrupted, say how to resume and exit."""
    from milldam.cli.summaries import make_observer

    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            return job(observer)
    except KeyboardInterrupt:
        end_interrupted()


def array_of_command(words: Sequence[str]) -> tuple[ArrayWork[Any], dict[str, Any]]:
    """The job of a command line, for array tasks, and how to show it."""
    here = click.get_current_context()
    root = here.find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, words[0])
    if not isinstance(command, JobCommand):
        jobs = [name for name, one in root.command.commands.items() if isinstance(one, JobCommand)]
        raise ConfigError(f"{words[0]}: not a job that array tasks can do; name one of {', '.join(jobs)}.")
    here.meta[DESCRIBED] = command
    with command.make_context(words[0], list(words[1:]), parent=root) as ctx:
        request = command.request(ctx)
    if isinstance(request, dict):
        raise ConfigError(Setting("split"), f": name one of {', '.join(request)}: each is a job of its own.")
    return request.array(), {name: ctx.params[name] for name in _SHOWING}


def as_interrupt(number: int, frame: FrameType | None) -> None:
    """For `signal.signal`: SIGTERM means what Ctrl-C does."""
    raise KeyboardInterrupt


def end_interrupted() -> NoReturn:
    click.echo("\nInterrupted. Everything finished is safe. To resume, run the same command again:", err=True)
    click.echo(f"  milldam {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(EXIT_INTERRUPTED)
