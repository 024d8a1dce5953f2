"""What near-dedup removed, as a person can judge it: pairs side by side, large clusters, and a warning about templates.

Which documents to show follows from the drops (dedup/near_drops.py). Their texts are set aside by the workers that
tokenize them, in the folder of the drop files (`ShownTexts`), and gathered at the end, before that folder is removed. A
text that is not there, since its unit was done by an earlier run, is read from the input again, of which at most
`READ_BYTES` are read; one that can't be had is None, and the rest is still told. Memory: one batch of the input, and a
few heads of documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.dedup.near_drops import Cluster, NearSummary, Pair, Place
from milldam.errors import MilldamError
from milldam.files import NewFile
from milldam.markup import counted, place_words, share
from milldam.pipeline.documents import Reading, SetRules, UnitReader, found_place
from milldam.sources.batch import Batch

READ_BYTES = 64 << 20
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


def near_examples(
    near: dict[str, Any], folder: Path, reading_of: Callable[[int], Reading], ngram: int
) -> dict[str, Any]:
    """`near`: what was found. For the summary of the run: `worst` pairs, `largest` clusters, `warnings`."""
    found = NearSummary.from_json(near["shown"])
    texts = _texts(found.places, folder, reading_of)

    def side(place: Place, start: int) -> dict[str, Any]:
        text = texts.get(place)
        shown = None if text is None else text[start : start + SHOWN_CHARACTERS]
        cut = text is not None and len(text) > start + SHOWN_CHARACTERS
        where = found_place(folder, *place)
        return where | {"unit": place[0], "row": place[1], "text": shown, "start": start, "cut": cut}

    def pair(one: Pair) -> dict[str, Any]:
        start = _difference(texts.get(one.dropped, ""), texts.get(one.kept, ""))
        sides = {"dropped": side(one.dropped, start), "kept": side(one.kept, start)}
        return {"similarity": one.similarity} | sides

    documents, templates = near["documents"], find_templates(found.clusters, texts, ngram)
    return {
        "worst": [pair(one) for one in found.pairs],
        "largest": [{"dropped": one.dropped, "worst": pair(one.worst)} for one in found.clusters],
        "warnings": [
            _warning(one, documents, found_place(folder, *one.first)) for one in templates if _is_large(one, documents)
        ],
    }


# ---- texts ----


class ShownTexts:
    """Sets the texts of some documents of a unit aside while it is worked on."""

    def __init__(self, folder: Path, unit: int, places: Iterable[Place], rules: SetRules) -> None:
        self._folder, self._unit, self._rules = folder, unit, rules
        self._rows = {row for number, row in places if number == unit}

    def look(self, batch: Batch) -> Batch:
        """A step: the batch as it is."""
        for row, text in _heads(batch, self._rules, self._rows):
            with NewFile(_shown_path(self._folder, (self._unit, row))) as new:
                new.write(text.encode("utf-8", "backslashreplace"))
                new.commit()
        return batch


def _shown_path(folder: Path, place: Place) -> Path:
    return folder / f"shown-{place[0]:07d}-{place[1]}.txt"


def _texts(places: set[Place], folder: Path, reading_of: Callable[[int], Reading]) -> dict[Place, str]:
    found = dict[Place, str]()
    for place in places:
        # What is lost or damaged is read from the input again.
        with suppress(OSError, UnicodeDecodeError):
            found[place] = _shown_path(folder, place).read_text(encoding="utf-8")
    return found | read_texts(places - found.keys(), reading_of)


def read_texts(places: set[Place], reading_of: Callable[[int], Reading]) -> dict[Place, str]:
    """The beginnings of some documents, from the input; units that have most of them first."""
    rows: defaultdict[int, set[int]] = defaultdict(set)
    for unit, row in places:
        rows[unit].add(row)
    left, found = READ_BYTES, dict[Place, str]()
    for unit in sorted(rows, key=lambda unit: (-len(rows[unit]), unit)):
        if left <= 0:
            break
        try:
            for batch in UnitReader(reading_of(unit)):
                left -= batch.bytes_read
                for row, text in _heads(batch, reading_of(unit).rules, rows[unit]):
                    found.setdefault((unit, row), text)
                if left <= 0 or batch.first_row + len(batch.texts) > max(rows[unit]):
                    break
        except (MilldamError, OSError):
            continue  # the store is made: what can't be read again costs its text here
    return found


def _heads(batch: Batch, rules: SetRules, rows: set[int]) -> Iterator[tuple[int, str]]:
    """Documents in pieces are no duplicates."""
    texts, first = rules.compared(batch), batch.first_row
    for row in sorted(row for row in rows if not batch.part and first <= row < first + len(texts)):
        yield row, texts[row - first].as_py()[:HEAD_CHARACTERS]


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


def _warning(template: Template, documents: int, place: dict[str, Any]) -> str:
    many = f"{counted(template.documents, 'document')} ({share(template.documents, documents)} of the corpus)"
    stay = "1 stays" if template.clusters == 1 else f"{template.clusters} stay"
    return f"{many} are copies of one text or template, of which {stay}: {place['file']}, {place_words(place)}."
