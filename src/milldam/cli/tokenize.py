"""`milldam tokenize`: text to tokens."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from milldam.choices import ChatForm, Encoder, SpecialText
from milldam.cli.commands import JobCommand, Request, job_options, listed, pairs, setting, text_options, together
from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.array import ArrayWork


@click.command(cls=JobCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@together(
    "Output",
    setting("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store, or file for --format npy."),
    click.option("--format", type=click.Choice(["store", "npy"]), default="store", help="Format of the output."),
    setting("--limit", type=int, metavar="N"),
    setting("--shard-size", metavar="SIZE"),
)
@together(
    "Input",
    setting("--text-column", of="DataSet", metavar="NAME"),
    text_options,
    setting("--decontaminate", multiple=True, metavar="PATH"),
)
@together(
    "Tokens",
    setting("--tokenizer", required=True, help="Folder, file or Hub name of the tokenizer."),
    setting("--eos", of="TokenizerRules", metavar="TOKEN"),
    setting("--bos", of="TokenizerRules", metavar="TOKEN"),
    setting("--special-text", of="TokenizerRules", type=click.Choice(get_args(SpecialText))),
    setting("--encoder", of="TokenizerRules", type=click.Choice(get_args(Encoder))),
)
@together(
    "Conversations",
    setting("--chat", is_flag=True, help="Records are conversations. The other options of this section imply it."),
    setting("--chat-form", of="ChatRules", key="form", type=click.Choice(get_args(ChatForm))),
    pairs(
        "--chat-column", "chat_columns", "NAME=COLUMN", "Name of a column, such as messages=turns or prompt=question."
    ),
    setting("--chat-template", of="ChatRules", key="template", metavar="FILE"),
    setting("--chat-named-template", of="ChatRules", key="named_template", metavar="NAME"),
    pairs("--chat-variable", "chat_variables", "NAME=VALUE", "A variable of the template, such as enable_thinking."),
    click.option(
        "--train-on",
        metavar="WHAT",
        callback=listed,
        help="Messages to train on: assistant, last, all, roles separated by commas, or a message field; "
        "assistant,-reasoning leaves out their thinking. [default: assistant]",
    ),
)
@job_options
def tokenize(
    inputs: tuple[str, ...], out: Path | None, tokenizer: str, format: str, **options: Any
) -> Request[TextSummary]:
    """
    INPUT: files, folders, globs, addresses such as s3://bucket/folder, or - for standard input; .txt, .jsonl, .json,
    .csv, .tsv, .parquet, .arrow, each also as .gz, .zst, .bz2, .xz. Memory is bounded. If it is
    interrupted or killed, run the same command to resume.

    \b
    milldam tokenize corpus.jsonl.zst -o corpus.milldam --tokenizer gpt2/
    milldam tokenize books/ -o books.milldam --tokenizer qwen2.5/tokenizer.json --memory 512MB
    milldam tokenize corpus.txt --format npy --tokenizer gpt2/
    milldam tokenize chat.jsonl --chat -o chat.milldam --tokenizer qwen2.5/
    """
    # No matrix is multiplied here: numpy need not start a thread for each core, which spins for 0.05 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from milldam.pipeline.starting import run_checked, tokenize_config

    def array() -> ArrayWork[TextSummary]:
        from milldam.pipeline.job import array_of

        if format == "npy":
            raise ConfigError("--format npy: array tasks make a store. Then: milldam export STORE --to npy -o FILE")
        return array_of(check(), report=False)

    if format == "npy":
        from milldam.pipeline.npy import npy_path, tokenize_to_npy

        config = tokenize_config(inputs, npy_path(inputs, out), tokenizer, options)
        return Request(partial(tokenize_to_npy, config), array)
    if out is None:
        raise ConfigError("No output: name the folder for the store with -o FOLDER.")
    check = partial(tokenize_config, inputs, out, tokenizer, options)
    return Request(partial(run_checked, check, report=False), array)
