"""`milldam inspect`: documents of a store as people and as the model see them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from milldam.cli.naming import visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from rich.text import Text

    from milldam.stores.tokens import Store

# Of the 256 that terminals have: others would be rounded to these, several to the same.
_COLOURS = ("white on color(24)", "white on color(94)", "white on color(22)", "white on color(53)")
_MARK = "▕"
"""Behind each token where there are no colours; no tokenizer has it in a special token, as they have the plain bar."""
_LOST = "\ufffd"
_LONGEST_CHARACTER = 6
"""Tokens that can share a character: it has four bytes, and a token may hold the end of the one before."""


@click.command()
@click.argument("store")
@click.option("--split", metavar="NAME", help="Documents of this split only, numbered from 0. [default: all]")
@click.option("--start", default=0, show_default=True, help="First document; negative counts from the end.")
@click.option("--documents", type=click.IntRange(min=1), default=3, show_default=True, help="How many documents.")
@click.option("--tokens", default=200, show_default=True, help="Tokens shown of each document.")
@click.option("--ids", is_flag=True, help="Show each token's id behind it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a document.")
def inspect(store: str, split: str | None, start: int, documents: int, tokens: int, ids: bool, as_json: bool) -> None:
    """Show documents decoded, token by token, with their boundaries.

    STORE: a store of tokens: its folder, or an address such as s3://bucket/corpus.milldam, of which the shards are
    fetched that hold them.

    \b
    milldam inspect corpus.milldam --start 1000 --ids
    milldam inspect corpus.milldam --split val
    """
    from milldam.remote import place_at
    from milldam.stores.tokens import open_store

    opened = open_store(place_at(store), split=split)
    first = start + len(opened) if start < 0 else start
    if not 0 <= first < len(opened):
        inside = f", split {split}" if split is not None else ""
        numbers = f"0 to {len(opened) - 1:,}" + (f", or -{len(opened):,} to -1 from the end" if start < 0 else "")
        raise ConfigError(
            f"--start {start}: {store}{inside} has {counted(len(opened), 'document')}, numbered {numbers}."
        )
    for number in range(first, min(len(opened), first + documents)):
        if as_json:
            row = opened[number]
            click.echo(json.dumps({"document": number, "tokens": row.tolist(), "text": opened.decode(row)}))
        else:
            show_tokens(opened, number, tokens, ids=ids)


def show_tokens(store: Store, number: int, shown: int, *, ids: bool = False, called: str = "document") -> None:
    """Print the first tokens of a document, or of a row that is `called` so."""
    from rich.console import Console

    row = store[number]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"── {called} {number:,}: {counted(len(row), 'token')} ──", style="bold")
    console.print(_coloured(store, row[: shown + _LONGEST_CHARACTER].tolist(), shown, ids=ids))
    if len(row) > shown:
        console.print(f"... {counted(len(row) - shown, 'token')} more", style="dim")


def _coloured(store: Store, tokens: list[int], shown: int, *, ids: bool) -> Text:
    """What begins in the first `shown` tokens, on changing grounds; without colours, with a mark between."""
    from rich.text import Text

    text, marked = Text(), not sys.stdout.isatty()
    added = store.tokenizer.get_added_tokens_decoder()
    special: set[int | None] = {id for id, token in added.items() if token.special}
    special |= {store.manifest.tokenizer.get("eos"), store.manifest.tokenizer.get("bos")}
    for position, (start, together) in enumerate(_by_character(store, tokens)):
        if start >= shown:
            break
        style = "bold red" if together[0] in special else _COLOURS[position % len(_COLOURS)]
        text.append(visible(store.decode(together)).replace("\n", "⏎\n"), style=style)
        if ids:
            text.append(f"[{' '.join(map(str, together))}]", style="dim")
        if marked:
            text.append(_MARK)
    return text


def _by_character(store: Store, tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Where each token begins, and the token; with it those that hold the rest of a character it begins."""
    start = 0
    while start < len(tokens):
        stop = start + _shared(store, tokens[start : start + _LONGEST_CHARACTER])
        yield start, tokens[start:stop]
        start = stop


def _shared(store: Store, tokens: Sequence[int]) -> int:
    """How many of some tokens it takes to have the characters of the first one whole; 1 when they never are."""
    lost = 0
    for count, token in enumerate(tokens, 1):
        lost += store.decode([token]).count(_LOST)
        text = store.decode(tokens[:count])
        if not text.endswith(_LOST):
            # A document may hold the sign itself: then nothing is gained.
            return count if text.count(_LOST) < lost else 1
    return 1
