"""What a template would make of conversations: how many can be proven, and which parts of its output are trained on.

Rows are read as they come, a batch at a time, and nothing is kept of them but counts and the first conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milldam.chat.forms import BadRowError, Conversation, Form, Pair, from_table, recognise
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import TrainOn
from milldam.chat.rendering import Renderer
from milldam.chat.template import Rendering, Stretch
from milldam.errors import InputError
from milldam.sources.batch import Places, Reject, TextRules
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import FileReader
from milldam.sources.rows import Rows
from milldam.sources.units import list_inputs, whole

_FIRST_ROWS = 100
"""So many tell the form."""
_BEFORE = 32
"""Characters in front of a stretch, where nothing tells where its turn begins."""


@dataclass(slots=True)
class Refusals:
    """Conversations that are refused for one reason."""

    count: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Where the first one is."""


@dataclass(slots=True)
class ChatCheck:
    """What came of a check."""

    form: Form
    tagged: bool
    turn_end: bool = True
    """What ends a turn is to be trained on with it."""
    first: tuple[str, list[Stretch]] | None = None
    """The first conversation's text, and what is trained on of it."""
    rows: int = 0
    proven: int = 0
    refused: dict[str, Refusals] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    headers: Counter[str] = field(default_factory=Counter)
    """What the template writes in a trained turn before that which is trained on."""
    leads: Counter[str] = field(default_factory=Counter)
    """What is trained on before the message's content."""
    ends: Counter[str] = field(default_factory=Counter)
    """What is trained on behind it."""

    def refuse(self, reason: str, message: str, place: str) -> None:
        found = self.refused.setdefault(reason, Refusals(first=place))
        found.count += 1
        if message in found.messages or len(found.messages) < 100:
            found.messages[message] += 1

    @property
    def trained_share(self) -> float:
        return self.counts["trained_characters"] / max(1, self.counts["characters"])


@dataclass(frozen=True, slots=True)
class CheckRules:
    """What to check by."""

    train_on: TrainOn
    form: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    """So many rows, all without."""


def check_chat(
    inputs: Sequence[str], source: TemplateSource, rules: CheckRules, *, special_tokens: Sequence[str] = ()
) -> ChatCheck:
    """Render the conversations of files, folders or datasets, and say what would be trained on."""
    renderer = Renderer(source, rules.train_on, special_tokens=special_tokens)
    check: ChatCheck | None = None
    unread: list[Reject] = []
    for records, places, begin in _batches(inputs, unread):
        if check is None:
            form = recognise(records[:_FIRST_ROWS], form=rules.form, columns=rules.columns)
            check = ChatCheck(form, renderer.tagged, rules.train_on.turn_end and not renderer.tagged)
        if rules.limit is not None:
            records = records[: rules.limit - check.rows]
        for number, record in enumerate(records):
            _check_row(check, renderer, record, places, begin + number)
        if rules.limit is not None and check.rows >= rules.limit:
            break
    if check is None:
        raise InputError(f"{', '.join(inputs)}: no rows in it.")
    for reject in unread:
        check.refuse(reject.reason, reject.detail, f"{reject.file}, line {reject.line}" if reject.line else reject.file)
    return check


def _check_row(check: ChatCheck, renderer: Renderer, record: dict[str, Any], places: Places, number: int) -> None:
    check.rows += 1
    try:
        found = check.form.conversation(record)
        sides = (found.chosen, found.rejected) if isinstance(found, Pair) else (found,)
        shown = [(side, *renderer.show(side)) for side in sides]
    except BadRowError as error:
        check.refuse(error.reason, str(error), "; ".join(map(str, places.of(number, number + 1))))
        return
    check.proven += 1
    for side, rendering, stretches in shown:
        check.counts += renderer.count(side, rendering.text, sum(end - begin for begin, end in stretches))
        _note_parts(check, side, rendering, stretches)
        if check.first is None:
            check.first = rendering.text, stretches


def _note_parts(check: ChatCheck, side: Conversation, rendering: Rendering, stretches: list[Stretch]) -> None:
    """Which parts of each turn are trained on."""
    turns = sorted((turn, number) for number, found in rendering.turns.items() for turn in found)
    at = 0
    for begin, end in stretches:
        while at + 1 < len(turns) and turns[at + 1][0][0] <= begin:
            at += 1
        said = rendering.text[begin:end]
        if not turns or not turns[at][0][0] <= begin < turns[at][0][1]:
            check.headers[f"...{rendering.text[max(0, begin - _BEFORE) : begin]}"] += 1
            continue
        (start, _), number = turns[at]
        check.headers[rendering.text[start:begin][-200:]] += 1
        content = side.messages[number].get("content")
        content = content.strip() if isinstance(content, str) else ""
        if content and content in said:
            lead, _, tail = said.partition(content)
            check.leads[lead[:200]] += 1
            check.ends[tail[:200]] += 1


def _batches(inputs: Sequence[str], unread: list[Reject]) -> Iterator[tuple[list[dict[str, Any]], Places, int]]:
    """Rows as dicts, with the places that they are from and the number of the first."""
    reader = FileReader(TextRules(), None)
    for given in inputs:
        found = resolve_data_set(given, None, None)
        for file in list_inputs(found.inputs, found.input_format):
            places, number = Places(), 0
            for rows in reader.rows([whole(file)], unread.append, places):
                records = as_records(rows)
                yield records, places, number
                number += len(records)


def as_records(rows: Rows) -> list[dict[str, Any]]:
    """Rows -> a dict of plain values each."""
    if isinstance(rows, dict):
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    return from_table(rows)
