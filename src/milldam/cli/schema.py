"""`milldam schema`: what a configuration file may say, for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click


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

    for block in _blocks(kind):
        # Here alone: reading docstrings takes longer than all the rest.
        block.__pydantic_config__ = block.__pydantic_config__ | {"use_attribute_docstrings": True}
    schema = TypeAdapter(kind).json_schema()
    for block in [schema, *schema["$defs"].values()]:
        for key in block["properties"].values():
            # Made from the name; it says nothing that the name does not.
            key.pop("title", None)
            key["description"] = " ".join(key.get("description", "").split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _blocks(block: Any) -> Iterator[Any]:
    """A block and all that it holds."""
    from milldam.config.checking import keys_of

    yield block
    for kinds in keys_of(block).values():
        if kinds.inner:
            yield from _blocks(kinds.inner)
