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
from importlib import import_module
from inspect import cleandoc
from typing import Any

import click

from milldam import __version__, memory
from milldam.cli.naming import DESCRIBED, as_option, visible
from milldam.errors import EXIT_INTERRUPTED, MilldamError, os_error

GROUPS = {
    "Every day": {
        "tokenize": "Turn text into a token store, or one .npy file.",
        "preprocess": "Clean, deduplicate, filter, tokenize, split and pack.",
        "inspect": "Show documents token by token, with their boundaries.",
        "stats": "Show counts, sizes and document lengths.",
        "verify": "Check a store: hashes, counts, indexes and token ids.",
        "status": "Show whether a run is working, stuck, ended or finished.",
        "feed": "Measure what a loader delivers on this machine.",
    },
    "Prepare": {
        "plan": "Check a configuration and show what a run would do.",
        "map": "Apply a Python function to every row; make a table.",
        "qa": "Turn question-answering examples into windows.",
        "train-tokenizer": "Train a tokenizer on a sample of the datasets.",
        "chat-check": "Show what a chat template makes of conversations.",
        "schema": "Print the JSON schema of configuration files.",
    },
    "Look": {
        "report": "Rebuild a finished run's report and print its path.",
        "contamination": "Look for items of evaluation sets in a finished store.",
        "dedup-index": "List or remove the runs that a dedup index has seen.",
    },
    "Move": {
        "export": "Write a store as files that other tools read.",
        "import": "Make a store from tokens that another tool wrote.",
        "push": "Push a store to the Hugging Face Hub, with a card.",
        "pull": "Fetch a store from the Hugging Face Hub.",
    },
    "Run elsewhere": {
        "slurm": "Write a script that queues a job on Slurm.",
        "run-units": "Run one array task of a stage, on any scheduler.",
    },
    "Try": {"demo": "Take a small corpus from text to training batches."},
}
"""Commands as `milldam --help` lists them, which imports none of them."""
_SUMMARIES = {name: summary for names in GROUPS.values() for name, summary in names.items()}
_MODULES = {
    **dict.fromkeys(("plan", "train-tokenizer", "schema"), "preprocess"),
    **dict.fromkeys(("verify", "report"), "inspect"),
    **dict.fromkeys(("export", "import", "push", "pull"), "moving"),
    **dict.fromkeys(("slurm", "run-units"), "arrays"),
}
"""Where a command is, if its module has another name."""


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each imported when it is needed: a run needs one of them."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in _SUMMARIES:
            raise KeyError(name)
        word = name.replace("-", "_")
        module = import_module(f"milldam.cli.{_MODULES.get(name, word)}")
        command: click.Command = getattr(module, "import_" if name == "import" else word)
        if command.short_help is None:
            command.short_help = _SUMMARIES[name]
            command.help = f"{_SUMMARIES[name]}\n\n{cleandoc(command.help or '')}"
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_SUMMARIES)

    def __len__(self) -> int:
        return len(_SUMMARIES)


class _Group(click.Group):
    """Turns milldam's errors into a few lines and an exit code; a traceback only with --debug."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in _SUMMARIES)  # not by `map`: that is a module of this package
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in names.items()])

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """At the end of a process of our own, leave without the tenth of a second that freeing everything takes.

        Not while a thread is at work, which is waited for, or a profiler.
        """
        memory.own_process = args is None
        try:
            return super().main(args, *others, **options)
        except SystemExit as end:
            threads = (one for one in threading.enumerate() if one is not threading.main_thread())
            is_watched = sys.getprofile() is not None or sys.gettrace() is not None
            if args is None and end.code == 0 and not is_watched and all(thread.daemon for thread in threads):
                with contextlib.suppress(OSError):  # the reader of our output may have gone: then it ends as usual
                    atexit._run_exitfuncs()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
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
                command = ctx.meta.get(DESCRIBED) or self.get_command(ctx, ctx.invoked_subcommand or "") or self
                click.echo(visible(f"milldam: {known.spelled(lambda one: as_option(command, one))}"), err=True)
                sys.exit(known.exit_code)
            click.echo(visible(f"milldam: unexpected {type(error).__name__}: {error}"), err=True)
            click.echo("This is a bug in milldam; run it again with `milldam --debug ...` for the traceback.", err=True)
            sys.exit(1)


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
