"""A finished store: `inspect` shows documents as people and as the model see them, `verify` whether it is whole,
`report` the page that tells how its run went.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from milldam.cli.naming import TRAINED_MARKS, has_colours, visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from rich.text import Text

    from milldam.stores.tokens.format import Int64s
    from milldam.stores.tokens.reader import Store

# Of the 256 that terminals have: others would be rounded to these, several to the same.
_COLOURS = ("white on color(24)", "white on color(94)", "white on color(22)", "white on color(53)")
_MARK = "▕"
"""Behind each token where there are no colours; no tokenizer has it in a special token, as they have the plain bar."""
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
    """Show documents token by token, with their boundaries.

    In conversations, tokens that are trained on are green, or in ⟦ ⟧ if there are no colours.

    STORE: a token store: its folder, or an address such as s3://bucket/corpus.milldam, from which only the
    shards with these documents are fetched.

    \b
    milldam inspect corpus.milldam --start 1000 --ids
    milldam inspect corpus.milldam --split val
    """
    from milldam.remote import place_at
    from milldam.stores.tokens.reader import open_store

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
    if _has_labels(store):
        found["label"] = store.label(number)
    return found


def _has_labels(store: Store) -> bool:
    return any(shard.labels is not None for shard in store.shards)


def show_tokens(store: Store, number: int, shown: int, *, ids: bool = False) -> None:
    """Print the first tokens of a document."""
    from rich.console import Console

    row = store[number]
    console = Console(highlight=False, soft_wrap=True)
    coloured = has_colours(console)
    told = [counted(len(row), "token"), *_told(store, number, coloured=coloured)]
    console.print(f"── document {number:,}: {', '.join(told)} ──", style="bold")
    spans = store.spans(number) if store.has_spans else None
    pieces = _pieces(store, row[: shown + _LONGEST_CHARACTER].tolist(), shown, spans)
    console.print(_coloured(pieces, ids=ids) if coloured else _marked(pieces, ids=ids))
    if len(row) > shown:
        console.print(f"... {counted(len(row) - shown, 'more token')}", style="dim")


def _told(store: Store, number: int, *, coloured: bool) -> Iterator[str]:
    """What a store of conversations says of a document."""
    if not store.has_spans:
        return
    trained = sum(end - begin for begin, end in store.spans(number).tolist())
    yield f"{trained:,} trained on ({'green' if coloured else f'in {_OPEN} {_CLOSE}'})"
    if store.manifest.chat is not None and store.manifest.chat["pairs"]:
        yield f"{'rejected' if number % 2 else 'chosen'} side of pair {number // 2:,}"
    if _has_labels(store):
        yield f"label {store.label(number)}"


class _Piece(NamedTuple):
    """A token, or several that share a character."""

    text: str
    ids: Sequence[int]
    special: bool
    trained: bool | None
    """None: the store does not say."""


def _pieces(store: Store, tokens: list[int], shown: int, spans: Int64s | None) -> Iterator[_Piece]:
    """What begins in the first `shown` tokens."""
    added = store.tokenizer.get_added_tokens_decoder()
    special: set[int | None] = {id for id, token in added.items() if token.special}
    special |= {store.manifest.tokenizer.get("eos"), store.manifest.tokenizer.get("bos")}
    for start, together in _by_character(store, tokens):
        if start >= shown:
            break
        trained = None if spans is None else bool(((spans[:, 0] < start + len(together)) & (spans[:, 1] > start)).any())
        text = visible(store.decode(together)).replace("\n", "⏎\n")
        yield _Piece(text, together, together[0] in special, trained)


def _coloured(pieces: Iterable[_Piece], *, ids: bool) -> Text:
    """Each token on another ground than the one before it."""
    from rich.text import Text

    text = Text()
    for position, piece in enumerate(pieces):
        grounds = {None: _COLOURS, False: _UNTRAINED, True: _TRAINED}[piece.trained]
        style = grounds[position % len(grounds)]
        if piece.special:
            style = _TRAINED_SPECIAL if piece.trained else _SPECIAL
        text.append(piece.text, style=style)
        if ids:
            text.append(_ids(piece), style="dim")
    return text


def _marked(pieces: Iterable[_Piece], *, ids: bool) -> Text:
    """With a mark behind each token, and others around what is trained on."""
    from rich.text import Text

    text, inside = Text(), False
    for piece in pieces:
        if inside != bool(piece.trained):
            inside = not inside
            text.append(_OPEN if inside else _CLOSE)
        text.append(f"{piece.text}{_ids(piece) if ids else ''}{_MARK}")
    return text.append(_CLOSE if inside else "")


def _ids(piece: _Piece) -> str:
    return f"[{' '.join(map(str, piece.ids))}]"


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


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--open-path", is_flag=True, help="Print the page as a file:// address, to be opened in a browser.")
def report(store: Path, open_path: bool) -> None:
    """Rebuild a finished run's report and print its path.

    The report is run/report.html in the store.

    \b
    milldam report corpus.milldam
    """
    from milldam.cli.naming import visible
    from milldam.report import write_report

    path = write_report(store)
    click.echo(path.resolve().as_uri() if open_path else visible(str(path)))


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(store: str, as_json: bool) -> None:
    """Check a store: hashes, counts, indexes and token ids.

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
