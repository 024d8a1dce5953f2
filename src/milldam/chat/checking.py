"""What a template would make of conversations: how many can be proven, and which parts of its output are trained on.

Rows are read as they come, a batch at a time, and nothing is kept of them but counts and the first conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milldam.chat.forms import BadRowError, Conversation, Form, recognise, records_of
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import Masks, TrainOn
from milldam.chat.template import Rendering, Stretch
from milldam.errors import InputError
from milldam.sources.batch import Reject, TextRules
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.rows import FileReader, Places
from milldam.sources.units import list_inputs, whole

_FIRST_ROWS = 100
"""So many tell the form."""


@dataclass(slots=True)
class ChatCheck:
    """The result of a check."""

    form: Form
    tagged: bool
    first: tuple[str, list[Stretch]] | None = None
    """The first conversation's text, and its trained stretches."""
    rows: int = 0
    usable: int = 0
    refused: dict[str, tuple[str, Counter[str]]] = field(default_factory=dict)
    """By reason: where the first one is, and how often each message."""
    counts: Counter[str] = field(default_factory=Counter)
    """Characters, trained ones, turns in all and by role, trained turns without an end, conversations with special
    tokens."""

    def refuse(self, reason: str, message: str, place: str) -> None:
        messages = self.refused.setdefault(reason, (place, Counter()))[1]
        messages[message if message in messages or len(messages) < 100 else "others"] += 1


def check_chat(
    inputs: Sequence[str],
    source: TemplateSource,
    rule: TrainOn,
    *,
    form: str = "auto",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    special_tokens: Sequence[str] = (),
) -> ChatCheck:
    """Render the conversations of files, folders or datasets, at most `limit` rows, and note what is trained on."""
    masks = Masks(source, rule, special_tokens)
    check: ChatCheck | None = None
    unread: list[Reject] = []
    for records, places, begin in _batches(inputs, unread):
        if check is None:
            check = ChatCheck(recognise(records[:_FIRST_ROWS], form=form, columns=columns), masks.tagged)
        for number, record in enumerate(records[: None if limit is None else limit - check.rows], begin):
            check.rows += 1
            try:
                shown = [(side, *masks.find(side)) for side in check.form.conversations(record)]
            except BadRowError as error:
                check.refuse(error.reason, str(error), "; ".join(map(str, places.of(number, number + 1))))
                continue
            check.usable += 1
            for side, rendering, stretches, _ in shown:
                _note(check, side, rendering, stretches)
                check.counts["special_tokens_in_content"] += masks.says_special(side)
        if check.rows == limit:
            break
    if check is None:
        raise InputError(f"{', '.join(inputs)}: no rows in it.")
    for reject in unread:
        check.refuse(reject.reason, reject.detail, f"{reject.file}, line {reject.line}" if reject.line else reject.file)
    return check


def _note(check: ChatCheck, side: Conversation, rendering: Rendering, stretches: list[Stretch]) -> None:
    if check.first is None:
        check.first = rendering.text, stretches
    trained = sum(end - begin for begin, end in stretches)
    check.counts += Counter(conversations=1, characters=len(rendering.text), trained_characters=trained)
    check.counts += Counter([f"turns_{message['role']}" for message in side.messages])
    check.counts["turns"] += len(side.messages)
    trained_ends = {end for _, end in stretches}
    for number, blocks in rendering.turns.items():
        content = side.messages[number].get("content")
        if isinstance(content, str) and content.strip() and not trained_ends.isdisjoint(end for _, end in blocks):
            end = rendering.text[blocks[-1][0] : blocks[-1][1]].rpartition(content.strip())[2]
            check.counts["turns_without_end"] += not end.strip()


def _batches(inputs: Sequence[str], unread: list[Reject]) -> Iterator[tuple[list[dict[str, Any]], Places, int]]:
    """Rows as dicts, with the places that they are from and the number of the first."""
    reader = FileReader(TextRules(), None)
    for path in inputs:
        data_set = resolve_data_set(path, None, None)
        for file in list_inputs(data_set.inputs, data_set.input_format):
            places, number = Places(), 0
            for rows in reader.rows([whole(file)], unread.append, places):
                records = records_of(rows)
                yield records, places, number
                number += len(records)
