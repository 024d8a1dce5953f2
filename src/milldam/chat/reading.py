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

from milldam.chat.forms import REASONING, BadRowError, Conversation, Form, recognise, records_of
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import ASSISTANT, Masks, TrainOn
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
from milldam.sources.rows import FileReader, Places, take
from milldam.sources.units import Slice, Unit
from milldam.text.arrays import Verdicts, text_offsets
from milldam.text.cleaning import Cleaner

MOST_BYTES = 8 << 20
"""Of a record as it lies in its file, whatever `max_document_bytes` is."""
_ROWS_SEEN = 100
ROLES = ("system", "developer", "user", "assistant", "tool", "other")
"""What turns are counted by."""
_ARRAYS = ("cuts", "stretches", "counts", "turns", "derived")
_idle: dict[str, Masks] = {}
"""Of the unit before, by its settings; one at most. Taking it out is atomic: a thread that reads ahead may outlive its
unit."""

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

    def as_json(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).ravel().tolist() for name in _ARRAYS}
        return {"count": self.count, **arrays, "labels": None if self.labels is None else self.labels.tolist()}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Sides:
        cuts, stretches, counts, turns, derived = (np.array(facts[name], dtype=np.int64) for name in _ARRAYS)
        labels = None if facts["labels"] is None else np.array(facts["labels"], dtype=np.uint8)
        table = turns.reshape(-1, len(ROLES))
        return cls(facts["count"], cuts, stretches.reshape(-1, 2), counts, table, derived.astype(bool), labels)

    def turn_counts(self) -> Counter[str]:
        """Messages in all and by role."""
        by_role = self.turns.sum(axis=0).tolist()
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
        recipe, files = self._recipe, FileReader(self._rules, None)
        settings = repr((recipe.template, recipe.train_on, recipe.special_tokens))
        masks = _idle.pop(settings, None) or Masks(recipe.template, recipe.train_on, recipe.special_tokens)
        for index, slice in enumerate(unit.slices):
            places, reading, first = Places(), Reading(self._rules, on_reject), 0
            is_lines = slice.format == "jsonl"
            for rows in files.rows([slice], on_reject, places):
                records = records_of(rows)
                batch, numbers, errors = self._batch(records, masks)
                for number, error in errors:
                    place = places.of(first + number, first + number + 1)[0]
                    line, row = (place.first + 1, None) if is_lines else (None, place.first)
                    shown = json.dumps(records[number], ensure_ascii=False, default=str)[: KEPT_RECORD_CHARS + 1]
                    reading.reject(
                        Reject(slice.path, error.reason, str(error), shown, line=line, row=row, origin=place.origin)
                    )
                origins = [places.of(first + number, first + number + 1)[0].first for number in numbers]
                batch.origins = np.array(origins, np.int64) | index << NUMBER_BITS
                batch.columns = kept_columns(self._keep, [records[number] for number in numbers])
                yield batch
                first += len(records)
                places.forget(first)
        _idle.clear()
        _idle[settings] = masks

    def _batch(
        self, records: list[dict[str, Any]], masks: Masks
    ) -> tuple[Batch, list[int], list[tuple[int, BadRowError]]]:
        """The conversations of records, the number of the record of each, and why others are refused."""
        recipe, talks = self._recipe, list[tuple[int, tuple[Conversation, ...]]]()
        errors: list[tuple[int, BadRowError]] = []
        for number, record in enumerate(records):
            try:
                talk = recipe.form.conversations(record)
            except BadRowError as error:
                errors.append((number, error))
                continue
            several = [talk]
            if recipe.per_turn and len(talk) == 1:
                with contextlib.suppress(BadRowError):  # raised again when it is rendered
                    several = [(one,) for one in masks.by_turn(talk[0])]
            talks += [(number, one) for one in several]
        reasons = {} if self._cleaner is None else self._clean([one for _, one in talks], self._cleaner)
        numbers, dropped = list[int](), list[str | None]()
        sides, texts, derived, pairs, ends = list[Conversation](), list[str](), list[bool](), list[Stretch](), [0]
        for at, (number, talk) in enumerate(talks):
            try:
                found = [masks.find(side) for side in talk]
            except BadRowError as error:
                errors.append((number, error))
                continue
            numbers.append(number)
            dropped.append(reasons.get(at))
            sides += talk
            for rendering, stretches, are_derived in found:
                texts.append(rendering.text)
                derived.append(are_derived)
                pairs += in_bytes(rendering.text, stretches)
                ends.append(len(pairs))
        utf8 = pa.array(texts, pa.large_string())
        offsets, count = text_offsets(utf8), recipe.sides
        verdicts = Verdicts(len(numbers))
        for at, reason in enumerate(dropped if reasons else ()):
            if reason is not None:
                verdicts.drop_one(at, reason)
        labelled = bool(sides) and sides[0].label is not None
        batch = Batch(
            pa.LargeStringArray.from_buffers(len(numbers), pa.py_buffer(offsets[::count].copy()), utf8.buffers()[2]),
            bytes_read=int(offsets[-1] - offsets[0]),
            verdicts=verdicts,
        )
        batch.sides = Sides(
            count,
            cuts=np.diff(offsets)[::count],
            stretches=np.array(pairs, np.int64).reshape(-1, 2),
            counts=np.diff(ends).astype(np.int64),
            turns=_turns(sides),
            derived=np.array(derived, np.bool_),
            labels=np.array([side.label for side in sides[::count]], dtype=np.uint8) if labelled else None,
        )
        if recipe.dedup_on_prompt or recipe.group_by_prompt:
            asked = zip(sides[::count], texts[::count], strict=True)
            batch.prompts = pa.array([prompt_of(side) or text for side, text in asked], pa.large_string())
        batch.counts["special_tokens_in_content"] = sum(map(masks.says_special, sides))
        return batch, numbers, errors

    def _clean(self, conversations: list[tuple[Conversation, ...]], cleaner: Cleaner) -> dict[int, str]:
        """Clean what is said, all of the batch at once; why a conversation is dropped, by its number."""
        places = [
            (number, message, name)
            for number, one in enumerate(conversations)
            for side in one
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


def prompt_of(conversation: Conversation) -> str:
    """What was asked: what is said before the last answer, or in the messages of the prompt.

    >>> prompt_of(Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]))
    'Hi'
    """
    messages = conversation.messages
    end = conversation.prompt_messages or max(
        (number for number, message in enumerate(messages) if message["role"] == ASSISTANT), default=len(messages)
    )
    return "\n".join(text for message in messages[:end] if isinstance(text := message.get("content"), str))


def in_bytes(text: str, stretches: Sequence[Stretch]) -> list[Stretch]:
    """Stretches of characters, in order -> stretches of bytes in UTF-8."""
    if text.isascii():
        return list(stretches)
    pairs, at, size = [], 0, 0
    for begin, end in stretches:
        start = size + len(text[at:begin].encode())
        size = start + len(text[begin:end].encode())
        at = end
        pairs.append((start, size))
    return pairs


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
    path, reader = "", FileReader(TextRules(invalid_utf8="replace"), None)
    for slice in slices:
        path = slice.path
        for some in reader.rows([slice], lambda _: None, Places()):
            try:
                return recognise(records_of(take(some, 0, _ROWS_SEEN)), form=form, columns=columns)
            except InputError as error:
                raise InputError(f"{path}: ", *error.args) from None
    raise InputError(f"{path}: no record in it tells the form of the conversations.")
