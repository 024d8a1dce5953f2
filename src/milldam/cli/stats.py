"""`milldam stats`: what is in a store, from its manifest and index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.source_lines import source_lines
from milldam.cli.terminal import visible

if TYPE_CHECKING:
    from milldam.store import Store

_LONGEST_COUNTED = 1 << 20
_QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99}


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def stats(store: str, as_json: bool) -> None:
    """Show counts, sizes and the lengths of documents.

    STORE: a folder, or an address such as s3://bucket/corpus.milldam, of which only the indexes are fetched.

    \b
    milldam stats corpus.milldam
    """
    from milldam.remote import place_at
    from milldam.store import open_store

    figures = collect(open_store(place_at(store)))
    if as_json:
        click.echo(json.dumps(figures))
        return
    sources = source_lines(figures.pop("sources"))
    for name, value in figures.items():
        if isinstance(value, dict):
            click.echo(f"{name}:" if value else f"{name + ':':<22}none")
            for key, inner in value.items():
                click.echo(f"  {key + ':':<20}{_shown(inner)}")
        else:
            click.echo(f"{name + ':':<22}{_shown(value)}")
    for line in sources:
        click.echo(visible(line))


def collect(store: Store) -> dict[str, Any]:
    """All figures; memory does not grow with the store."""
    manifest, tally = store.manifest, store.manifest.tally
    lengths = _lengths(store)
    return {
        "store": store.name,
        "documents": len(store),
        "tokens": store.tokens,
        "characters": manifest.characters,
        "text_bytes": manifest.text_bytes,
        "characters_per_token": round(manifest.characters / max(1, store.tokens), 4),
        "bytes_per_token": round(manifest.text_bytes / max(1, store.tokens), 4),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "tokenizer": manifest.tokenizer.get("name"),
        "eos": manifest.tokenizer.get("eos_token"),
        "bos": manifest.tokenizer.get("bos_token"),
        "engine": manifest.engine,
        "shards": len(manifest.shards),
        "splits": {split: sum(s.documents for s in manifest.shards if s.split == split) for split in manifest.splits},
        "tokens_per_document": lengths,
        "read": tally.read,
        "rejected": tally.rejected,
        "dropped": tally.reasons,
        "sources": manifest.sources,
    }


def _lengths(store: Store) -> dict[str, float]:
    """Quantiles by counting: exact up to a million tokens a document."""
    import numpy as np

    counts = np.zeros(_LONGEST_COUNTED + 1, dtype=np.int64)
    longest = 0
    for lengths in store.document_lengths():
        longest = max(longest, int(lengths.max()))
        found = np.bincount(np.minimum(lengths, _LONGEST_COUNTED))
        counts[: len(found)] += found
    reached = np.cumsum(counts)
    quantiles = {
        name: int(np.searchsorted(reached, max(1, np.ceil(share * reached[-1])))) for name, share in _QUANTILES.items()
    }
    return quantiles | {"longest": longest, "mean": round(store.tokens / max(1, len(store)), 1)}


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
