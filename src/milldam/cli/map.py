"""`milldam map`: any function over the rows of any source."""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, given, job_options, text_options
from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.mapping.job import MapSummary
    from milldam.mapping.settings import MapSettings
    from milldam.run.summary import Observer


@click.command(cls=JobCommand)
@click.argument("function", metavar="SCRIPT.PY:FUNCTION")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder for the table. [default: in the cache, by its key]"
)
@click.option(
    "--rows", "batched", is_flag=True, flag_value=False, default=True, help="The function takes one row, not a batch."
)
@click.option("--batch-size", type=int, metavar="N", help="Rows per call. [default: 1000]")
@click.option("--batch-bytes", metavar="SIZE", help="Most bytes per call. [default: 8MB]")
@click.option("--columns", metavar="NAMES", help="Read only these columns: a,b,c. [default: all]")
@click.option("--remove-columns", metavar="NAMES", help='Input columns to leave out: a,b,c or "all".')
@click.option(
    "--format",
    type=click.Choice(["python", "numpy", "arrow"]),
    help="Type of the columns that the function gets. [default: python]",
)
@click.option("--with-indices", is_flag=True, help="Pass the row numbers as a second argument.")
@click.option(
    "--args",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A further argument for the function, JSON or text; may be repeated.",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "reject"]),
    help="If the function fails: stop, or set the row aside. [default: raise]",
)
@click.option("--key", metavar="NAME", help="Name that identifies the function, if what it depends on can't be hashed.")
@click.option("--shard-size", metavar="SIZE", help="Approximate input per unit. [default: 64MB]")
@click.option("--shards", type=int, metavar="N", help="Instead of --shard-size: N units of even size.")
@text_options
@click.option("--split", metavar="NAME", help="Read only this split of a dataset.")
@click.option("--subset", metavar="NAME", help="Configuration of a dataset on the Hub.")
@job_options()
def map(function: str, inputs: tuple[str, ...], **options: Any) -> Request[MapSummary] | dict[str, Request[MapSummary]]:
    """Apply a Python function to every row; make a table.

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
    from milldam.mapping.rows import each_split
    from milldam.mapping.settings import settings_of

    said = {"source": list(inputs), "function": function, **_given(options)}
    splits = each_split(said)
    if splits is None:
        return _request(settings_of(said))
    return {name: _request(settings_of(one)) for name, one in splits.items()}


def _request(settings: MapSettings) -> Request[MapSummary]:
    from milldam.mapping.job import array_of

    return Request(partial(_run, settings), partial(array_of, settings))


def _run(settings: MapSettings, observer: Observer) -> MapSummary:
    from milldam.mapping.job import run_map

    # What the function prints goes where that of worker processes goes: standard output is for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        return run_map(settings, observer)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options as settings."""
    found = given(options) | {"batched": options["batched"]}
    if "arguments" in found:
        found["fn_kwargs"] = dict(_argument(text) for text in found.pop("arguments"))
    for name in ("columns", "remove_columns"):
        if name in found and found[name] != "all":
            found[name] = [one.strip() for one in found[name].split(",")]
    return found


def _argument(text: str) -> tuple[str, Any]:
    """
    >>> _argument("limit=500"), _argument("mode=fast")
    (('limit', 500), ('mode', 'fast'))
    """
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ConfigError(f"--args {text}: write it as name=value, such as --args limit=500.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
