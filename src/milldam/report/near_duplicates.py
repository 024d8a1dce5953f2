"""What near-dedup removed, to judge by eye: pairs side by side with their differences marked, the largest clusters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from milldam.markup import escape, preferred_line, share, shorten
from milldam.report.layout import table

# Words with the space behind them; where there are no spaces, single characters.
_WORD = re.compile(r"[!-~\u00a1-\u2fff]+\s*|.\s*", re.DOTALL)
_NAME_CHARACTERS = 40


def show_removals(near: dict[str, Any]) -> str:
    """Markup from what a run's summary tells; empty where it tells nothing of single documents."""
    body = "".join(f'<p class="alarm">{escape(warning)}</p>' for warning in near.get("warnings", ()))
    if near.get("prefer"):
        body += f"<p>{escape('Of those that are alike, ' + preferred_line(near['prefer']))}.</p>"
    if near.get("worst"):
        body += "<h3>Removed, the least alike first</h3>" + "".join(map(_pair, near["worst"]))
    if near.get("largest"):
        body += f"<h3>What most was removed for</h3>{_clusters(near)}"
        body += "".join(_pair(one["worst"], f", {one['dropped']:,} removed for it") for one in near["largest"][:3])
    return body


def _clusters(near: dict[str, Any]) -> str:
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
    texts = _marked(dropped["text"], kept["text"])
    heads = (f"removed, {pair['similarity']:.3f} alike: {_place(dropped)}", f"stays{more}: {_place(kept)}")
    sides = zip(heads, (dropped, kept), texts, strict=True)
    return f'<div class="pair">{"".join(_side(*side) for side in sides)}</div>'


def _side(head: str, side: dict[str, Any], text: str) -> str:
    before = f"<span>from character {side['start']:,}</span>" if side["start"] else ""
    shown = f'<p dir="auto">{text}</p>' if side["text"] is not None else '<p class="none">not read again</p>'
    return f'<figure class="sample"><figcaption><span>{escape(head)}</span>{before}</figcaption>{shown}</figure>'


def _place(side: dict[str, Any]) -> str:
    return f"{shorten(side['file'].rpartition('/')[2], _NAME_CHARACTERS)}, unit {side['unit']}, row {side['row']:,}"


def _marked(one: str | None, other: str | None) -> tuple[str, str]:
    """Both texts, what only one has in a mark; without the other there is nothing to mark."""
    if one is None or other is None:
        return escape(one or ""), escape(other or "")
    words = _WORD.findall(one), _WORD.findall(other)
    bare = [[word.strip() for word in some] for some in words]
    found = SequenceMatcher(None, bare[0], bare[1], autojunk=False).get_opcodes()
    first = _joined((words[0][begin:end], kind) for kind, begin, end, _, _ in found)
    return first, _joined((words[1][begin:end], kind) for kind, _, _, begin, end in found)


def _joined(parts: Iterable[tuple[list[str], str]]) -> str:
    texts = ((escape("".join(words)), kind) for words, kind in parts if words)
    return "".join(text if kind == "equal" else f"<mark>{text}</mark>" for text, kind in texts)
