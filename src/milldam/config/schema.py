"""What pydantic makes of Config: the check of plain values, and the JSON schema for editors."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from milldam.config.settings import Config


@cache
def adapter() -> TypeAdapter[Config]:
    """Made once: it takes a good part of a second to read the docstrings."""
    return TypeAdapter(Config)


def json_schema() -> dict[str, Any]:
    """What a file may say, every key with its description and default."""
    schema = adapter().json_schema()
    for block in [schema, *schema["$defs"].values()]:
        for key in block["properties"].values():
            # Made from the name; it says nothing that the name does not.
            key.pop("title", None)
            key["description"] = " ".join(key.get("description", "").split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "milldam preprocess"}
