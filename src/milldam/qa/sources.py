"""Files -> examples, one at a time: SQuAD v1.1 and v2 as JSON; HF's flat form as JSON, JSON lines, parquet or Arrow.

Nothing is parsed whole: a paragraph with its questions, a line, or a few megabytes of rows are held. A record that
can't be used is told with its place and the reason, and left out; with `strict` it ends the reading. What is larger
than `Limits` allow is passed over without being held, and rejected by its id, field and size.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import InputError
from milldam.memory import format_size
from milldam.qa.examples import Answer, Example
from milldam.qa.listing import ARRAY, list_files
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.json_items import as_json_lines
from milldam.sources.json_stream import BLOCK_BYTES, LARGEST_VALUE, JsonError, JsonStream, TooLarge
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes

_FIELDS = ("id", "title", "context", "question", "answers", "is_impossible")
_NEEDED = ("id", "context", "question")
_WANTED = frozenset((*_FIELDS, "paragraphs", "qas", "text", "answer_start"))
_ROWS, _BATCH_BYTES = 1024, 4 << 20
_KEPT_CHARS = 4096


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
        return {"file": self.file, "where": self.where, "reason": self.reason, "detail": self.detail} | (
            {"record": self.record} if self.record else {}
        )


OnReject = Callable[[Reject], None]
_Refuse = Callable[[str, str, "_UnusableError", Any], None]
"""(file, where, why, record)"""


class _UnusableError(Exception):
    """Why a record is no example."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


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

    def error(self, what: str, size: int, weight: int | None = None) -> _UnusableError:
        advice = self.advice(self.weigh(size, None) if weight is None else weight)
        return _UnusableError("too_large", f"{what} has {format_size(size)}: {advice}")


@dataclass(frozen=True, slots=True)
class _Record:
    """Something that should hold one example or several, and where it was found."""

    where: str
    value: Any
    title: Any = ""
    error: _UnusableError | None = None


def examples_of(
    inputs: str | Path | Sequence[str | Path],
    *,
    split: str = "train",
    max_examples: int | None = None,
    strict: bool = False,
    on_reject: OnReject | None = None,
) -> Iterator[Example]:
    """The examples of files, folders, globs, addresses, `save_to_disk` folders and data sets on the Hub, in order.

    `max_examples` counts those that can be used, over all inputs.

    >>> next(examples_of("train-v2.0.json")).question                 # doctest: +SKIP
    'When did Beyonce start becoming popular?'
    """
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    files = list_files([str(one) for one in given], split)
    return read_examples(files, max_examples=max_examples, strict=strict, on_reject=on_reject)


def read_examples(
    files: Iterable[InputFile],
    *,
    max_examples: int | None = None,
    strict: bool = False,
    on_reject: OnReject | None = None,
    spool: str | None = None,
    limits: Limits | None = None,
) -> Iterator[Example]:
    """The examples of listed files. `spool`: where compressed tables are unpacked to."""
    limited = limits or Limits()

    def reject(file: str, where: str, why: _UnusableError, record: Any) -> None:
        kept = "" if record is None else json.dumps(_shortened(record), default=str)[:_KEPT_CHARS]
        found = Reject(file, where, why.reason, why.detail, kept)
        if strict:
            raise InputError(f"{file}: {where}: {why.detail} ({why.reason}). Without --strict it is left out.")
        if on_reject is not None:
            on_reject(found)

    found = (example for file in files for example in _of_file(file, reject, spool, limited))
    return itertools.islice(found, max_examples)


def _of_file(file: InputFile, reject: _Refuse, spool: str | None, limits: Limits) -> Iterator[Example]:
    for record in READERS[file.format](file, spool, limits.value_bytes):
        if record.error is not None:
            reject(file.path, record.where, record.error, record.value)
            continue
        for where, value in flat_records(record.where, record.value, record.title):
            try:
                yield _example(value, limits)
            except _UnusableError as why:
                reject(file.path, where, why, value)


def _shortened(value: Any) -> Any:
    """A record as it is kept: the begin of its texts and lists."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value[: _KEPT_CHARS // 4]]
    return value[:_KEPT_CHARS] if isinstance(value, str) else value


# ---- a record -> examples ----


def flat_records(where: str, value: Any, title: str) -> Iterator[tuple[str, Any]]:
    """The flat records in a record: itself, the questions of a paragraph, or those of an article's paragraphs."""
    if isinstance(value, dict) and isinstance(value.get("qas"), list):
        shared = {"context": value.get("context"), "title": value.get("title", title)}
        for number, qa in enumerate(value["qas"]):
            yield f"{where}.qas[{number}]", qa | shared if isinstance(qa, dict) else qa
    elif isinstance(value, dict) and isinstance(value.get("paragraphs"), list):
        for number, paragraph in enumerate(value["paragraphs"]):
            yield from flat_records(f"{where}.paragraphs[{number}]", paragraph, value.get("title", title))
    else:
        yield where, {"title": title} | value if isinstance(value, dict) else value


def _example(record: Any, limits: Limits) -> Example:
    if not isinstance(record, dict):
        raise _UnusableError("no_record", f"an object is wanted, not {_kind(record)}")
    _require_all_of_it(record, limits)
    number = record.get("id")
    given = {**record, "id": str(number) if isinstance(number, int) and not isinstance(number, bool) else number}
    for name in _NEEDED:
        if not isinstance(given.get(name), str):
            raise _UnusableError(f"no_{name}", f'"{name}" must be a text, not {_kind(given.get(name))}')
    if not given["context"].strip():
        raise _UnusableError("no_context", "the context is empty")
    title = given.get("title") if isinstance(given.get("title"), str) else ""
    answers = () if given.get("is_impossible") is True else tuple(_answers(given.get("answers")))
    made = Example(given["id"], given["question"], given["context"], answers, title or "")
    try:
        size = made.size_bytes
    except UnicodeEncodeError as error:
        # Half a pair of surrogates is no character: no tokenizer takes it, and no file.
        raise _UnusableError("not_unicode", f"a text that is not Unicode ({error.reason})") from None
    if (weight := limits.weigh(size, made)) > limits.room_bytes:
        raise limits.error(f'question "{made.id}" with its context and answers', size, weight)
    return made


def _require_all_of_it(record: dict[str, Any], limits: Limits) -> None:
    """Raises _UnusableError when a part was passed over as too large; answers may have it inside."""
    answers = record.get("answers")
    inside = answers if isinstance(answers, list) else [answers]
    for part in (record, *(one for one in inside if isinstance(one, dict))):
        for name, value in part.items():
            if isinstance(value, TooLarge) and name in _WANTED:
                question = f' of question "{record["id"]}"' if isinstance(record.get("id"), str | int) else ""
                raise limits.error(f'"{name}"{question}', value.bytes)


def _answers(given: Any) -> Iterator[Answer]:
    """HF's {"text": [...], "answer_start": [...]}, or SQuAD's [{"text", "answer_start"}, ...]; null: none."""
    if given is None:
        return
    if isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise _UnusableError("bad_answers", '"text" and "answer_start" must be lists of the same length')
        given = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list):
        raise _UnusableError("bad_answers", f'"answers" must be a list or an object, not {_kind(given)}')
    for answer in given:
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise _UnusableError("bad_answers", f"an answer must have text and answer_start, not {answer!r}"[:200])
        yield Answer(text, start)


def _kind(value: Any) -> str:
    names = {type(None): "nothing", str: "a text", dict: "an object", list: "a list", bool: "true or false"}
    return names.get(type(value), "a number")


# ---- JSON ----


class _Unpacked(io.RawIOBase):
    """The blocks of a file, as a stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        taken = min(len(buffer), len(self._rest))
        buffer[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        return taken


@contextmanager
def _open(file: InputFile) -> Iterator[io.BufferedReader]:
    with open_bytes(file.path) as raw:
        blocks = read_blocks(raw, file.compression, 1 << 18)
        lines = as_json_lines(blocks) if file.format == ARRAY else blocks
        yield io.BufferedReader(_Unpacked(lines), 1 << 18)


def _read_json(file: InputFile, spool: str | None, largest: int = LARGEST_VALUE) -> Iterator[_Record]:
    """One JSON text: SQuAD's, or one record after the other."""
    titles = _Titles(file, largest)
    try:
        with _open(file) as opened:
            stream = JsonStream(opened.read, largest, _WANTED)
            while stream.peek() != "":
                yield from _walk(stream, titles)
    except (JsonError, DamagedError) as error:
        raise InputError(f"{file.path}: not whole JSON ({error}). Get the file again.") from None


def _walk(stream: JsonStream, titles: _Titles) -> Iterator[_Record]:
    record = {}
    for key in stream.fields():
        if key == "data" and stream.peek() == "[":
            for number in stream.items():
                yield from _article(stream, number, titles)
        else:
            record[key] = stream.value()
    if any(name in record for name in ("context", "question", "qas", "paragraphs")):
        yield _Record("the only record", record)


def _article(stream: JsonStream, number: int, titles: _Titles) -> Iterator[_Record]:
    """The paragraphs of an article, one at a time; or a flat record."""
    where = f"data[{number}]"
    if stream.peek() != "{":
        yield _Record(where, stream.value())
        return
    record: dict[str, Any] = {}
    walked = False
    for key in stream.fields():
        if key == "paragraphs" and stream.peek() == "[":
            walked = True
            title = _title(record["title"]) if "title" in record else titles.of(number)
            for paragraph in stream.items():
                yield _Record(f"{where}.paragraphs[{paragraph}]", stream.value(), title)
        else:
            record[key] = stream.value()
    if not walked:
        yield _Record(where, record)


class _Titles:
    """Titles that come behind their paragraphs: a second reading of the file, which goes ahead by one article."""

    def __init__(self, file: InputFile, largest: int) -> None:
        self._titles = self._read(file, largest)
        self._next = 0

    def of(self, number: int) -> Any:
        title = ""
        while self._next <= number:
            title = next(self._titles)
            self._next += 1
        return title

    def _read(self, file: InputFile, largest: int) -> Iterator[Any]:
        with _open(file) as opened:
            stream = JsonStream(opened.read, largest)
            for key in stream.fields():
                if key != "data" or stream.peek() != "[":
                    stream.skip()
                    continue
                for _ in stream.items():
                    yield self._of_article(stream)

    def _of_article(self, stream: JsonStream) -> Any:
        title: Any = ""
        if stream.peek() != "{":
            stream.skip()
            return title
        for key in stream.fields():
            if key == "title":
                title = stream.value()
            else:
                stream.skip()
        return _title(title)


def _title(value: Any) -> Any:
    return value if isinstance(value, TooLarge) else str(value or "")


def _read_lines(file: InputFile, spool: str | None, largest: int = LARGEST_VALUE) -> Iterator[_Record]:
    """JSON lines, or the items of an array. One that is no JSON is told, and the next one read."""
    place = "[{}]".format if file.format == ARRAY else "line {}".format
    number = first = int(file.format != ARRAY)
    with _open(file) as opened:
        try:
            while line := opened.readline(largest):
                if len(line) == largest and not line.endswith(b"\n"):
                    yield _long_record(line, opened, place(number), largest)
                elif line.strip():
                    yield _parsed(line, place(number))
                number += 1
        except DamagedError as error:
            where = f"behind {place(number - 1)}" if number > first else "the beginning"
            yield _Record(where, None, error=_UnusableError(error.reason, str(error)))


class _Line:
    """A line whose begin was read already, as a stream."""

    def __init__(self, begin: bytes, opened: io.BufferedReader) -> None:
        self._begin, self._opened, self._ended = begin, opened, False

    def read(self, size: int) -> bytes:
        part, self._begin = self._begin, b""
        if not part and not self._ended:
            part = self._opened.readline(size)
            self._ended = not part or part.endswith(b"\n")
        return part


def _long_record(begin: bytes, opened: io.BufferedReader, where: str, largest: int) -> _Record:
    """The record in a line that is too long to be held, without what makes it so."""
    line = _Line(begin, opened)
    try:
        stream = JsonStream(line.read, largest, _WANTED)
        value, error = stream.value(), None
        stream.require_end()
    except JsonError as wrong:
        value, error = begin[:_KEPT_CHARS].decode("utf-8", "replace"), _UnusableError("bad_json", str(wrong))
    while line.read(BLOCK_BYTES):
        pass
    return _Record(where, value, error=error)


def _parsed(line: bytes, where: str) -> _Record:
    text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    try:
        return _Record(where, json.loads(text, strict=False))
    except (ValueError, RecursionError) as error:
        return _Record(where, text[:_KEPT_CHARS], error=_UnusableError("bad_json", str(error)))


# ---- tables ----


def _read_parquet(file: InputFile, spool: str | None, largest: int = LARGEST_VALUE) -> Iterator[_Record]:
    import pyarrow as pa

    from milldam.sources.tables import open_parquet, rows_at_a_time

    with open_parquet(file.path, file.compression, spool) as parquet:
        columns = _columns(parquet.schema_arrow.names, file.path)
        metadata = parquet.metadata
        row = 0
        try:
            for group in range(metadata.num_row_groups):
                rows = min(_ROWS, rows_at_a_time(metadata.row_group(group), ["context"]))
                for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    yield from table_records(batch, row, largest)
                    row += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise damaged(file.path, "parquet", error) from None


def _read_arrow(file: InputFile, spool: str | None, largest: int = LARGEST_VALUE) -> Iterator[_Record]:
    import pyarrow as pa

    from milldam.sources.tables import open_arrow

    with open_arrow(file.path, file.compression, spool) as reader:
        columns = _columns(reader.schema.names, file.path)
        count = getattr(reader, "num_record_batches", None)
        batches = iter(reader) if count is None else (reader.get_batch(number) for number in range(count))
        row = 0
        try:
            for batch in batches:
                wanted = batch.select(columns)
                wanted.validate(full=False)
                yield from table_records(wanted, row, largest)
                row += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise damaged(file.path, "Arrow", error) from None


def _columns(names: Sequence[str], path: str) -> list[str]:
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise InputError(
            f"{path}: no column {', '.join(missing)}; found {', '.join(names) or 'none'}. "
            "Wanted are id, context, question, answers and, if there are any, title and is_impossible."
        )
    return [name for name in _FIELDS if name in names]


def table_records(batch: Any, first: int, largest: int = LARGEST_VALUE) -> Iterator[_Record]:
    """Rows as objects, some megabytes at a time; those that could be large, one at a time."""
    step = max(1, min(_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, step):
        part = batch.slice(begin, step)
        try:
            values = part.to_pylist() if part.nbytes <= largest else None
        except UnicodeDecodeError:
            values = None
        if values is None:
            yield from (_row(part.slice(k, 1), first + begin + k, largest) for k in range(part.num_rows))
        else:
            yield from (_Record(f"row {first + begin + k}", value) for k, value in enumerate(values))


def _row(alone: Any, number: int, largest: int) -> _Record:
    try:
        value = {name: _cell(column, largest) for name, column in zip(alone.schema.names, alone.columns, strict=True)}
        return _Record(f"row {number}", value)
    except UnicodeDecodeError as error:
        why = _UnusableError("not_unicode", f"a text that is not UTF-8 ({error.reason})")
        return _Record(f"row {number}", None, error=why)


def _cell(column: Any, largest: int) -> Any:
    plain = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    return TooLarge(plain.nbytes) if plain.nbytes > largest else plain.to_pylist()[0]


def damaged(path: str, kind: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0][:160]
    return InputError(f"{path}: not a whole {kind} file ({reason}). Get or make it again.")


READERS: dict[str, Callable[..., Iterator[_Record]]] = {
    "json": _read_json,
    "jsonl": _read_lines,
    ARRAY: _read_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
