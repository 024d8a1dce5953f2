"""Records -> examples: a question with its context and answers. SQuAD v1.1 and v2, HF's flat form.

A record that can't be used is set aside with its place and the reason, as in every source.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milldam.qa.records import Piece, flat_records, list_files, read_records
from milldam.sources.batch import KEPT_RECORD_CHARS, OnReject, Reading, TextRules
from milldam.sources.compression import DamagedError
from milldam.sources.units import whole


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context, in characters.

    >>> milldam.qa.Answer("1990", 46).stop
    50
    """

    text: str
    start: int
    """Where it begins, according to the data."""

    @property
    def stop(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Example:
    """One question.

    >>> milldam.qa.Example("q1", "When?", "In 1990.", (milldam.qa.Answer("1990", 3),)).answers[0].text
    '1990'
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    """Empty: the question can't be answered from the context."""
    title: str = ""


def examples_of(
    inputs: str | Path | Sequence[str | Path],
    *,
    split: str = "train",
    max_examples: int | None = None,
    strict: bool = False,
    on_reject: OnReject | None = None,
) -> Iterator[Example]:
    """The examples of files, folders, globs, addresses, `save_to_disk` folders and datasets on the Hub, in order.

    `max_examples` counts usable ones, over all inputs. `strict`: stop at the first record that can't be used.

    >>> next(milldam.qa.examples_of("train-v2.0.json")).question
    'what year did the city pay'
    """
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    files = list(list_files([str(name) for name in names], split))
    reading = Reading(TextRules(strict=strict, only_file=len(files) == 1), on_reject or (lambda reject: None))
    examples = (example for file in files for example in read_examples(Piece(whole(file)), reading))
    return itertools.islice(examples, max_examples)


def read_examples(piece: Piece, reading: Reading) -> Iterator[Example]:
    """The examples of a part of a file."""
    for record, place, path in read_records(piece, reading):
        for where, value in flat_records(record, path):
            try:
                yield _example(value)
            except DamagedError as error:
                kept = json.dumps(value, ensure_ascii=False, default=str)[: KEPT_RECORD_CHARS + 1]
                detail = ": ".join(filter(None, (where.removeprefix("."), error.detail)))
                reading.reject(replace(place, reason=error.reason, detail=detail, record=kept))


def _example(record: Any) -> Example:
    if not isinstance(record, dict):
        raise DamagedError("no_record", f"an object is wanted, not {described(record)}")
    id, title = record.get("id"), record.get("title")
    if isinstance(id, int) and not isinstance(id, bool):
        record = {**record, "id": str(id)}
    for name in ("id", "context", "question"):
        if record.get(name) is None:
            found = ", ".join(key for key, value in record.items() if value) or "none"
            needed = 'Needed are the texts "id", "context" and "question", and "answers" as SQuAD has them'
            raise DamagedError(f"no_{name}", f'no field "{name}"; found {found}. {needed}')
        if not isinstance(record[name], str):
            raise DamagedError(f"no_{name}", f'"{name}" must be a text, not {described(record[name])}')
    if not record["context"].strip():
        raise DamagedError("no_context", "the context is empty")
    answers = () if record.get("is_impossible") is True else tuple(_answers(record.get("answers")))
    title = title if isinstance(title, str) else ""
    example = Example(record["id"], record["question"], record["context"], answers, title)
    try:
        for text in (
            example.id,
            example.title,
            example.question,
            example.context,
            *(answer.text for answer in answers),
        ):
            text.encode()
    except UnicodeEncodeError as error:
        # Half a pair of surrogates is no character: no tokenizer takes it, and no file.
        raise DamagedError("not_unicode", f"a text that is not Unicode ({error.reason})") from None
    return example


def _answers(answers: Any) -> Iterator[Answer]:
    """HF's {"text": [...], "answer_start": [...]}, or SQuAD's [{"text", "answer_start"}, ...]; null: none."""
    if answers is None:
        return
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise DamagedError("bad_answers", '"text" and "answer_start" must be lists of the same length')
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise DamagedError("bad_answers", f'"answers" must be a list or an object, not {described(answers)}')
    for answer in answers:
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise DamagedError("bad_answers", f"an answer must have text and answer_start, not {answer!r}"[:200])
        yield Answer(text, start)


def described(value: Any) -> str:
    """The kind of a JSON value, in words."""
    names = {type(None): "null", str: "a text", dict: "an object", list: "a list", bool: "true or false"}
    return names.get(type(value), "a number")
