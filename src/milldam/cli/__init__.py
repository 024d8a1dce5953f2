"""The command line: the only place that prints or exits.

Results go to standard output, progress and messages to standard error. Commands import what they need when they
run, so that `milldam --help` answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import click

from milldam import __version__, memory
from milldam.cli.naming import DESCRIBED, as_option, explained, visible
from milldam.errors import EXIT_INTERRUPTED, MilldamError, os_error

GROUPS = {
    "Prepare": (
        *("tokenize", "preprocess", "plan", "qa", "map", "train-tokenizer", "chat-check", "dedup-index"),
        "schema",
    ),
    "Look": ("inspect", "stats", "verify", "contamination", "report", "status", "cache"),
    "Train": ("feed", "qa-eval"),
    "Move": ("export", "import", "push", "pull"),
    "Run elsewhere": ("slurm", "run-units"),
    "Try and set up": ("demo", "completion"),
}
"""Commands as `milldam --help` lists them."""
_MODULES = (
    dict.fromkeys(("plan", "train-tokenizer", "schema"), "preprocess")
    | dict.fromkeys(("verify", "report"), "inspect")
    | dict.fromkeys(("export", "import", "push", "pull"), "moving")
    | dict.fromkeys(("slurm", "run-units"), "arrays")
    | {"qa-eval": "qa"}
)
"""Where a command is, when its module is not called as it is."""


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each imported when it is asked for: a run needs one of them."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in list(self):
            raise KeyError(name)
        word = name.replace("-", "_")
        module = import_module(f"milldam.cli.{_MODULES.get(name, word)}")
        command: click.Command = getattr(module, "import_" if name == "import" else word)
        # Its own too: click remembers the names that it first saw, also where a command is called without this group.
        command.context_settings["help_option_names"] = ["-h", "--help"]
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for names in GROUPS.values() for name in names))

    def __len__(self) -> int:
        # Not by `map`: that is a module of this package.
        return sum(len(names) for names in GROUPS.values())


class _Group(click.Group):
    """Turns milldam's errors into a few lines and an exit code; a traceback only with --debug."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            found = [(name.ljust(width), self.commands[name]) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(formatter.width - width - 6)) for name, one in found])

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        memory.own_process = args is None
        try:
            return super().main(args, *others, **options)
        except SystemExit as end:
            if args is None and end.code == 0:
                _leave()
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise explained(error) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Whoever read our output has gone, as `head` does: nothing is left to say, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            known = os_error(error) if isinstance(error, OSError) and error.errno is not None else error
            if isinstance(known, MilldamError):
                command = self.get_command(ctx, ctx.invoked_subcommand or "") or self
                spell = partial(as_option, ctx.meta.get(DESCRIBED, command), within=command)
                click.echo(visible(f"milldam: {known.spelled(spell)}"), err=True)
                sys.exit(known.exit_code)
            click.echo(visible(f"milldam: unexpected {type(error).__name__}: {error}"), err=True)
            click.echo("This is a bug in milldam; run it again with `milldam --debug ...` for the traceback.", err=True)
            sys.exit(1)


def _leave() -> None:
    """End the process that is `milldam`, without the tenth of a second that it takes to give everything back first.

    Not while a thread is at work, which is waited for, or a profiler, which has yet to tell.
    """
    if sys.getprofile() is sys.gettrace() is None and all(
        thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()
    ):
        # Who reads our output may have gone: then it ends as ever.
        with contextlib.suppress(OSError):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


@click.group(
    cls=_Group, commands=_Commands(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="milldam")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Turn any amount of text into training-ready tokens in a fixed amount of memory.

    \b
    milldam tokenize corpus.jsonl -o corpus.milldam --tokenizer gpt2/ --memory 512MB
    milldam inspect corpus.milldam
    milldam feed corpus.milldam --seq-len 1024 --batch-size 16

    `milldam COMMAND --help` has an example of each.
    """
