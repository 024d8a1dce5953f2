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
from milldam.run.engine import Telling
from milldam.run.folder import RunFolder
from milldam.run.pools import SMALL_INPUT, TOKENIZER_FACTOR, LocalPool, Workers, fit_workers, require_room
from milldam.run.session import Session, Stage, session
from milldam.run.summary import Observer, Quiet
from milldam.run.tasks import Report
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
        session(run_folder, machine.observer or Quiet(), budget, LocalPool(budget.limit_bytes)) as work,
    ):
        folder = Path(place)
        evaluation = Evaluation(sets, place)
        require_room(budget, {"evaluation sets": usage().anonymous + evaluation.building_bytes})
        index = evaluation.provide_index(folder)
        units = _scan(work, ScanTask(store, index, folder), machine.workers)

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


def _scan(work: Session, task: ScanTask, workers: int | None) -> int:
    """Find the matches of all documents; in how many units."""
    store = task.store
    units = max(1, min(len(store), -(-store.tokens // UNIT_TOKENS)))
    size = store.tokens * store.dtype.itemsize
    useful = min(units, workers or (1 if size < SMALL_INPUT else work.pool.cores))
    loaded = TOKENIZER_FACTOR * len(store.place.read("tokenizer.json") or b"") + SCANNING_BYTES + DECODING_BYTES
    count = fit_workers(work.budget, usage().anonymous, loaded, useful, forked=work.pool.forks)
    alone = fit_workers(work.budget, usage().anonymous, loaded, useful)

    def assign(number: int) -> tuple[int, int, int]:
        return number, len(store) * number // units, len(store) * (number + 1) // units

    chosen = Workers(count, 1, alone=alone)
    work.work(Stage("decontaminate", task, iter(range(units)), assign, chosen, total=units, input_bytes=size))
    return units


def _path(folder: Path, unit: int) -> Path:
    return match_path(folder, f"{unit:07d}")


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Documents of a store -> a file of their matches."""

    store: Store
    index: Path
    folder: Path

    def start(self) -> _Scan:
        return _Scan(self)


class _Scan:
    def __init__(self, task: ScanTask) -> None:
        self._task = task
        _, _ = task.store.tokenizer, letter_tables()  # there before workers are forked

    @functools.cached_property
    def _scanner(self) -> Scanner:
        return Scanner(Index(self._task.index))

    def __call__(self, given: tuple[int, int, int], report: Report) -> None:
        unit, first, stop = given
        store = self._task.store
        finder = MatchFinder(self._scanner, _path(self._task.folder, unit))
        telling = Telling(report, store.tokens * store.dtype.itemsize)
        for row, documents in _batches(store, first, stop):
            texts = store.tokenizer.decode_batch(documents, skip_special_tokens=False)
            finder.add(pa.array(texts, pa.large_string()), row, np.ones(len(texts), np.bool_))
            tokens = sum(map(len, documents))
            telling.add(documents=len(documents), tokens=tokens, input_bytes=tokens * store.dtype.itemsize)
        finder.commit()
        telling.tell()


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
