"""`milldam cache`: the tables that `milldam map` made without a folder named for them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from milldam.cli.naming import visible
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.mapping.cache import CachedTable


@click.command()
@click.option("--remove", metavar="KEY", help="Remove a table; the beginning of its key is enough.")
@click.option("--clear", is_flag=True, help="Remove all tables that are not in use.")
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
def cache(remove: str | None, clear: bool, as_json: bool) -> None:
    """List or remove the cached tables of `milldam map`.

    The cache is MILLDAM_CACHE, or else ~/.cache/milldam. When it grows beyond MILLDAM_MAP_CACHE_SIZE, such as 100GB,
    the tables that have not been used for longest are removed.

    \b
    milldam cache
    milldam cache --remove 3f0c
    """
    from milldam.errors import ResourceError
    from milldam.mapping import cache as tables

    if remove is not None:
        chosen = tables.table_of(remove)
        if not tables.remove(chosen):
            raise ResourceError(f"{chosen.path}: in use. It can be removed when what reads or makes it has ended.")
        click.echo(f"{chosen.path} is removed.", err=True)
    if clear:
        tables.remove_leftovers()
        gone = [tables.remove(one) for one in tables.cached_tables()]
        rest = "" if all(gone) else "; the others are in use"
        click.echo(f"{sum(gone)} of {len(gone)} tables are removed{rest}.", err=True)
    found = tables.cached_tables()
    if as_json:
        click.echo(json.dumps([_described(one) for one in found]))
        return
    for one in found:
        click.echo(visible(_line(one)))
    total, limit = sum(one.bytes for one in found), tables.cache_limit()
    click.echo(f"{tables.cache_folder()}: {counted(len(found), 'table')}, {format_size(total)} of {format_size(limit)}")


def _described(table: CachedTable) -> dict[str, object]:
    from milldam.errors import StoreError
    from milldam.stores.table.manifest import TableManifest

    told: dict[str, object] = {"key": table.key, "path": str(table.path), "bytes": table.bytes, "used": table.used}
    try:
        manifest = TableManifest.read(table.path)
        facts: dict[str, object] = {
            "function": manifest.settings["function"]["name"],
            "rows": manifest.rows,
            "finished": True,
        }
    except StoreError:
        facts = {"function": None, "rows": None, "finished": False}
    return told | facts | {"in_use": table.in_use}


def _line(table: CachedTable) -> str:
    told = _described(table)
    what = f"{told['function']}, {told['rows']:,} rows" if told["finished"] else "unfinished"
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(table.used))
    return f"{table.key}  {used}  {format_size(table.bytes)}  {what}{', in use' if table.in_use else ''}"
