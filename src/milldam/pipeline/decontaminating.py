"""Evaluation sets -> the passages that are looked for; and whether a finished store is clean of them.

The rows of evaluation sets are read as any other source's, column by column. Holds the texts of all sets until their
index is built: about 250 bytes an item of a usual benchmark.

A store's documents are decoded and compared with the sets, as the first pass does it: ranges of documents are the units
of a stage, in as many workers as the budget holds; then one decision on all matches. Nothing is kept: the work is in a
folder that is removed. A worker holds a batch of about `BATCH_TOKENS` tokens; a longer document is looked at in pieces
that overlap. The findings do not depend on the workers.
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
from milldam.decontamination.index import BUILDING_FACTOR, LAYOUT, Index, Passages, build_index
from milldam.decontamination.letters import letter_tables
from milldam.decontamination.matches import SCANNING_BYTES, Matches, MatchFinder, Scanner, match_path
from milldam.errors import InputError, Setting, did_you_mean
from milldam.files import hash_bytes
from milldam.memory import Budget, usage
from milldam.rules import REPORT, EvaluationSet
from milldam.run.budget import SMALL_INPUT, TOKENIZER_FACTOR, fit_workers, require_room
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.pools import Pool
from milldam.run.records import Record, Records
from milldam.run.summary import Observer, Quiet
from milldam.run.tasks import Workers
from milldam.sources.batch import Reject, TextRules, listed_names
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.rows import FileReader, Places, Rows, row_count, rows_between
from milldam.sources.splits import RowSlice
from milldam.sources.units import Slice, list_inputs
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.reader import Store

BATCH_TOKENS, OVERLAP_TOKENS = 1 << 18, 1 << 13
UNIT_TOKENS = 1 << 22
"""Whatever the workers: of each passage, a unit keeps the text of its first matches."""
DECODING_BYTES = 30 * 10**6
"""The tokens of a batch as Python's numbers, and their text."""


class Evaluation:
    """The evaluation sets of a job, read."""

    def __init__(self, sets: tuple[EvaluationSet, ...]) -> None:
        self.sets = sets
        self._passages: Passages | None = _gather(sets)
        self.digest = self._passages.digest
        """Another one whenever an item is another one."""
        self.name = hash_bytes(f"{LAYOUT} {self.digest} {sets}".encode())[:16]
        """Names the index: of these items, by these rules."""

    @property
    def building_bytes(self) -> int:
        """Memory that building the index takes; 0 where it is built."""
        return 0 if self._passages is None else BUILDING_FACTOR * len(self._passages.texts)

    def provide_index(self, folder: Path) -> Path:
        """Build it, where it is not there yet; the texts are let go."""
        path, passages = folder / f"evaluation-{self.name}.bin", self._passages
        self._passages = None
        if not path.exists():
            build_index(path, passages or _gather(self.sets), self.sets)
        return path


def _gather(sets: tuple[EvaluationSet, ...]) -> Passages:
    passages = Passages()
    for number, one in enumerate(sets):
        seen, found, item = dict[str, None](), set[str](), 0
        for rows in _rows(one):
            records = rows if isinstance(rows, dict) else rows.to_pydict()
            seen |= dict.fromkeys(records)
            for values in zip(*records.values(), strict=True):
                texts = [text for name, value in zip(records, values, strict=True) for text in _texts(value, name)]
                if one.column_names:
                    texts = [text for column in one.column_names for text in texts if text[0] == column]
                for name, text in texts:
                    passages.add(number, item, name, text)
                    found.add(name)
                item += 1
        gone = next((name for name in one.column_names if name not in found), None)
        if gone is not None:
            message = f': {one.path}: no text in a field "{gone}"; its fields are {listed_names(seen)}.'
            raise InputError(Setting(f"decontaminate.{number}.columns"), message + did_you_mean(gone, seen))
        if not found:
            raise InputError(Setting(f"decontaminate.{number}.path"), f": {one.path}: no text in its rows.")
    return passages


def _rows(one: EvaluationSet) -> Iterator[Rows]:
    found = resolve_data_set(one.path, one.split, one.subset, input_format=one.input_format)
    reader = FileReader(TextRules(documents="line"), None)

    def refuse(reject: Reject) -> None:
        """An item that can't be read could not be kept out either."""
        number = reject.as_json().get("row", reject.line)
        place = reject.file if number is None else f"{reject.file}:{number}"
        must = "Every item of an evaluation set must be readable."
        raise InputError(f"{place}: {reject.reason}: {reject.detail}\n{must}")

    def rows() -> Iterator[Rows]:
        for file in list_inputs(found.inputs, found.input_format):
            yield from reader.rows([Slice(file.path, file.format, file.compression)], refuse, Places())

    chosen = found.rows or RowSlice()
    total = sum(map(row_count, rows())) if chosen.needs_total else 1 << 62
    return rows_between(rows(), *chosen.bounds(total))


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a value of a record, with the path to it; of a list, each has the path of the list.

    >>> list(_texts([{"text": "a"}, {"text": ["b", "c"]}], "answers"))
    [('answers.text', 'a'), ('answers.text', 'b'), ('answers.text', 'c')]
    """
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, name)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(one, f"{name}.{key}")


# ---- a finished store ----


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
    """Looks for evaluation sets in a store, all by the same `rules`: figures of each, as a run's summary has them.

    `findings`: a file for all that was found, a JSON object a line. `held_bytes`: memory that the calling program holds
    already; the limit comes on top of it.
    """
    chosen = {"action": REPORT} | {name: value for name, value in rules.items() if value is not None}
    sets = tuple(checked_settings(EvaluationSet, {"path": str(path), **chosen}) for path in against)
    if not sets:
        raise InputError("against names no evaluation set.")
    budget = Budget.of(memory, held_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="milldam-contamination-") as place,
        RunFolder(Path(place) / "work", TOKENS) as run_folder,
        Session(run_folder, observer or Quiet(), budget, Pool(budget.limit_bytes)) as work,
    ):
        folder, evaluation = Path(place), Evaluation(sets)
        require_room(budget, {"evaluation sets": usage().anonymous + evaluation.building_bytes})
        index = evaluation.provide_index(folder)
        units = max(1, min(len(store), -(-store.tokens // UNIT_TOKENS)))
        useful = min(units, workers or (1 if store.tokens * store.dtype.itemsize < SMALL_INPUT else work.pool.cores))
        loaded = TOKENIZER_FACTOR * len(store.place.read("tokenizer.json") or b"") + SCANNING_BYTES + DECODING_BYTES
        held = usage().anonymous
        count = fit_workers(budget, held, loaded, useful, forked=work.pool.forks)
        team = Workers(count, 1)
        records = Records(run_folder, "scanned.jsonl", np.arange(units, dtype=np.uint64))
        load = Scanning(store, units, index, folder)
        work.work(Stage("decontaminate", load, records, workers=team))

        def matches() -> Iterator[tuple[int, Matches]]:
            for _, record in records.in_plan_order():  # to who reads of it, a store is one unit
                yield from ((0, Matches.read(folder / name)) for name in record.files)

        found, where = folder / "findings.jsonl", {"file": store.name}
        figures = decide(Index(index), sets, matches, lambda _, row: where | {"document": row}, lambda *_: None, found)
        if findings is not None:
            shutil.copyfile(found, findings)
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
