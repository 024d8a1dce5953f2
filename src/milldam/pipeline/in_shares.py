"""The same job in shares, by several machines that see its output folder: prepared by one, finished by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from milldam.config.settings import Config
from milldam.errors import ConfigError, MilldamError
from milldam.pipeline.finishing import TextSummary
from milldam.pipeline.stages import Job
from milldam.run.array_task import ShareDone
from milldam.run.folder import Run
from milldam.run.progress import Observer, Quiet
from milldam.run.shares import Share
from milldam.sources.opening import STDIN


def prepare_job(config: Config, observer: Observer | None = None) -> None:
    """Check and plan the job in its output folder, for shares to work on; what is there of it already stays."""
    require_shareable(config)
    with Run(Path(config.out)) as run:
        Job(config, run, observer or Quiet(), 0).prepare()


def work_share(config: Config, share: Share, observer: Observer | None = None) -> None:
    """Do what is left of a share of a stage, beside others that do theirs.

    Raises NotReadyError when the job is not prepared or a stage before is not done, ShareHeldError when somebody is at
    work on this share.
    """
    require_shareable(config)
    with Run(Path(config.out), share=share) as run:
        try:
            Job(config, run, observer or Quiet(), 0).run(report=False)
        except ShareDone:
            run.close_status(stage=share.stage, state="done")
        except MilldamError as error:
            run.close_status(stage=share.stage, state="failed", message=str(error))
            raise


def finish_job(config: Config, observer: Observer | None = None) -> TextSummary:
    """Make the store of what shares have done. Raises NotReadyError when something of theirs is left."""
    require_shareable(config)
    # What shares have done is never replaced: only who prepares may.
    config = replace(config, overwrite=False)
    with Run(Path(config.out)) as run:
        return Job(config, run, observer or Quiet(), 0, after_shares=True).run(report=True)


def require_shareable(config: Config) -> None:
    """Raise ConfigError when the job can't be done in shares."""
    if config.engine != "local":
        raise ConfigError(f"engine: {config.engine}: shares work on the machine that each is on. Leave it out.")
    if config.limit is not None:
        raise ConfigError("limit counts documents in one process, not in shares. Use max_documents of the data sets.")
    alone = [path for one in config.sources for path in one.paths if path == STDIN or path.startswith("memory://")]
    if alone:
        raise ConfigError(f"{alone[0]}: other machines can't read it. Save it to a file.")
