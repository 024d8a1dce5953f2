"""Files -> records that should hold examples: SQuAD's JSON article by article, all other formats by the readers that
every source uses.

SQuAD's file is one JSON object of any size; its articles are decoded one at a time. A large file is read through once
to cut it into runs of articles, so that several workers can share it. Holds an article.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import is_address, kind_of
from milldam.sources.batch import Reading, Reject, TextRules
from milldam.sources.compression import STDIN, DamagedError, compression_of, open_bytes, read_blocks
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import TABLES, columns_of, slice_file
from milldam.sources.rows import FileReader, Places
from milldam.sources.splits import parse_split
from milldam.sources.units import InputFile, Slice, list_inputs

SQUAD, ARRAY = "squad", "json"
"""What a .json file may hold: SQuAD's object, or a list of records."""
FIELDS = ("id", "title", "context", "question", "answers", "is_impossible")
PIECE_BYTES = 1_000_000
"""A unit of work: part of a file, or several small ones."""
LARGEST_RECORD = 16 << 20
"""Bytes of a line or row, and characters of an article."""
_BLOCK_BYTES = 1 << 18
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_FORMATS = ("json", "jsonl", "parquet", "arrow")
_KNOWN = "Known are SQuAD's JSON, JSON lines, parquet and Arrow, each also as .gz, .zst, .bz2 or .xz."


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
        if os.path.isfile(name) or is_address(name) or (glob.has_magic(name) and not os.path.isdir(name)):
            paths: tuple[str, ...] = (name,)
        else:
            resolved = resolve_data_set(name, split, None).inputs
            paths = tuple(path for path in resolved if (kind_of(path) or ("",))[0] in _FORMATS)
            if not paths:
                raise InputError(f"{name}: no input files in it. {_KNOWN}")
        yield from (_with_format(file) for file in list_inputs(paths, ARRAY))


def _with_format(file: InputFile) -> InputFile:
    """By the name, or by the content if the name does not say: JSON lines if the first line is a record."""
    kind = kind_of(file.path)
    if kind is not None and kind[0] in _FORMATS[1:]:
        return replace(file, format=kind[0])
    with open_bytes(file.path) as opened:
        head = opened.read(_BLOCK_BYTES)
    compression = file.compression or compression_of(head)
    with suppress(DamagedError):
        head = next(read_blocks(io.BytesIO(head), compression), b"")
    table = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    text = head.decode("utf-8-sig", "replace").lstrip()
    if table is None and text[:1] not in ("{", "["):
        raise InputError(f"{file.path}: no examples of question answering in it. {_KNOWN}")
    format = ARRAY if text.startswith("[") else SQUAD
    with suppress(ValueError, RecursionError):
        first = json.loads(text.partition("\n")[0])
        format = "jsonl" if isinstance(first, dict) and not isinstance(first.get("data"), list) else format
    return replace(file, format=table or format, compression=compression)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file; of SQuAD's, a run of articles."""

    slice: Slice
    article: int = 0
    """The number of the first article."""


def cut_file(file: InputFile) -> Iterator[Piece]:
    """The parts of a file that workers share."""
    if file.format != SQUAD:
        yield from (Piece(slice) for slice in slice_file(file, PIECE_BYTES, TextRules()))
        return
    if file.compression is not None or file.size <= PIECE_BYTES:
        yield Piece(Slice(file.path, SQUAD, file.compression, size=file.size, state=file.state))
        return

    def piece(first: int, begin: int, stop: int) -> Piece:
        return Piece(Slice(file.path, SQUAD, None, begin, stop, stop - begin, state=file.state), first)

    first = begin = stop = -1
    for number, start, end, _ in _articles(Piece(Slice(file.path, SQUAD, None))):
        if first >= 0 and stop - begin >= PIECE_BYTES:
            yield piece(first, begin, stop)
            first = -1
        if first < 0:
            first, begin = number, start
        stop = end
    if first >= 0:
        yield piece(first, begin, stop)


# ---- records of a piece ----


def read_records(
    piece: Piece, reading: Reading, needed: Sequence[str] = ("id", "context", "question")
) -> Iterator[tuple[Any, Reject, str]]:
    """(record, a reject of it without a reason, its path in SQuAD's JSON). `needed`: columns that a table must have."""
    slice = piece.slice
    if slice.format == SQUAD:
        for number, _, _, value in _articles(piece):
            yield value, Reject(slice.path, "", ""), f"data[{number}]"
        return
    columns = None
    if slice.format in TABLES:
        with suppress(DamagedError):  # the reader says what is wrong
            there = columns_of(slice)
            missing = ", ".join(name for name in needed if name not in there)
            if missing:
                found, wanted = ", ".join(there) or "none", ", ".join(FIELDS)
                raise InputError(f"{slice.path}: no column {missing}; found {found}. Wanted are {wanted}.")
            columns = tuple(name for name in FIELDS if name in there)
    rules = replace(reading.rules, max_document_bytes=LARGEST_RECORD)
    places, done = Places(), 0
    for rows in FileReader(rules, columns).rows([slice], reading.on_reject, places):
        lists = rows if isinstance(rows, dict) else rows.to_pydict()
        for values in zip(*lists.values(), strict=True):
            (place,) = places.of(done, done + 1)
            record = {name: value for name, value in zip(lists, values, strict=True) if value is not None}
            line, row = (place.first + 1, None) if slice.format == "jsonl" else (None, place.first)
            yield record, Reject(slice.path, "", "", line=line, row=row, origin=place.origin), ""
            done += 1
        places.forget(done)


def flat_records(value: Any, where: str = "", title: Any = "") -> Iterator[tuple[str, Any]]:
    """(path, flat record) of a record: itself, the questions of a paragraph, or those of an article's paragraphs."""
    if isinstance(value, dict) and isinstance(value.get("qas"), list):
        shared = {"context": value.get("context"), "title": value.get("title", title)}
        for number, qa in enumerate(value["qas"]):
            yield f"{where}.qas[{number}]", qa | shared if isinstance(qa, dict) else qa
    elif isinstance(value, dict) and isinstance(value.get("paragraphs"), list):
        for number, paragraph in enumerate(value["paragraphs"]):
            yield from flat_records(paragraph, f"{where}.paragraphs[{number}]", value.get("title", title))
    else:
        yield where, {"title": title} | value if isinstance(value, dict) else value


# ---- SQuAD's JSON: {"data": [{"title", "paragraphs": [...]}]}, or flat records in "data" ----


def _articles(piece: Piece) -> Iterator[tuple[int, int, int, Any]]:
    """(number, first byte, byte behind it, article)."""
    slice = piece.slice
    with open_bytes(slice.path) as file:
        if slice.stop is not None:
            file.seek(slice.start)
            part = _JsonText(slice.path, iter([file.read(slice.stop - slice.start)]))
            yield from _items(part, piece.article, slice.start)
            return
        text = _JsonText(slice.path, read_blocks(file, slice.compression))
        has_data = False
        text.take("{")
        while text.peek() not in ("}", ""):
            key = text.value("a key")
            text.take(":")
            if key == "data" and text.peek() == "[":
                has_data = True
                text.take("[")
                yield from _items(text, 0, 0)
                text.take("]")
            else:
                text.value(f'"{key}"')
            if text.peek() != "}":
                text.take(",")
        text.take("}")
        if not has_data or text.peek():
            raise InputError(f'{slice.path}: no JSON object with a list "data", as SQuAD files are. {_KNOWN}')


def _items(text: _JsonText, number: int, shift: int) -> Iterator[tuple[int, int, int, Any]]:
    """The items of an array, up to its closing bracket or the end of the text."""
    while text.peek() not in ("]", ""):
        begin = text.byte
        value = text.value(f"data[{number}]")
        yield number, shift + begin, shift + text.byte, value
        number += 1
        if text.peek() not in ("]", ""):
            text.take(",")


class _JsonText:
    """A JSON text of any size, read forward value by value. Bytes that are not UTF-8 become lone surrogates, so that
    whoever uses a text finds them."""

    def __init__(self, path: str, blocks: Iterator[bytes]) -> None:
        self._path, self._blocks = path, blocks
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder(strict=False)
        self._text, self._at, self._ended = "", 0, False
        self._counted = self._counted_at = 0
        if self.peek() == "\ufeff":
            self._at += 1

    @property
    def byte(self) -> int:
        """The position of the next character."""
        self._counted += len(self._text[self._counted_at : self._at].encode("utf-8", "surrogateescape"))
        self._counted_at = self._at
        return self._counted

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while (character := self._text[self._at : self._at + 1]) and character in " \n\t\r":
                self._at += 1
            if character or self._ended:
                return character
            self._more()

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise self._damaged(f'"{character}" expected')
        self._at += 1

    def value(self, what: str) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                value, stop = self._json.raw_decode(self._text, self._at)
                if self._ended or self._text[stop : stop + 1] not in ("", ".", "e", "E"):  # else a number may go on
                    self._at = stop
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended:
                    raise self._damaged(str(error)) from None
            if len(self._text) - self._at > LARGEST_RECORD:
                raise InputError(
                    f"{self._path}: {what} is not JSON or has more than {LARGEST_RECORD:,} characters, which is too "
                    "much to read at once. Repair or divide it."
                )
            self._more()

    def _more(self) -> None:
        """Read on, as much again as is held: a long value is not decoded more than twice over."""
        self._counted = self.byte
        parts, wanted = [], max(_BLOCK_BYTES, len(self._text) - self._at)
        try:
            while wanted > 0 and not self._ended:
                parts.append(next(self._blocks, b""))
                wanted -= len(parts[-1])
                self._ended = not parts[-1]
        except DamagedError as error:
            raise self._damaged(str(error)) from None
        self._text = self._text[self._at :] + self._bytes.decode(b"".join(parts), final=self._ended)
        self._at = self._counted_at = 0

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self._path}: not whole JSON ({what}, near byte {self._counted:,}). Get the file again.")
