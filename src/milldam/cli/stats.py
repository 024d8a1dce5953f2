"""`milldam stats`: what is in a store, from its manifest and index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import json_option
from milldam.cli.naming import visible
from milldam.cli.summaries import source_lines

if TYPE_CHECKING:
    from milldam.stores.tokens.reader import Store

_LONGEST_COUNTED = 1 << 20
_QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99}


@click.command()
@click.argument("store")
@json_option
def stats(store: str, as_json: bool) -> None:
    """
    STORE: anything that `milldam.open` opens. Of a store at an address, only the indexes are fetched.

    \b
    milldam stats corpus.milldam
    """
    from milldam.api import open
    from milldam.stores.tokens.manifest import Tally
    from milldam.stores.tokens.reader import Store

    opened = open(store)
    figures = _of_store(opened) if isinstance(opened, Store) else _of_other(opened)
    if as_json:
        click.echo(json.dumps(figures))
        return
    sources, rows = [Tally(**one) for one in figures.pop("sources", [])], list[tuple[str, Any]]()
    for name, value in figures.items():
        rows.append((name, value if value != {} else None))
        if isinstance(value, dict) and value:
            rows[-1] = (name, "")
            rows += [(f"  {key}", inner) for key, inner in value.items()]
    for name, value in rows:
        shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        words = {"None": "none", "True": "yes", "False": "no"}
        click.echo(f"{name + ':':<22}{words.get(shown, shown)}".rstrip())
    for line in source_lines(sources):
        click.echo(visible(line))


def _of_store(store: Store) -> dict[str, Any]:
    """All figures; memory does not grow with the store."""
    from milldam.config.settings import text_columns

    manifest, tally, tokens = store.manifest, store.manifest.tally, max(1, store.tokens)
    counted = manifest.totals
    figures = {
        "store": store.name,
        "documents": len(store),
        "tokens": store.tokens,
        "characters": counted["characters"],
        "text_bytes": counted["text_bytes"],
        "characters_per_token": round(counted["characters"] / tokens, 4),
        "bytes_per_token": round(counted["text_bytes"] / tokens, 4),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "tokenizer": manifest.tokenizer.get("name"),
        "text_columns": text_columns(manifest.settings),
        "eos": manifest.tokenizer.get("eos_token"),
        "bos": manifest.tokenizer.get("bos_token"),
        "encoder": manifest.encoder,
        "shards": len(manifest.shards),
        "splits": {split: sum(s.documents for s in manifest.shards if s.split == split) for split in manifest.splits},
        "tokens_per_document": _lengths(store.document_lengths()),
        "read": tally.read,
        "rejected": tally.rejected,
        "dropped": tally.reasons,
        "sources": [asdict(one) for one in manifest.sources],
        "damaged_files": manifest.damaged_files,
        "audit": {what: str(path) for what, path in store.audit.items()},
    }
    if chat := manifest.chat:
        pairs = chat["conversations"] // 2 if chat["pairs"] else 0
        figures["chat"] = chat | {"pairs": pairs, "trained_share": round(chat["trained_tokens"] / tokens, 4)}
    return figures


def _of_other(opened: Any) -> dict[str, Any]:
    """The same of a table, or of a file of another tool."""
    from milldam.formats.foreign import ForeignFile

    if isinstance(opened, ForeignFile):
        facts = {"file": str(opened.path), "kind": opened.kind, "tokens": opened.tokens, "dtype": str(opened.dtype)}
        return facts | {"vocab_size": opened.vocab_size, "tokenizer": opened.tokenizer_name}
    manifest = opened.manifest
    facts = {"table": str(opened.path), "rows": len(opened), "shards": opened.shards, "bytes": manifest.bytes}
    facts |= {"columns": dict(manifest.schema.columns)}
    facts |= {"windows": manifest.counts["windows"], **manifest.qa} if manifest.qa else {}
    return facts | {"settings": manifest.settings, "counts": manifest.counts}


def _lengths(several: Iterable[Any]) -> dict[str, float]:
    """Quantiles by counting: exact up to a million tokens a document."""
    from milldam.report.facts import Lengths

    lengths = Lengths(exact=_LONGEST_COUNTED)
    for block in several:
        lengths.add(block)
    quantiles = {name: lengths.quantile(share) for name, share in _QUANTILES.items()}
    found = {name: _LONGEST_COUNTED if length is None else length for name, length in quantiles.items()}
    return found | {"longest": lengths.longest, "mean": round(lengths.tokens / max(1, lengths.documents), 1)}
