"""Is a finished store clean? Its documents are decoded and held against evaluation sets, as the first pass does it.

One process; holds a batch of about a million tokens, the index of the sets and what was found. A document of more than
a million tokens is looked at in pieces that overlap.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.decontamination.deciding import decide
from milldam.decontamination.index import Index
from milldam.decontamination.matches import Matches, MatchFinder, match_path
from milldam.decontamination.rules import EvaluationSet
from milldam.decontamination.scanning import Scanner
from milldam.pipeline.evaluation_sets import Evaluation
from milldam.stores.tokens.reader import Store

BATCH_TOKENS = 1 << 20
OVERLAP_TOKENS = 1 << 13


def find_contamination(
    store: Store, sets: tuple[EvaluationSet, ...], *, findings: Path | None = None
) -> dict[str, Any]:
    """What a store holds of evaluation sets: figures of each, as a run's summary has them.

    `findings`: a file for all that was found, a JSON object a line.
    """
    with tempfile.TemporaryDirectory(prefix="milldam-contamination-") as place:
        folder = Path(place)
        index = Index(Evaluation(sets, place).provide_index(folder))
        finder = MatchFinder(Scanner(index), match_path(folder, "store"))
        for texts, row, wanted in _documents(store):
            finder.add(texts, row, wanted)
        finder.commit()

        def units() -> Iterator[tuple[int, Matches]]:
            yield 0, Matches.read(finder.path)

        found = folder / "findings.jsonl"
        figures = decide(index, sets, units, lambda number: {"file": store.name}, folder / "removals.bin", found)
        if findings is not None:
            shutil.copyfile(found, findings)
    return figures


def _documents(store: Store) -> Iterator[tuple[pa.LargeStringArray, int, Any]]:
    """Texts of documents, the number of the first, and which of them count as documents."""
    held: list[list[int]] = []
    first = tokens = 0
    for number in range(len(store)):
        document = store[number]
        if tokens + len(document) > BATCH_TOKENS and held:
            yield _decoded(store, held), first, np.ones(len(held), np.bool_)
            held, tokens = [], 0
        if not held:
            first = number
        if len(document) > BATCH_TOKENS:
            for start in range(0, len(document), BATCH_TOKENS - OVERLAP_TOKENS):
                piece = document[start : start + BATCH_TOKENS].tolist()
                yield _decoded(store, [piece]), number, np.ones(1, np.bool_)
            continue
        held.append(document.tolist())
        tokens += len(document)
    if held:
        yield _decoded(store, held), first, np.ones(len(held), np.bool_)


def _decoded(store: Store, documents: list[list[int]]) -> pa.LargeStringArray:
    return pa.array(store.tokenizer.decode_batch(documents, skip_special_tokens=False), pa.large_string())
