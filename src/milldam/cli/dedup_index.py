"""`milldam dedup-index`: which runs an index of hashes knows, and forgetting one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from milldam.cli.commands import json_option
from milldam.markup import counted


@click.command("dedup-index")
@click.argument("index", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--remove", metavar="RUN", help="Remove a run: its documents no longer count as seen.")
@json_option
def dedup_index(index: Path, remove: str | None, as_json: bool) -> None:
    """List or remove the runs that a dedup index has seen.

    INDEX: the folder that `dedup.index` of a configuration names.

    \b
    milldam dedup-index seen/
    milldam dedup-index seen/ --remove 5f0c6a1e9b3d2748
    """
    from milldam.dedup.index import DedupIndex

    opened = DedupIndex(index)
    if remove is not None:
        opened.remove(remove)
        click.echo(f"{remove} is forgotten.", err=True)
    runs = opened.runs()
    if as_json:
        click.echo(json.dumps([asdict(run) for run in runs]))
        return
    for run in runs:
        near = ", with near-dedup" if run.near is not None else ""
        click.echo(f"{run.id}  {counted(run.documents, 'document')}, {run.hashes:,} new{near}  {run.out}")
    if not runs:
        click.echo(f"{index}: no runs.")
