"""A unit of files -> batches of conversations as texts, with what is trained on.

Rows are read as any other (sources), made conversations (forms), cleaned message by message, and rendered. What is no
conversation, what a template refuses and what can't be proven is rejected with its file and line. Holds one batch: some
megabytes of records, and of a larger record `MOST_BYTES` at most.

A record is one entry; a pair of answers is one record with two sides, so that nothing can part them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.chat.forms import BadRowError, Conversation, Form, Pair, recognise, records_of
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import REASONING, TrainOn
from milldam.chat.rendering import Renderer, in_bytes, prompt_of, shared_renderer
from milldam.chat.template import Stretch
from milldam.errors import InputError
from milldam.rules import CleanRules
from milldam.sources.arrays import kept_columns
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    NUMBER_BITS,
    Batch,
    OnReject,
    Reading,
    Reject,
    TextRules,
)
from milldam.sources.rows import FileReader, Place, Places, Rows, from_records, row_count
from milldam.sources.units import Slice, Unit
from milldam.text.arrays import Verdicts, text_offsets
from milldam.text.cleaning import Cleaner

MOST_BYTES = 8 << 20
"""Of a record as it lies in its file, whatever `max_document_bytes` is."""
_ROWS_SEEN = 100
ROLES = ("system", "developer", "user", "assistant", "tool", "other")
"""What turns are counted by."""
_ARRAYS = ("cuts", "stretches", "counts", "turns", "derived")

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChatRecipe:
    """What makes texts of the records of a dataset; it pickles."""

    form: Form
    template: TemplateSource
    train_on: TrainOn
    clean: CleanRules | None = None
    special_tokens: tuple[str, ...] = ()
    dedup_on_prompt: bool = False
    group_by_prompt: bool = False
    max_tokens: int | None = None
    too_long: str = "drop"
    per_turn: bool = False

    @property
    def sides(self) -> int:
        """Texts a record."""
        return 2 if self.form.name == "preference" else 1


@dataclass(frozen=True, slots=True)
class Sides:
    """What comes with the texts of some records: where their sides end, and what of them is trained on."""

    count: int
    """Sides of a record: 1, or 2 where it is a pair."""
    cuts: Int64s
    """Bytes of the first side of each record."""
    stretches: Int64s
    """(stretches, 2): bytes of a side, from and to, that are trained on."""
    counts: Int64s
    """Stretches of each side."""
    turns: Int64s
    """(sides, roles): messages of each side by ROLES."""
    derived: npt.NDArray[np.bool_]
    """(sides,): whether the stretches of each are derived."""
    labels: npt.NDArray[np.uint8] | None = None
    """A label a record."""

    def only(self, keep: npt.NDArray[np.bool_]) -> Sides:
        """Those of the records of a mask."""
        if keep.all():
            return self
        both = np.repeat(keep, self.count)
        labels = None if self.labels is None else self.labels[keep]
        stretches = self.stretches[np.repeat(both, self.counts)]
        derived = self.derived[both]
        return Sides(self.count, self.cuts[keep], stretches, self.counts[both], self.turns[both], derived, labels)

    def texts(self, records: pa.LargeStringArray) -> pa.LargeStringArray:
        """The text of each side, of the texts of the records."""
        if self.count == 1:
            return records
        offsets = text_offsets(records)
        both = np.empty(2 * len(records) + 1, dtype=np.int64)
        both[::2] = offsets
        both[1::2] = offsets[:-1] + self.cuts
        return pa.LargeStringArray.from_buffers(2 * len(records), pa.py_buffer(both), records.buffers()[2])

    @property
    def offsets(self) -> Int64s:
        """(sides + 1,): where the stretches of each begin."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    def as_json(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).ravel().tolist() for name in _ARRAYS}
        return {"count": self.count, **arrays, "labels": None if self.labels is None else self.labels.tolist()}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Sides:
        cuts, stretches, counts, turns, derived = (np.array(facts[name], dtype=np.int64) for name in _ARRAYS)
        labels = None if facts["labels"] is None else np.array(facts["labels"], dtype=np.uint8)
        table = turns.reshape(-1, len(ROLES))
        return cls(facts["count"], cuts, stretches.reshape(-1, 2), counts, table, derived.astype(bool), labels)

    def turn_counts(self, which: npt.NDArray[np.bool_]) -> Counter[str]:
        """Messages of the sides of a mask, in all and by role."""
        by_role = self.turns[which].sum(axis=0).tolist()
        return Counter(
            {"turns": sum(by_role)} | {f"turns_{role}": n for role, n in zip(ROLES, by_role, strict=True) if n}
        )


class ConversationReader:
    """One for each unit. `keep`: fields to read as well."""

    def __init__(self, recipe: ChatRecipe, rules: TextRules, keep: tuple[str, ...] = ()) -> None:
        self._recipe, self._keep = recipe, keep
        self._rules = replace(rules, max_document_bytes=min(MOST_BYTES, rules.max_document_bytes))
        self._cleaner = Cleaner(recipe.clean) if recipe.clean is not None else None

    def read(self, unit: Unit, on_reject: OnReject) -> Iterator[Batch]:
        recipe = self._recipe
        files = FileReader(self._rules, None)
        with shared_renderer(recipe.template, recipe.train_on, recipe.special_tokens) as renderer:
            for number, slice in enumerate(unit.slices):
                places, reading, first = Places(), Reading(self._rules, on_reject), 0
                for rows in files.rows([slice], on_reject, places):
                    records = _Records(slice, places, first, rows, reading)
                    yield self._batch(records, renderer, number << NUMBER_BITS)
                    first += row_count(rows)
                    places.forget(first)

    def _batch(self, records: _Records, renderer: Renderer, slice_bits: int) -> Batch:
        recipe, numbers, conversations = self._recipe, list[int](), list[Conversation | Pair]()
        for number, record in records.read_by(recipe.form):
            try:
                conversation = recipe.form.conversation(record)
            except BadRowError as error:
                records.reject(number, error.reason, str(error))
                continue
            several: Sequence[Conversation | Pair] = [conversation]
            if recipe.per_turn and isinstance(conversation, Conversation):
                with contextlib.suppress(BadRowError):  # raised again when it is rendered
                    several = renderer.masks(conversation).by_turn(conversation)
            numbers += [number] * len(several)
            conversations += several
        reasons = {} if self._cleaner is None else self._clean(conversations, self._cleaner)
        stay, dropped = list[int](), list[str | None]()
        sides, texts, pairs, ends = list[Conversation](), list[str](), list[Stretch](), [0]
        for at, (number, one) in enumerate(zip(numbers, conversations, strict=True)):
            try:
                shown = [renderer.show(side) for side in one.sides]
            except BadRowError as error:
                records.reject(number, error.reason, str(error))
                continue
            stay.append(number)
            dropped.append(reasons.get(at))
            sides += one.sides
            for rendering, stretches in shown:
                texts.append(rendering.text)
                pairs += in_bytes(rendering.text, stretches)
                ends.append(len(pairs))
        utf8 = pa.array(texts, pa.large_string())
        offsets, count = text_offsets(utf8), recipe.sides
        verdicts = Verdicts(len(stay))
        for at, reason in enumerate(dropped if reasons else ()):
            if reason is not None:
                verdicts.drop_one(at, reason)
        labelled = bool(sides) and sides[0].label is not None
        of_sides = Sides(
            count,
            cuts=np.diff(offsets)[::count],
            stretches=np.array(pairs, np.int64).reshape(-1, 2),
            counts=np.diff(ends).astype(np.int64),
            turns=_turns(sides),
            derived=np.array([renderer.masks(side).derives(side) for side in sides], np.bool_),
            labels=np.array([side.label for side in sides[::count]], dtype=np.uint8) if labelled else None,
        )
        batch = Batch(
            pa.LargeStringArray.from_buffers(len(stay), pa.py_buffer(offsets[::count].copy()), utf8.buffers()[2]),
            bytes_read=int(offsets[-1] - offsets[0]),
            verdicts=verdicts,
            sides=of_sides,
        )
        if recipe.dedup_on_prompt or recipe.group_by_prompt:
            asked = zip(sides[::count], texts[::count], strict=True)
            batch.prompts = pa.array([prompt_of(side) or text for side, text in asked], pa.large_string())
        batch.counts["special_tokens_in_content"] = sum(map(renderer.says_special, sides))
        batch.origins = np.array([records.place(number).first for number in stay], np.int64) | slice_bits
        batch.columns = kept_columns(self._keep, [records.record(number) for number in stay])
        return batch

    def _clean(self, conversations: list[Conversation | Pair], cleaner: Cleaner) -> dict[int, str]:
        """Clean what is said, all of the batch at once; why a conversation is dropped, by its number."""
        places = [
            (number, message, name)
            for number, one in enumerate(conversations)
            for side in one.sides
            for message in side.messages
            for name in ("content", *REASONING)
            if isinstance(message.get(name), str)
        ]
        verdicts = Verdicts(len(places))
        texts = pa.array([message[name] for _, message, name in places], pa.large_string())
        cleaned = cleaner.clean(texts, verdicts)
        for (_, message, name), text in zip(places, cleaned.to_pylist(), strict=True):
            message[name] = text
        wrong = np.flatnonzero(~verdicts.keep).tolist()
        return {places[at][0]: str(verdicts.reason(at)) for at in reversed(wrong)}


class _Records:
    """The records of a batch, and where each is from."""

    def __init__(self, slice: Slice, places: Places, first: int, rows: Rows, reading: Reading) -> None:
        self._slice, self._places, self._first, self._reading = slice, places, first, reading
        self._rows = from_records(records_of(rows)) if not isinstance(rows, dict) else rows

    def read_by(self, form: Form) -> Iterator[tuple[int, dict[str, Any]]]:
        names = [name for name in self._rows if form.reads(name)] or list(self._rows)
        for number, values in enumerate(zip(*[self._rows[name] for name in names], strict=True)):
            yield number, {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def record(self, number: int) -> dict[str, Any]:
        """All that it has."""
        return {name: values[number] for name, values in self._rows.items() if values[number] is not None}

    def place(self, number: int) -> Place:
        return self._places.of(self._first + number, self._first + number + 1)[0]

    def reject(self, number: int, reason: str, detail: str) -> None:
        place = self.place(number)
        is_line = self._slice.format == "jsonl"
        line, row = (place.first + 1, None) if is_line else (None, place.first)
        shown = json.dumps(self.record(number), ensure_ascii=False, default=str)[: KEPT_RECORD_CHARS + 1]
        self._reading.reject(Reject(self._slice.path, reason, detail, shown, line=line, row=row, origin=place.origin))


def _turns(sides: Sequence[Conversation]) -> Int64s:
    """(sides, roles): messages of each side by role."""
    kinds: dict[tuple[str, ...], int] = {}
    numbers = [kinds.setdefault(tuple([one["role"] for one in side.messages]), len(kinds)) for side in sides]
    table = np.zeros((len(kinds), len(ROLES)), np.int64)
    for row, roles in zip(table, kinds, strict=True):
        np.add.at(row, [ROLES.index(role if role in ROLES else "other") for role in roles], 1)
    return table[numbers]


def find_form(slices: Iterator[Slice], form: str, columns: dict[str, str]) -> Form:
    """The form of the first rows of a dataset; InputError if it is none of ours."""
    path = ""
    for slice in slices:
        path = slice.path
        if slice.format in ("jsonl", "json"):
            from milldam.sources.jsonl import first_records

            rows = first_records(slice, _ROWS_SEEN)
        else:
            reader = FileReader(TextRules(invalid_utf8="replace"), None)
            some = next(iter(reader.rows([slice], lambda _: None, Places())), {})
            rows = records_of(some if isinstance(some, dict) else some.slice(0, _ROWS_SEEN))[:_ROWS_SEEN]
        if rows:
            try:
                return recognise(rows, form=form, columns=columns)
            except InputError as error:
                raise InputError(f"{path}: ", *error.args) from None
    raise InputError(f"{path}: no record in it tells the form of the conversations.")
