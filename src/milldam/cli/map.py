"""`milldam map`: any function over the rows of any source."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from milldam.cli.engine import engine_options
from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.summaries import memory_lines
from milldam.cli.terminal import visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.stores.table.summary import MapSummary


@click.command()
@click.argument("function", metavar="SCRIPT.PY:FUNCTION")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder for the table. [default: in the cache, by its key]"
)
@click.option(
    "--rows", "batched", is_flag=True, flag_value=False, default=True, help="The function takes one row, not a batch."
)
@click.option("--batch-size", type=int, metavar="N", help="Rows a call. [default: 1000]")
@click.option("--batch-bytes", metavar="SIZE", help="Bytes a call, at most. [default: 8MB]")
@click.option("--columns", metavar="NAMES", help="Read only these columns: a,b,c. [default: all]")
@click.option("--remove-columns", metavar="NAMES", help='Input columns to leave out: a,b,c or "all".')
@click.option(
    "--format", type=click.Choice(["python", "numpy", "arrow"]), help="What the function gets. [default: python]"
)
@click.option("--with-indices", is_flag=True, help="Give the numbers of the rows as a second argument.")
@click.option("--args", "arguments", multiple=True, metavar="NAME=VALUE", help="A further argument; JSON or text.")
@click.option("--on-error", type=click.Choice(["raise", "reject"]), help="When the function fails. [default: raise]")
@click.option("--key", metavar="NAME", help="Names the function where what it depends on can't be hashed.")
@click.option("--shard-size", metavar="SIZE", help="Input of a unit, about. [default: 64MB]")
@click.option("--shards", type=int, metavar="N", help="So many units of even size instead.")
@click.option(
    "--documents",
    type=click.Choice(["file", "line", "paragraph"]),
    help="In .txt files: what is a row. [default: file]",
)
@click.option("--separator", metavar="TEXT", help="In .txt files: rows end at this text. \\n and \\t are understood.")
@click.option(
    "--invalid-utf8",
    type=click.Choice(["reject", "drop", "replace", "strict"]),
    help="Records that are not UTF-8. [default: reject]",
)
@click.option(
    "--input-format",
    type=click.Choice(["txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]),
    help="What the input is, when its name does not say.",
)
@click.option("--split", metavar="NAME", help="Of a data set: which split is read.")
@click.option("--subset", metavar="NAME", help="Of a data set on the Hub: which configuration is read.")
@click.option("--strict", is_flag=True, help="Stop at the first record that can't be read.")
@click.option("--memory", metavar="SIZE", help="Limit for the whole process tree. [default: half of what is free]")
@click.option("--workers", type=int, help="Cores to use. [default: all]")
@engine_options
@click.option("--overwrite", is_flag=True, help="Do everything again, also what is up to date.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary.")
def map(function: str, inputs: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Apply a Python function to every row of the input, in a fixed amount of memory; the result is a table.

    The function takes a dict of columns (lists) and returns one, as in HF's `map`. INPUT: text (columns text and file),
    JSON lines, CSV, parquet, Arrow, a folder that `save_to_disk` wrote, or a name on the Hub. Interrupted or killed,
    the same command goes on where it stopped; after a change it does again what the change touches, and nothing else.

    \b
    milldam map clean.py:clean books/ -o clean.table
    milldam map tokens.py:tokenize corpus.jsonl -o tokens.table --remove-columns all --memory 512MB
    milldam map clean.py:clean books/ -o clean.table --args limit=500 --rows

    Without -o the table is in the cache (`milldam cache`). A data set with several splits becomes a table for each, in
    folders of OUT, unless --split names one.
    """
    from milldam.mapping.sources import each_split

    said = {"source": list(inputs), "function": function, **_said(options)}
    splits = each_split(said)
    made = {name: _summary_of(one, quiet=quiet) for name, one in (splits or {"": said}).items()}
    if as_json:
        told = {name: summary.as_json() for name, summary in made.items()}
        click.echo(json.dumps(told if splits is not None else told[""]))
    elif not quiet:
        click.echo(visible("\n".join(line for summary in made.values() for line in summary_lines(summary))))


def _summary_of(said: dict[str, Any], *, quiet: bool) -> MapSummary:
    """Make one table."""
    from milldam.cli.progress import make_observer
    from milldam.mapping import run_map
    from milldam.mapping.settings import settings_of

    settings = settings_of(said)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        # What the function prints goes where that of worker processes goes: standard output is for the summary.
        with make_observer(quiet=quiet) as observer, contextlib.redirect_stdout(sys.stderr):
            return run_map(settings, observer)
    except KeyboardInterrupt:
        _explain_interrupt(settings.out)


def _said(options: dict[str, Any]) -> dict[str, Any]:
    """The options as settings."""
    found = {"batched": options.pop("batched")}
    found |= {name: value for name, value in options.items() if value not in (None, False, ())}
    if "arguments" in found:
        found["fn_kwargs"] = dict(_argument(text) for text in found.pop("arguments"))
    for name in ("columns", "remove_columns"):
        if name in found and found[name] != "all":
            found[name] = [one.strip() for one in found[name].split(",")]
    if "separator" in found:
        found["separator"] = found["separator"].replace("\\n", "\n").replace("\\t", "\t")
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


def _explain_interrupt(out: str | None) -> NoReturn:
    from milldam.mapping.map_run import MapRun

    done = "" if out is None else f"\n{counted(len(MapRun(Path(out)).made()), 'unit')} done."
    end_interrupted(f"Every finished unit is safe.{done}")


def summary_lines(summary: MapSummary) -> list[str]:
    """The closing lines: what was made, what was reused and why not more, at what rate, in how much memory."""
    from milldam.memory import format_size

    if summary.up_to_date:
        return [f"{summary.out} is up to date: {counted(summary.rows, 'row')}; {summary.reuse}."]
    counts = counted(summary.rows, "row")
    if summary.read != summary.rows:
        counts = f"{counted(summary.read, 'row')} in, {summary.rows:,} out"
    columns = ", ".join(f"{name} ({kind})" for name, kind in summary.columns.items())
    lines = [
        f"{summary.out}: {counts}, {format_size(summary.bytes)}; {summary.reuse}",
        f"Columns: {columns}",
        f"{summary.seconds:.1f} s, {counted(summary.workers, 'worker')}",
    ]
    lines += [f"Changed: {what}" for what in summary.changed]
    if summary.rejected:
        lines.append(f"Rejected: {summary.set_aside}")
    if summary.over_budget:
        lines.append(f"Warning: {summary.over_budget}")
    return lines + memory_lines(summary.memory)
