"""Commands that take a configuration file: `preprocess`, `plan` and `train-tokenizer`; `schema`, the keys of a file for
editors.
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
    job_options,
    json_option,
    machine_options,
    present,
    setting,
)
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.config.settings import Config
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.array import ArrayWork


@click.command(cls=JobCommand)
@config_file
@setting("-o", "--out", type=click.Path(path_type=Path))
@setting("--decontaminate", multiple=True, metavar="PATH")
@job_options
def preprocess(config: Path, overrides: tuple[str, ...], **options: Any) -> Request[TextSummary]:
    """
    CONFIG: a YAML file; docs/config.md lists every key, `milldam schema` prints its JSON schema. If it is
    interrupted or killed, run the same command to resume.

    \b
    milldam preprocess config.yaml
    milldam preprocess config.yaml --set dedup=near --memory 2GB
    """
    from milldam.pipeline.starting import run_checked

    quiet = click.get_current_context().params["quiet"]
    check = partial(_load, config, overrides, options, quiet=quiet)

    def array() -> ArrayWork[TextSummary]:
        from milldam.pipeline.job import array_of

        return array_of(check())

    return Request(partial(run_checked, check), array)


@click.command()
@config_file
@machine_options
@json_option
def plan(config: Path, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """
    Checks input and tokenizer too. Shows the stages, the units, the workers that the budget holds, and the disk that
    typical text of this size takes. Reads no documents and writes nothing.

    \b
    milldam plan config.yaml
    milldam plan config.yaml --workers 32 --memory 64GB
    """
    from milldam.cli.summaries import plan_lines
    from milldam.pipeline.job import plan_job

    checked = _load(config, overrides, options)
    planned = plan_job(checked)
    disk, workers = planned.disk, counted(planned.plan.workers, "worker")
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(planned)))
        return
    sizes = [format_size(one) for one in (disk.store_bytes, disk.most_bytes, disk.free_bytes)]
    lines = [
        *plan_lines(planned.plan),
        f"Output: {checked.out} ({planned.state}; for typical text about {sizes[0]}, at most {sizes[1]} meanwhile; "
        f"{sizes[2]} are free)",
        f"Least memory: {format_size(planned.memory_bytes)} for {workers}",
    ]
    click.echo("\n".join(lines))


def _load(path: Path, overrides: tuple[str, ...], options: dict[str, Any], *, quiet: bool = False) -> Config:
    """The checked configuration of a file, with the options of its addresses for as long as the command runs."""
    from milldam.config.checking import checked_settings
    from milldam.config.loading import read_config
    from milldam.config.settings import Config
    from milldam.sources.compression import storage_options

    values = read_config(path, overrides, present(options))
    for note in () if quiet else values.notes:
        click.echo(f"Note: {note}", err=True)
    config = checked_settings(Config, values)
    click.get_current_context().find_root().with_resource(storage_options(config.storage_options))
    return config


@click.command()
def schema() -> None:
    """
    Editors complete and check a file that names it in its first line:

    \b
    milldam schema > milldam.schema.json
    # yaml-language-server: $schema=milldam.schema.json
    """
    from pydantic import TypeAdapter

    from milldam.config.checking import blocks_of, descriptions_of
    from milldam.config.settings import Config

    schema = TypeAdapter(Config).json_schema()
    blocks = {**schema["$defs"], "Config": schema}
    for _, block in blocks_of(Config):
        for key, text in descriptions_of(block).items():
            found = blocks[block.__name__]["properties"][key]
            found.pop("title", None)  # made from the name
            found["description"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps({**head, **schema, "title": "milldam preprocess"}, indent=2, ensure_ascii=False))


@click.command("train-tokenizer")
@config_file
@click.option("--overwrite", is_flag=True, help="Replace an existing tokenizer.")
@json_option
def train_tokenizer(config: Path, overrides: tuple[str, ...], overwrite: bool, as_json: bool) -> None:
    """
    The settings are under tokenizer.train in CONFIG. The tokenizer is saved to tokenizer.path, from where
    `milldam preprocess` with the same file uses it.

    \b
    milldam train-tokenizer config.yaml
    milldam train-tokenizer config.yaml --set tokenizer.train.vocab_size=16_000
    """
    from milldam.pipeline.tokenizer_training import train_from_config

    trained = train_from_config(_load(config, overrides, {"overwrite": overwrite}))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(trained), default=str))
    else:
        click.echo("\n".join(trained.lines()))
