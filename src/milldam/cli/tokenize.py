"""`milldam tokenize`: text to tokens."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from milldam.cli.engine import engine_options
from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.summaries import show_summary
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.progress import Observer


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store, or file for --format npy.")
@click.option("--tokenizer", required=True, help="Folder, file or Hub name of the tokenizer.")
@click.option(
    "--memory", metavar="SIZE", help="Limit for the whole process tree, such as 512MB. [default: half of what is free]"
)
@click.option("--workers", type=int, help="Cores to use. [default: all]")
@click.option("--shard-size", metavar="SIZE", help="Input per shard, such as 256MB. [default: 64MB]")
@click.option("--limit", type=int, metavar="N", help="Stop after N documents, exactly.")
@click.option(
    "--text-column", metavar="NAME", help="Field with the text; dots for nested fields. [default: the obvious one]"
)
@click.option(
    "--documents",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="In .txt files: what is a document.",
)
@click.option(
    "--separator", metavar="TEXT", help="In .txt files: documents end at this text. \\n and \\t are understood."
)
@click.option(
    "--input-format",
    type=click.Choice(["txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]),
    help="What the input is, when its name does not say.",
)
@click.option(
    "--eos",
    default="auto",
    show_default=True,
    metavar="TOKEN",
    help="Token after each document: auto, none or its text.",
)
@click.option(
    "--bos",
    default="none",
    show_default=True,
    metavar="TOKEN",
    help="Token before each document: none, auto or its text.",
)
@click.option(
    "--special-text",
    type=click.Choice(["special", "plain"]),
    default="special",
    show_default=True,
    help="The text of a special token inside a document: the special token, as HF has it, or plain text.",
)
@click.option(
    "--invalid-utf8",
    type=click.Choice(["reject", "drop", "replace", "strict"]),
    default="reject",
    show_default=True,
    help="Records that are not UTF-8: set aside, drop the bytes, put U+FFFD in their place, or stop.",
)
@click.option("--strict", is_flag=True, help="Stop at the first record that can't be read.")
@click.option(
    "--encoder",
    type=click.Choice(["auto", "gigatoken", "huggingface"]),
    help="What encodes; auto takes gigatoken where it gives the same ids as HF tokenizers. [default: auto]",
)
@engine_options
@click.option(
    "--format", type=click.Choice(["store", "npy"]), default="store", show_default=True, help="What to write."
)
@click.option("--overwrite", is_flag=True, help="Replace what was made from other settings or input.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary.")
def tokenize(
    inputs: tuple[str, ...],
    out: Path | None,
    tokenizer: str,
    format: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Turn text into a token store (or one .npy file), in a fixed amount of memory.

    INPUT: files, folders, globs, addresses such as s3://bucket/folder, or - for standard input; .txt, .jsonl, .json,
    .csv, .tsv, .parquet, .arrow, each also as .gz, .zst, .bz2, .xz. Interrupted or killed, the same command resumes.

    \b
    milldam tokenize corpus.jsonl.zst -o corpus.milldam --tokenizer gpt2/
    milldam tokenize books/ -o books.milldam --tokenizer qwen2.5/tokenizer.json --memory 512MB
    milldam tokenize corpus.txt --format npy --tokenizer gpt2/
    """
    from milldam.config.tokenize_options import tokenize_config
    from milldam.pipeline.job import run_job
    from milldam.pipeline.npy import npy_path, tokenize_to_npy, work_folder

    if options["separator"] is not None:
        options["separator"] = options["separator"].replace("\\n", "\n").replace("\\t", "\t")
    if format == "npy":
        config = tokenize_config(inputs, npy_path(inputs, out), tokenizer, options)
        run_and_show(partial(tokenize_to_npy, config), work_folder(Path(config.out)), as_json=as_json, quiet=quiet)
        return
    if out is None:
        raise ConfigError("No output: say where the store goes with -o FOLDER.")
    config = tokenize_config(inputs, out, tokenizer, options)
    run_and_show(partial(run_job, config, report=False), out, as_json=as_json, quiet=quiet)


def run_and_show(job: Callable[[Observer], TextSummary], work: Path, *, as_json: bool, quiet: bool) -> TextSummary:
    """Run a job with its progress shown; then its summary, or after an interruption how to go on."""
    from milldam.cli.progress import make_observer

    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            summary = job(observer)
    except KeyboardInterrupt:
        _explain_interrupt(work)
    show_summary(summary, as_json=as_json, quiet=quiet)
    return summary


def _explain_interrupt(work: Path) -> NoReturn:
    from milldam.run.folder import RUN_FOLDER
    from milldam.run.journal import Journal
    from milldam.run.records import safe_counts

    units = counted(safe_counts(Journal(work / RUN_FOLDER), "records.jsonl")["units_done"], "unit")
    end_interrupted(f"Every finished shard is safe.\n{units} done, and what the stages before them finished.")
