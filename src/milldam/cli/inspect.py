"""`milldam inspect`: documents of a store as people and as the model see them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from milldam.cli.terminal import visible

if TYPE_CHECKING:
    from rich.text import Text

    from milldam.store import Store

_COLOURS = ("on #3b4252", "on #5e4b3c", "on #3c5e4b", "on #4b3c5e")


@click.command()
@click.argument("store")
@click.option("--start", default=0, show_default=True, help="First document; negative counts from the end.")
@click.option("--documents", default=3, show_default=True, help="How many documents.")
@click.option("--tokens", default=200, show_default=True, help="Tokens shown of each document.")
@click.option("--ids", is_flag=True, help="Show each token's id behind it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a document.")
def inspect(store: str, start: int, documents: int, tokens: int, ids: bool, as_json: bool) -> None:
    """Show documents decoded, token by token, with their boundaries.

    STORE: a store of tokens: its folder, or an address such as s3://bucket/corpus.milldam, of which the shards are
    fetched that hold them.

    \b
    milldam inspect corpus.milldam --start 1000 --ids
    """
    from milldam.remote import place_at
    from milldam.store import open_store

    opened = open_store(place_at(store))
    first = start + len(opened) if start < 0 else start
    for number in range(max(0, first), min(len(opened), first + documents)):
        if as_json:
            row = opened[number]
            click.echo(json.dumps({"document": number, "tokens": row.tolist(), "text": opened.decode(row)}))
        else:
            _print_document(opened, number, tokens, ids)


def _print_document(store: Store, number: int, shown: int, ids: bool) -> None:
    from rich.console import Console

    row = store[number]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"── document {number:,}: {len(row):,} tokens ──", style="bold")
    console.print(_coloured(store, row[:shown].tolist(), ids, marks=not sys.stdout.isatty()))
    if len(row) > shown:
        console.print(f"... {len(row) - shown:,} tokens more", style="dim")


def _coloured(store: Store, tokens: list[int], ids: bool, *, marks: bool) -> Text:
    """Tokens on changing grounds; without colours, a bar stands between them."""
    from rich.text import Text

    text = Text()
    special = {store.manifest.tokenizer.get("eos"), store.manifest.tokenizer.get("bos")}
    for position, token in enumerate(tokens):
        style = "bold red" if token in special else _COLOURS[position % len(_COLOURS)]
        text.append(visible(store.decode([token])).replace("\n", "⏎\n"), style=style)
        if ids:
            text.append(f"[{token}]", style="dim")
        if marks:
            text.append("|")
    return text
