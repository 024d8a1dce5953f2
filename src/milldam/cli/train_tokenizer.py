"""`milldam train-tokenizer`: a tokenizer from a sample of the datasets of a configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from milldam.cli.commands import config_file, json_option
from milldam.cli.preprocess import load


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
