"""`milldam verify`: is the store whole?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

QA_MANIFEST = "milldam-qa.json"


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(store: Path, as_json: bool) -> None:
    """Check every file of a store: hashes, counts, indexes and token ids. Exits with 1 when something is wrong.

    \b
    milldam verify corpus.milldam
    """
    facts, found = _features(store) if (store / QA_MANIFEST).exists() else _tokens(store)
    problems = []
    for problem in found:
        problems.append(problem)
        if not as_json:
            click.echo(f"{problem}", err=True)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems, **facts}))
    elif not problems:
        counted = ", ".join(f"{count:,} {name}" for name, count in facts.items())
        click.echo(f"{store}: whole. {counted}; all hashes, indexes and ids are right.")
    else:
        click.echo(f"{store}: {len(problems)} problems. Make the store again with --overwrite.", err=True)
    sys.exit(1 if problems else 0)


def _tokens(store: Path) -> tuple[dict[str, int], Iterator[str]]:
    """What a store of tokens counts, and what is wrong with it."""
    from milldam.store.manifest import Manifest
    from milldam.store.verify import verify as find_problems

    manifest = Manifest.read(store)
    facts = {"shards": len(manifest.shards), "documents": manifest.documents, "tokens": manifest.tokens}
    return facts, find_problems(store)


def _features(store: Path) -> tuple[dict[str, int], Iterator[str]]:
    """The same of a store of features."""
    from milldam.qa.feature_store import FeatureManifest
    from milldam.qa.feature_store.verify import verify as find_problems

    shards = FeatureManifest.read(store).shards
    examples, windows = sum(shard.examples for shard in shards), sum(shard.windows for shard in shards)
    return {"shards": len(shards), "examples": examples, "windows": windows}, find_problems(store)
