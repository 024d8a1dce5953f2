"""`milldam schema`: what a configuration file may say, for editors."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of configuration files.

    Editors complete and check a file that names it in its first line:

    \b
    milldam schema > milldam.schema.json
    # yaml-language-server: $schema=milldam.schema.json
    """
    from milldam.config.checking import json_schema
    from milldam.config.settings import Config

    click.echo(json.dumps(json_schema(Config, "milldam preprocess"), indent=2, ensure_ascii=False))
