"""`milldam stats`: what is in a store, from its manifest and index."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.naming import visible
from milldam.cli.summaries import source_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from milldam.formats.foreign import ForeignFile
    from milldam.stores.table.reader import Table
    from milldam.stores.tokens.reader import Store

_LONGEST_COUNTED = 1 << 20
_QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99}


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def stats(store: str, as_json: bool) -> None:
    """Show counts, sizes and document lengths.

    STORE: anything that `milldam.open` opens. Of a store at an address, only the indexes are fetched.

    \b
    milldam stats corpus.milldam
    """
    from milldam.api import open
    from milldam.stores.tokens.manifest import Tally
    from milldam.stores.tokens.reader import Store

    opened = open(store)
    figures = collect(opened) if isinstance(opened, Store) else _collect_other(opened)
    if as_json:
        click.echo(json.dumps(figures))
        return
    sources = source_lines([Tally(**one) for one in figures.pop("sources", [])])
    for name, value in figures.items():
        if isinstance(value, dict):
            click.echo(f"{name}:" if value else f"{name + ':':<22}none")
            for key, inner in value.items():
                click.echo(f"  {key + ': ':<20}{_shown(inner)}")
        else:
            click.echo(f"{name + ':':<22}{_shown(value)}")
    for line in sources:
        click.echo(visible(line))


def collect(store: Store) -> dict[str, Any]:
    """All figures; memory does not grow with the store."""
    from milldam.config.settings import text_columns

    manifest, tally = store.manifest, store.manifest.tally
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
        "text_columns": text_columns(manifest.settings),
        "eos": manifest.tokenizer.get("eos_token"),
        "bos": manifest.tokenizer.get("bos_token"),
        "encoder": manifest.encoder,
        "shards": len(manifest.shards),
        "splits": {split: sum(s.documents for s in manifest.shards if s.split == split) for split in manifest.splits},
        "tokens_per_document": _quantiles(store.document_lengths()),
        "read": tally.read,
        "rejected": tally.rejected,
        "dropped": tally.reasons,
        "sources": [asdict(one) for one in manifest.sources],
        "damaged_files": manifest.damaged_files,
        "audit": {what: str(path) for what, path in store.audit.items()},
    } | ({} if manifest.chat is None else {"chat": _of_chat(manifest.chat, manifest.tokens)})


def _of_chat(told: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What the manifest says of conversations: nothing else is read."""
    pairs = told["conversations"] // 2 if told["pairs"] else 0
    return told | {"pairs": pairs, "trained_share": round(told["trained_tokens"] / max(1, tokens), 4)}


def _quantiles(several: Iterable[Any]) -> dict[str, float]:
    """By counting: exact up to a million tokens a document."""
    from milldam.report.facts import Lengths

    lengths = Lengths(exact=_LONGEST_COUNTED)
    for block in several:
        lengths.add(block)
    quantiles = {name: lengths.quantile(share) for name, share in _QUANTILES.items()}
    found: dict[str, float] = {name: _LONGEST_COUNTED if one is None else one for name, one in quantiles.items()}
    return found | {"longest": lengths.longest, "mean": round(lengths.tokens / max(1, lengths.documents), 1)}


def _collect_other(opened: Any) -> dict[str, Any]:
    """The same of what else `milldam.open` opens."""
    from milldam.formats.foreign import ForeignFile
    from milldam.stores.table.reader import Table

    if isinstance(opened, ForeignFile):
        return _of_file(opened)
    assert isinstance(opened, Table)
    return _of_table(opened) | {"settings": opened.manifest.settings, "counts": opened.manifest.counts}


def _of_file(file: ForeignFile) -> dict[str, Any]:
    from milldam.formats.megatron import MegatronFile

    facts = {"file": str(file.path), "kind": file.kind, "tokens": file.tokens, "dtype": str(file.dtype)}
    facts |= {"vocab_size": file.vocab_size, "tokenizer": file.tokenizer_name}
    if not isinstance(file, MegatronFile):
        return facts
    lengths = _quantiles(file.index.length_blocks())
    return facts | {"documents": len(file), "tokens_per_document": lengths}


def _of_table(table: Table) -> dict[str, Any]:
    facts = {"table": str(table.path), "rows": len(table), "shards": table.shards, "bytes": table.manifest.bytes}
    facts |= {"columns": dict(table.manifest.schema.columns)}
    return facts | ({"windows": table.manifest.counts["windows"], **table.manifest.qa} if table.manifest.qa else {})


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int | float) else str(value)
