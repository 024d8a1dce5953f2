"""`milldam verify`: is the store whole?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.stores.tokens.place import Place


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(store: str, as_json: bool) -> None:
    """Check every file of a store: hashes, counts, indexes and token ids. Exits with 1 when something is wrong.

    STORE: anything that `milldam.open` opens. At an address every file is streamed once, past the cache.

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
    """What a store counts, and what is wrong with it, by its kind."""
    from milldam.formats.foreign import foreign_path
    from milldam.stores.kinds import FEATURES, TABLE, store_kind

    folder = place.folder
    if folder is None:
        return _tokens(place)
    kind, file = store_kind(folder), foreign_path(folder)
    if kind is FEATURES:
        return _features(folder)
    if kind is TABLE:
        return _table(folder)
    return _tokens(place) if file is None or kind is not None else _file(file)


def _table(store: Path) -> tuple[dict[str, int], Iterator[str]]:
    from milldam.stores.table import TableManifest
    from milldam.stores.table.verify import verify as find_problems

    table = TableManifest.read(store)
    return {"shards": len(table.shards), "rows": table.rows}, find_problems(store)


def _tokens(store: Place) -> tuple[dict[str, int], Iterator[str]]:
    """What a store of tokens counts, and what is wrong with it."""
    from milldam.stores.tokens.manifest import Manifest
    from milldam.stores.tokens.verify import verify as find_problems

    manifest = Manifest.read_at(store)
    facts = {"shards": len(manifest.shards), "documents": manifest.documents, "tokens": manifest.tokens}
    return facts, find_problems(store)


def _file(path: Path) -> tuple[dict[str, int], Iterator[str]]:
    """The same of a file of another tool, or an .npy file of ours."""
    from milldam.formats.foreign import open_foreign
    from milldam.loader.verify import verify as find_problems

    file = open_foreign(path)
    return {"tokens": file.tokens}, find_problems(file)


def _features(store: Path) -> tuple[dict[str, int], Iterator[str]]:
    """The same of a store of features."""
    from milldam.stores.features import FeatureManifest
    from milldam.stores.features.verify import verify as find_problems

    shards = FeatureManifest.read(store).shards
    examples, windows = sum(shard.examples for shard in shards), sum(shard.windows for shard in shards)
    return {"shards": len(shards), "examples": examples, "windows": windows}, find_problems(store)
