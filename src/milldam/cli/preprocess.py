"""Commands that take a configuration file: `preprocess` and `plan`, raw datasets to a ready store; `train-tokenizer`;
`schema`, what a file may say, for editors.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import (
    JobCommand,
    Request,
    config_file,
    evaluation_options,
    evaluation_sets,
    given,
    job_options,
    json_option,
    machine_options,
)
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.config.checking import Values
    from milldam.config.settings import Config
    from milldam.pipeline.finishing import TextSummary
    from milldam.pipeline.job import PlannedJob
    from milldam.run.engine import ArrayWork


@click.command(cls=JobCommand)
@config_file
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store. [default: `out` of the file]")
@evaluation_options
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan, as `milldam plan` does.")
@job_options(in_file=True)
def preprocess(config: Path, overrides: tuple[str, ...], dry_run: bool, **options: Any) -> Request[TextSummary] | None:
    """Clean, deduplicate, filter, tokenize, split and pack.

    CONFIG: a YAML file; docs/config.md lists every key, `milldam schema` prints its JSON schema. If it is
    interrupted or killed, run the same command to resume.

    \b
    milldam preprocess config.yaml
    milldam preprocess config.yaml --set dedup=near --memory 2GB
    """
    from milldam.pipeline.starting import run_checked

    shown = click.get_current_context().params
    read = _read(config, overrides, quiet=shown["quiet"], options=evaluation_sets(options))
    if dry_run:
        _show_plan(_checked(read), as_json=shown["as_json"])
        return None

    def array() -> ArrayWork[TextSummary]:
        from milldam.pipeline.job import array_of

        return array_of(_checked(read))

    return Request(partial(run_checked, partial(_checked, read)), array)


@click.command()
@config_file
@machine_options(in_file=True)
@json_option
def plan(config: Path, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check a configuration and show what a run would do.

    Checks input and tokenizer too. Shows the stages, the units, the workers that the budget holds, and the disk that
    typical text of this size takes. Reads no documents and writes nothing.

    \b
    milldam plan config.yaml
    milldam plan config.yaml --workers 32 --memory 64GB
    """
    _show_plan(load(config, overrides, quiet=False, options=options), as_json=as_json)


def load(path: Path, overrides: tuple[str, ...], *, quiet: bool, options: dict[str, Any]) -> Config:
    """The configuration of a file, with options put over it."""
    return _checked(_read(path, overrides, quiet=quiet, options=options))


def _checked(read: Values) -> Config:
    """Its configuration, with the options of its addresses for as long as the command runs."""
    from milldam.config.checking import checked_settings
    from milldam.config.settings import Config
    from milldam.sources.compression import storage_options

    config = checked_settings(Config, read)
    click.get_current_context().find_root().with_resource(storage_options(config.storage_options))
    return config


def _read(path: Path, overrides: tuple[str, ...], *, quiet: bool, options: dict[str, Any]) -> Values:
    from milldam.config.loading import read_config

    read = read_config(path, overrides, given(options))
    if not quiet:
        for note in read.notes:
            click.echo(f"Note: {note}", err=True)
    return read


def _show_plan(config: Config, *, as_json: bool) -> None:
    from milldam.pipeline.job import plan_job

    planned = plan_job(config)
    if as_json:
        click.echo(json.dumps({one.name: _plain(getattr(planned, one.name)) for one in dataclasses.fields(planned)}))
        return
    for line in _plan_lines(planned, config):
        click.echo(line)


def _plain(told: Any) -> Any:
    """A part of the plan as JSON has it; of the plan of the work, what every job's has."""
    from milldam.run.pools import WorkPlan

    if isinstance(told, WorkPlan):
        return {one.name: _plain(getattr(told, one.name)) for one in dataclasses.fields(WorkPlan)}
    return dataclasses.asdict(told) if dataclasses.is_dataclass(told) and not isinstance(told, type) else told


def _plan_lines(planned: PlannedJob, config: Config) -> list[str]:
    from milldam.cli.summaries import plan_lines

    plan, disk = planned.plan, planned.disk
    return [
        *plan_lines(plan),
        f"Output: {config.out} ({planned.state})",
        f"Disk, if it is typical text: about {format_size(disk.store_bytes)} for the store, at most"
        f" {format_size(disk.most_bytes)} meanwhile; {format_size(disk.free_bytes)} are free",
        f"Memory: at least {format_size(planned.memory_bytes)} for {counted(plan.workers, 'worker')}",
    ]


@click.command()
def schema() -> None:
    """Print the JSON schema of configuration files.

    Editors complete and check a file that names it in its first line:

    \b
    milldam schema > milldam.schema.json
    # yaml-language-server: $schema=milldam.schema.json
    """
    from milldam.config.settings import Config

    click.echo(json.dumps(json_schema(Config, "milldam preprocess"), indent=2, ensure_ascii=False))


def json_schema(kind: type, title: str) -> dict[str, Any]:
    """What a file may say, every key with its description and default, for editors."""
    from pydantic import TypeAdapter

    from milldam.config.checking import blocks_of, descriptions_of

    descriptions = {block.__name__: descriptions_of(block) for _, block in blocks_of(kind)}
    schema = TypeAdapter(kind).json_schema()
    for name, block in {kind.__name__: schema, **schema["$defs"]}.items():
        for key, found in block["properties"].items():
            found.pop("title", None)  # made from the name
            found["description"] = descriptions[name][key]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


@click.command("train-tokenizer")
@config_file
@click.option("--overwrite", is_flag=True, help="Replace an existing tokenizer.")
@json_option
def train_tokenizer(config: Path, overrides: tuple[str, ...], overwrite: bool, as_json: bool) -> None:
    """Train a tokenizer on a sample of the datasets.

    The settings are under tokenizer.train in CONFIG. The tokenizer is saved to tokenizer.path, from where
    `milldam preprocess` with the same file uses it.

    \b
    milldam train-tokenizer config.yaml
    milldam train-tokenizer config.yaml --set tokenizer.train.vocab_size=16_000
    """
    from milldam.pipeline.tokenizer_training import train_from_config

    trained = train_from_config(load(config, overrides, quiet=False, options={"overwrite": overwrite}))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(trained), default=str))
        return
    for line in trained.lines():
        click.echo(line)
