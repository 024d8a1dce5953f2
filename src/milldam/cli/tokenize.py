"""`milldam tokenize`: text to tokens."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from milldam.choices import ChatForm, Encoder, SpecialText
from milldam.cli.commands import (
    JobCommand,
    Request,
    choice,
    evaluation_options,
    evaluation_sets,
    job_options,
    json_values,
    named_values,
    text_options,
)
from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.engine import ArrayWork


@click.command(cls=JobCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store, or file for --format npy.")
@click.option("--tokenizer", required=True, help="Folder, file or Hub name of the tokenizer.")
@click.option(
    "--text-column", metavar="NAME", help="Field with the text; dots for nested fields. [default: the obvious one]"
)
@text_options
@click.option("--eos", metavar="TOKEN", help="Token after each document: auto, none or its text. [default: auto]")
@click.option("--bos", metavar="TOKEN", help="Token before each document: none, auto or its text. [default: none]")
@click.option(
    "--special-text",
    type=choice(SpecialText),
    help="How to encode the text of a special token in a document: as that token, like HF, or as plain text. "
    "[default: special]",
)
@click.option(
    "--chat", is_flag=True, help="Records are conversations: render them with a chat template and store loss masks."
)
@click.option("--chat-template", metavar="FILE", help="A Jinja file. [default: the tokenizer's chat template]")
@click.option("--chat-form", type=choice(ChatForm), help="The form of the conversations. [default: auto]")
@click.option(
    "--chat-variable",
    "chat_variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the template, such as bos_token or enable_thinking; may be repeated.",
)
@click.option(
    "--chat-column",
    "chat_columns",
    multiple=True,
    metavar="NAME=COLUMN",
    help="Name of a column, such as messages=turns or prompt=question; may be repeated.",
)
@click.option("--chat-named-template", metavar="NAME", help="Which template to use, if there are several.")
@click.option(
    "--train-on",
    metavar="WHAT",
    help="Messages to train on: assistant, last, all, roles separated by commas, or a message field; "
    "assistant,-reasoning leaves out their thinking. "
    "[default: assistant]",
)
@evaluation_options
@click.option("--limit", type=int, metavar="N", help="Stop after exactly N documents.")
@click.option(
    "--encoder",
    type=choice(Encoder),
    help="Encoder to use; auto uses gigatoken if it gives the same ids as HF tokenizers. [default: auto]",
)
@click.option(
    "--format", type=click.Choice(["store", "npy"]), default="store", show_default=True, help="What to write."
)
@click.option("--shard-size", metavar="SIZE", help="Input per shard, such as 256MB. [default: 64MB; 16MB with --chat]")
@job_options()
def tokenize(
    inputs: tuple[str, ...], out: Path | None, tokenizer: str, format: str, **options: Any
) -> Request[TextSummary]:
    """Turn text into a token store, or one .npy file.

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

    options = evaluation_sets(options)
    options |= _chat_options(options)
    if format == "npy":
        from milldam.pipeline.npy import npy_path, tokenize_to_npy

        config = tokenize_config(inputs, npy_path(inputs, out), tokenizer, options)
        return Request(partial(tokenize_to_npy, config), _refuse_npy)
    if out is None:
        raise ConfigError("No output: say where the store goes with -o FOLDER.")
    check = partial(tokenize_config, inputs, out, tokenizer, options)

    def array() -> ArrayWork[TextSummary]:
        from milldam.pipeline.job import array_of

        return array_of(check(), report=False)

    return Request(partial(run_checked, check, report=False), array)


def _chat_options(options: dict[str, Any]) -> dict[str, Any]:
    """As the library takes them."""
    roles = options["train_on"].split(",") if options["train_on"] else []
    chat = {
        "variables": json_values(options.pop("chat_variables"), "chat-variable"),
        "columns": named_values(options.pop("chat_columns"), "chat-column"),
        "named_template": options.pop("chat_named_template"),
    }
    return {
        "chat": {name: value for name, value in chat.items() if value} or options["chat"],
        "train_on": roles if len(roles) > 1 else options["train_on"],
    }


def _refuse_npy() -> NoReturn:
    raise ConfigError("--format npy: array tasks make a store. Then: milldam export STORE --to npy -o FILE")
