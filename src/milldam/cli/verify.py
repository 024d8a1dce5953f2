"""`milldam verify`: is the store whole?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(store: Path, as_json: bool) -> None:
    """Check every file of a store: hashes, counts, indexes and token ids. Exits with 1 when something is wrong.

    \b
    milldam verify corpus.milldam
    """
    from milldam.store.manifest import Manifest
    from milldam.store.verify import verify as find_problems

    manifest = Manifest.read(store)
    problems = []
    for problem in find_problems(store):
        problems.append(problem)
        if not as_json:
            click.echo(f"{problem}", err=True)
    facts = {"shards": len(manifest.shards), "documents": manifest.documents, "tokens": manifest.tokens}
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems, **facts}))
    elif not problems:
        counted = f"{facts['shards']:,} shards, {facts['documents']:,} documents, {facts['tokens']:,} tokens"
        click.echo(f"{store}: whole. {counted}; all hashes, indexes and ids are right.")
    else:
        click.echo(f"{store}: {len(problems)} problems. Make the store again with --overwrite.", err=True)
    sys.exit(1 if problems else 0)
