"""`milldam dedup-index`: the runs whose documents an index has seen."""

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
    """
    INDEX: the folder that `dedup.index` of a configuration names. The oldest run comes first.

    \b
    milldam dedup-index seen/
    milldam dedup-index seen/ --remove 5f0c6a1e9b3d2748
    """
    from milldam.dedup.index import DedupIndex

    opened = DedupIndex(index)
    if remove is not None:
        opened.remove(remove)
        click.echo(f"{remove} is removed.", err=True)
    lines = [f"{run.id}  {counted(run.documents, 'document')}, {run.hashes:,} new  {run.out}" for run in opened.runs()]
    runs = [asdict(run) for run in opened.runs()]
    click.echo(json.dumps(runs) if as_json else "\n".join(lines or [f"{index}: no runs."]))
