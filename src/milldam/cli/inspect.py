"""A finished store: `inspect` shows its documents, `verify` checks it, `report` rebuilds the page about its run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from milldam.cli.commands import json_option
from milldam.cli.naming import TRAINED_MARKS, has_colours, visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from rich.text import Text

    from milldam.stores.tokens.format import Int64s
    from milldam.stores.tokens.reader import Store

# Of the 256 colours that terminals have: others would be rounded to these, several to the same.
_COLOURS = ("white on color(24)", "white on color(94)", "white on color(22)", "white on color(53)")
_MARK = "▕"
"""After each token where there are no colours; special tokens have the plain bar, but not this."""
_UNTRAINED = ("white on color(236)", "white on color(240)")
_TRAINED = ("black on color(34)", "black on color(40)")
_SPECIAL, _TRAINED_SPECIAL = "bold red", "bold white on color(22)"
_OPEN, _CLOSE = TRAINED_MARKS
_LOST = "\ufffd"
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per document.")
def inspect(store: str, split: str | None, start: int, documents: int, tokens: int, ids: bool, as_json: bool) -> None:
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
        if as_json:
            click.echo(json.dumps(_as_dict(opened, number)))
        else:
            show_tokens(opened, number, tokens, ids=ids)
    if not as_json:
        for what, path in opened.audit.items():
            click.echo(f"{what}: {visible(str(path))}")


def _as_dict(store: Store, number: int) -> dict[str, Any]:
    row = store[number]
    found = {"document": number, "tokens": row.tolist(), "text": store.decode(row)}
    if store.has_spans:
        found["spans"] = store.spans(number).tolist()
    if any(shard.labels is not None for shard in store.shards):
        found["label"] = store.label(number)
    return found


def show_tokens(store: Store, number: int, shown: int, *, ids: bool = False) -> None:
    """Print the first tokens of a document."""
    from rich.console import Console

    row = store[number]
    console = Console(highlight=False, soft_wrap=True)
    coloured = has_colours(console)
    facts, spans = [counted(len(row), "token")], None
    if store.has_spans:
        spans = store.spans(number)
        trained = sum(end - begin for begin, end in spans.tolist())
        facts.append(f"{trained:,} trained on ({'green' if coloured else f'in {_OPEN} {_CLOSE}'})")
        if store.manifest.chat is not None and store.manifest.chat["pairs"]:
            facts.append(f"{'rejected' if number % 2 else 'chosen'} side of pair {number // 2:,}")
        if any(shard.labels is not None for shard in store.shards):
            facts.append(f"label {store.label(number)}")
    console.print(f"── document {number:,}: {', '.join(facts)} ──", style="bold")
    pieces = _pieces(store, row[: shown + _LONGEST_CHARACTER].tolist(), shown, spans)
    console.print(_shown(pieces, coloured=coloured, ids=ids))
    if len(row) > shown:
        console.print(f"... {counted(len(row) - shown, 'more token')}", style="dim")


class _Piece(NamedTuple):
    """A token, or several that share a character."""

    text: str
    ids: str
    special: bool
    trained: bool | None
    """None: the store does not say."""


def _pieces(store: Store, tokens: list[int], shown: int, spans: Int64s | None) -> Iterator[_Piece]:
    """The tokens that begin in the first `shown` ones; those that share a character are one piece."""
    added = store.tokenizer.get_added_tokens_decoder()
    special: set[int | None] = {id for id, token in added.items() if token.special}
    special |= {store.manifest.tokenizer.get("eos"), store.manifest.tokenizer.get("bos")}
    start = 0
    while start < min(shown, len(tokens)):
        lost, length = 0, 1
        for count, token in enumerate(tokens[start : start + _LONGEST_CHARACTER], 1):
            lost += store.decode([token]).count(_LOST)
            text = store.decode(tokens[start : start + count])
            if not text.endswith(_LOST):
                # A document may hold the sign itself: then nothing is gained by joining.
                length = count if text.count(_LOST) < lost else 1
                break
        together = tokens[start : start + length]
        trained = None if spans is None else bool(((spans[:, 0] < start + length) & (spans[:, 1] > start)).any())
        text = visible(store.decode(together)).replace("\n", "⏎\n")
        yield _Piece(text, f"[{' '.join(map(str, together))}]", together[0] in special, trained)
        start += length


def _shown(pieces: Iterable[_Piece], *, coloured: bool, ids: bool) -> Text:
    """Each token on another background than the one before it; without colours a mark after each, and others around
    those that are trained on."""
    from rich.text import Text

    text, inside = Text(), False
    for position, piece in enumerate(pieces):
        grounds = {None: _COLOURS, False: _UNTRAINED, True: _TRAINED}[piece.trained]
        style = grounds[position % len(grounds)]
        if piece.special:
            style = _TRAINED_SPECIAL if piece.trained else _SPECIAL
        if not coloured and inside != bool(piece.trained):
            inside = not inside
            text.append(_OPEN if inside else _CLOSE)
        text.append(piece.text, style=style if coloured else "")
        text.append(piece.ids if ids else "", style="dim" if coloured else "")
        text.append("" if coloured else _MARK)
    return text.append(_CLOSE if inside else "")


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
    counts = {name: count for name, count in manifest.totals.items() if not name.endswith("bytes")}
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
