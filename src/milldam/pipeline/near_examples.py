"""What near-dedup removed, as a person can judge it: pairs side by side, large clusters, and a warning about templates.

Out of a run's drop files and its input, before the drop files are removed. The few documents that are shown are read
from the input again, at most `READ_BYTES` of it; a text that can't be had (too far into its unit, or the input is gone)
is None, and the rest is still told. Memory: one batch of the input, and a few heads of documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.dedup.near_summary import Cluster, NearSummary, Pair, Place, summarize
from milldam.errors import MilldamError
from milldam.markup import counted, share
from milldam.pipeline.documents import Documents, Reading, UnitReader

READ_BYTES = 512 << 20
HEAD_CHARACTERS = 20_000
"""Of a document: enough to find where two of them differ."""
SHOWN_CHARACTERS = 800
LARGE_SHARE, LARGE_COUNT = 0.01, 100
"""A cluster or template of so much of the corpus, and so many documents, is worth a warning."""
TEMPLATE_SIMILARITY = 0.5
"""Documents that stay and are so much alike are copies of one template."""


@dataclass(frozen=True, slots=True)
class Template:
    """Clusters whose kept documents share most of their text."""

    first: Place
    """The kept document of the largest."""
    clusters: int
    documents: int
    """Kept and dropped."""


def near_examples(folder: Path, reading_of: Callable[[int], Reading], *, documents: int, ngram: int) -> dict[str, Any]:
    """For the run's summary: `worst` pairs, `largest` clusters, `warnings`. `folder`: of the drop files; `documents`:
    all that were compared."""
    found = summarize(sorted(folder.glob("drops-near-*.parquet")))
    texts = read_texts(_places(found), reading_of)
    paths = {unit: reading_of(unit).unit.slices[0].path for unit, _ in _places(found)}

    def side(place: Place, start: int) -> dict[str, Any]:
        text = texts.get(place)
        shown = None if text is None else text[start : start + SHOWN_CHARACTERS]
        return {"file": paths[place[0]], "unit": place[0], "row": place[1], "text": shown, "start": start}

    def pair(one: Pair) -> dict[str, Any]:
        start = _difference(texts.get(one.dropped, ""), texts.get(one.kept, ""))
        sides = {"dropped": side(one.dropped, start), "kept": side(one.kept, start)}
        return {"similarity": one.similarity} | sides

    told = {
        "worst": [pair(one) for one in found.pairs],
        "largest": [{"dropped": one.dropped, "worst": pair(one.worst)} for one in found.clusters],
    }
    templates = find_templates(found.clusters, texts, ngram)
    warnings = [_warning(one, documents, paths) for one in templates if _is_large(one, documents)]
    return told | {"warnings": warnings}


def _places(found: NearSummary) -> set[Place]:
    pairs = [*found.pairs, *(one.worst for one in found.clusters)]
    return {place for one in pairs for place in (one.dropped, one.kept)}


# ---- texts ----


def read_texts(places: Iterable[Place], reading_of: Callable[[int], Reading]) -> dict[Place, str]:
    """The beginnings of some documents; those in the fewest units first, so that most of them are had."""
    rows: defaultdict[int, set[int]] = defaultdict(set)
    for unit, row in places:
        rows[unit].add(row)
    left, found = READ_BYTES, dict[Place, str]()
    for unit in sorted(rows, key=lambda unit: (-len(rows[unit]), unit)):
        if left <= 0:
            break
        try:
            for documents in UnitReader(reading_of(unit)):
                left -= documents.bytes_read
                for row, text in _heads(documents, reading_of(unit), rows[unit]):
                    found.setdefault((unit, row), text)
                if left <= 0 or (documents.last and documents.first_row + len(documents.texts) > max(rows[unit])):
                    break
        except (MilldamError, OSError):
            continue  # the store is made: what can't be read again costs its text here
    return found


def _heads(documents: Documents, reading: Reading, rows: set[int]) -> list[tuple[int, str]]:
    texts = documents.texts if documents.part else reading.rules.compared(documents)
    first = documents.first_row
    wanted = sorted(row for row in rows if first <= row < first + len(texts))
    return [(row, texts[row - first].as_py()[:HEAD_CHARACTERS]) for row in wanted]


def _difference(one: str, other: str) -> int:
    """Where to begin to show two texts: a little before they differ, at a word."""
    shorter = min(len(one), len(other))
    same = next((k for k in range(shorter) if one[k] != other[k]), shorter)
    if same < SHOWN_CHARACTERS // 2:
        return 0
    return one.find(" ", same - SHOWN_CHARACTERS // 4, same) + 1 or same - SHOWN_CHARACTERS // 4


# ---- templates ----


def find_templates(clusters: tuple[Cluster, ...], texts: dict[Place, str], ngram: int) -> list[Template]:
    """The clusters, those together whose kept documents are alike."""
    from milldam.dedup.shingles import shingle

    shown = pa.array([texts.get(one.kept, "") for one in clusters], pa.large_string())
    found = shingle(shown, ngram)
    sets = [np.unique(found.flat[a:b]) for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]
    groups: list[list[int]] = []
    for k in range(len(clusters)):
        like = next((group for group in groups if _jaccard(sets[group[0]], sets[k]) >= TEMPLATE_SIMILARITY), None)
        if like is None:
            groups.append([k])
        else:
            like.append(k)
    return [
        Template(clusters[group[0]].kept, len(group), sum(clusters[k].dropped + 1 for k in group)) for group in groups
    ]


def _jaccard(one: Any, other: Any) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(1, len(one) + len(other) - shared)


def _is_large(template: Template, documents: int) -> bool:
    return template.documents >= max(LARGE_COUNT, LARGE_SHARE * documents)


def _warning(template: Template, documents: int, paths: dict[int, str]) -> str:
    unit, row = template.first
    many = f"{counted(template.documents, 'document')} ({share(template.documents, documents)} of the corpus)"
    stay = "1 stays" if template.clusters == 1 else f"{template.clusters} stay"
    return f"{many} are copies of one text or template, of which {stay}: {paths[unit]}, unit {unit}, row {row}."
