"""`milldam run-units`: an array task of a stage, for Slurm and other schedulers."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.options import config_file, machine_options
from milldam.errors import ConfigError, NotReadyError, TaskHeldError

if TYPE_CHECKING:
    from milldam.config.settings import Config
    from milldam.run.progress import Observer

_LOOK_AGAIN_SECONDS = 2.0


@click.command("run-units")
@config_file
@click.option("--stage", required=True, help="prepare, a stage of the job (`milldam plan` lists them), or finish.")
@click.option("--index", type=int, metavar="I", help="Which array task, from 0.")
@click.option("--of", type=int, metavar="N", help="How many array tasks the stage has.")
@machine_options(in_file=True)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Look so long for what stages before have done, where a file system shows it late. [default: 0]",
)
@click.option("-q", "--quiet", is_flag=True, help="No plan or progress.")
def run_units(
    config: Path,
    stage: str,
    index: int | None,
    of: int | None,
    overrides: tuple[str, ...],
    wait: float,
    quiet: bool,
    **machine: Any,
) -> None:
    """Do one array task of a stage, on Slurm or any other scheduler.

    Does every N-th unit of the stage, from I on. Run again, it does what is left; if the same task is running already,
    it waits for it. All tasks of the stages before must be done; `prepare` comes first and `finish` last, each as one
    task. `milldam slurm` writes a script of them. Exit code 0: what was asked for is done.

    \b
    milldam run-units config.yaml --stage prepare
    milldam run-units config.yaml --stage tokenize --index 3 --of 8
    milldam run-units config.yaml --stage finish
    """
    from milldam.cli.preprocess import load
    from milldam.cli.progress import make_observer
    from milldam.cli.running import EXIT_INTERRUPTED, as_interrupt

    loaded = load(config, overrides, quiet=quiet, options=machine)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            _patiently(_work_of(loaded, stage, index, of), observer, wait)
    except KeyboardInterrupt:
        click.echo("\nInterrupted. Everything finished is safe. To resume, run or queue the same task again.", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _work_of(config: Config, stage: str, index: int | None, of: int | None) -> Callable[[Observer], Any]:
    from milldam.pipeline.job import finish_job, prepare_job, run_task
    from milldam.run.array_task import FINISH, PREPARE, ArrayTask

    if stage in (PREPARE, FINISH):
        if index or (of or 1) > 1:
            raise ConfigError(f"--stage {stage} is for one task alone: leave out --index and --of.")
        return partial(prepare_job if stage == PREPARE else finish_job, config)
    if index is None or of is None:
        raise ConfigError(f"--stage {stage} is done by array tasks: say which one, such as --index 0 --of 1.")
    return partial(run_task, config, ArrayTask(stage, index, of))


def _patiently(work: Callable[[Observer], Any], observer: Observer, seconds: float) -> None:
    """Where the same task is running already, wait for it, then do what it left, if anything."""
    begun, told = time.monotonic(), False
    while True:
        try:
            work(observer)
            return
        except TaskHeldError as error:
            if not told:
                observer.warn(f"{error} Waiting for it.")
                told = True
        except NotReadyError:
            if time.monotonic() - begun >= seconds:
                raise
        time.sleep(_LOOK_AGAIN_SECONDS)
