"""`milldam contamination`: what a finished store holds of evaluation sets."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from milldam.cli.commands import json_option, machine_options
from milldam.cli.naming import visible
from milldam.markup import counted, place_words

_SHOWN = 3


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--against", multiple=True, required=True, metavar="PATH", help="An evaluation set; may be repeated.")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Fields of the evaluation set, separated by commas. [default: every field with text]",
)
@click.option("--ngram", type=int, metavar="N", help="Words in an n-gram. [default: 13]")
@click.option(
    "--min-share", type=float, metavar="SHARE", help="Share of a passage's n-grams that makes a match. [default: 0.5]"
)
@click.option("--findings", type=click.Path(path_type=Path), help="File for all findings, one JSON object per line.")
@machine_options()
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def contamination(
    store: Path,
    against: tuple[str, ...],
    findings: Path | None,
    as_json: bool,
    quiet: bool,
    memory: str | None,
    workers: int | None,
    **rules: Any,
) -> None:
    """Look for items of evaluation sets in a finished store.

    Decodes the store and searches its text. Exits with 1 if an item is found.

    \b
    milldam contamination corpus.milldam --against evals/gsm8k.jsonl --columns question,answer
    """
    from milldam.cli.commands import as_interrupt
    from milldam.cli.summaries import make_observer
    from milldam.decontamination.deciding import warning_of
    from milldam.errors import EXIT_INTERRUPTED
    from milldam.pipeline.decontaminating import find_contamination
    from milldam.stores.tokens.reader import Store

    rules["columns"] = None if rules["columns"] is None else rules["columns"].split(",")
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            machine: dict[str, Any] = {"memory": memory, "workers": workers, "observer": observer}
            figures = find_contamination(Store(store), against, findings=findings, **machine, **rules)
    except KeyboardInterrupt:
        click.echo("\nInterrupted. Nothing was kept.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for line in contamination_lines(figures):
            click.echo(line)
    for warning in filter(None, (warning_of(one["set"], one["searched"]) for one in figures["sets"])):
        click.echo(visible(f"Warning: {warning}"), err=True)
    sys.exit(1 if any(one["findings"] for one in figures["sets"]) else 0)


def contamination_lines(figures: dict[str, Any]) -> list[str]:
    """What was found of each evaluation set, a line each, and the worst of it."""
    from milldam.decontamination.deciding import left_out

    lines = []
    for one in figures["sets"]:
        searched, found = one["searched"], one["items_found"]
        not_searched = left_out(searched | {"everywhere": one["common"]})
        shown = f" (passages not searched: {not_searched})" if not_searched else ""
        where = f" in {counted(one['documents'], 'document')}, action: {one['action']}" if found else ""
        lines.append(f"{one['set']}: {found:,} of {counted(searched['items'], 'item')} found{where}{shown}")
        lines += [
            f"  item {line['item']}, {line['column']}: {100 * line['share']:.0f} % in {line['file']}, "
            + place_words(line)
            for line in one["worst"][:_SHOWN]
        ]
    return lines
