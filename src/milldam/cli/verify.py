"""`milldam verify`: is the store whole?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.stores.place import Place


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(store: str, as_json: bool) -> None:
    """Check a store: hashes, counts, indexes and token ids.

    Reads every file. Exits with 1 if something is wrong.

    STORE: anything that `milldam.open` opens. At an address, every file is streamed once and not cached.

    \b
    milldam verify corpus.milldam
    milldam verify s3://bucket/corpus.milldam
    """
    from milldam.remote import place_at

    place = place_at(store)
    folder = place.folder
    facts, found = _look(place)
    problems = []
    for problem in found:
        problems.append(problem)
        if not as_json:
            click.echo(f"{problem}", err=True)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems, **facts}))
    elif not problems:
        figures = ", ".join(counted(count, name.removesuffix("s")) for name, count in facts.items())
        click.echo(f"{place.name}: whole. {figures}; all checks passed.")
    else:
        again = "Make it again with --overwrite." if folder is not None else "Push it again."
        click.echo(f"{place.name}: {counted(len(problems), 'problem')}. {again}", err=True)
    sys.exit(1 if problems else 0)


def _look(place: Place) -> tuple[dict[str, int], Iterator[str]]:
    """What a store, or a file of another tool, counts, and what is wrong with it."""
    from milldam.formats.foreign import foreign_path, open_foreign
    from milldam.stores.kinds import store_kind
    from milldam.stores.verify import manifest_at
    from milldam.stores.verify import verify as problems

    file = None if place.folder is None or store_kind(place.folder) else foreign_path(place.folder)
    if file is not None:
        from milldam.formats.foreign import verify as problems_of_file

        opened = open_foreign(file)
        return {"tokens": opened.tokens}, problems_of_file(opened)
    _, manifest = manifest_at(place)
    counted = {name: count for name, count in manifest.totals.items() if not name.endswith("bytes")}
    return {"shards": len(manifest.shards)} | counted, problems(place)
