"""`milldam map`: any function over the rows of any source."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import (
    JobCommand,
    Request,
    job_options,
    pairs,
    present,
    setting,
    settings,
    text_options,
    together,
)
from milldam.mapping.settings import MapSettings, settings_of

if TYPE_CHECKING:
    from milldam.mapping.table_job import TableSummary
    from milldam.run.summary import Observer


@click.command(cls=JobCommand)
@click.argument("function", metavar="SCRIPT.PY:FUNCTION")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@together("Output", *settings(MapSettings, "out remove_columns shard_size"))
@together(
    "Input", text_options, *settings(MapSettings, "columns split"), setting("--subset", of="DataSet", metavar="NAME")
)
@together(
    "Function",
    click.option(
        *("--rows", "batched"), is_flag=True, flag_value=False, default=True, help="It takes one row, not a batch."
    ),
    *settings(MapSettings, "batch_size batch_bytes format with_indices"),
    pairs("--args", "fn_kwargs", "NAME=VALUE", "A further argument of the function, as JSON or text."),
    *settings(MapSettings, "on_error key"),
)
@job_options
def map(function: str, inputs: tuple[str, ...], **options: Any) -> Request[TableSummary]:
    """
    The function takes a dict of columns (lists) and returns one, as in HF's `map`. INPUT: text (columns text and file),
    JSON lines, CSV, parquet, Arrow, a folder that `save_to_disk` wrote, or a name on the Hub. Memory is bounded. If it
    is interrupted or killed, run the same command to resume; after a change, only the units that it affects are
    redone.

    \b
    milldam map clean.py:clean books/ -o clean.table
    milldam map tokens.py:tokenize corpus.jsonl -o tokens.table --remove-columns all --memory 512MB
    milldam map clean.py:clean books/ -o clean.table --args limit=500 --rows

    Without -o the table goes to the cache, ~/.cache/milldam/map. Of a dataset with several splits, train is read, or
    what --split names.
    """
    from milldam.mapping.job import array_of

    found = present(options) | {"source": list(inputs), "function": function, "batched": options["batched"]}
    chosen = settings_of(found)
    return Request(partial(_run, chosen), partial(array_of, chosen))


def _run(settings: MapSettings, observer: Observer) -> TableSummary:
    from milldam.mapping.job import run_map

    # What the function prints goes where that of worker processes goes: standard output is for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        return run_map(settings, observer)
