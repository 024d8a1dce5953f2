"""Near-duplicates that were removed, for a person to judge: pairs side by side, large clusters, and warnings.

Which documents to show follows from the drops (dedup/near.py). The workers that tokenize them set their texts
aside in the folder of the drop files (`set_aside`); at the end they are gathered, before that folder is removed. The
text of a unit that an earlier run has done is not read again: it is None, and the rest is still told. Memory: a few
heads of documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from milldam.dedup.near import Place, places_of
from milldam.files import NewFile
from milldam.markup import counted, place_words, share
from milldam.pipeline.documents import SetRules, recorded_place
from milldam.sources.batch import Batch

HEAD_CHARACTERS = 20_000
"""Of a document: enough to find where two of them differ."""
SHOWN_CHARACTERS = 800
LARGE_SHARE, LARGE_COUNT = 0.01, 100
"""A cluster of so much of the corpus, and so many documents, is worth a warning."""


def set_aside(folder: Path, unit: int, shown: Iterable[Place], rules: SetRules, batch: Batch) -> Batch:
    """A step: writes the texts of some documents of a unit aside; the batch stays as it is."""
    texts, first = rules.compared(batch), batch.first_row
    for row in (row for number, row in shown if number == unit and first <= row < first + len(texts)):
        with NewFile(_shown_path(folder, (unit, row))) as new:
            new.write(texts[row - first].as_py()[:HEAD_CHARACTERS].encode("utf-8", "backslashreplace"))
            new.put_in_place()
    return batch


def _shown_path(folder: Path, place: Place) -> Path:
    return folder / f"shown-{place[0]:07d}-{place[1]}.txt"


def near_examples(near: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`near`: what was found. For the summary of the run: `worst` pairs, `largest` clusters, `warnings`."""
    texts, found, documents = dict[Place, str](), near["shown"], near["documents"]
    for place in places_of(found):
        with suppress(OSError, UnicodeDecodeError):  # its unit was done by an earlier run
            texts[place] = _shown_path(folder, place).read_text(encoding="utf-8")

    def side(place: Place, start: int) -> dict[str, Any]:
        text = texts.get(place)
        shown = None if text is None else text[start : start + SHOWN_CHARACTERS]
        cut = text is not None and len(text) > start + SHOWN_CHARACTERS
        where = recorded_place(folder, *place)
        return where | {"unit": place[0], "row": place[1], "text": shown, "start": start, "cut": cut}

    def pair(one: dict[str, Any]) -> dict[str, Any]:
        dropped, kept = tuple(one["dropped"]), tuple(one["kept"])
        start = _difference(texts.get(dropped, ""), texts.get(kept, ""))
        return {"similarity": one["similarity"], "dropped": side(dropped, start), "kept": side(kept, start)}

    largest, warnings = [{"dropped": one["dropped"], "worst": pair(one["worst"])} for one in found["clusters"]], []
    for one in found["clusters"]:
        copies = one["dropped"] + 1
        if copies >= max(LARGE_COUNT, LARGE_SHARE * documents):
            where = recorded_place(folder, *one["worst"]["kept"])
            many = f"{counted(copies, 'document')} ({share(copies, documents)} of the corpus)"
            warnings.append(f"{many} are copies of one text, of which 1 stays: {where['file']}, {place_words(where)}.")
    return {"worst": [pair(one) for one in found["pairs"]], "largest": largest, "warnings": warnings}


def _difference(one: str, other: str) -> int:
    """The character to show two texts from: a little before they differ, at a word."""
    shorter = min(len(one), len(other))
    same = next((k for k in range(shorter) if one[k] != other[k]), shorter)
    if same < SHOWN_CHARACTERS // 2:
        return 0
    return one.find(" ", same - SHOWN_CHARACTERS // 4, same) + 1 or same - SHOWN_CHARACTERS // 4
