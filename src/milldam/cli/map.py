"""`milldam map`: any function over the rows of any source."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, job_options, json_values, present, setting, text_options, together

if TYPE_CHECKING:
    from milldam.mapping.settings import MapSettings
    from milldam.mapping.table_job import TableSummary
    from milldam.run.summary import Observer


@click.command(cls=JobCommand)
@click.argument("function", metavar="SCRIPT.PY:FUNCTION")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@together(
    "Output",
    click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the table. [default: in the cache]"),
    click.option("--remove-columns", metavar="NAMES", help='Input columns to leave out: a,b,c or "all".'),
    click.option("--shard-size", metavar="SIZE", help="Approximate input per unit. [default: 64MB]"),
    click.option("--shards", type=int, metavar="N", help="Instead of --shard-size: N units of even size."),
)
@together(
    "Input",
    text_options,
    click.option("--columns", metavar="NAMES", help="Read only these columns: a,b,c. [default: all]"),
    click.option("--split", metavar="NAME", help="Read only this split of a dataset."),
    setting("--subset", of="DataSet", metavar="NAME"),
)
@together(
    "Function",
    click.option(
        *("--rows", "batched"), is_flag=True, flag_value=False, default=True, help="It takes one row, not a batch."
    ),
    click.option("--batch-size", type=int, metavar="N", help="Rows per call. [default: 1000]"),
    click.option("--batch-bytes", metavar="SIZE", help="Most bytes per call. [default: 8MB]"),
    click.option(
        "--format",
        type=click.Choice(["python", "numpy", "arrow"]),
        help="Type of the columns that it gets. [default: python]",
    ),
    click.option("--with-indices", is_flag=True, help="Pass the row numbers as a second argument."),
    click.option(
        *("--args", "arguments"),
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument, JSON or text. Repeatable.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["raise", "reject"]),
        help="If it fails: stop, or set the row aside. [default: raise]",
    ),
    click.option("--key", metavar="NAME", help="Name that identifies it, if what it depends on can't be hashed."),
)
@job_options()
def map(
    function: str, inputs: tuple[str, ...], **options: Any
) -> Request[TableSummary] | dict[str, Request[TableSummary]]:
    """
    The function takes a dict of columns (lists) and returns one, as in HF's `map`. INPUT: text (columns text and file),
    JSON lines, CSV, parquet, Arrow, a folder that `save_to_disk` wrote, or a name on the Hub. Memory is bounded. If it
    is interrupted or killed, run the same command to resume; after a change, only the units that it affects are
    redone.

    \b
    milldam map clean.py:clean books/ -o clean.table
    milldam map tokens.py:tokenize corpus.jsonl -o tokens.table --remove-columns all --memory 512MB
    milldam map clean.py:clean books/ -o clean.table --args limit=500 --rows

    Without -o the table goes to the cache (`milldam cache`). A dataset with several splits becomes one table per
    split, in folders of OUT, unless --split names one.
    """
    from milldam.mapping.job import array_of
    from milldam.mapping.rows import each_split
    from milldam.mapping.settings import settings_of

    found = present(options) | {"source": list(inputs), "function": function, "batched": options["batched"]}
    if "arguments" in found:
        found["fn_kwargs"] = json_values(found.pop("arguments"), "args")
    for name in ("columns", "remove_columns"):
        if name in found and found[name] != "all":
            found[name] = [one.strip() for one in found[name].split(",")]

    def request(values: dict[str, Any]) -> Request[TableSummary]:
        settings = settings_of(values)
        return Request(partial(_run, settings), partial(array_of, settings))

    splits = each_split(found)
    return request(found) if splits is None else {name: request(one) for name, one in splits.items()}


def _run(settings: MapSettings, observer: Observer) -> TableSummary:
    from milldam.mapping.job import run_map

    # What the function prints goes where that of worker processes goes: standard output is for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        return run_map(settings, observer)
