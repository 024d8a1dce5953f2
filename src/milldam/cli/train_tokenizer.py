"""`milldam train-tokenizer`: a tokenizer from a sample of the data sets of a configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click


@click.command("train-tokenizer")
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the file.")
@click.option("--overwrite", is_flag=True, help="Replace a tokenizer that is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def train_tokenizer(config: Path, overrides: tuple[str, ...], overwrite: bool, as_json: bool) -> None:
    """Train a tokenizer on a sample of the data sets of CONFIG, as its key tokenizer.train says.

    It is saved to tokenizer.path, where `milldam preprocess` with the same file finds it.

    \b
    milldam train-tokenizer config.yaml
    milldam train-tokenizer config.yaml --set tokenizer.train.vocab_size=16_000
    """
    from milldam.config.loading import load_config
    from milldam.pipeline.tokenizer_training import train_from_config

    loaded = load_config(config, overrides, {"overwrite": True} if overwrite else {})
    for note in loaded.notes:
        click.echo(f"Note: {note}", err=True)
    trained = train_from_config(loaded.config)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(trained), default=str))
        return
    for line in trained.lines():
        click.echo(line)
