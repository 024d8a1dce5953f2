"""`milldam import`: tokens that other tools wrote -> a store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, job_options
from milldam.formats import FORMATS

if TYPE_CHECKING:
    from milldam.formats.importing import ImportSummary


@click.command("import", cls=JobCommand)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="STORE", help="Folder for the store."
)
@click.option(
    "--from", "format", type=click.Choice(FORMATS), help="Format of SOURCE. [default: recognised from the files]"
)
@click.option(
    "--tokenizer", metavar="NAME", help="Tokenizer that made the tokens: a folder, file or Hub name. [default: none]"
)
@click.option("--column", metavar="NAME", help="Column with the token ids. [default: input_ids or tokens]")
@click.option(
    "--masks",
    metavar="NAME",
    help="Column with the loss mask, or none. [default: labels, assistant_masks or completion_mask]",
)
@click.option("--eos", type=int, metavar="ID", help="Join all rows and cut documents after this id.")
@click.option("--bos", type=int, metavar="ID", help="The same, but cut before this id, as in llm.c's files.")
@click.option(
    "--dtype", metavar="DTYPE", help="Type of the tokens in .bin files and columns of bytes. [default: uint16]"
)
@click.option("--split", metavar="NAME", help="Split to read, and its name in the store. [default: all, or train]")
@click.option(
    "--vocab-size",
    type=int,
    metavar="N",
    help="Size of the vocabulary, if there is no tokenizer. [default: the largest id + 1]",
)
@click.option("--shard-size", default="256MB", metavar="SIZE", show_default=True, help="Size of the store's files.")
@job_options()
def import_(sources: tuple[str, ...], out: Path, **options: Any) -> Request[ImportSummary]:
    """Make a store from tokens that another tool wrote.

    SOURCE: .npy, .bin of nanoGPT or llm.c, a .bin/.idx pair of Megatron, Parquet, Arrow, or a folder of save_to_disk,
    MDS or litdata. Each row, or each flat file, becomes one document. With --eos all are joined and cut after each such
    token, with --bos before it. If it is interrupted or killed, run the same command to resume; if the source has
    changed, only the files that changed are imported again.

    \b
    milldam import train.bin -o owt.milldam --eos 50256 --tokenizer gpt2/
    milldam import tokenized_dataset/ -o corpus.milldam --column input_ids
    """
    from milldam.config.checking import checked_settings
    from milldam.formats.importing import ImportSettings, array_of, run_import

    settings = checked_settings(ImportSettings, {"source": sources, "out": out, **options})
    return Request(partial(run_import, settings), partial(array_of, settings))
