"""Is a finished store clean? Its documents are decoded and held against evaluation sets, as the first pass does it.

Ranges of documents are the units of a stage, in as many workers as the budget holds; then one decision on all matches.
Nothing is kept: the work is in a folder that is removed. A worker holds a batch of about `BATCH_TOKENS` tokens; a
longer document is looked at in pieces that overlap. What is found does not depend on the workers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
from milldam.run.engine import Assigned, Make, Stage, Telling
from milldam.run.folder import RunFolder
from milldam.run.pools import SMALL_INPUT, TOKENIZER_FACTOR, Pool, Workers, fit_workers, require_room
from milldam.run.records import Record, Records
from milldam.run.session import Session, session
from milldam.run.summary import Observer, Quiet
from milldam.run.units import Keys, key_of
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.reader import Store

BATCH_TOKENS = 1 << 18
OVERLAP_TOKENS = 1 << 13
UNIT_TOKENS = 1 << 22
"""Whatever the workers: of each passage, a unit keeps the text of its first matches."""
DECODING_BYTES = 30 * 10**6
"""The tokens of a batch as Python's numbers, and their text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be used, of memory, processes and somebody's attention."""

    memory: str | int | None = None
    workers: int | None = None
    observer: Observer | None = None
    held_bytes: int = 0
    """Memory that the calling program holds already; the limit comes on top of it."""


def evaluation_sets(paths: Iterable[str | Path], **rules: Any) -> tuple[EvaluationSet, ...]:
    """Evaluation sets by the same rules, checked; what is None is as by default."""
    chosen = {name: value for name, value in rules.items() if value is not None}
    given = ({"path": str(path), "action": REPORT, **chosen} for path in paths)
    return tuple(checked_settings(EvaluationSet, one) for one in given)


def find_contamination(
    store: Store, sets: tuple[EvaluationSet, ...], *, findings: Path | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """What a store holds of evaluation sets: figures of each, as a run's summary has them.

    `findings`: a file for all that was found, a JSON object a line.
    """
    machine = machine or Machine()
    budget = Budget.of(machine.memory, machine.held_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="milldam-contamination-") as place,
        RunFolder(Path(place) / "work", TOKENS) as run_folder,
        session(run_folder, machine.observer or Quiet(), budget, Pool(budget.limit_bytes)) as work,
    ):
        folder = Path(place)
        evaluation = Evaluation(sets, place)
        require_room(budget, {"evaluation sets": usage().anonymous + evaluation.building_bytes})
        index = evaluation.provide_index(folder)
        units = _scan(work, ScanLoad(store, index, folder), machine.workers)

        def matches() -> Iterator[tuple[int, Matches]]:
            for number in range(units):
                yield 0, Matches.read(_path(folder, number))  # to who reads of it, a store is one unit

        found = folder / "findings.jsonl"
        figures = decide(
            Index(index),
            sets,
            matches,
            lambda number, row: {"file": store.name, "document": row},
            lambda number, rows: None,
            found,
        )
        if findings is not None:
            shutil.copyfile(found, findings)
    return figures


def _scan(work: Session, task: ScanLoad, workers: int | None) -> int:
    """Find the matches of all documents; in how many units."""
    store = task.store
    units = max(1, min(len(store), -(-store.tokens // UNIT_TOKENS)))
    size = store.tokens * store.dtype.itemsize
    useful = min(units, workers or (1 if size < SMALL_INPUT else work.pool.cores))
    loaded = TOKENIZER_FACTOR * len(store.place.read("tokenizer.json") or b"") + SCANNING_BYTES + DECODING_BYTES
    count = fit_workers(work.budget, usage().anonymous, loaded, useful, forked=work.pool.forks)
    alone = fit_workers(work.budget, usage().anonymous, loaded, useful)

    keys = Keys.of(key_of(number) for number in range(units))
    records = Records(work.folder.journal, "scanned.jsonl", work.folder.out, keys)
    chosen = Workers(count, 1, alone=alone)
    work.work(Stage("decontaminate", replace(task, units=units), records, workers=chosen))
    return units


def _path(folder: Path, unit: int) -> Path:
    return match_path(folder, f"{unit:07d}")


@dataclass(frozen=True, slots=True)
class ScanLoad:
    """Documents of a store -> a file of their matches."""

    store: Store
    index: Path
    folder: Path
    units: int = 1

    def load(self) -> Make:
        store = self.store
        _, _ = store.tokenizer, letter_tables()  # there before workers are forked
        scanner: Scanner | None = None  # of each process

        def make(assigned: Assigned, telling: Telling) -> Iterator[Record]:
            nonlocal scanner
            scanner = scanner or Scanner(Index(self.index))
            unit = assigned.unit
            first, stop = len(store) * unit // self.units, len(store) * (unit + 1) // self.units
            finder = MatchFinder(scanner, _path(self.folder, unit))
            for row, documents in _batches(store, first, stop):
                texts = store.tokenizer.decode_batch(documents, skip_special_tokens=False)
                finder.add(pa.array(texts, pa.large_string()), row, np.ones(len(texts), np.bool_))
                telling.add(documents=len(documents), tokens=sum(map(len, documents)))
            finder.commit()
            yield Record(assigned.key)

        return make


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
