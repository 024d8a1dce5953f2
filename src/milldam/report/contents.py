"""What came out of the run: lengths, rows, duplicates, splits and a few documents; what was found of evaluation sets,
passages beside what documents say; what near-dedup removed, to judge by eye: pairs side by side with their differences
marked, the largest clusters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any

from milldam.markup import escape, place_words, preferred_line, share, short_count, shorten, turns_by_role
from milldam.memory import format_size
from milldam.report.drawing import WIDTH, Column, Section, Tile, bar, chart, column_chart, paragraphs, show_tiles, table
from milldam.report.facts import MAX_SPLITS, Facts, Lengths, Sample

_SPLITS_DRAWN = 6
_DEDUP_KINDS = {"dedup": "equal documents", "near": "near duplicates"}
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
    about = paragraphs("Documents spread over the store, decoded from its tokens; … marks an excerpt, the beginning.")
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


# ---- evaluation sets ----

_HEADS = ("Evaluation set", "Items", "Found", "Share", "Documents", "Action", "Too short", "Repeated", "Common")
_TEXT_SHOWN = 600


def contamination(facts: Facts) -> Section | None:
    """None when no evaluation set was looked for."""
    told = facts.told.get("contamination")
    if not told:
        return None
    rows = [_row(one) for one in told["sets"]]
    body = table(list(_HEADS), rows, numbers=(1, 2, 3, 4, 6, 7, 8))
    for one in told["sets"]:
        if one["worst"]:
            pairs = ((_where(line), *_evidence(line)) for line in one["worst"])
            found = table(["Found", "The item says", "The document says (excerpt)"], pairs)
            body += f"<h3>{escape(shorten(one['set']))}</h3>{found}"
    about = "<p><mark>Highlighted</mark>: words that item and document have in common, in order.</p>" + paragraphs(
        "An item is found in a document that holds at least a share of the n-grams of one of its passages.",
        "Too short, repeated and common passages are not looked for.",
        "All findings are in contamination.jsonl.",
    )
    return Section("contamination", "Evaluation sets", about, body)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    searched = one["searched"]
    counts = (searched["items"], one["items_found"])
    left_out = (searched["too_short"], searched["repeated"], searched["common"] + one["common"])
    return (
        f"<b>{escape(shorten(one['set']))}</b>",
        *(f"{count:,}" for count in counts),
        share(one["items_found"], max(1, searched["items"])),
        f"{one['documents']:,}",
        escape(one["action"]),
        *(f"{count:,}" for count in left_out),
    )


def _where(line: dict[str, Any]) -> str:
    found = f"item {line['item']:,}, {escape(shorten(line['column']))}"
    much = f"{100 * line['share']:.0f} %: {line['ngrams']:,} of {line['of']:,}"
    return f"{found}<br>{much}<br>{escape(shorten(line['file']))}, {place_words(line)}"


def _evidence(line: dict[str, Any]) -> Iterator[str]:
    """What the item says and what the document says there, with what they share in a mark."""
    passage, document = ((line[name] or "")[:_TEXT_SHOWN] for name in ("passage", "document"))
    before, behind = "… " if line["start"] else "", " …" if len(passage) == _TEXT_SHOWN else ""
    texts = _marked(passage, document, alike=True)
    yield f'<span dir="auto">{texts[0]}{behind}</span>'
    yield f'<span dir="auto">{before}{texts[1]} …</span>'


# Words with the space behind them; where there are no spaces, single characters.


# ---- near-duplicates ----

_WORD = re.compile(r"[!-~\u00a1-\u2fff]+\s*|.\s*", re.DOTALL)
_NAME_CHARACTERS = 40


def show_removals(near: dict[str, Any]) -> str:
    """Markup from what a run's summary tells; empty where it tells nothing of single documents."""
    body = "".join(f'<p class="alarm">{escape(warning)}</p>' for warning in near.get("warnings", ()))
    if near.get("prefer"):
        body += f"<p>{escape('Of those that are alike, ' + preferred_line(near['prefer']))}.</p>"
    if near.get("worst"):
        legend = "<p><mark>Highlighted</mark>: what only one of the two says; the rest matches. … marks an excerpt.</p>"
        body += f"<h3>Removed, the least alike first</h3>{legend}" + "".join(map(_pair, near["worst"]))
    if near.get("largest"):
        body += f"<h3>What most was removed for</h3>{_near_clusters(near)}"
        body += "".join(_pair(one["worst"], f", {one['dropped']:,} removed for it") for one in near["largest"][:3])
    return body


def _near_clusters(near: dict[str, Any]) -> str:
    rows = (
        (
            escape(_place(one["worst"]["kept"])),
            f"{one['dropped']:,}",
            share(one["dropped"], near["documents"]),
            f"{one['worst']['similarity']:.3f}",
            escape(shorten(" ".join((one["worst"]["kept"]["text"] or "").split()))),
        )
        for one in near["largest"]
    )
    heads = ["Document that stays", "Removed", "Of the corpus", "Least alike", "It reads"]
    return table(heads, rows, numbers=(1, 2, 3))


def _pair(pair: dict[str, Any], more: str = "") -> str:
    dropped, kept = pair["dropped"], pair["kept"]
    texts = _marked(dropped["text"], kept["text"], alike=False)
    heads = (f"removed, {pair['similarity']:.3f} alike: {_place(dropped)}", f"stays{more}: {_place(kept)}")
    sides = zip(heads, (dropped, kept), texts, strict=True)
    return f'<div class="pair">{"".join(_side(*side) for side in sides)}</div>'


def _side(head: str, side: dict[str, Any], text: str) -> str:
    before = f"<span>excerpt from character {side['start']:,}</span>" if side["start"] or side["cut"] else ""
    text = ("… " if side["start"] else "") + text + (" …" if side["cut"] else "")
    shown = f'<p dir="auto">{text}</p>' if side["text"] is not None else '<p class="none">not read again</p>'
    return f'<figure class="sample"><figcaption><span>{escape(head)}</span>{before}</figcaption>{shown}</figure>'


def _place(side: dict[str, Any]) -> str:
    return f"{shorten(side['file'].rpartition('/')[2], _NAME_CHARACTERS)}, {place_words(side)}"


def _marked(one: str | None, other: str | None, *, alike: bool) -> tuple[str, str]:
    """Both texts, in a mark what both have (`alike`) or only one; without the other there is nothing to mark."""
    if one is None or other is None:
        return escape(one or ""), escape(other or "")
    words = _WORD.findall(one), _WORD.findall(other)
    bare = [[(re.sub(r"\W", "", word).lower() if alike else word.strip()) for word in some] for some in words]
    found = SequenceMatcher(None, bare[0], bare[1], autojunk=False).get_opcodes()
    first = _joined((words[0][begin:end], (kind == "equal") == alike) for kind, begin, end, _, _ in found)
    return first, _joined((words[1][begin:end], (kind == "equal") == alike) for kind, _, _, begin, end in found)


def _joined(parts: Iterable[tuple[list[str], bool]]) -> str:
    texts = ((escape("".join(words)), marked) for words, marked in parts if words)
    return "".join(f"<mark>{text}</mark>" if marked else text for text, marked in texts)
