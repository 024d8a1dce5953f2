"""The generated part of docs/cli.md (every command, from click) and docs/config.md (every key, from its docstring).

python site/reference.py    write both; a guard fails when they differ from the code
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from milldam.cli import main
from milldam.config.checking import blocks_of
from milldam.config.settings import Config

DOCS = Path(__file__).parents[1] / "docs"
MARK = "<!-- From here on made by site/reference.py: python site/reference.py -->\n"
MORE = {
    "chat": "chat.md",
    "clean": "preprocessing.md",
    "dedup": "preprocessing.md",
    "dedup.near.prefer": "preprocessing.md#which-one-stays",
    "decontaminate": "decontamination.md",
    "filters": "preprocessing.md",
    "packing": "training.md",
}


def pages() -> dict[Path, str]:
    """Both pages as they should be: the head as it is, then what follows from the code."""
    made = {DOCS / "cli.md": commands(), DOCS / "config.md": settings()}
    return {page: page.read_text(encoding="utf-8").split(MARK)[0] + MARK + text for page, text in made.items()}


def commands() -> str:
    parts = []
    for name in main.commands:
        command = main.commands[name]
        context = click.Context(command, info_name=f"milldam {name}")
        blocks = inspect.cleandoc(command.help or "").split("\n\n")
        text = (f"```\n{block[2:]}\n```" if block.startswith("\b\n") else block for block in blocks)
        parts += [f"\n## milldam {name}\n", "\n\n".join(text), ""]
        options = [one for one in command.params if isinstance(one, click.Option)]
        for section, several in itertools.groupby(options, lambda one: getattr(one, "section", "")):
            records = [one.get_help_record(context) for one in several]
            parts.append(f"| {section or 'option'} | |\n|---|---|")
            parts += [f"| `{_cell(left)}` | {_cell(right)} |" for left, right in filter(None, records)] + [""]
    return "\n".join(parts)


def settings() -> str:
    """Every key, out of the JSON schema."""
    schema = json.loads(CliRunner().invoke(main, ["schema"], catch_exceptions=False).stdout)
    parts = []
    for name, block in blocks_of(Config):
        more = f" More: [{MORE[name]}]({MORE[name]})." if name in MORE else ""
        parts += [f"\n## {f'`{name}`' if name else 'The keys'}\n", f"{inspect.cleandoc(block.__doc__ or '')}{more}\n"]
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        facts = schema["$defs"][block.__name__] if name else schema
        # Its own keys first.
        for key in sorted(facts["properties"], key=lambda key: key not in block.__annotations__):
            about = facts["properties"][key]
            kinds = list(dict.fromkeys(filter(None, _kinds(about))))
            value = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
            default = "**required**" if key in facts.get("required", ()) else "not set"
            shown = about.get("default")
            if "default" not in about and key not in facts.get("required", ()):  # a block: the word for its defaults
                words = getattr(dict(blocks_of(Config)).get(f"{name}.{key}".removeprefix(".")), "words", {})
                shown = next((word for word, keys in words.items() if not keys), None)
            if shown not in (None, []):
                default = f"`{_cell(shown if isinstance(shown, str) else json.dumps(shown))}`"
            parts.append(f"| `{key}` | {value} | {default} | {_cell(about['description'])} |")
    return "\n".join([*parts, ""])


def _kinds(about: dict[str, Any]) -> list[str]:
    """What a key may hold, in words."""
    if "anyOf" in about:
        return [kind for one in about["anyOf"] for kind in _kinds(one)]
    if "enum" in about or "const" in about:
        return about.get("enum") or [about["const"]]
    words = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "true or false"}
    words |= {"array": "a list", "null": "", "object": "a block of keys"}
    return [words[about.get("type", "object")]]


def _cell(text: str) -> str:
    """Text in a table; brackets are no links there, nor angles tags."""
    return re.sub(r"(?<!`)<(?=\w)", r"\<", " ".join(text.replace("|", r"\|").split()))


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
