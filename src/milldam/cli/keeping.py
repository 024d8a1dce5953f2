"""`milldam cache`: the tables that `milldam map` made without `-o`; `milldam dedup-index`: the runs of an index."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from milldam.cli.commands import json_option
from milldam.cli.naming import visible
from milldam.markup import counted
from milldam.memory import format_size


@click.command()
@click.option("--clear", is_flag=True, help="Remove all tables that are not in use.")
@json_option
def cache(clear: bool, as_json: bool) -> None:
    """
    The cache is MILLDAM_CACHE, or else ~/.cache/milldam. When it grows beyond MILLDAM_MAP_CACHE_SIZE, such as 100GB,
    the tables that have not been used for longest are removed.

    \b
    milldam cache
    milldam cache --clear
    """
    from milldam.errors import StoreError
    from milldam.mapping import cache as tables
    from milldam.stores.table.manifest import TableManifest

    if clear:
        tables.remove_leftovers()
        removed = [tables.remove(one) for one in tables.cached_tables()]
        click.echo(f"{sum(removed)} of {len(removed)} tables are removed. Others are in use.", err=True)
    found, facts = list(tables.cached_tables()), list[dict[str, Any]]()
    for table in found:
        facts.append({"key": table.key, "path": str(table.path), "bytes": table.bytes, "used": table.used})
        facts[-1] |= {"function": None, "rows": None, "finished": False, "in_use": table.in_use}
        with contextlib.suppress(StoreError):
            manifest = TableManifest.read(table.path)
            facts[-1] |= {"function": manifest.settings["function"]["name"], "rows": manifest.rows, "finished": True}
        if not as_json:
            one, used = facts[-1], time.strftime("%Y-%m-%d %H:%M", time.localtime(table.used))
            what = f"{one['function']}, {one['rows']:,} rows" if one["finished"] else "unfinished"
            in_use = ", in use" if table.in_use else ""
            click.echo(visible(f"{table.key}  {used}  {format_size(table.bytes)}  {what}{in_use}"))
    total, limit = sum(one.bytes for one in found), tables.cache_limit()
    held = f"{counted(len(found), 'table')}, {format_size(total)} of {format_size(limit)}"
    click.echo(json.dumps(facts) if as_json else f"{tables.cache_folder()}: {held}")


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
