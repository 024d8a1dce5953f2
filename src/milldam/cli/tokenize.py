"""`milldam tokenize`: text to tokens."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from milldam.cli.engine import engine_options
from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.memory_lines import memory_lines
from milldam.cli.source_lines import source_lines
from milldam.cli.terminal import visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.run.progress import Observer, Summary


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
    from milldam.pipeline.npy import npy_path, tokenize_to_npy, work_folder
    from milldam.pipeline.stages import run_job

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


def run_and_show(job: Callable[[Observer], Summary], work: Path, *, as_json: bool, quiet: bool) -> Summary:
    """Run a job with its progress shown; then its summary, or after an interruption how to go on."""
    from milldam.cli.progress import make_observer

    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            summary = job(observer)
    except KeyboardInterrupt:
        _explain_interrupt(work)
    _show(summary, as_json=as_json, quiet=quiet)
    return summary


def _explain_interrupt(work: Path) -> NoReturn:
    from milldam.run.folder import Run

    done = len({record.unit for record in Run(work).records() if record.last})
    units = counted(done, "unit")
    end_interrupted(f"Every finished shard is safe.\n{units} done, and what the stages before them finished.")


def _show(summary: Summary, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary) | {"out": str(summary.out)}))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def summary_lines(summary: Summary) -> list[str]:
    """The closing lines: what was made, at what rate, in how much memory."""
    from milldam.cli.progress import column_lines
    from milldam.memory import format_size

    made = f"{counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')}"
    if summary.up_to_date:
        up_to_date = f"{summary.out} is up to date: {made}."
        return [up_to_date, *column_lines(summary.text_columns), *_packing_lines(summary)]
    ratio = summary.characters / max(1, summary.tokens)
    lines = [
        f"{summary.out}: {made}, {format_size(summary.output_bytes)} on disk",
        f"from {format_size(summary.text_bytes)} of text, {counted(summary.characters, 'character')}"
        f" ({ratio:.2f} characters a token)",
        *column_lines(summary.text_columns),
        f"{_speed(summary)}, {counted(summary.workers, 'worker')}, {summary.engine}",
    ]
    total = sum(summary.stages.values()) or 1.0
    lines.append("Time: " + ", ".join(f"{name} {value / total:.0%}" for name, value in summary.stages.items()))
    lines += memory_lines(summary.memory)
    lines += _document_lines(summary)
    beside = summary.out.with_name(f"{summary.out.name}.rejects.jsonl")
    rejects = summary.out / "rejects.jsonl" if summary.out.is_dir() else beside
    if rejects.exists():
        lines.append(f"Rejected records are in {rejects}")
    if summary.inexact_cuts:
        cuts = counted(summary.inexact_cuts, "cut")
        lines.append(f"Warning: {cuts} in giant documents could not be proved exact.")
    if summary.report is not None:
        lines.append(f"Report: {summary.report}")
    return lines


def _speed(summary: Summary) -> str:
    """The time of this session, and the rate at what it did: a run that went on had done the rest before."""
    from milldam.memory import format_size

    seconds, done = summary.seconds, summary.session_text_bytes
    if not done:
        return f"{seconds:.1f} s"
    left = f" for {format_size(done)} that were left" if done < summary.text_bytes else ""
    return f"{seconds:.1f} s{left}, {format_size(done / max(seconds, 1e-9))}/s"


def _document_lines(summary: Summary) -> list[str]:
    """What became of the records: lost, by stage and reason; kept, by source and split; packed."""
    dropped, rejected = sum(summary.dropped.values()), sum(summary.rejected.values())
    kept = f"{summary.documents:,} kept, {dropped:,} dropped, {rejected:,} rejected"
    lines = [f"Read {counted(summary.read, 'record')}: {kept}"]
    for stage in (stage for stage in summary.flow if stage["dropped"]):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in stage["dropped"].items())
        lines.append(f"  {stage['stage']}: {reasons}")
    lines += source_lines(summary.sources)
    if len(summary.splits) > 1:
        splits = (
            f"{name} {one['documents']:,} ({counted(one['tokens'], 'token')})" for name, one in summary.splits.items()
        )
        lines.append(f"Splits: {', '.join(splits)}")
    return lines + _packing_lines(summary)


def _packing_lines(summary: Summary) -> list[str]:
    return [
        f"Rows of {packed['sequence_len']}, {packed['strategy']}, {name}: {counted(packed['rows'], 'row')}, "
        f"{packed['efficiency']:.2%} filled, {counted(packed['cut_documents'], 'document')} cut, "
        f"{counted(packed['tail'], 'token')} at the end left out"
        for name, packed in summary.packing.items()
    ]
