"""`milldam import`: tokens that other tools wrote -> a store."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.interrupting import as_interrupt
from milldam.cli.terminal import visible
from milldam.formats import FORMATS
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.formats.importing import ImportSummary


@click.command("import")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--out", required=True, metavar="STORE", help="Folder for the store.")
@click.option("--from", "format", type=click.Choice(FORMATS), help="What it is. [default: seen from the files]")
@click.option(
    "--tokenizer", metavar="NAME", help="What made the tokens: a folder, a file or a Hub name. [default: none]"
)
@click.option("--column", metavar="NAME", help="The column with the ids. [default: input_ids or tokens]")
@click.option("--eos", type=int, metavar="ID", help="Join all rows and cut documents behind this id.")
@click.option("--bos", type=int, metavar="ID", help="The same, cut before this id, as llm.c has it.")
@click.option("--dtype", metavar="DTYPE", help="Of .bin files and columns of bytes. [default: uint16]")
@click.option("--split", metavar="NAME", help="Which split, and its name in the store. [default: all, or train]")
@click.option("--vocab-size", type=int, metavar="N", help="Without a tokenizer. [default: the largest id + 1]")
@click.option("--shard-size", default="256MB", metavar="SIZE", show_default=True, help="Of the store's files.")
@click.option("--overwrite", is_flag=True, help="Replace what was made from another source or with other options.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def import_(sources: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Make a store of tokens that another tool wrote.

    SOURCE: .npy, .bin of nanoGPT or llm.c, a pair of Megatron, Parquet, Arrow, or a folder of save_to_disk, MDS or
    litdata. A row is a document, a flat file is one; with --eos they are joined and cut behind each end of text, with
    --bos before. Interrupted or killed, the same command goes on where it stopped.

    \b
    milldam import train.bin -o owt.milldam --eos 50256 --tokenizer gpt2/
    milldam import tokenized_dataset/ -o corpus.milldam --column input_ids
    """
    from milldam.formats.importing import ImportSettings, run_import
    from milldam.memory import parse_size

    signal.signal(signal.SIGTERM, as_interrupt)
    options["shard_size"] = parse_size(options["shard_size"])
    paths = tuple(Path(source).expanduser() for source in sources)
    summary = run_import(ImportSettings(paths, Path(out), **options))
    if as_json:
        click.echo(json.dumps(summary.as_json()))
        return
    click.echo(visible("\n".join(_lines(summary, Path(out)))))


def _lines(summary: ImportSummary, out: Path) -> list[str]:
    made = f"{counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}, {summary.dtype}"
    if summary.up_to_date:
        return [f"{out} is up to date: {made}."]
    rate = summary.tokens / max(summary.seconds, 1e-9) / 1e6
    lines = [
        f"{out}: {made}, vocabulary {summary.vocab_size:,}",
        f"from {counted(summary.files, 'file')} ({', '.join(summary.formats)}) in {summary.seconds:.1f} s, "
        f"{rate:.1f}M tokens/s" + (", resumed" if summary.resumed else ""),
    ]
    if len(summary.splits) > 1:
        for name, one in summary.splits.items():
            lines.append(f"  {name}: {counted(one['documents'], 'document')}, {counted(one['tokens'], 'token')}")
    return lines
