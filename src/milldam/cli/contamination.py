"""`milldam contamination`: items of evaluation sets in a finished store."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from milldam.cli.commands import as_interrupt, json_option, listed, machine_options, quiet_option, setting
from milldam.cli.naming import visible
from milldam.markup import counted, place_words

_SHOWN = 3


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--against", multiple=True, required=True, metavar="PATH", help="An evaluation set. May be repeated.")
@setting("--columns", of="EvaluationSet", metavar="NAMES", callback=listed)
@setting("--ngram", of="EvaluationSet", type=int, metavar="N")
@setting("--min-share", of="EvaluationSet", type=float, metavar="SHARE")
@click.option("--findings", type=click.Path(path_type=Path), help="File for all findings, one JSON object per line.")
@machine_options
@json_option
@quiet_option
def contamination(store: Path, against: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """
    Decodes the store and searches its text. Exits with 1 if an item is found.

    \b
    milldam contamination corpus.milldam --against evals/gsm8k.jsonl --columns question,answer
    """
    from milldam.cli.summaries import Display
    from milldam.decontamination.deciding import warning_of
    from milldam.pipeline.decontaminating import find_contamination
    from milldam.stores.tokens.reader import Store

    signal.signal(signal.SIGTERM, as_interrupt)
    with Display(quiet=quiet) as display:
        figures = find_contamination(Store(store), against, observer=display, **options)
    click.echo(json.dumps(figures) if as_json else "\n".join(contamination_lines(figures)))
    for warning in filter(None, (warning_of(one["set"], one["searched"]) for one in figures["sets"])):
        click.echo(visible(f"Warning: {warning}"), err=True)
    sys.exit(1 if any(one["findings"] for one in figures["sets"]) else 0)


def contamination_lines(figures: dict[str, Any]) -> list[str]:
    """The findings of each evaluation set: a line, and the worst ones."""
    from milldam.decontamination.deciding import left_out

    lines = []
    for one in figures["sets"]:
        searched, found = one["searched"], one["items_found"]
        left = left_out(searched | {"everywhere": one["common"]})
        where = f" in {counted(one['documents'], 'document')}, action: {one['action']}" if found else ""
        lines.append(
            f"{one['set']}: {found:,} of {counted(searched['items'], 'item')} found{where}"
            + (f" (passages not searched: {left})" if left else "")
        )
        lines += [
            f"  item {line['item']}, {line['column']}: {100 * line['share']:.0f} % in {line['file']}, "
            + place_words(line)
            for line in one["worst"][:_SHOWN]
        ]
    return lines
