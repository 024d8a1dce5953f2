"""Files -> records that should hold examples: SQuAD's JSON as a stream; JSON lines, arrays and tables row by row.

Nothing is parsed whole: a paragraph with its questions, a line, or a few megabytes of rows are held. Of a record that
is larger than it may be, `TooLarge` stands for what makes it so.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import InputState, is_address, kind_of
from milldam.qa.json_stream import BLOCK_BYTES, LARGEST_VALUE, JsonError, JsonStream, TooLarge
from milldam.sources.batch import TOO_LARGE, MalformedError
from milldam.sources.compression import STDIN, DamagedError, compression_of, open_bytes, read_blocks
from milldam.sources.data_sets import parse_split, resolve_data_set
from milldam.sources.jsonl import json_blocks
from milldam.sources.units import InputFile, list_inputs, whole

SQUAD, ARRAY = "squad", "json"
"""What a .json file may hold: SQuAD's object, or a list of records."""
FIELDS = ("id", "title", "context", "question", "answers", "is_impossible")
WANTED = frozenset((*FIELDS, "paragraphs", "qas", "text", "answer_start"))
KEPT_CHARS = 4096
_FORMATS = ("json", "jsonl", "parquet", "arrow")
_TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_KNOWN = "Known are SQuAD's JSON, JSON lines, parquet and Arrow, each also as .gz, .zst, .bz2 or .xz."
_HEAD_BYTES = 1 << 18
_ROWS, _BATCH_BYTES = 1024, 4 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """Something that should hold one example or several, and where it was found."""

    where: str
    """line 7, row 7, or the path in the JSON: data[0].paragraphs[3]"""
    value: Any
    title: Any = ""
    error: MalformedError | None = None


# ---- which files ----


def list_files(inputs: Sequence[str], split: str = "train") -> Iterator[InputFile]:
    """The files behind each input, in the order given. Reads the head of each at most.

    A file is taken as it is named. Of a folder, of what `save_to_disk` wrote and of a dataset on the Hub, the files of
    the split are taken.
    """
    if parse_split(split).rows is not None:
        raise ConfigError(f'split "{split}": slices are not known here. Use max_examples for the first ones.')
    for given in inputs:
        if given == STDIN:
            raise InputError("Standard input can't be read for question answering: name a file.")
        named = os.path.isfile(given) or is_address(given) or (glob.has_magic(given) and not os.path.isdir(given))
        paths = (given,) if named else _of_split(given, split)
        yield from (_described(file) for file in list_inputs(paths, ARRAY))


def input_state(inputs: Sequence[str], split: str) -> dict[str, Any]:
    """Number, size and fingerprint of the files behind inputs, as they are now."""
    state = InputState()
    for file in list_files(inputs, split):
        state.add(file.path, file.size, file.version)
    return state.as_json()


def _of_split(given: str, split: str) -> tuple[str, ...]:
    files = resolve_data_set(given, split, None).inputs
    wanted = tuple(path for path in files if (kind_of(path) or ("",))[0] in _FORMATS)
    if not wanted:
        raise InputError(f"{given}: no input files in it. {_KNOWN}")
    return wanted


def _described(file: InputFile) -> InputFile:
    """With its format by the name; by the content where the name does not say."""
    named = kind_of(file.path)
    if named is not None and named[0] in _FORMATS[1:]:
        return replace(file, format=named[0])
    with open_bytes(file.path) as opened:
        head = opened.read(_HEAD_BYTES)
    compression = file.compression or compression_of(head)
    with suppress(DamagedError):
        head = next(read_blocks(io.BytesIO(head), compression, _HEAD_BYTES), b"")
    table = next((kind for magic, kind in _TABLES.items() if head.startswith(magic)), None)
    return replace(file, format=table or _json_kind(head, file.path), compression=compression)


def _json_kind(head: bytes, path: str) -> str:
    """JSON lines when the first line is a record by itself; else a list of records, or SQuAD's JSON."""
    text = head.decode("utf-8-sig", "replace").lstrip()
    if text[:1] not in ("{", "["):
        raise InputError(f"{path}: no examples of question answering in it. {_KNOWN}")
    if text.startswith("["):
        return ARRAY
    try:
        first = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return SQUAD
    return "jsonl" if isinstance(first, dict) and not isinstance(first.get("data"), list) else SQUAD


# ---- records of a file ----


def read_records(
    file: InputFile,
    *,
    columns: Sequence[str] = FIELDS,
    needed: Sequence[str] = ("id", "context", "question"),
    spool: str | None = None,
    largest: int = LARGEST_VALUE,
) -> Iterator[Record]:
    """The records of a listed file. Of tables, these columns.

    `spool`: where compressed tables are unpacked to. `largest`: bytes of a value that is held.
    """
    if file.format == SQUAD:
        return _read_squad(file, largest)
    if file.format in ("jsonl", ARRAY):
        return _read_lines(file, largest)
    return _read_table(file, columns, needed, spool, largest)


def flat_records(where: str, value: Any, title: Any = "") -> Iterator[tuple[str, Any]]:
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


def _read_of(blocks: Iterator[bytes]) -> Callable[[int], bytes]:
    """`read(size)` over blocks: at least so many bytes, fewer at the end."""

    def read(size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0 and (block := next(blocks, None)) is not None:
            parts.append(block)
            size -= len(block)
        return b"".join(parts)

    return read


# ---- SQuAD's JSON ----


@contextmanager
def _walking(file: InputFile, largest: int) -> Iterator[JsonStream]:
    with open_bytes(file.path) as opened:
        yield JsonStream(_read_of(read_blocks(opened, file.compression, BLOCK_BYTES)), largest, WANTED)


def _read_squad(file: InputFile, largest: int) -> Iterator[Record]:
    """One JSON text: SQuAD's, or one record after the other."""
    try:
        with _walking(file, largest) as stream:
            titles = enumerate(_titles(file, largest))
            while stream.peek() != "":
                yield from _read_object(stream, titles)
    except (JsonError, DamagedError) as error:
        raise InputError(f"{file.path}: not whole JSON ({error}). Get the file again.") from None


def _read_object(stream: JsonStream, titles: Iterator[tuple[int, Any]]) -> Iterator[Record]:
    record = {}
    for key in stream.fields():
        if key == "data" and stream.peek() == "[":
            for number in stream.items():
                yield from _read_article(stream, number, titles)
        else:
            record[key] = stream.value()
    if any(name in record for name in ("context", "question", "qas", "paragraphs")):
        yield Record("the only record", record)


def _read_article(stream: JsonStream, number: int, titles: Iterator[tuple[int, Any]]) -> Iterator[Record]:
    """The paragraphs of an article, one at a time; or a flat record."""
    where = f"data[{number}]"
    if stream.peek() != "{":
        yield Record(where, stream.value())
        return
    record: dict[str, Any] = {}
    walked = False
    for key in stream.fields():
        if key == "paragraphs" and stream.peek() == "[":
            walked = True
            if "title" not in record:
                record["title"] = next(title for at, title in titles if at == number)
            for paragraph in stream.items():
                yield Record(f"{where}.paragraphs[{paragraph}]", stream.value(), _title(record["title"]))
        else:
            record[key] = stream.value()
    if not walked:
        yield Record(where, record)


def _titles(file: InputFile, largest: int) -> Iterator[Any]:
    """The title of each article: for those that come behind their paragraphs, a second reading of the file."""
    with _walking(file, largest) as stream:
        for key in stream.fields():
            if key != "data" or stream.peek() != "[":
                stream.skip()
                continue
            for _ in stream.items():
                title: Any = ""
                if stream.peek() != "{":
                    stream.skip()
                else:
                    for field in stream.fields():
                        if field == "title":
                            title = stream.value()
                        else:
                            stream.skip()
                yield title


def _title(value: Any) -> Any:
    return value if isinstance(value, TooLarge) else str(value or "")


# ---- JSON lines, and the items of a list ----


def _read_lines(file: InputFile, largest: int) -> Iterator[Record]:
    """One that is no JSON is told, and the next one read."""
    behind = "the beginning"
    with open_bytes(file.path) as opened:
        blocks = json_blocks(opened, whole(file))
        try:
            for block in blocks:
                for number, line in enumerate(block.data.split(b"\n"), start=block.line):
                    if line.strip():
                        where = f"[{number - 1}]" if file.format == ARRAY else f"line {number}"
                        yield _parsed(line, where, largest, block.too_large)
                        behind = f"behind {where}"
                    if block.too_large:
                        break  # the head of one line
        except DamagedError as error:
            yield Record(behind, None, error=MalformedError(error.reason, str(error)))


def _parsed(line: bytes, where: str, largest: int, too_large: int) -> Record:
    """The record in a line; of one that is larger than it may be, without what makes it so."""
    kept = line[:KEPT_CHARS].decode("utf-8", "replace")
    if too_large:
        return Record(where, kept, error=MalformedError(TOO_LARGE, f"{too_large:,} bytes"))
    try:
        if len(line) <= largest:
            return Record(where, json.loads(line.decode("utf-8", "surrogateescape"), strict=False))
        stream = JsonStream(io.BytesIO(line).read, largest, WANTED)
        value = stream.value()
        stream.require_end()
        return Record(where, value)
    except (ValueError, RecursionError) as error:
        return Record(where, kept, error=MalformedError("bad_json", str(error)))


# ---- tables ----


def _read_table(
    file: InputFile, columns: Sequence[str], needed: Sequence[str], spool: str | None, largest: int
) -> Iterator[Record]:
    from milldam.sources.tables import table_batches

    def choose(schema: Any) -> list[str]:
        missing = [name for name in needed if name not in schema.names]
        if missing:
            found = ", ".join(schema.names) or "none"
            raise InputError(
                f"{file.path}: no column {', '.join(missing)}; found {found}. Wanted are {', '.join(columns)}."
            )
        return [name for name in columns if name in schema.names]

    behind = "the beginning"
    try:
        for row, batch in table_batches(whole(file), choose, spool):
            yield from _rows(batch, row, largest)
            behind = f"behind row {row + batch.num_rows}"
    except DamagedError as error:
        yield Record(behind, None, error=MalformedError(error.reason, str(error)))


def _rows(batch: Any, first: int, largest: int) -> Iterator[Record]:
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
            yield from (Record(f"row {first + begin + k + 1}", value) for k, value in enumerate(values))


def _row(alone: Any, number: int, largest: int) -> Record:
    try:
        value = {name: _cell(column, largest) for name, column in zip(alone.schema.names, alone.columns, strict=True)}
        return Record(f"row {number + 1}", value)
    except UnicodeDecodeError as error:
        why = MalformedError("not_unicode", f"a text that is not UTF-8 ({error.reason})")
        return Record(f"row {number + 1}", None, error=why)


def _cell(column: Any, largest: int) -> Any:
    plain = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    return TooLarge(plain.nbytes) if plain.nbytes > largest else plain.to_pylist()[0]
