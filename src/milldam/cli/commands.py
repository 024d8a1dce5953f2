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
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import click

from milldam.choices import Documents, Executor, InputFormat, InvalidUtf8
from milldam.cli.naming import DESCRIBED
from milldam.errors import EXIT_INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from milldam.run.array import ArrayWork
    from milldam.run.summary import Observer, Summary

_SHOWING = ("as_json", "quiet", "verbose")
S = TypeVar("S", bound="Summary[Any]")
Add = Callable[[Any], Any]


# ---- options ----


class SettingOption(click.Option):
    """An option for a field of `of`, a class or the name of a block of configurations; `shown`: another default.

    The text of its help is read when it is shown.
    """

    def __init__(self, *names: Any, of: str | type = "Config", key: str = "", shown: str = "", **more: Any):
        super().__init__(*names, **more)
        self._of, self._key, self._shown = of, key, shown

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if self.help is None:
            from milldam.config import settings
            from milldam.config.checking import descriptions_of

            block: Any = getattr(settings, self._of) if isinstance(self._of, str) else self._of
            key = self._key or str(self.name)
            text, default = descriptions_of(block)[key], self._shown or block.__dataclass_fields__[key].default
            if any(param.name == "config" for param in ctx.command.params):
                text, default = re.sub(r" Default: [^.]*\.", "", text), "that of the file"
            ends = f" [default: {default}]" if isinstance(default, str | int | float) and default else ""
            self.help = text + (" May be repeated." if self.multiple else "") + ends
        return super().get_help_record(ctx)


def setting(*names: str, **more: Any) -> Add:
    return click.option(*names, cls=SettingOption, **more)


def settings(block: Any, keys: str) -> list[Add]:
    """Options for fields of a job's settings, made from their types; a list is written a,b,c."""
    options, hints = [], get_type_hints(block)
    for key in keys.split():
        kinds, field = (hints[key], *get_args(hints[key])), block.__dataclass_fields__[key]
        more: dict[str, Any] = {"required": field.default is field.default_factory is MISSING}
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if bool in kinds:
            more["is_flag"] = True
        elif any(get_origin(kind) is tuple for kind in kinds):
            more |= {"metavar": "NAMES", "callback": listed}
        elif words:
            more["type"] = click.Choice(words)
        elif int in kinds and str not in kinds:
            more |= {"type": int, "metavar": "N"}
        else:
            more["metavar"] = "SIZE" if int in kinds else "PATH" if key in ("out", "tokenizer") else "NAME"
        names = ["-o", "--out"] if key == "out" else [f"--{key.replace('_', '-')}"]
        options.append(setting(*names, of=block, **more))
    return options


def listed(ctx: click.Context, param: click.Parameter, text: str | None) -> str | list[str] | None:
    """For callbacks: a,b,c as a list; a single word as it is."""
    return [name.strip() for name in text.split(",")] if text and "," in text else text


def _unescaped(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    return text and text.replace("\\n", "\n").replace("\\t", "\t")


def together(section: str, *options: Add) -> Add:
    """Options in the order in which the help shows them, under the name of a section."""

    def add(command: Any) -> Any:
        before = len(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__[before:]:
            param.section = getattr(param, "section", "") or section
        return command

    return add


def pairs(name: str, dest: str, metavar: str, text: str) -> Add:
    """An option NAME=VALUE that may be repeated, as a dict; values that are JSON (true, 3, "a") are taken as such."""

    def read(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"{name} {text}: write it as NAME=VALUE.")
            try:
                found[key] = json.loads(value)
            except ValueError:
                found[key] = value
        return found

    return click.option(name, dest, metavar=metavar, callback=read, multiple=True, help=f"{text} May be repeated.")


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
machine_options = together(
    "Resources", setting("--memory", metavar="SIZE"), setting("--workers", type=int, metavar="N")
)
job_options = together(
    "Resources",
    machine_options,
    setting("--executor", type=click.Choice(get_args(Executor))),
    setting("--address", metavar="HOST:PORT"),
    setting("--overwrite", is_flag=True),
    together(
        "Display",
        click.option(
            "-v", "--verbose", is_flag=True, help="Also show time by step, memory by stage and a sample document."
        ),
        json_option,
        quiet_option,
    ),
)
"""How a job runs and what it shows: the same for every job."""
text_options = together(
    "Input",
    setting("--documents", of="DataSet", type=click.Choice(get_args(Documents))),
    setting("--separator", of="DataSet", metavar="TEXT", callback=_unescaped),
    setting("--input-format", of="DataSet", type=click.Choice(get_args(InputFormat))),
    setting("--invalid-utf8", type=click.Choice(get_args(InvalidUtf8)), shown="reject"),
    setting("--max-document-bytes", metavar="SIZE"),
    setting("--strict", is_flag=True),
)
"""How text files are read."""


def present(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were used; by identity, since 0 is a value, if a wrong one."""
    return {name: one for name, one in options.items() if one is not None and one is not False and one not in ((), {})}


# ---- jobs ----


@dataclass(frozen=True, slots=True)
class Request(Generic[S]):
    """The job of a command: run here, or as tasks of a job array, which may raise ConfigError."""

    run: Callable[[Observer], S]
    array: Callable[[], ArrayWork[S]]


class JobCommand(click.Command):
    """A command whose function returns a request."""

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

    def request(self, ctx: click.Context) -> Request[Any]:
        assert self.callback is not None
        options = {name: value for name, value in ctx.params.items() if name not in _SHOWING}
        found: Request[Any] = ctx.invoke(self.callback, **options)
        return found

    def invoke(self, ctx: click.Context) -> None:
        """Run the job with progress and show its summary; interrupted, say how to resume and exit."""
        from milldam.cli.summaries import Display, show_summary

        request, as_json, quiet = self.request(ctx), ctx.params["as_json"], ctx.params["quiet"]
        signal.signal(signal.SIGTERM, as_interrupt)
        try:
            with Display(quiet=quiet) as display:
                summary = request.run(display)
        except KeyboardInterrupt:
            end_interrupted()
        show_summary(summary, as_json=as_json, quiet=quiet, verbose=ctx.params["verbose"])


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
    return request.array(), {name: ctx.params[name] for name in _SHOWING}


def as_interrupt(number: int, frame: FrameType | None) -> None:
    """For `signal.signal`: SIGTERM means what Ctrl-C does."""
    raise KeyboardInterrupt


def end_interrupted() -> NoReturn:
    click.echo("\nInterrupted. Everything finished is safe. To resume, run the same command again:", err=True)
    click.echo(f"  milldam {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(EXIT_INTERRUPTED)
