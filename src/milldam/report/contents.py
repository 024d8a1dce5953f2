"""What came out of the run: lengths, rows, duplicates, splits and a few documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from milldam.markup import escape, share, short_count, shorten, turns_by_role
from milldam.memory import format_size
from milldam.report.drawing import WIDTH, Column, column_chart
from milldam.report.facts import MAX_SPLITS, Facts, Lengths, Sample
from milldam.report.layout import Section, Tile, bar, chart, paragraphs, show_tiles, table
from milldam.report.near_duplicates import show_removals

_SPLITS_DRAWN = 6
_DEDUP_KINDS = {"dedup": "exact duplicates", "near": "near duplicates"}
_SIZES_APART = 10
"""Cluster sizes that have a bar of their own; larger ones share bars by powers of two."""


def lengths(facts: Facts) -> Section:
    """A histogram per split."""
    counted = [(name, one) for name, one in facts.lengths.items() if one.documents]
    drawn = counted[:_SPLITS_DRAWN]
    if len(drawn) == 1:
        body = _length_chart(*drawn[0], WIDTH) + _length_figures(drawn[0][1])
    else:
        body = "".join(
            f"<div><h3>{escape(shorten(name))}</h3>{_length_chart(name, one, WIDTH // 2)}{_length_figures(one)}</div>"
            for name, one in drawn
        )
        body = f'<div class="pair">{body}</div>' if body else '<p class="none">There are no documents.</p>'
    hidden = len(facts.manifest.splits) - len(drawn)
    left_out = f"Not drawn: {hidden} splits more." if len(drawn) == _SPLITS_DRAWN and hidden else ""
    about = paragraphs(
        "Documents by number of tokens. Each bar begins at twice the length of the one before.", left_out
    )
    return Section("lengths", "Document lengths", about, body)


def _length_chart(name: str, one: Lengths, width: int) -> str:
    columns = [
        Column(
            short_count(bucket.low),
            bucket.documents,
            f"{bucket.low:,} to {bucket.high:,} tokens: {bucket.documents:,} documents "
            f"({share(bucket.documents, one.documents)})",
        )
        for bucket in one.buckets()
    ]
    return chart(column_chart(columns, f"Tokens per document, {shorten(name)}", "tokens, from", width=width))


def _length_figures(one: Lengths) -> str:
    def shown(length: int | None) -> str:
        return "over 65,535" if length is None else f"{length:,}"

    figures = {
        "mean": f"{one.tokens / one.documents:,.1f}",
        "10 %": shown(one.quantile(0.1)),
        "median": shown(one.quantile(0.5)),
        "90 %": shown(one.quantile(0.9)),
        "99 %": shown(one.quantile(0.99)),
        "longest": f"{one.longest:,}",
    }
    return table(list(figures), [list(figures.values())], kind="figures")


def packing(facts: Facts) -> Section | None:
    """How well the rows are filled; None for a store without rows."""
    by_split: dict[str, dict[str, Any]] = facts.told.get("packing", {})
    if not by_split:
        return None
    first, rows = next(iter(by_split.values())), by_split.values()
    total, room = sum(one["rows"] for one in rows), sum(one["rows"] * one["seq_len"] for one in rows)
    filled = sum(one["efficiency"] * one["rows"] * one["seq_len"] for one in rows)
    tiles = [
        Tile("Strategy", shorten(first["strategy"].replace("_", " "), 20)),
        Tile("Tokens a row", f"{first['seq_len']:,}"),
        Tile("Rows", short_count(total), "", f"{total:,}" if total >= 10_000 else ""),
        Tile("Efficiency", f"{100 * filled / max(room, 1):.2f}", "%"),
    ]
    about = paragraphs(
        "Rows of a fixed number of tokens, as training reads them.",
        "Efficiency: the part of the rows that holds tokens of documents.",
        "Tail: tokens at the very end that fill no row.",
    )
    body = f"{show_tiles(tiles, small=True)}<h3>By split</h3>{_row_table(by_split)}"
    return Section("packing", "Packing", about, body)


def _row_table(by_split: dict[str, dict[str, Any]]) -> str:
    heads = ["Split", "Filled", "Efficiency", "Rows", "Padding", "Tail", "Documents cut"]
    cells = (
        (
            escape(shorten(split)),
            bar([(one["efficiency"], "")], 1),
            f"{100 * one['efficiency']:.2f} %",
            *(f"{one[name]:,}" for name in ("rows", "padding", "tail", "cut_documents")),
        )
        for split, one in by_split.items()
    )
    return table(heads, cells, numbers=range(2, 7), kind="rows")


def duplicates(facts: Facts) -> Section | None:
    """How large the clusters of duplicates are; None when none were looked for."""
    found = {kind: facts.told[name] for name, kind in _DEDUP_KINDS.items() if facts.told.get(name)}
    if not found:
        return None
    body = f'<div class="pair">{"".join(_clusters(kind, one) for kind, one in found.items())}</div>'
    body += show_removals(facts.told.get("near", {}))
    about = paragraphs(
        "Clusters by size: a document that stays, and those that were removed because they are equal or similar to it.",
        "Similarity: the share of word n-grams that two documents have in common, compared n-gram by n-gram."
        if facts.told.get("near")
        else "",
    )
    return Section("duplicates", "Duplicates", about, body)


def _clusters(kind: str, told: dict[str, Any]) -> str:
    """`told["clusters"]`: how many there are of each size; those of one document are none."""
    sizes = {int(size): n for size, n in told.get("clusters", {}).items() if int(size) > 1}
    found, documents, dropped = sum(sizes.values()), told["documents"], told["dropped"]
    figures = {
        "compared": short_count(documents),
        "dropped": short_count(dropped),
        "share": share(dropped, documents),
        "clusters": short_count(found),
        "largest": short_count(max(sizes, default=1)),
    }
    drawn = '<p class="none">No two documents belong together.</p>'
    if found:
        columns = _size_columns(sizes)
        drawn = chart(column_chart(columns, f"Clusters, {kind}", "documents in a cluster", width=WIDTH // 2))
    below = table(list(figures), [list(figures.values())], kind="figures")
    return f"<div><h3>{escape(kind.capitalize())}</h3>{drawn}{below}</div>"


def _size_columns(sizes: dict[int, int]) -> list[Column]:
    """A bar per size; larger ones share a bar up to the next power of two."""
    joined: dict[tuple[int, int], int] = {}
    for size, n in sizes.items():
        power = size.bit_length() - 1
        range_ = (size, size) if size <= _SIZES_APART else (max(_SIZES_APART + 1, 1 << power), (2 << power) - 1)
        joined[range_] = joined.get(range_, 0) + n
    return [
        Column(f"{low}" if low == high else f"{short_count(low)}+", n, f"{low:,} to {high:,} documents: {n:,} clusters")
        for (low, high), n in sorted(joined.items())
    ]


def splits(facts: Facts) -> Section:
    shards = facts.manifest.shards
    rows = []
    for name in facts.manifest.splits[:MAX_SPLITS]:
        mine = [shard for shard in shards if shard.split == name]
        documents, tokens, text, files = (
            sum(shard.documents for shard in mine),
            sum(shard.tokens for shard in mine),
            sum(shard.text_bytes for shard in mine),
            sum(file["bytes"] for shard in mine for file in shard.files.values()),
        )
        counts = (f"{documents:,}", f"{tokens:,}", share(tokens, facts.manifest.tokens))
        rows.append(
            (f"<b>{escape(shorten(name))}</b>", *counts, format_size(text), f"{len(mine):,}", format_size(files))
        )
    heads = ["Split", "Documents", "Tokens", "Share of tokens", "Text", "Shards", "On disk"]
    hidden = len(facts.manifest.splits) - len(rows)
    about = paragraphs("What each split holds.", f"{hidden} more are not listed." if hidden else "")
    return Section("splits", "Splits", about, table(heads, rows, numbers=range(1, 7)))


def conversations(facts: Facts) -> Section | None:
    """How much of the conversations is trained on; None for a store of plain text."""
    told = facts.manifest.chat
    if told is None:
        return None
    count, trained = told["conversations"], told["trained_tokens"]
    tiles = [
        Tile("Pairs" if told["pairs"] else "Conversations", short_count(count // 2 if told["pairs"] else count)),
        Tile("Turns", short_count(told["turns"]) if told["turns"] else "–", "", turns_by_role(told)),
        Tile("Trained tokens", short_count(trained), "", f"{trained:,}" if trained >= 10_000 else ""),
        Tile("Trained share", share(trained, facts.manifest.tokens) or "–"),
        Tile("Cut to fit", short_count(told.get("truncated", 0))),
    ]
    said = told.get("special_tokens_in_content", 0)
    about = paragraphs(
        f"Form: {told['form']}.",
        "Trained share: the part of the tokens that the loss is computed on.",
        f"In {said:,} of them somebody says the text of a special token; it became that token." if said else "",
    )
    return Section("conversations", "Conversations", about, show_tiles(tiles, small=True))


def samples(facts: Facts) -> Section:
    body = _figures(facts.samples) or '<p class="none">There are no documents.</p>'
    if facts.dropped_samples:
        body += f"<h3>Dropped</h3>{_figures(facts.dropped_samples)}"
    about = paragraphs("The beginnings of some documents, spread over the store and decoded from its tokens.")
    about += f"<p>What can not be seen is shown as {escape(chr(0x202E))}.</p>"
    if facts.manifest.chat is not None:
        about += "<p><mark>Highlighted</mark>: trained on.</p>"
    return Section("samples", "Sample documents", about, body)


def _figures(found: Iterable[Sample]) -> str:
    def figure(one: Sample) -> str:
        caption = f"<figcaption><span>{escape(one.origin)}</span><span>{escape(one.size)}</span></figcaption>"
        text = _highlighted(one) + (" …" if one.cut else "")
        return f'<figure class="sample">{caption}<p dir="auto">{text}</p></figure>'

    return "".join(map(figure, found))


def _highlighted(one: Sample) -> str:
    parts, at = [], 0
    for begin, end in one.trained:
        parts.append(f"{escape(one.text[at:begin])}<mark>{escape(one.text[begin:end])}</mark>")
        at = end
    return "".join(parts) + escape(one.text[at:])
