"""Files -> examples: a question with its context and answers. SQuAD v1.1 and v2, HF's flat form.

SQuAD's file is one JSON object of any size; its articles are decoded one at a time. A large file is read through once
to cut it into runs of articles, so that several workers can share it. All other formats are read as every source is.
A record that can't be used is set aside with its place and the reason. Holds an article.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import is_address, kind_of
from milldam.sources.batch import KEPT_RECORD_CHARS, Reading, Reject, TextRules
from milldam.sources.compression import BLOCK_BYTES, STDIN, DamagedError, open_bytes, read_blocks
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import TABLES, reader_of, slice_file
from milldam.sources.splits import parse_split
from milldam.sources.units import InputFile, Slice, list_inputs, whole

SQUAD = "squad"
"""The format of a .json file with a list "data"; another one, "json", is a list of records, or a record a line."""
PIECE_BYTES = 1_000_000
"""A unit of work: part of a file, or several small ones."""
LARGEST_RECORD = 16 << 20
"""Bytes of a line, row or article."""
_DATA = re.compile(r'"data"[ \n\t\r]*:[ \n\t\r]*\[')
_BETWEEN = re.compile(r"[ \n\t\r,]*")
_FORMATS = ("json", "jsonl", "parquet", "arrow")
_KNOWN = "Known are SQuAD's JSON, JSON lines, parquet and Arrow, each also as .gz, .zst, .bz2 or .xz."
_NEEDED = 'Needed are the texts "id", "context" and "question", and "answers" as SQuAD has them'


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context, in characters."""

    text: str
    start: int
    """Where it begins, according to the data."""

    @property
    def stop(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Example:
    """One question."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    """Empty: the question can't be answered from the context."""
    title: str = ""


def read_examples(slice: Slice, reading: Reading) -> Iterator[Example]:
    """The examples of a part of a file."""
    for record, place in read_questions(slice, reading):
        try:
            yield _example(record)
        except DamagedError as error:
            kept = json.dumps(record, ensure_ascii=False, default=str)[: KEPT_RECORD_CHARS + 1]
            detail = ": ".join(filter(None, (place.detail, error.detail)))
            reading.reject(replace(place, reason=error.reason, detail=detail, record=kept))


def _example(record: Any) -> Example:
    if not isinstance(record, dict):
        raise DamagedError("no_record", f"an object is wanted, not {record!r}"[:200])
    id = record.get("id")
    texts: dict[str, Any] = {name: record.get(name) for name in ("id", "context", "question")}
    if isinstance(id, int) and not isinstance(id, bool):
        texts["id"] = str(id)
    for name, text in texts.items():
        if not isinstance(text, str):
            found = ", ".join(key for key, value in record.items() if value) or "none"
            lacks = "field" if text is None else "text"
            raise DamagedError(f"no_{name}", f'no {lacks} "{name}"; found {found}. {_NEEDED}')
    if not record["context"].strip():
        raise DamagedError("no_context", "the context is empty")
    answers = () if record.get("is_impossible") is True else tuple(_answers(record.get("answers")))
    title = record["title"] if isinstance(record.get("title"), str) else ""
    example = Example(**texts, answers=answers, title=title)
    try:
        "".join((title, *texts.values(), *(answer.text for answer in answers))).encode()
    except UnicodeEncodeError as error:
        # Half a pair of surrogates is no character: no tokenizer takes it, and no file.
        raise DamagedError("not_unicode", f"a text that is not Unicode ({error.reason})") from None
    return example


def _answers(answers: Any) -> Iterator[Answer]:
    """HF's {"text": [...], "answer_start": [...]}, or SQuAD's [{"text", "answer_start"}, ...]; null: none."""
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise DamagedError("bad_answers", '"text" and "answer_start" must be lists of the same length')
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list | None):
        raise DamagedError("bad_answers", f'"answers" must be a list or an object, not {answers!r}'[:200])
    for answer in answers or ():
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise DamagedError("bad_answers", f"an answer must have text and answer_start, not {answer!r}"[:200])
        yield Answer(text, start)


# ---- which files ----


def list_files(inputs: Sequence[str], split: str = "train") -> Iterator[InputFile]:
    """The files of each input, in order, with their formats. Reads at most the head of each.

    A file is taken as it is named. Of a folder, of what `save_to_disk` wrote and of a dataset on the Hub, the files of
    the split are taken.
    """
    if parse_split(split)[1] is not None:
        raise ConfigError(f'split "{split}": slices are not known here. Use max_examples for the first ones.')
    for name in inputs:
        if name == STDIN:
            raise InputError("Standard input can't be read for question answering: name a file.")
        paths: tuple[str, ...] = (name,)
        if not (os.path.isfile(name) or is_address(name) or (glob.has_magic(name) and not os.path.isdir(name))):
            resolved = resolve_data_set(name, split, None).inputs
            paths = tuple(path for path in resolved if (kind_of(path) or ("",))[0] in _FORMATS)
            if not paths:
                raise InputError(f"{name}: no input files in it. {_KNOWN}")
        for file in list_inputs(paths, "json"):
            format = (kind_of(file.path) or ("",))[0]
            if format not in _FORMATS:
                raise InputError(f"{file.path}: no examples of question answering in it. {_KNOWN}")
            if format == "json":
                with open_bytes(file.path) as opened:
                    head = _more(read_blocks(opened, file.compression), 1, file.path)
                format = SQUAD if _DATA.search(head) else format
            yield replace(file, format=format)


def cut_file(file: InputFile) -> Iterator[Slice]:
    """The parts of a file that workers share; of SQuAD's JSON, runs of articles."""
    if file.format != SQUAD:
        yield from slice_file(file, PIECE_BYTES, TextRules())
        return
    if file.compression is not None or file.size <= PIECE_BYTES:
        yield whole(file)
        return
    first = stop = 0
    for begin, stop, _ in _articles(whole(file)):
        first = first or begin
        if stop - first >= PIECE_BYTES:
            yield Slice(file.path, SQUAD, None, first, stop, stop - first, state=file.state)
            first = 0
    if first:
        yield Slice(file.path, SQUAD, None, first, stop, stop - first, state=file.state)


# ---- the records of a part ----


def read_questions(slice: Slice, reading: Reading) -> Iterator[tuple[Any, Reject]]:
    """The questions of a part of a file as flat records, each with the reject that it would be: its place, and in
    `detail` its path in SQuAD's JSON."""
    for record, place in _records(slice, reading):
        for path, question in flat_records(record):
            yield question, replace(place, detail=path) if path else place


def _records(slice: Slice, reading: Reading) -> Iterator[tuple[Any, Reject]]:
    if slice.format == SQUAD:
        values: Iterable[Any] = (value for _, _, value in _articles(slice))
        if slice.stop is not None:
            with open_bytes(slice.path) as file:
                file.seek(slice.start)
                values = _parsed(b"[" + file.read(slice.stop - slice.start) + b"]", slice.path)
        yield from ((value, Reject(slice.path, "", "")) for value in values)
        return
    rules = replace(reading.rules, max_document_bytes=LARGEST_RECORD)
    origin = 0 if slice.format in TABLES else slice.start
    for rows, numbers in reader_of(slice.format).read_rows(slice, replace(reading, rules=rules)):
        lists = rows if isinstance(rows, dict) else rows.to_pydict()
        for number, values in zip(numbers.tolist(), zip(*lists.values(), strict=True), strict=True):
            record = {name: value for name, value in zip(lists, values, strict=True) if value is not None}
            line, row = (number + 1, None) if slice.format == "jsonl" else (None, number)
            yield record, Reject(slice.path, "", "", line=line, row=row, origin=origin)


def flat_records(value: Any, path: str = "", title: Any = "") -> Iterator[tuple[str, Any]]:
    """(path, flat record) of a record: itself, the questions of a paragraph, or those of an article's paragraphs."""
    if isinstance(value, dict) and isinstance(value.get("qas"), list):
        shared = {"context": value.get("context"), "title": value.get("title", title)}
        for number, qa in enumerate(value["qas"]):
            yield f"{path}qas[{number}]", qa | shared if isinstance(qa, dict) else qa
    elif isinstance(value, dict) and isinstance(value.get("paragraphs"), list):
        for number, paragraph in enumerate(value["paragraphs"]):
            yield from flat_records(paragraph, f"{path}paragraphs[{number}].", value.get("title", title))
    else:
        yield path, {"title": title} | value if isinstance(value, dict) else value


def _parsed(data: bytes, path: str) -> Any:
    """Bytes that are not UTF-8 become lone surrogates, so that they cost their record alone."""
    try:
        return json.loads(data.decode("utf-8", "surrogateescape"), strict=False)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def _articles(slice: Slice) -> Iterator[tuple[int, int, Any]]:
    """(first byte, byte behind it, article) of each item of the list "data" in a whole file."""
    decoder = json.JSONDecoder(strict=False)
    with open_bytes(slice.path) as file:
        blocks = read_blocks(file, slice.compression)
        text = _more(blocks, 1, slice.path)  # a character a byte
        data = _DATA.search(text)
        if data is None:
            raise InputError(f'{slice.path}: no JSON object with a list "data", as SQuAD files are. {_KNOWN}')
        before, at = 0, data.end()
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                return
            try:
                value, stop = decoder.raw_decode(text, at)
                if not text[at:stop].isascii():
                    value = _parsed(text[at:stop].encode("latin-1"), slice.path)
                yield before + at, before + stop, value
                at = stop
                continue
            except (ValueError, RecursionError) as error:
                problem = str(error)
            held = len(text) - at
            if held > LARGEST_RECORD:
                raise InputError(
                    f"{slice.path}: the article at byte {before + at:,} is not JSON or has more than "
                    f"{LARGEST_RECORD:,} bytes, which is too much to read at once. Repair or divide it."
                )
            # As much again as is held: a long article is not decoded more than twice over.
            more = _more(blocks, held // BLOCK_BYTES + 1, slice.path)
            if not more:
                raise _damaged(slice.path, problem)
            before, at, text = before + at, 0, text[at:] + more


def _more(blocks: Iterator[bytes], count: int, path: str) -> str:
    try:
        return b"".join(itertools.islice(blocks, count)).decode("latin-1")
    except DamagedError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: str, problem: str) -> InputError:
    return InputError(f"{path}: not whole JSON ({problem}). Get the file again.")
