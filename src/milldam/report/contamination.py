"""What was found of evaluation sets: a table of the sets, and passages beside what documents say, the worst first."""

from __future__ import annotations

from typing import Any

from milldam.markup import escape, share, shorten
from milldam.report.facts import Facts
from milldam.report.layout import Section, paragraphs, table

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
            pairs = ((_where(line), _said(line["passage"]), _said(line["document"])) for line in one["worst"])
            found = table(["Found", "The item says", "The document says"], pairs)
            body += f"<h3>{escape(shorten(one['set']))}</h3>{found}"
    about = paragraphs(
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
    return f"{found}<br>{much}<br>{escape(shorten(line['file']))}, row {line['row']:,}"


def _said(text: str | None) -> str:
    return f'<span dir="auto">{escape((text or "")[:_TEXT_SHOWN])}</span>'
