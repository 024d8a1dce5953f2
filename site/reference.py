"""The generated part of docs/cli.md (every command, from click) and docs/config.md (every key, from its docstring).

python site/reference.py    write both; a guard fails when they differ from the code
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from pathlib import Path

import click

from milldam.cli import main
from milldam.config.checking import blocks_of, defaults_of, descriptions_of, keys_of
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
    parts = []
    for name, block in blocks_of(Config):
        if name.startswith("validation"):
            continue  # the same as datasets
        more = f" More: [{MORE[name]}]({MORE[name]})." if name in MORE else ""
        parts += [f"\n## {f'`{name}`' if name else 'The keys'}\n", f"{inspect.cleandoc(block.__doc__ or '')}{more}\n"]
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        for key, kinds in keys_of(block).items():
            parts.append(f"| `{key}` | {kinds} | {_default(block, key)} | {_cell(descriptions_of(block)[key])} |")
    return "\n".join([*parts, ""])


def _default(block: type, key: str) -> str:
    if key not in defaults_of(block):
        return "**required**"
    default = defaults_of(block)[key]
    if default is None or default in ((), {}) or dataclasses.is_dataclass(default):
        return "not set"
    shown = default if isinstance(default, str) else json.dumps(default)
    return f"`{_cell(shown)}`"


def _cell(text: str) -> str:
    """Text in a table; brackets are no links there, nor angles tags."""
    return re.sub(r"(?<!`)<(?=\w)", r"\<", " ".join(text.replace("|", r"\|").split()))


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
