"""Records -> examples, one at a time, each a question with its context and answers: SQuAD v1.1 and v2, HF's flat form.

A record that can't be used is told with its place and the reason, and left out. What is larger than `Limits` allow is
passed over without being held, and rejected by its id, field and size.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import InputError, Setting
from milldam.memory import format_size
from milldam.qa.json_stream import LARGEST_VALUE, TooLarge
from milldam.qa.records import KEPT_CHARS, WANTED, flat_records, list_files, read_records
from milldam.sources.batch import MalformedError
from milldam.sources.units import InputFile


@dataclass(frozen=True, slots=True)
class Answer:
    """A stretch of the context, by characters.

    >>> milldam.qa.Answer("1990", 46).stop
    50
    """

    text: str
    start: int
    """Where the data says that it begins."""

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
    """None: the question can't be answered from the context."""
    title: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all its texts; raises UnicodeEncodeError where one of them has half a character."""
        texts = (self.id, self.title, self.question, self.context, *(answer.text for answer in self.answers))
        return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that can't be used, with enough to find and mend it."""

    file: str
    where: str
    """line 7, row 7, or the path in the JSON: data[0].paragraphs[3].qas[1]"""
    reason: str
    detail: str
    record: str = ""

    def as_json(self) -> dict[str, str]:
        place = {"file": self.file, "where": self.where, "reason": self.reason, "detail": self.detail}
        return place | ({"record": self.record} if self.record else {})


OnReject = Callable[[Reject], None]


def stop_at_reject(reject: Reject) -> None:
    """What a reject is to those who want all or nothing."""
    raise InputError(
        f"{reject.file}: {reject.where}: {reject.detail} ({reject.reason}). Without ",
        Setting("strict"),
        " it is left out.",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """How large what is read may be."""

    value_bytes: int = LARGEST_VALUE
    """Of what is held while it is read: a paragraph, a line, a row."""
    room_bytes: int = sys.maxsize
    """Memory that there is for an example."""
    weigh: Callable[[int, Example | None], int] = lambda size, example: 0
    """What an example of so many bytes takes of it; None: it could not be read."""
    advice: Callable[[int], str] = lambda weight: "more than is read at once"
    """Of one that takes so much."""

    def error(self, what: str, size: int, weight: int | None = None) -> MalformedError:
        advice = self.advice(self.weigh(size, None) if weight is None else weight)
        return MalformedError("too_large", f"{what} has {format_size(size)}: {advice}")


def examples_of(
    inputs: str | Path | Sequence[str | Path],
    *,
    split: str = "train",
    max_examples: int | None = None,
    strict: bool = False,
    on_reject: OnReject | None = None,
) -> Iterator[Example]:
    """The examples of files, folders, globs, addresses, `save_to_disk` folders and datasets on the Hub, in order.

    `max_examples` counts those that can be used, over all inputs. `strict`: a record that can't be ends it.

    >>> next(milldam.qa.examples_of("train-v2.0.json")).question
    'what year did the city pay'
    """
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    files = list(list_files([str(one) for one in given], split))
    told = stop_at_reject if strict else on_reject or (lambda reject: None)
    return itertools.islice(
        (example for file in files for example in read_examples(file, told, alone=len(files) == 1)), max_examples
    )


def read_examples(
    file: InputFile,
    on_reject: OnReject,
    *,
    limits: Limits | None = None,
    spool: str | None = None,
    alone: bool = False,
) -> Iterator[Example]:
    """The examples of a listed file. `spool`: where compressed tables are unpacked to. `alone`: there is no other file,
    so that a damaged table is an error."""
    limits = limits or Limits()

    def reject(where: str, why: MalformedError, record: Any) -> None:
        kept = "" if record is None else json.dumps(_shortened(record), default=str)[:KEPT_CHARS]
        on_reject(Reject(file.path, where, why.reason, why.detail, kept))

    for record in read_records(file, spool=spool, largest=limits.value_bytes):
        if record.error is not None:
            if alone and record.error.reason == "damaged_table":
                raise InputError(f"{file.path}: {record.error.detail}. Get or make it again.")
            reject(record.where, record.error, record.value)
            continue
        for where, value in flat_records(record.where, record.value, record.title):
            try:
                yield _example(value, limits)
            except MalformedError as why:
                reject(where, why, value)


def _shortened(value: Any) -> Any:
    """A record as it is kept: the begin of its texts and lists."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value[: KEPT_CHARS // 4]]
    return value[:KEPT_CHARS] if isinstance(value, str) else value


def _example(record: Any, limits: Limits) -> Example:
    if not isinstance(record, dict):
        raise MalformedError("no_record", f"an object is wanted, not {described(record)}")
    _require_all_of_it(record, limits)
    number = record.get("id")
    given = {**record, "id": str(number) if isinstance(number, int) and not isinstance(number, bool) else number}
    for name in ("id", "context", "question"):
        if name not in record:
            found = ", ".join(key for key in record if key != "title" or record[key]) or "none"
            needed = 'Needed are the texts "id", "context" and "question", and "answers" as SQuAD has them'
            raise MalformedError(f"no_{name}", f'no field "{name}"; found {found}. {needed}')
        if not isinstance(given.get(name), str):
            raise MalformedError(f"no_{name}", f'"{name}" must be a text, not {described(given.get(name))}')
    if not given["context"].strip():
        raise MalformedError("no_context", "the context is empty")
    title = given.get("title") if isinstance(given.get("title"), str) else ""
    answers = () if given.get("is_impossible") is True else tuple(_answers(given.get("answers")))
    made = Example(given["id"], given["question"], given["context"], answers, title or "")
    try:
        size = made.size_bytes
    except UnicodeEncodeError as error:
        # Half a pair of surrogates is no character: no tokenizer takes it, and no file.
        raise MalformedError("not_unicode", f"a text that is not Unicode ({error.reason})") from None
    if (weight := limits.weigh(size, made)) > limits.room_bytes:
        raise limits.error(f'question "{made.id}" with its context and answers', size, weight)
    return made


def _require_all_of_it(record: dict[str, Any], limits: Limits) -> None:
    """Raises MalformedError when a part was passed over as too large; answers may have it inside."""
    answers = record.get("answers")
    inside = answers if isinstance(answers, list) else [answers]
    for part in (record, *(one for one in inside if isinstance(one, dict))):
        for name, value in part.items():
            if isinstance(value, TooLarge) and name in WANTED:
                question = f' of question "{record["id"]}"' if isinstance(record.get("id"), str | int) else ""
                raise limits.error(f'"{name}"{question}', value.bytes)


def _answers(given: Any) -> Iterator[Answer]:
    """HF's {"text": [...], "answer_start": [...]}, or SQuAD's [{"text", "answer_start"}, ...]; null: none."""
    if given is None:
        return
    if isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise MalformedError("bad_answers", '"text" and "answer_start" must be lists of the same length')
        given = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list):
        raise MalformedError("bad_answers", f'"answers" must be a list or an object, not {described(given)}')
    for answer in given:
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise MalformedError("bad_answers", f"an answer must have text and answer_start, not {answer!r}"[:200])
        yield Answer(text, start)


def described(value: Any) -> str:
    """The kind of a JSON value, in words."""
    names = {type(None): "null", str: "a text", dict: "an object", list: "a list", bool: "true or false"}
    return names.get(type(value), "a number")
