"""A finished store: `inspect` shows its documents, `verify` checks it, `report` rebuilds the page about its run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.cli.commands import json_option
from milldam.cli.naming import TRAINED_MARKS, visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.stores.tokens.reader import Store

# Of the 256 colours that terminals have: others would be rounded to these, several to the same.
_COLOURS = ("white on color(24)", "white on color(94)", "white on color(22)", "white on color(53)")
_UNTRAINED = ("white on color(236)", "white on color(240)")
_TRAINED = ("black on color(34)", "black on color(40)")
_SPECIAL, _TRAINED_SPECIAL = "bold red", "bold white on color(22)"
_MARK = "▕"
"""After each token where there are no colours; special tokens have the plain bar, but not this."""
_LONGEST_CHARACTER = 6
"""Tokens that can share a character: it has four bytes, and a token may hold the end of the one before."""


@click.command()
@click.argument("store")
@click.option("--split", metavar="NAME", help="Show only this split, its documents numbered from 0. [default: all]")
@click.option("--start", default=0, show_default=True, help="First document; negative numbers count from the end.")
@click.option(
    "--documents", type=click.IntRange(min=1), default=3, show_default=True, help="Number of documents to show."
)
@click.option(
    "--tokens", type=click.IntRange(min=0), default=200, show_default=True, help="Tokens to show of each document."
)
@click.option("--ids", is_flag=True, help="Show each token's id after it.")
def inspect(store: str, split: str | None, start: int, documents: int, tokens: int, ids: bool) -> None:
    """
    In conversations, tokens that are trained on are green, or in ⟦ ⟧ if there are no colours.

    STORE: a token store: its folder, or an address such as s3://bucket/corpus.milldam, from which only the
    shards with these documents are fetched.

    \b
    milldam inspect corpus.milldam --start 1000 --ids
    milldam inspect corpus.milldam --split val
    """
    from milldam.remote import place_at
    from milldam.stores.tokens.reader import Store

    opened = Store(place_at(store), split=split)
    first = start + len(opened) if start < 0 else start
    if not 0 <= first < len(opened):
        inside = f", split {split}" if split is not None else ""
        numbers = f"0 to {len(opened) - 1:,}" + (f", or -{len(opened):,} to -1 from the end" if start < 0 else "")
        raise ConfigError(
            f"--start {start}: {store}{inside} has {counted(len(opened), 'document')}, numbered {numbers}."
        )
    for number in range(first, min(len(opened), first + documents)):
        show_tokens(opened, number, tokens, ids=ids)
    for what, path in opened.audit.items():
        click.echo(f"{what}: {visible(str(path))}")


def show_tokens(store: Store, number: int, shown: int, *, ids: bool = False) -> None:
    """Print the first tokens of a document; those that share a character as one piece.

    Each piece has another background than the one before it; without colours there is a mark after each, and others
    around those that are trained on.
    """
    from rich.console import Console
    from rich.text import Text

    row, spans = store[number], store.spans(number) if store.has_spans else None
    console, (begin, end) = Console(highlight=False, soft_wrap=True), TRAINED_MARKS
    coloured = console.is_terminal and not console.no_color
    facts = [counted(len(row), "token")]
    if spans is not None:
        trained = sum(end - begin for begin, end in spans.tolist())
        facts.append(f"{trained:,} trained on ({'green' if coloured else f'in {begin} {end}'})")
        if store.manifest.chat is not None and store.manifest.chat["pairs"]:
            facts.append(f"{'rejected' if number % 2 else 'chosen'} side of pair {number // 2:,}")
        if any(shard.labels is not None for shard in store.shards):
            facts.append(f"label {store.label(number)}")
    console.print(f"── document {number:,}: {', '.join(facts)} ──", style="bold")
    tokens, text = row[: shown + _LONGEST_CHARACTER].tolist(), Text()
    special: set[int | None] = {id for id, token in store.tokenizer.get_added_tokens_decoder().items() if token.special}
    special |= {store.manifest.tokenizer.get("eos"), store.manifest.tokenizer.get("bos")}
    start, position, inside = 0, 0, False
    while start < min(shown, len(tokens)):
        stops = range(start + 1, min(start + _LONGEST_CHARACTER, len(tokens)) + 1)
        stop = next((one for one in stops if not store.decode(tokens[start:one]).endswith("\ufffd")), start + 1)
        piece, is_special = tokens[start:stop], tokens[start] in special
        is_trained = spans is not None and bool(((spans[:, 0] < stop) & (spans[:, 1] > start)).any())
        grounds = _COLOURS if spans is None else _TRAINED if is_trained else _UNTRAINED
        style = (_TRAINED_SPECIAL if is_trained else _SPECIAL) if is_special else grounds[position % len(grounds)]
        if not coloured and inside != is_trained:
            text.append(begin if is_trained else end)
        text.append(visible(store.decode(piece)).replace("\n", "⏎\n"), style=style if coloured else "")
        text.append(f"[{' '.join(map(str, piece))}]" if ids else "", style="dim" if coloured else "")
        text.append("" if coloured else _MARK)
        start, position, inside = stop, position + 1, is_trained
    console.print(text.append(end if inside and not coloured else ""))
    if len(row) > shown:
        console.print(f"... {counted(len(row) - shown, 'more token')}", style="dim")


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
def report(store: Path) -> None:
    """
    The report is run/report.html in the store.

    \b
    milldam report corpus.milldam
    """
    from milldam.report import write_report

    click.echo(visible(str(write_report(store))))


@click.command()
@click.argument("store")
@json_option
def verify(store: str, as_json: bool) -> None:
    """
    Reads every file. Exits with 1 if something is wrong.

    STORE: tokens, question-answering features or a table. At an address, every file is streamed once.

    \b
    milldam verify corpus.milldam
    milldam verify s3://bucket/corpus.milldam
    """
    from milldam.remote import place_at
    from milldam.stores.verify import manifest_at
    from milldam.stores.verify import verify as verify_store

    place = place_at(store)
    _, manifest = manifest_at(place)
    counts = {name: count for name, count in manifest.totals.items() if name in ("documents", "tokens", "rows")}
    facts, problems = {"shards": len(manifest.shards)} | counts, []
    for problem in verify_store(place):
        problems.append(problem)
        if not as_json:
            click.echo(f"{problem}", err=True)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems, **facts}))
    elif not problems:
        figures = ", ".join(counted(count, name.removesuffix("s")) for name, count in facts.items())
        click.echo(f"{place.name}: whole. {figures}; all checks passed.")
    else:
        again = "Make it again with --overwrite." if place.folder is not None else "Push it again."
        click.echo(f"{place.name}: {counted(len(problems), 'problem')}. {again}", err=True)
    sys.exit(1 if problems else 0)
