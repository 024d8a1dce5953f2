"""Files -> records that should hold examples: SQuAD's JSON paragraph by paragraph, all other forms by the readers of
every source.

SQuAD's is one JSON object of any size. Its articles are decoded by the standard library, one at a time; an article that
is larger than `ARTICLE_BYTES` is walked through, paragraph by paragraph. A large file is read through once to cut it
into pieces that start at an article or a paragraph, so that several workers can share it. Holds an article.
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
from typing import IO, Any

from milldam.errors import ConfigError, InputError
from milldam.input_files import is_address, kind_of
from milldam.sources.batch import MalformedError, Places, Reading, Reject, TextRules
from milldam.sources.compression import STDIN, DamagedError, compression_of, open_bytes, read_blocks
from milldam.sources.data_sets import parse_split, resolve_data_set
from milldam.sources.reading import TABLES, FileReader, columns_of, slice_file
from milldam.sources.units import InputFile, Slice, list_inputs

SQUAD, ARRAY = "squad", "json"
"""What a .json file may hold: SQuAD's object, or a list of records."""
FIELDS = ("id", "title", "context", "question", "answers", "is_impossible")
PIECE_BYTES = 1_000_000
"""Of a file, or of several small ones, what is a unit of work."""
LARGEST_RECORD, ARTICLE_BYTES = 16 << 20, 2 << 20
"""Bytes of a paragraph, line or row, and of an article that is decoded as a whole."""
_BLOCK_BYTES = _HEAD_BYTES = 1 << 18
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_FORMATS = ("json", "jsonl", "parquet", "arrow")
_KNOWN = "Known are SQuAD's JSON, JSON lines, parquet and Arrow, each also as .gz, .zst, .bz2 or .xz."


# ---- which files ----


def list_files(inputs: Sequence[str], split: str = "train") -> Iterator[InputFile]:
    """The files behind each input, in the order given, with their formats. Reads the head of each at most.

    A file is taken as it is named. Of a folder, of what `save_to_disk` wrote and of a dataset on the Hub, the files of
    the split are taken.
    """
    if parse_split(split).rows is not None:
        raise ConfigError(f'split "{split}": slices are not known here. Use max_examples for the first ones.')
    for given in inputs:
        if given == STDIN:
            raise InputError("Standard input can't be read for question answering: name a file.")
        if os.path.isfile(given) or is_address(given) or (glob.has_magic(given) and not os.path.isdir(given)):
            paths: tuple[str, ...] = (given,)
        else:
            found = resolve_data_set(given, split, None).inputs
            paths = tuple(path for path in found if (kind_of(path) or ("",))[0] in _FORMATS)
            if not paths:
                raise InputError(f"{given}: no input files in it. {_KNOWN}")
        yield from (_with_format(file) for file in list_inputs(paths, ARRAY))


def _with_format(file: InputFile) -> InputFile:
    """By the name; by the content where the name does not say: JSON lines when the first line is a record."""
    named = kind_of(file.path)
    if named is not None and named[0] in _FORMATS[1:]:
        return replace(file, format=named[0])
    with open_bytes(file.path) as opened:
        head = opened.read(_HEAD_BYTES)
    compression = file.compression or compression_of(head)
    with suppress(DamagedError):
        head = next(read_blocks(io.BytesIO(head), compression, _HEAD_BYTES), b"")
    table = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    text = head.decode("utf-8-sig", "replace").lstrip()
    if table is None and text[:1] not in ("{", "["):
        raise InputError(f"{file.path}: no examples of question answering in it. {_KNOWN}")
    kind = ARRAY if text.startswith("[") else SQUAD
    with suppress(ValueError, RecursionError):
        first = json.loads(text.partition("\n")[0])
        kind = "jsonl" if isinstance(first, dict) and not isinstance(first.get("data"), list) else kind
    return replace(file, format=table or kind, compression=compression)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file; of SQuAD's, where in its articles it begins."""

    slice: Slice
    article: int = 0
    paragraph: int | None = None
    """None: it begins at an article."""
    title: str = ""
    """Of the article in which it begins at a paragraph."""


def cut_file(file: InputFile, rules: TextRules) -> Iterator[Piece]:
    """What workers can share of a file."""
    if file.format != SQUAD:
        yield from (Piece(slice.of_state(file.state)) for slice in slice_file(file, PIECE_BYTES, rules))
    elif file.compression is not None or file.size <= PIECE_BYTES:
        yield Piece(Slice(file.path, SQUAD, file.compression, size=file.size, state=file.state))
    else:
        yield from _cut_squad(file)


# ---- records of a piece ----


@dataclass(frozen=True, slots=True)
class Record:
    """Something that should hold one example or several, and where it was found."""

    value: Any
    place: Reject
    """A reject of it, without a reason."""
    where: str = ""
    """Its path in SQuAD's JSON: data[0].paragraphs[3]"""
    title: str = ""

    def rejected(self, inside: str, why: MalformedError, record: str = "") -> Reject:
        """`inside`: the path of the example in it."""
        where = f"{self.where}{inside}".removeprefix(".")
        detail = f"{where}: {why.detail}" if where else why.detail
        return replace(self.place, reason=why.reason, detail=detail, record=record)


def read_records(
    piece: Piece, reading: Reading, needed: Sequence[str] = ("id", "context", "question")
) -> Iterator[Record]:
    """The records of a piece; a table must have the columns `needed`."""
    if piece.slice.format == SQUAD:
        return _read_squad(piece)
    return _read_rows(piece.slice, reading, needed)


def _read_rows(slice: Slice, reading: Reading, needed: Sequence[str]) -> Iterator[Record]:
    columns = None
    if slice.format in TABLES:
        with suppress(DamagedError):  # whoever reads it says what is wrong
            there = columns_of(slice, reading.spool)
            missing = ", ".join(name for name in needed if name not in there)
            if missing:
                found, wanted = ", ".join(there) or "none", ", ".join(FIELDS)
                raise InputError(f"{slice.path}: no column {missing}; found {found}. Wanted are {wanted}.")
            columns = tuple(name for name in FIELDS if name in there)
    rules = replace(reading.rules, max_document_bytes=LARGEST_RECORD)
    places, done = Places(), 0
    for rows in FileReader(rules, columns, reading.spool or "").rows([slice], reading.on_reject, places):
        lists = rows if isinstance(rows, dict) else rows.to_pydict()
        for values in zip(*lists.values(), strict=True):
            (place,) = places.of(done, done + 1)
            record = {name: value for name, value in zip(lists, values, strict=True) if value is not None}
            line, row = (place.first + 1, None) if slice.format == "jsonl" else (None, place.first)
            yield Record(record, Reject(slice.path, "", "", line=line, row=row, origin=place.origin))
            done += 1
        places.forget(done)


def flat_records(value: Any, title: Any = "", where: str = "") -> Iterator[tuple[str, Any]]:
    """The flat records in a record: itself, the questions of a paragraph, or those of an article's paragraphs."""
    if isinstance(value, dict) and isinstance(value.get("qas"), list):
        shared = {"context": value.get("context"), "title": value.get("title", title)}
        for number, qa in enumerate(value["qas"]):
            yield f"{where}.qas[{number}]", qa | shared if isinstance(qa, dict) else qa
    elif isinstance(value, dict) and isinstance(value.get("paragraphs"), list):
        for number, paragraph in enumerate(value["paragraphs"]):
            yield from flat_records(paragraph, value.get("title", title), f"{where}.paragraphs[{number}]")
    else:
        yield where, {"title": title} | value if isinstance(value, dict) else value


# ---- SQuAD's JSON ----


@dataclass(frozen=True, slots=True)
class _Item:
    """An article, or a paragraph of one that is too large, and the bytes of the file that it is."""

    value: Any
    article: int
    paragraph: int | None
    title: str
    begin: int
    stop: int

    @property
    def where(self) -> str:
        return f"data[{self.article}]" + ("" if self.paragraph is None else f".paragraphs[{self.paragraph}]")


def _read_squad(piece: Piece) -> Iterator[Record]:
    for item in _piece_items(piece) if piece.slice.start else _squad_items(piece.slice):
        yield Record(item.value, Reject(piece.slice.path, "", ""), item.where, item.title)


def _cut_squad(file: InputFile) -> Iterator[Piece]:
    """Runs of articles, or of paragraphs of one article, of about `PIECE_BYTES`; reads the file once."""
    first = last = None
    for item in _squad_items(Slice(file.path, SQUAD, None)):
        if first is not None and last is not None:
            same = item.paragraph is first.paragraph is None or (
                item.paragraph is not None and first.paragraph is not None and item.article == first.article
            )
            if not same or last.stop - first.begin >= PIECE_BYTES:
                yield _piece(file, first, last)
                first = None
        first, last = first or item, item
    if first is not None and last is not None:
        yield _piece(file, first, last)


def _piece(file: InputFile, first: _Item, last: _Item) -> Piece:
    size = last.stop - first.begin
    slice = Slice(file.path, SQUAD, None, first.begin, last.stop, size, state=file.state)
    return Piece(slice, first.article, first.paragraph, first.title)


def _squad_items(slice: Slice) -> Iterator[_Item]:
    """Those of a whole file: `{"data": [{"title", "paragraphs": [...]}]}`, or flat records in `data`."""
    with open_bytes(slice.path) as file:
        walk = _Walk(slice.path, read_blocks(file, slice.compression, _BLOCK_BYTES))
        has_data = False
        for key in walk.fields():
            if key != "data" or walk.peek() != "[":
                walk.value(f'"{key}"')
                continue
            has_data = True
            for number in walk.items():
                begin = walk.byte
                article = walk.value(f"data[{number}]", ARTICLE_BYTES)
                if article is _TOO_LARGE:
                    yield from _paragraphs(walk, number)
                else:
                    yield _Item(article, number, None, "", begin, walk.byte)
        if not has_data or walk.peek():
            raise InputError(f'{slice.path}: no JSON object with a list "data", as SQuAD files are. {_KNOWN}')


def _paragraphs(walk: _Walk, article: int) -> Iterator[_Item]:
    """Of a large article; its title is known when it stands in front of them."""
    title = ""
    for key in walk.fields():
        if key == "paragraphs" and walk.peek() == "[":
            for number in walk.items():
                begin = walk.byte
                value = walk.value(f"data[{article}].paragraphs[{number}]")
                yield _Item(value, article, number, title, begin, walk.byte)
        else:
            value = walk.value(f'data[{article}], "{key}"')
            title = str(value or "") if key == "title" else title


def _piece_items(piece: Piece) -> Iterator[_Item]:
    slice, article, paragraph = piece.slice, piece.article, piece.paragraph
    assert slice.stop is not None
    with open_bytes(slice.path) as file:
        file.seek(slice.start)
        walk = _Walk(slice.path, _blocks_of(file, slice.stop - slice.start))
        while walk.peek():
            begin = walk.byte
            value = walk.value(f"what begins at byte {slice.start + begin:,}")
            yield _Item(value, article, paragraph, piece.title, begin, walk.byte)
            article, paragraph = (article + 1, None) if paragraph is None else (article, paragraph + 1)
            if walk.peek():
                walk.take(",")


def _blocks_of(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        size -= len(block)
        yield block


_TOO_LARGE = object()
_WHITE = " \n\t\r"
_GOES_ON = ("", ".", "e", "E")
"""What may follow the digits of a number that is cut off."""


class _Walk:
    """A JSON text of any size, read forward: what encloses values is walked through, values are decoded.

    `items` and `fields` walk through an array and an object; the value at hand must be read or walked through before
    the next one is asked for. Bytes that are no UTF-8 become lone surrogates, so that whoever uses a text finds them.
    """

    def __init__(self, path: str, blocks: Iterator[bytes]) -> None:
        self._path, self._blocks = path, blocks
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder(strict=False)
        self._text, self._at, self._ended = "", 0, False
        self._counted, self._counted_at = 0, 0
        if self.peek() == "\ufeff":
            self._at += 1

    @property
    def byte(self) -> int:
        """Where the next character is that is no white space."""
        self.peek()
        self._counted += len(self._text[self._counted_at : self._at].encode("utf-8", "surrogateescape"))
        self._counted_at = self._at
        return self._counted

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while (character := self._text[self._at : self._at + 1]) and character in _WHITE:
                self._at += 1
            if character or self._ended:
                return character
            self._more()

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise self._wrong(f'"{character}" expected')
        self._at += 1

    def items(self) -> Iterator[int]:
        """The number of each item, when it is its turn."""
        yield from self._members("[", "]")

    def fields(self) -> Iterator[str]:
        """Each key, when its value is the next to be read."""
        for _ in self._members("{", "}"):
            key = self.value("a key")
            self.take(":")
            yield str(key)

    def _members(self, opening: str, closing: str) -> Iterator[int]:
        self.take(opening)
        number = 0
        while self.peek() != closing:
            if number:
                self.take(",")
            yield number
            number += 1
        self.take(closing)

    def value(self, what: str, most: int | None = None) -> Any:
        """The next value, whole. `most`: `_TOO_LARGE` for one of more characters, which is still the next one."""
        self.peek()
        while True:
            try:
                value, stop = self._json.raw_decode(self._text, self._at)
                if self._ended or self._text[stop : stop + 1] not in _GOES_ON:
                    self._at = stop
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended:
                    raise self._wrong(str(error)) from None
            if len(self._text) - self._at > (most or LARGEST_RECORD):
                if most is not None:
                    return _TOO_LARGE
                raise InputError(
                    f"{self._path}: {what} is no JSON, or of more than {LARGEST_RECORD:,} characters, which is too "
                    "much to be read at once. Mend or divide it."
                )
            self._more()

    def _more(self) -> None:
        """Read on, as much again as is held: a long value is not decoded more than twice over."""
        self._counted += len(self._text[self._counted_at : self._at].encode("utf-8", "surrogateescape"))
        parts, wanted = [], max(_BLOCK_BYTES, len(self._text) - self._at)
        try:
            while wanted > 0 and not self._ended:
                parts.append(next(self._blocks, b""))
                wanted -= len(parts[-1])
                self._ended = not parts[-1]
        except DamagedError as error:
            raise self._wrong(str(error)) from None
        self._text = self._text[self._at :] + self._bytes.decode(b"".join(parts), final=self._ended)
        self._at = self._counted_at = 0

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self._path}: not whole JSON ({what}, near byte {self._counted:,}). Get the file again.")
