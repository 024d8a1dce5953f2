"""`milldam run-units`: an array task of a stage, for Slurm and other schedulers."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from milldam.cli.commands import described_job
from milldam.errors import EXIT_INTERRUPTED, ConfigError, NotReadyError, TaskHeldError

if TYPE_CHECKING:
    from milldam.run.summary import Observer
    from milldam.run.tasks import ArrayTask

S = TypeVar("S")
_LOOK_AGAIN_SECONDS = 2.0


@click.command("run-units", context_settings={"allow_interspersed_args": False})
@described_job
@click.option("--stage", required=True, help="prepare, a stage of the job (`milldam slurm` names them), or finish.")
@click.option("--index", type=int, metavar="I", help="Number of this array task, from 0.")
@click.option("--of", type=int, metavar="N", help="Number of array tasks of the stage.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="How long to wait for results of earlier stages that a slow file system shows late. [default: 0]",
)
def run_units(command: tuple[str, ...], stage: str, index: int | None, of: int | None, wait: float) -> None:
    """Run one array task of a stage, on any scheduler.

    COMMAND: the job as you would run it on one machine. Does every N-th unit of the stage, starting with unit I. If
    it is run again, it does only the rest; if the same task is already running, it waits for it. All tasks of earlier
    stages must be done; `prepare` comes first and `finish` last, each as one task. `milldam slurm` writes a script of
    them. Exit code 0 means that the task is done.

    \b
    milldam run-units --stage prepare preprocess config.yaml
    milldam run-units --stage tokenize --index 3 --of 8 preprocess config.yaml
    milldam run-units --stage finish preprocess config.yaml
    """
    from milldam.cli.commands import array_of_command, as_interrupt
    from milldam.cli.summaries import make_observer, show_summary

    task = _task_of(stage, index, of)
    work, showing = array_of_command(command)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        # What a function prints goes where that of worker processes goes: standard output is for the summary.
        with make_observer(quiet=showing["quiet"]) as observer, contextlib.redirect_stdout(sys.stderr):
            summary = _patiently(partial(work.run, task), observer, wait)
    except KeyboardInterrupt:
        click.echo("\nInterrupted. Everything finished is safe. To resume, run or queue the same task again.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if summary is not None:
        show_summary(summary, **showing)


def _task_of(stage: str, index: int | None, of: int | None) -> ArrayTask:
    from milldam.run.tasks import FINISH, PREPARE, ArrayTask

    if stage in (PREPARE, FINISH):
        if index or (of or 1) > 1:
            raise ConfigError(f"--stage {stage} is for one task alone: leave out --index and --of.")
        return ArrayTask(stage, 0, 1)
    if index is None or of is None:
        raise ConfigError(f"--stage {stage} is done by array tasks: say which one, such as --index 0 --of 1.")
    return ArrayTask(stage, index, of)


def _patiently(work: Callable[[Observer], S], observer: Observer, seconds: float) -> S:
    """Where the same task is running already, wait for it, then do what it left, if anything."""
    begun, told = time.monotonic(), False
    while True:
        try:
            return work(observer)
        except TaskHeldError as error:
            if not told:
                observer.warn(f"{error} Waiting for it.")
                told = True
        except NotReadyError:
            if time.monotonic() - begun >= seconds:
                raise
        time.sleep(_LOOK_AGAIN_SECONDS)
