"""Is a finished store clean? Its documents are decoded and held against evaluation sets, as the first pass does it.

Ranges of documents are the units of a stage, in as many workers as the budget holds; then one decision on all matches.
Nothing is kept: the work is in a folder that is removed. A worker holds a batch of about `BATCH_TOKENS` tokens; a
longer document is looked at in pieces that overlap. What is found does not depend on the workers.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.config.checking import checked_settings
from milldam.decontamination.deciding import decide
from milldam.decontamination.index import Index
from milldam.decontamination.letters import letter_tables
from milldam.decontamination.matches import SCANNING_BYTES, Matches, MatchFinder, Scanner, match_path
from milldam.memory import Budget, usage
from milldam.pipeline.evaluation_sets import Evaluation
from milldam.rules import REPORT, EvaluationSet
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.pools import SMALL_INPUT, TOKENIZER_FACTOR, Pool, Workers, fit_workers, require_room
from milldam.run.records import Record, Records
from milldam.run.summary import Observer, Quiet
from milldam.run.units import Keys
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.reader import Store

BATCH_TOKENS, OVERLAP_TOKENS = 1 << 18, 1 << 13
UNIT_TOKENS = 1 << 22
"""Whatever the workers: of each passage, a unit keeps the text of its first matches."""
DECODING_BYTES = 30 * 10**6
"""The tokens of a batch as Python's numbers, and their text."""


def find_contamination(
    store: Store,
    against: Iterable[str | Path],
    *,
    findings: Path | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
    observer: Observer | None = None,
    held_bytes: int = 0,
    **rules: Any,
) -> dict[str, Any]:
    """What a store holds of evaluation sets, all by the same `rules`: figures of each, as a run's summary has them.

    `findings`: a file for all that was found, a JSON object a line. `held_bytes`: memory that the calling program holds
    already; the limit comes on top of it.
    """
    chosen = {"action": REPORT} | {name: value for name, value in rules.items() if value is not None}
    sets = tuple(checked_settings(EvaluationSet, {"path": str(path), **chosen}) for path in against)
    budget = Budget.of(memory, held_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="milldam-contamination-") as place,
        RunFolder(Path(place) / "work", TOKENS) as run_folder,
        Session(run_folder, observer or Quiet(), budget, Pool(budget.limit_bytes)) as work,
    ):
        folder, evaluation = Path(place), Evaluation(sets, place)
        require_room(budget, {"evaluation sets": usage().anonymous + evaluation.building_bytes})
        index = evaluation.provide_index(folder)
        units = max(1, min(len(store), -(-store.tokens // UNIT_TOKENS)))
        useful = min(units, workers or (1 if store.tokens * store.dtype.itemsize < SMALL_INPUT else work.pool.cores))
        loaded = TOKENIZER_FACTOR * len(store.place.read("tokenizer.json") or b"") + SCANNING_BYTES + DECODING_BYTES
        held = usage().anonymous
        count = fit_workers(budget, held, loaded, useful, forked=work.pool.forks)
        team = Workers(count, 1)
        records = Records(run_folder.journal, "scanned.jsonl", folder, Keys(np.arange(units, dtype=np.uint64)))
        load = Scanning(store, units, index, folder)
        work.work(Stage("decontaminate", load, records, workers=team))

        def matches() -> Iterator[tuple[int, Matches]]:
            for _, record in records.in_plan_order():  # to who reads of it, a store is one unit
                yield from ((0, Matches.read(folder / name)) for name in record.files)

        def place_of(unit: int, row: int) -> dict[str, Any]:
            return {"file": store.name, "document": row}

        figures = decide(Index(index), sets, matches, place_of, lambda unit, rows: None, folder / "findings.jsonl")
        if findings is not None:
            shutil.copyfile(folder / "findings.jsonl", findings)
    return figures


@dataclass(frozen=True, slots=True)
class Scanning:
    """A range of the documents of a store to a file of their matches."""

    store: Store
    units: int
    index: Path
    folder: Path

    def load(self) -> Make:
        _, _ = self.store.tokenizer, letter_tables()  # there before workers are forked
        return functools.partial(self._make, functools.cache(lambda: Scanner(Index(self.index))))

    def _make(self, scanner: Any, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        store, unit = self.store, assigned.unit
        finder = MatchFinder(scanner(), match_path(self.folder, assigned.key))
        first, stop = (len(store) * edge // self.units for edge in (unit, unit + 1))
        for row, documents in _batches(store, first, stop):
            texts = store.tokenizer.decode_batch(documents, skip_special_tokens=False)
            finder.add(pa.array(texts, pa.large_string()), row, np.ones(len(texts), np.bool_))
            progress.add(documents=len(documents), tokens=sum(map(len, documents)))
        yield Record(assigned.key, files=finder.commit())


def _batches(store: Store, first: int, stop: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Tokens of documents, and the number of the first."""
    held: list[list[int]] = []
    tokens = 0
    for number in range(first, stop):
        document = store[number]
        if tokens + len(document) > BATCH_TOKENS and held:
            yield number - len(held), held
            held, tokens = [], 0
        if len(document) > BATCH_TOKENS:
            for start in range(0, len(document), BATCH_TOKENS - OVERLAP_TOKENS):
                yield number, [document[start : start + BATCH_TOKENS].tolist()]
            continue
        held.append(document.tolist())
        tokens += len(document)
    if held:
        yield stop - len(held), held
