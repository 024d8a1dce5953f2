"""`milldam preprocess` and `milldam plan`: raw data sets to a ready store, by a YAML file."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.engine import engine_options

if TYPE_CHECKING:
    from milldam.config import Config
    from milldam.job.stages import PlannedJob

_config = click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
_set = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the file: --set dedup.near.rows=8."
)


@click.command()
@_config
@_set
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store. [default: out of the file]")
@click.option("--memory", metavar="SIZE", help="Limit for the whole process tree. [default: memory of the file]")
@click.option("--workers", type=int, help="Cores to use. [default: workers of the file]")
@engine_options
@click.option("--overwrite", is_flag=True, help="Replace what was made from other settings or input.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan, as `milldam plan` does.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary.")
def preprocess(
    config: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Take raw data sets to a ready store: clean, deduplicate, filter, tokenize, split, pack.

    CONFIG: a YAML file; docs/config.md has every key, `milldam schema` its JSON schema. Interrupted or killed, the same
    command goes on where it stopped.

    \b
    milldam preprocess config.yaml
    milldam preprocess config.yaml --set dedup=near --memory 2GB
    """
    from milldam.cli.tokenize import run_and_show
    from milldam.job.stages import run_job

    loaded = load(config, overrides, quiet=quiet, options=options)
    if dry_run:
        _show_plan(loaded, as_json=as_json)
        return
    run_and_show(partial(run_job, loaded), Path(loaded.out), as_json=as_json, quiet=quiet)


@click.command()
@_config
@_set
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a configuration, its inputs and its tokenizer; show stages, units, estimated tokens, disk, time and memory.

    Reads a small sample of the input and writes nothing.

    \b
    milldam plan config.yaml
    """
    _show_plan(load(config, overrides, quiet=False, options={}), as_json=as_json)


def load(path: Path, overrides: tuple[str, ...], *, quiet: bool, options: dict[str, Any]) -> Config:
    """The configuration of a file, with options put over it."""
    from milldam.config_file import load_config

    chosen = {name: value for name, value in options.items() if value is not None and value is not False}
    given = [f"{name}={json.dumps(value, default=str)}" for name, value in chosen.items()]
    loaded = load_config(path, [*overrides, *given])
    if not quiet:
        for note in loaded.notes:
            click.echo(f"Note: {note}", err=True)
    return loaded.config


def _show_plan(config: Config, *, as_json: bool) -> None:
    from milldam.job.stages import plan_job

    planned = plan_job(config)
    if as_json:
        click.echo(json.dumps(_as_json(planned)))
        return
    for line in _plan_lines(planned, config):
        click.echo(line)


def _as_json(planned: PlannedJob) -> dict[str, Any]:
    return dataclasses.asdict(planned)


def _plan_lines(planned: PlannedJob, config: Config) -> list[str]:
    from milldam.cli.progress import plan_lines
    from milldam.memory import format_size

    guess = planned.estimate
    temporary = ", ".join(f"{kind} {format_size(size)}" for kind, size in guess.temporary_bytes.items())
    minutes, seconds = divmod(int(guess.seconds), 60)
    return [
        *plan_lines(planned.plan),
        f"Output: {config.out} ({planned.state})",
        "Estimated from a sample:",
        f"  documents {guess.documents:,}, text {format_size(guess.text_bytes)}, tokens {guess.tokens:,}"
        " (before anything is dropped)",
        f"  disk: store {format_size(guess.store_bytes)}, meanwhile {temporary or 'nothing'};"
        f" {format_size(guess.free_bytes)} are free",
        f"  time: {f'{minutes} min ' if minutes else ''}{seconds} s",
    ]
