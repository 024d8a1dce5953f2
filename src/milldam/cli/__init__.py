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
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from milldam import __version__
from milldam.cli.cache import cache
from milldam.cli.chat_check import chat_check
from milldam.cli.completion import completion
from milldam.cli.contamination import contamination
from milldam.cli.dedup_index import dedup_index
from milldam.cli.demo import demo
from milldam.cli.export import export
from milldam.cli.feed import feed
from milldam.cli.hub import pull, push
from milldam.cli.import_ import import_
from milldam.cli.inspect import inspect
from milldam.cli.map import map
from milldam.cli.migrate import migrate
from milldam.cli.naming import as_option, explained, visible
from milldam.cli.preprocess import plan, preprocess
from milldam.cli.qa import qa, qa_eval
from milldam.cli.report import report
from milldam.cli.run_units import run_units
from milldam.cli.running import DESCRIBED, EXIT_INTERRUPTED
from milldam.cli.schema import schema
from milldam.cli.slurm import slurm
from milldam.cli.stats import stats
from milldam.cli.status import status
from milldam.cli.tokenize import tokenize
from milldam.cli.train_tokenizer import train_tokenizer
from milldam.cli.verify import verify
from milldam.cli.watch import watch
from milldam.errors import MilldamError

GROUPS = {
    "Prepare": (
        *("tokenize", "preprocess", "plan", "qa", "map", "train-tokenizer", "chat-check", "dedup-index"),
        *("migrate", "schema"),
    ),
    "Look": ("inspect", "stats", "verify", "contamination", "report", "status", "watch", "cache"),
    "Train": ("feed", "qa-eval"),
    "Move": ("export", "import", "push", "pull"),
    "Run elsewhere": ("slurm", "run-units"),
    "Try and set up": ("demo", "completion"),
}
"""Commands as `milldam --help` lists them."""


class _Group(click.Group):
    """Turns milldam's errors into a few lines and an exit code; a traceback only with --debug."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            found = [(name.ljust(width), self.commands[name]) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(formatter.width - width - 6)) for name, one in found])

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
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
        except MilldamError as error:
            if ctx.params.get("debug"):
                raise
            command = self.get_command(ctx, ctx.invoked_subcommand or "") or self
            spell = partial(as_option, ctx.meta.get(DESCRIBED, command), within=command)
            click.echo(visible(f"milldam: {error.spelled(spell)}"), err=True)
            sys.exit(error.exit_code)
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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


_COMMANDS = (
    cache, chat_check, completion, contamination, dedup_index, demo, export, feed, import_, inspect, map, migrate, plan,
    preprocess, pull, push, qa, qa_eval, report, run_units, schema, slurm, stats, status, tokenize, train_tokenizer,
    verify, watch,
)  # fmt: skip
for command in _COMMANDS:
    # Its own too: click remembers the names that it first saw, also where a command is called without this group.
    command.context_settings["help_option_names"] = ["-h", "--help"]
    main.add_command(command)
