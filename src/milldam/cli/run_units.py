"""`milldam run-units`: a share of a stage, for array schedulers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.config import Config
    from milldam.progress import Observer


@click.command("run-units")
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
@click.option("--stage", required=True, help="prepare, a stage of the job (`milldam plan` lists them), or finish.")
@click.option("--index", type=int, metavar="I", help="Which share, from 0.")
@click.option("--of", type=int, metavar="N", help="How many shares there are.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the file.")
@click.option("--memory", metavar="SIZE", help="Limit for this machine. [default: memory of the file]")
@click.option("--workers", type=int, help="Cores to use on this machine. [default: workers of the file]")
@click.option("-q", "--quiet", is_flag=True, help="No plan or progress.")
def run_units(
    config: Path,
    stage: str,
    index: int | None,
    of: int | None,
    overrides: tuple[str, ...],
    memory: str | None,
    workers: int | None,
    quiet: bool,
) -> None:
    """Do a share of a stage: what one task of an array runs, on Slurm or any other scheduler.

    Every N-th unit of the stage from I on. Run again, it does what is left. The stages before must be done, by all of
    their shares; `prepare` comes first and `finish` last, each by one task. `milldam slurm` writes a script of them.

    \b
    milldam run-units config.yaml --stage prepare
    milldam run-units config.yaml --stage tokenize --index 3 --of 8
    milldam run-units config.yaml --stage finish
    """
    from milldam.cli.preprocess import load
    from milldam.cli.progress import make_observer
    from milldam.cli.tokenize import as_interrupt

    loaded = load(config, overrides, quiet=quiet, options={"memory": memory, "workers": workers})
    signal.signal(signal.SIGTERM, as_interrupt)
    with make_observer(quiet=quiet) as observer:
        _run(loaded, stage, index, of, observer)


def _run(config: Config, stage: str, index: int | None, of: int | None, observer: Observer) -> None:
    from milldam.array_jobs import FINISH, PREPARE
    from milldam.job.stages import prepare_job, run_job, work_share
    from milldam.run import Share

    if stage in (PREPARE, FINISH):
        if index or (of or 1) > 1:
            raise ConfigError(f"--stage {stage} is for one task alone: leave out --index and --of.")
        (prepare_job if stage == PREPARE else run_job)(config, observer)
    elif index is None or of is None:
        raise ConfigError(f"--stage {stage} is done in shares: say which one, such as --index 0 --of 1.")
    else:
        work_share(config, Share(stage, index, of), observer)
