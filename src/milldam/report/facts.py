"""Everything the page tells, gathered from a store and its run folder: the variables of page.html.jinja.

Only the manifest and the index are needed. What `run/summary.json` and `run/memory.csv` tell comes on top; a damaged or
missing one costs only what it would tell: a page with less in it is better than none.

Lengths are counted, not collected: half a megabyte a split however many documents there are, read in blocks. Exact up
to 65,535 tokens a document, by powers of two beyond. A billion documents are some 4 GB of index to read. Of the
samples, spread evenly over the store, only the first tokens are decoded, so a document of gigabytes costs no more than
a short one.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from milldam.files import read_sealed
from milldam.markup import escape, shorten
from milldam.report.timeline import read_timeline
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.manifest import READ, Manifest, Tally
from milldam.stores.tokens.reader import Store

_SPLITS_LISTED, _SPLITS_DRAWN, _REASONS_SHOWN = 50, 6, 40
_CHARACTERS, _PASSAGE_CHARACTERS = 500, 600
_SAMPLES, _TOKENS = 5, 400
_DROPPED, _PER_REASON, _DROPPED_BYTES = 6, 2, 1 << 20
_SIZES_APART = 10
"""Cluster sizes that have a bar of their own; larger ones share bars by powers of two."""
Bar = tuple[str, int]
"""A label and a count."""
_WORD = re.compile(r"[!-~\u00a1-\u2fff]+\s*|.\s*", re.DOTALL)
"""Words with the space behind them; where there are no spaces, single characters."""


def gather(out: Path) -> dict[str, Any]:
    """Read it all, in memory that does not grow with the store."""
    store = Store(out)
    manifest, tally = store.manifest, store.manifest.tally
    summary = read_sealed(out / "run" / "summary.json") or {}
    details = summary.get("facts", {})
    # A later command that finds nothing to do adds to the file.
    end, curve = math.inf if summary.get("finished") is None else summary["finished"] + 1, out / "run" / "memory.csv"
    timeline = read_timeline(curve, end) or read_timeline(curve)
    # The summary knows its own session only; the timeline knows all.
    sessions, seconds = 1 + (len(timeline.restarts) if timeline else 0), float(summary.get("seconds", 0.0))
    if timeline is not None and (sessions > 1 or not seconds):
        seconds = max(timeline.seconds, seconds)
    memory, packing = summary.get("memory") or {}, details.get("packing") or {}
    room = sum(one["rows"] * one["seq_len"] for one in packing.values())
    filled = sum(one["efficiency"] * one["rows"] * one["seq_len"] for one in packing.values())
    dedup = manifest.settings.get("dedup")
    near = {"dedup": dedup | {"method": "near, after exact"}} if dedup and dedup.get("near") else {}
    lengths = [(split, one) for split, one in _lengths(out, manifest).items() if one.documents][:_SPLITS_DRAWN]
    _mark_differences(details)
    return {
        "path": out.resolve(),
        "name": out.resolve().name,
        "manifest": manifest,
        "store_version": TOKENS.version,
        "settings": manifest.settings | near,
        **manifest.totals,
        "tally": tally,
        "flow": list(_flow(tally)),
        "summary": summary,
        "details": details,
        "workers": summary.get("workers"),
        "timeline": timeline,
        "sessions": sessions,
        "seconds": seconds,
        "memory": memory,
        "budget": memory.get("budget"),
        "peak": max(int(memory.get("peak", 0)), timeline.peak if timeline else 0),
        "packed_percent": 100 * filled / max(room, 1),
        "lengths": lengths,
        "splits_not_drawn": len(manifest.splits) - len(lengths) if len(lengths) == _SPLITS_DRAWN else 0,
        "splits": manifest.splits[:_SPLITS_LISTED],
        "clusters": list(_clusters(details)),
        "samples": _sample_documents(store),
        "dropped_samples": _sample_dropped(store.audit["dropped"]) if "dropped" in store.audit else [],
        "audit": {what: path.name for what, path in store.audit.items()},
    }


def _flow(tally: Tally) -> Iterator[dict[str, Any]]:
    """The stages that did something, with their reasons ranked and the rare ones summed up."""
    for stage in tally.flow():
        if stage["stage"] == READ or stage["dropped"]:
            ranked = sorted(stage["dropped"].items(), key=lambda item: (-item[1], item[0]))
            reasons, rest = ranked[:_REASONS_SHOWN], ranked[_REASONS_SHOWN:]
            if rest:
                reasons.append((f"{len(rest)} other reasons", sum(count for _, count in rest)))
            yield stage | {"reasons": reasons}


def _clusters(details: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], list[Bar]]]:
    """Of each kind of dedup how many clusters there are of each size: a bar a size, larger ones to a power of two."""
    for name, kind in (("dedup", "Equal documents"), ("near", "Near duplicates")):
        if not details.get(name):
            continue
        sizes = {int(size): count for size, count in details[name].get("clusters", {}).items() if int(size) > 1}
        bars: Counter[int] = Counter()
        for size, count in sizes.items():
            bars[size if size <= _SIZES_APART else max(_SIZES_APART + 1, 1 << (size.bit_length() - 1))] += count
        figures = details[name] | {"found": sum(sizes.values()), "largest": max(sizes, default=1)}
        yield kind, figures, [(f"{low:,}" + "+" * (low > _SIZES_APART), count) for low, count in sorted(bars.items())]


# ---- differences ----


def _mark_differences(details: dict[str, Any]) -> None:
    """Adds `marked` to each pair of near-duplicates and each passage that was found of an evaluation set."""
    near = details.get("near") or {}
    for pair in (*near.get("worst", ()), *(one["worst"] for one in near.get("largest", ()))):
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
        if not len(lengths):
            return
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max()))
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


def _lengths(folder: Path, manifest: Manifest) -> dict[str, Lengths]:
    """Tokens per document, by split in the manifest's order; each takes memory, so only the first are counted."""
    lengths = {split: Lengths() for split in manifest.splits[:_SPLITS_LISTED]}
    for shard in (shard for shard in manifest.shards if shard.split in lengths):
        for block in Index.map(folder / f"{shard.name}.idx").length_blocks():
            lengths[shard.split].add(block)
    return lengths


# ---- samples ----


class Sample(NamedTuple):
    """The beginning of a document."""

    parts: list[tuple[str, bool]]
    """Text, and whether it is trained on."""
    origin: str
    """Where it is, or why it was dropped."""
    size: str
    cut: bool
    """There is more of it."""


def _sample_documents(store: Store) -> list[Sample]:
    shards, documents = store.manifest.shards, len(store)
    ends = list(itertools.accumulate(shard.documents for shard in shards))
    chosen, samples = min(_SAMPLES, documents), []
    for number in ((2 * k + 1) * documents // (2 * chosen) for k in range(chosen)):
        document = store[number]
        text = _decode(store, document[:_TOKENS])
        cut = len(document) > _TOKENS or len(text) > _CHARACTERS
        # The cut may have gone through a character.
        text = text[:_CHARACTERS].rstrip("\ufffd") if cut else text
        size, parts = f"{len(document):,} tokens", [(text, False)]
        if store.has_spans:
            spans = store.spans(number)
            size += f", {int((spans[:, 1] - spans[:, 0]).sum()):,} trained on"
            parts = list(_trained_parts(store, document, spans[spans[:, 0] < _TOKENS].tolist(), text))
        split = shards[bisect.bisect_right(ends, number)].split
        samples.append(Sample(parts, f"document {number:,}, {shorten(split)}", size, cut))
    return samples


def _trained_parts(
    store: Store, document: Any, spans: Iterable[tuple[int, int]], text: str
) -> Iterator[tuple[str, bool]]:
    """Stretches of tokens -> of the characters of their text. A border within a character is put before it."""
    at = 0
    for span in spans:
        begin, end = (
            min(len(text), len(_decode(store, document[: min(one, _TOKENS)]).rstrip("\ufffd"))) for one in span
        )
        if begin < end:
            yield text[at:begin], False
            yield text[begin:end], True
            at = end
    yield text[at:], False


def _decode(store: Store, tokens: Any) -> str:
    try:
        return store.decode(tokens)
    except Exception:  # tokenizers raises nothing narrower, and the rest of the page is worth having
        return f"(the store's tokenizer can't decode it) {' '.join(map(str, tokens[:60].tolist()))}"


def _sample_dropped(path: Path) -> list[Sample]:
    """The first documents of each reason at the head of the file; none when it is damaged."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        with zstd.open(path, "rb") as file:
            head = file.read(_DROPPED_BYTES)
        records = [json.loads(line) for line in head[: head.rfind(b"\n") + 1].splitlines()]
    except (OSError, EOFError, ValueError, zstd.ZstdError):
        return []
    samples: list[Sample] = []
    seen: Counter[str] = Counter()
    for record in records:
        reason, text = record.pop("reason"), record.pop("text")
        seen[reason] += 1
        if seen[reason] <= _PER_REASON and len(samples) < _DROPPED:
            beside = ", ".join(f"{name} {value}" for name, value in record.items())[:200]
            origin = f"{shorten(reason)}: {beside}" if beside else shorten(reason)
            cut = len(text) > _CHARACTERS
            samples.append(Sample([(text[:_CHARACTERS], False)], origin, f"{len(text):,} characters", cut))
    return samples
