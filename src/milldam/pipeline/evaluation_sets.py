"""Evaluation sets -> the passages that are looked for: their rows are read as any other source's, column by column.

Holds the texts of all sets until their index is built: about 250 bytes an item of a usual benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milldam.decontamination.index import BUILDING_FACTOR, LAYOUT, Passages, build_index
from milldam.errors import InputError, Setting, did_you_mean
from milldam.files import hash_bytes
from milldam.rules import EvaluationSet
from milldam.sources.batch import Places, Reject, TextRules, listed_names
from milldam.sources.data_sets import RowSlice, resolve_data_set
from milldam.sources.reading import FileReader, rows_between
from milldam.sources.rows import Rows, row_count
from milldam.sources.units import Slice, list_inputs


class Evaluation:
    """The evaluation sets of a job, read."""

    def __init__(self, sets: tuple[EvaluationSet, ...]) -> None:
        self.sets = sets
        self._passages: Passages | None = _gather(sets)
        self.digest = self._passages.digest
        """Another one whenever an item is another one."""

    @property
    def name(self) -> str:
        """Names the index: of these items, by these rules."""
        return hash_bytes(f"{LAYOUT} {self.digest} {self.sets}".encode())[:16]

    @property
    def building_bytes(self) -> int:
        """What building the index takes; 0 where it is built."""
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
        before = passages.read
        _read(passages, number, one)
        if passages.read == before:
            raise InputError(Setting(f"decontaminate.{number}.path"), f": {one.path}: no text in its rows.")
    return passages


def _read(passages: Passages, number: int, one: EvaluationSet) -> None:
    columns, before = one.column_names, 0
    seen: dict[str, None] = {}
    found: set[str] = set()
    for rows in _rows(one):
        records = rows if isinstance(rows, dict) else rows.to_pydict()
        names = list(records)
        seen |= dict.fromkeys(names)
        for item, values in enumerate(zip(*records.values(), strict=True), start=before):
            texts = [one for name, value in zip(names, values, strict=True) for one in _texts(value, name)]
            if columns:
                texts = [one for column in columns for one in texts if one[0] == column]
            for name, text in texts:
                passages.add(number, item, name, text)
                found.add(name)
        before += row_count(rows)
    gone = next((name for name in columns if name not in found), None)
    if gone is not None:
        said = f': {one.path}: no text in a field "{gone}"; its fields are {listed_names(seen)}.'
        raise InputError(Setting(f"decontaminate.{number}.columns"), said + did_you_mean(gone, seen))


def _rows(one: EvaluationSet) -> Iterator[Rows]:
    found = resolve_data_set(one.path, one.split, one.subset, input_format=one.input_format)
    reader = FileReader(TextRules(documents="line"), None)

    def rows() -> Iterator[Rows]:
        for file in list_inputs(found.inputs, found.input_format):
            yield from reader.rows([Slice(file.path, file.format, file.compression)], _refuse, Places())

    chosen = found.rows or RowSlice()
    total = sum(map(row_count, rows())) if chosen.needs_total else 1 << 62
    return rows_between(rows(), *chosen.bounds(total))


def _refuse(reject: Reject) -> None:
    """An item that can't be read could not be kept out either."""
    number = reject.as_json().get("row", reject.line)
    place = reject.file if number is None else f"{reject.file}:{number}"
    raise InputError(f"{place}: {reject.reason}: {reject.detail}\nEvery item of an evaluation set must be readable.")


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
