"""`milldam export`: a store as files that other tools read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, job_options
from milldam.formats import FORMATS

if TYPE_CHECKING:
    from milldam.formats.exporting import ExportSummary


@click.command(cls=JobCommand)
@click.argument("store")
@click.option("--to", type=click.Choice(FORMATS), required=True, help="Format to write.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File, file pair or folder to write.")
@click.option("--split", metavar="NAME", help="Write only this split. [default: all, if the format can hold them]")
@click.option("--seq-len", type=int, metavar="N", help="Rows of N tokens, end to end. [default: one document per row]")
@click.option("--dtype", metavar="D", help="Type of the tokens, such as uint16 or int32. [default: by format]")
@click.option(
    "--shard-size", default="256MB", metavar="SIZE", show_default=True, help="Size of the files, if there are several."
)
@job_options()
def export(store: str, to: str, out: Path, **options: Any) -> Request[ExportSummary]:
    """Write a store as files that other tools read.

    Memory is bounded. If it is interrupted or killed, run the same command to resume. Files appear when
    they are complete.

    \b
    milldam export corpus.milldam --to nanogpt -o train.bin
    milldam export corpus.milldam --to megatron -o corpus_text_document
    milldam export corpus.milldam --to hf -o corpus-hf --seq-len 2048
    """
    from milldam.config.checking import checked_settings
    from milldam.formats.exporting import ExportSettings, array_of, run_export

    settings = checked_settings(ExportSettings, {"to": to, "out": out, **options})
    return Request(partial(run_export, store, settings), partial(array_of, store, settings))
