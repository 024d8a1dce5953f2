"""Tokens to and from elsewhere: `export` to files that other tools read, `import` of what they wrote; `push` to the
Hugging Face Hub and `pull` from there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

import click

from milldam.cli.commands import (
    JobCommand,
    Request,
    end_interrupted,
    job_options,
    json_option,
    quiet_option,
    setting,
    settings,
    together,
)
from milldam.cli.summaries import show_summary
from milldam.errors import EXIT_INTERRUPTED
from milldam.formats import ReadName
from milldam.formats.settings import ExportSettings, ImportSettings

if TYPE_CHECKING:
    from milldam.formats.exporting import ExportSummary
    from milldam.formats.importing import ImportSummary
    from milldam.run.summary import Summary


@click.command(cls=JobCommand)
@click.argument("store")
@together("Format", *settings(ExportSettings, "to out split seq_len dtype shard_size"))
@job_options
def export(store: str, **options: Any) -> Request[ExportSummary]:
    """
    Memory is bounded. If it is interrupted or killed, run the same command to resume. Files appear when
    they are complete.

    \b
    milldam export corpus.milldam --to nanogpt -o train.bin
    milldam export corpus.milldam --to megatron -o corpus_text_document
    milldam export corpus.milldam --to hf -o corpus-hf --seq-len 2048
    """
    from milldam.config.checking import checked_settings
    from milldam.formats.exporting import array_of, run_export

    checked = checked_settings(ExportSettings, options)
    return Request(partial(run_export, store, checked), partial(array_of, store, checked))


@click.command("import", cls=JobCommand)
@click.argument("source", nargs=-1, required=True, metavar="SOURCE...")
@together(
    "Format",
    *settings(ImportSettings, "out"),
    setting("--from", "format", of=ImportSettings, type=click.Choice(get_args(ReadName))),
    *settings(ImportSettings, "tokenizer column masks eos bos dtype split vocab_size shard_size"),
)
@job_options
def import_(source: tuple[str, ...], **options: Any) -> Request[ImportSummary]:
    """
    SOURCE: .npy, .bin of nanoGPT or llm.c, a .bin/.idx pair of Megatron, Parquet, Arrow, or a folder of save_to_disk.
    Each row, or each flat file, becomes one document. With --eos all are joined and cut after each such
    token, with --bos before it. If it is interrupted or killed, run the same command to resume; if the source has
    changed, only the files that changed are imported again.

    \b
    milldam import train.bin -o owt.milldam --eos 50256 --tokenizer gpt2/
    milldam import tokenized_dataset/ -o corpus.milldam --column input_ids
    """
    from milldam.config.checking import checked_settings
    from milldam.formats.importing import array_of, run_import

    checked = checked_settings(ImportSettings, {"source": source, **options})
    return Request(partial(run_import, checked), partial(array_of, checked))


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("repo", metavar="USER/NAME")
@click.option("--public", is_flag=True, help="Let anyone read it. [default: private]")
@click.option("--revision", metavar="BRANCH", help="Branch to push to; created if it does not exist. [default: main]")
@click.option("--message", help="Commit message.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent and removed; change nothing.")
@json_option
@quiet_option
def push(store: Path, repo: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """
    STORE: tokens or a table. Private unless --public. Files that are already
    there are not sent again; if it is interrupted or killed, run the same command to resume. The access token comes
    from the variable HF_TOKEN or `hf auth login`. Only the files of the store and its card are sent: no run folder, no
    rejects.

    \b
    milldam push corpus.milldam anna/corpus
    milldam push corpus.milldam anna/corpus --public --dry-run
    """
    from milldam.hub.pushing import push_store

    _move(partial(push_store, store, repo, **options), as_json=as_json, quiet=quiet)


@click.command()
@click.argument("repo", metavar="USER/NAME")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store. [default: NAME]")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit. [default: main]")
@json_option
@quiet_option
def pull(repo: str, out: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """
    Fetches what `milldam push` sent, and compares every file with the manifest. Files that are here and complete are
    kept; if it is interrupted or killed, run the same command to resume. The store then opens memory-mapped, like any
    local one.

    \b
    milldam pull anna/corpus -o corpus.milldam
    milldam pull anna/corpus --revision v2
    """
    from milldam.hub.pulling import pull_store

    _move(partial(pull_store, repo, out, **options), as_json=as_json, quiet=quiet)


def _move(call: Callable[..., Summary[Any]], *, as_json: bool, quiet: bool) -> None:
    """Push or pull, with the progress bars of huggingface_hub on a terminal, and show the summary.

    Interrupted, it does not wait for the threads of huggingface_hub, which wait for the network: a kill does no harm.
    """

    def end_at_once(number: int, frame: FrameType | None) -> None:
        try:
            end_interrupted()
        finally:
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)

    before = {number: signal.signal(number, end_at_once) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        summary = call(progress=not quiet and sys.stderr.isatty())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    show_summary(summary, as_json=as_json, quiet=quiet)
