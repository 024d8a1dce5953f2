"""`milldam export`: a store as files that other tools read."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.terminal import visible
from milldam.formats import FORMATS
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.formats.exporting import ExportSummary


@click.command()
@click.argument("store")
@click.option("--to", type=click.Choice(FORMATS), required=True, help="Which tool reads it.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File, pair or folder to make.")
@click.option("--split", metavar="NAME", help="One of the store's splits. [default: all, where the format can]")
@click.option("--seq-len", type=int, metavar="N", help="Rows of N tokens, end to end. [default: a document a row]")
@click.option("--dtype", metavar="D", help="Of the tokens, such as uint16 or int32. [default: by format]")
@click.option(
    "--shard-size", default="256MB", metavar="SIZE", show_default=True, help="Of the files, where there are several."
)
@click.option("--overwrite", is_flag=True, help="Replace what was made from another store or with other options.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def export(store: str, to: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write a store as files that other tools read, in a fixed amount of memory.

    Interrupted or killed, the same command goes on where it stopped. What is made appears when it is whole.

    \b
    milldam export corpus.milldam --to nanogpt -o train.bin
    milldam export corpus.milldam --to megatron -o corpus_text_document
    milldam export corpus.milldam --to hf -o corpus-hf --seq-len 2048
    """
    from milldam import formats

    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        summary = formats.export(store, to, out, **options)
    except KeyboardInterrupt:
        end_interrupted("What is written so far is safe.")
    click.echo(json.dumps(summary.as_json()) if as_json else visible("\n".join(summary_lines(summary))))


def summary_lines(summary: ExportSummary) -> list[str]:
    """The closing lines: what was made, of what size, at what rate."""
    made = f"{counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}"
    if summary.up_to_date:
        return [f"{summary.out} is up to date: {made}."]
    files = counted(summary.files, "file")
    rate = summary.bytes / max(summary.seconds, 1e-9) / 1e6
    # Of a resumed export, only a part was written in these seconds.
    pace = "" if summary.resumed else f", {rate:,.0f} MB/s"
    lines = [
        f"{summary.out}: {made}, as {summary.to}",
        f"{files}, {format_size(summary.bytes)}, {summary.seconds:.1f} s{pace}",
    ]
    if "rows" in summary.counts:
        lines.append(counted(summary.counts["rows"], "row"))
    if summary.counts.get("tokens_left_out"):
        lines.append(f"{summary.counts['tokens_left_out']:,} tokens at the end fill no row and are left out")
    return lines
