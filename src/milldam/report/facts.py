"""Everything the page tells, gathered from a store and its run folder: the variables of page.html.jinja.

Only the manifest and the index are needed. What `run/summary.json` and `run/memory.csv` tell comes on top; a damaged or
missing one costs only what it would tell: a page with less in it is better than none.

Lengths are counted, not collected: half a megabyte a split however many documents there are, read in blocks. Of the
samples, spread evenly over the store, only the first tokens are decoded, so a document of gigabytes costs no more than
a short one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from milldam.files import read_sealed
from milldam.markup import escape, shorten
from milldam.report.timeline import chart_of, read_timeline
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.reader import Store

_SPLITS_DRAWN, _SAMPLES, _TOKENS, _PASSAGE_CHARACTERS = 6, 5, 120, 600
_SIZES_APART = 10
"""Sizes of clusters that have a bar of their own."""
Bar = tuple[str, int]
"""A label and a count."""
_WORD = re.compile(r"[!-~\u00a1-\u2fff]+\s*|.\s*", re.DOTALL)
"""Words with the space behind them; where there are no spaces, single characters."""


def gather(out: Path) -> dict[str, Any]:
    """Read it all, in memory that does not grow with the store."""
    store = Store(out)
    manifest = store.manifest
    summary = read_sealed(out / "run" / "summary.json") or {}
    details, memory = summary.get("facts", {}), summary.get("memory") or {}
    # A later command that finds nothing to do adds to the file.
    end, curve = math.inf if summary.get("finished") is None else summary["finished"] + 1, out / "run" / "memory.csv"
    timeline = read_timeline(curve, end) or read_timeline(curve)
    # The summary knows its own session only; the timeline knows all.
    sessions, seconds = 1 + (len(timeline.restarts) if timeline else 0), float(summary.get("seconds", 0.0))
    if timeline is not None and (sessions > 1 or not seconds):
        seconds = max(timeline.seconds, seconds)
    lengths = {split: Lengths() for split in manifest.splits[:_SPLITS_DRAWN]}
    for shard in manifest.shards:
        for block in Index.map(out / f"{shard.name}.idx").length_blocks() if shard.split in lengths else ():
            lengths[shard.split].add(block)
    _mark_differences(details)
    return {
        "path": out.resolve(),
        "manifest": manifest,
        "store_version": TOKENS.version,
        "settings": _near_named(manifest.settings),
        "config": _near_named(details.get("config") or {}),
        **manifest.totals,
        "tally": manifest.tally,
        "summary": summary,
        "details": details,
        "timeline": timeline,
        "chart": chart_of(timeline, memory.get("budget")) if timeline else None,
        "sessions": sessions,
        "seconds": seconds,
        "memory": memory,
        "budget": memory.get("budget"),
        "peak": max(int(memory.get("peak", 0)), timeline.peak if timeline else 0),
        "lengths": [(split, one) for split, one in lengths.items() if one.documents],
        "splits_not_drawn": len(manifest.splits) - len(lengths),
        "clusters": list(_clusters(details)),
        "samples": list(_sample_documents(store)),
        "audit": {what: path.name for what, path in store.audit.items()},
    }


def _near_named(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose dedup is not called exact where it is more."""
    dedup = settings.get("dedup")
    if not isinstance(dedup, dict) or not dedup.get("near"):
        return settings
    return settings | {"dedup": dedup | {"method": "near, after exact"}}


def _clusters(details: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], list[Bar]]]:
    """Of each kind of dedup how many clusters there are of each size; the large ones share a bar."""
    for name, kind in (("dedup", "Equal documents"), ("near", "Near duplicates")):
        if details.get(name):
            sizes = {int(size): count for size, count in details[name].get("clusters", {}).items() if int(size) > 1}
            bars: Counter[int] = Counter()
            for size, count in sizes.items():
                bars[min(size, _SIZES_APART + 1)] += count
            figures = details[name] | {"found": sum(sizes.values()), "largest": max(sizes, default=1)}
            yield kind, figures, [(f"{n}" + "+" * (n > _SIZES_APART), count) for n, count in sorted(bars.items())]


def _mark_differences(details: dict[str, Any]) -> None:
    """Adds `marked` to each pair of near-duplicates and each passage that was found of an evaluation set."""
    for pair in (details.get("near") or {}).get("worst", ()):
        pair["marked"] = _marked(pair["dropped"]["text"], pair["kept"]["text"], alike=False)
    for found in (details.get("contamination") or {}).get("sets", ()):
        for line in found["worst"]:
            passage, document = ((line[name] or "")[:_PASSAGE_CHARACTERS] for name in ("passage", "document"))
            line |= {"cut": len(passage) == _PASSAGE_CHARACTERS, "marked": _marked(passage, document, alike=True)}


def _marked(one: str | None, other: str | None, *, alike: bool) -> list[Any]:
    """Both texts as markup, in a mark what both have (`alike`) or only one; of one text alone nothing is marked."""
    from markupsafe import Markup

    if one is None or other is None:
        return [one or "", other or ""]
    words = _WORD.findall(one), _WORD.findall(other)
    bare = [[(re.sub(r"\W", "", word).lower() if alike else word.strip()) for word in some] for some in words]
    marked = ["", ""]
    for kind, *bounds in SequenceMatcher(None, bare[0], bare[1], autojunk=False).get_opcodes():
        for side, (begin, end) in enumerate((bounds[:2], bounds[2:])):
            text = escape("".join(words[side][begin:end]))
            marked[side] += f"<mark>{text}</mark>" if text and (kind == "equal") == alike else text
    return [Markup(text) for text in marked]


# ---- lengths ----


class Lengths:
    """Documents by their number of tokens: exactly below `exact`, by powers of two from there on."""

    def __init__(self, exact: int = 1 << 16) -> None:
        self._exact = exact
        self.documents = self.tokens = self.longest = 0
        self._counts, self._longer = np.zeros(exact, np.int64), np.zeros(64, np.int64)

    def add(self, lengths: Int64s) -> None:
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        short = lengths < self._exact
        self._counts += np.bincount(lengths[short], minlength=self._exact)
        # frexp: the exponent of 2**k is k + 1, exactly.
        self._longer += np.bincount(np.frexp(lengths[~short].astype(np.float64))[1] - 1, minlength=64)

    def quantile(self, part: float) -> int | None:
        """The length that this part of the documents does not exceed; None when it is beyond what is counted exactly.

        >>> lengths = Lengths()
        >>> lengths.add(np.array([5, 1, 9]))
        >>> lengths.quantile(0.5)
        5
        """
        wanted = max(1, int(np.ceil(part * self.documents)))
        position = int(np.searchsorted(np.cumsum(self._counts), wanted))
        return position if position < self._exact else None

    def figures(self) -> dict[str, str]:
        """For people: the mean, some quantiles, the longest."""
        figures = {"mean": f"{self.tokens / self.documents:,.1f}"}
        for name, part in {"10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99}.items():
            length = self.quantile(part)
            figures[name] = f"over {self._exact - 1:,}" if length is None else f"{length:,}"
        return figures | {"longest": f"{self.longest:,}"}

    def bars(self) -> list[Bar]:
        """By powers of two, from the shortest to the longest; one for empty documents if there are any."""
        powers = [int(self._counts[2**k : 2 ** (k + 1)].sum()) + int(self._longer[k]) for k in range(64)]
        used = np.flatnonzero(powers)
        span = range(used[0], used[-1] + 1) if len(used) else range(0)
        empty = [("0", int(self._counts[0]))] if self._counts[0] else []
        return empty + [(f"{2**k:,} to {2 ** (k + 1) - 1:,}" if k else "1", powers[k]) for k in span]


# ---- samples ----


def _sample_documents(store: Store) -> Iterator[dict[str, Any]]:
    """The beginnings of some documents: their parts, each with whether it is trained on."""
    shards, documents = store.manifest.shards, len(store)
    ends = list(itertools.accumulate(shard.documents for shard in shards))
    chosen = min(_SAMPLES, documents)
    for number in ((2 * k + 1) * documents // (2 * chosen) for k in range(chosen)):
        document, at = store[number], 0
        size, parts, spans = f"{len(document):,} tokens", list[tuple[str, bool]](), np.zeros((0, 2), np.int64)
        if store.has_spans:
            spans = store.spans(number)
            size += f", {int((spans[:, 1] - spans[:, 0]).sum()):,} trained on"
        for begin, end in [*spans[spans[:, 0] < _TOKENS].tolist(), (_TOKENS, _TOKENS)]:
            parts += [(_decode(store, document[at : min(begin, _TOKENS)]), False)]
            parts += [(_decode(store, document[begin : min(end, _TOKENS)]), True)]
            at = end
        origin = f"document {number:,}, {shorten(shards[bisect.bisect_right(ends, number)].split)}"
        yield {"parts": parts, "origin": origin, "size": size, "cut": len(document) > _TOKENS}


def _decode(store: Store, tokens: Any) -> str:
    try:
        # A cut may have gone through a character.
        return store.decode(tokens).rstrip("\ufffd")
    except Exception:  # tokenizers raises nothing narrower, and the rest of the page is worth having
        return f"(the store's tokenizer can't decode it) {' '.join(map(str, tokens[:60].tolist()))}"
