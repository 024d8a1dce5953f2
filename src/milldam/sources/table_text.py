"""CSV and TSV -> documents, as Python's csv module reads them: a field may hold line ends, blank lines are skipped.

A row with too few or too many fields is rejected with its line. Holds one batch; a giant record is read in parts
(giant_row.py). A field may have `_LARGEST_FIELD` characters, and a quote that is never closed ends there.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError
from milldam.sources.arrays import BATCH_BYTES, gathered, open_batches, require_array
from milldam.sources.batch import (
    KEPT_RECORD_CHARS,
    Batch,
    MalformedError,
    OnReject,
    Reject,
    TextRules,
    no_such_column,
    stop_or_reject,
)
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.decoding import HEAD_BYTES, decode_text
from milldam.sources.giant_row import GiantRow
from milldam.sources.lines import BOM, make_damage_reject
from milldam.sources.listing import InputFile
from milldam.sources.opening import open_bytes, open_head
from milldam.sources.records import BLOCK_BYTES, GIANT_BYTES
from milldam.sources.units import Slice, whole

_LARGEST_FIELD = 64 << 20
DELIMITERS = {"csv": ",", "tsv": "\t"}
_CSV_ERRORS = {
    "new-line character seen in unquoted field": "a carriage return (\\r) in a field without quotes",
}
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_ROW_BYTES = 100
_BETWEEN_QUOTES = re.compile(rb'[^"](?=[^"])')

csv.field_size_limit(_LARGEST_FIELD)

Positions = npt.NDArray[np.int64]


# ---- slices ----


def slice_csv(file: InputFile, shard_size: int) -> Iterator[Slice]:
    """Byte ranges that begin at records. A large file is read once for that, at the speed of the disk.

    A file with stray quotes can be read only from its start: it stays whole.
    """
    if file.compression is not None or file.size <= shard_size * 1.25:
        yield whole(file)
        return
    cuts = _find_cuts(file, shard_size)
    edges = [0, *cuts, None] if cuts is not None else [0, None]
    for start, stop in itertools.pairwise(edges):
        assert start is not None
        size = (file.size if stop is None else stop) - start
        yield Slice(file.path, file.format, None, start, stop, size)


def _find_cuts(file: InputFile, shard_size: int) -> list[int] | None:
    """Where to cut: the first record end after each `shard_size` bytes; None when quotes are not as they should be."""
    cuts: list[int] = []
    position, inside, wanted = 0, False, shard_size
    with open_bytes(file.path) as source:
        for lines in _stretches(read_blocks(source, None, BLOCK_BYTES)):
            array = np.frombuffer(lines, dtype=np.uint8)
            quotes = np.flatnonzero(array == _QUOTE)
            if not _well_placed(array, quotes, ord(DELIMITERS[file.format]), inside):
                return None
            ends = position + _record_ends(array, quotes, inside)
            after = ends[ends >= wanted]
            while len(after) and int(after[0]) < file.size:
                cuts.append(int(after[0]))
                wanted = cuts[-1] + shard_size
                after = after[after >= wanted]
            inside ^= bool(len(quotes) % 2)
            position += len(lines)
    return cuts


def _well_placed(array: npt.NDArray[np.uint8], quotes: Positions, delimiter: int, inside: bool) -> bool:
    """Whether every quote opens a field, closes one, or is doubled inside one."""
    padded = np.concatenate(([_NEWLINE], array, [_NEWLINE]))
    opening, closing = quotes[int(inside) :: 2], quotes[1 - int(inside) :: 2]
    edges = np.zeros(256, dtype=bool)
    edges[[delimiter, _NEWLINE, _RETURN, _QUOTE]] = True
    return bool(edges[padded[opening]].all() and edges[padded[closing + 2]].all())


def _record_ends(array: npt.NDArray[np.uint8], quotes: Positions, inside: bool) -> Positions:
    """Line ends outside of quotes: those with an even number of quotes before them."""
    newlines = np.flatnonzero(array == _NEWLINE)
    ends: Positions = newlines[(np.searchsorted(quotes, newlines) + inside) % 2 == 0] + 1
    return ends


def _stretches(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines as far as possible. A giant one is cut, but not beside a quote."""
    held = b""
    try:
        for block in blocks:
            held += block
            end = held.rfind(b"\n") + 1
            if not end and len(held) > GIANT_BYTES:
                cuts = _BETWEEN_QUOTES.search(held, len(held) // 2)
                end = cuts.end() if cuts is not None else 0
            if end:
                yield held[:end]
                held = held[end:]
    except DamagedError as error:
        error.cut = held or None
        raise
    if held:
        yield held


def _whole_lines(blocks: Iterator[bytes], path: str) -> Iterator[bytes]:
    held = b""
    for stretch in _stretches(blocks):
        held += stretch
        if held.endswith(b"\n"):
            yield held
            held = b""
        elif len(held) > _LARGEST_FIELD:
            raise InputError(
                f"{path}: a line of more than {_LARGEST_FIELD:,} bytes. Is it a {path.rsplit('.')[-1]} file?"
            )
    if held:
        yield held


# ---- rows ----


@dataclass(slots=True)
class _Gathered:
    """Texts on their way into a batch, with the line of each."""

    texts: list[str]
    lines: list[int]
    size: int = 0

    def add(self, text: str, line: int) -> None:
        self.texts.append(text)
        self.lines.append(line)
        self.size += len(text)


class _Lines:
    """Lines with their ends, for csv's reader; bytes that are no UTF-8 come as lone surrogates.

    When a record turns out to be giant, they end for that reader; `take_record` gives what was read of it, and `pieces`
    what follows.
    """

    def __init__(self, stretches: Iterator[bytes]) -> None:
        texts = codecs.iterdecode(stretches, "utf-8", "surrogateescape")
        first = next(texts, "").removeprefix("\ufeff")
        lines = (line for text in itertools.chain([first], texts) for line in io.StringIO(text, newline="\n"))
        self.pieces: Iterator[str] = lines
        """Lines; but a giant line in several."""
        self.count, self.ended, self.giant = 0, False, False
        self.begin_record()

    def begin_record(self) -> None:
        self._record: list[str] = []
        self._size, self._before = 0, self.count

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        piece = None if self.giant else next(self.pieces, None)
        if piece is None:
            self.ended = not self.giant
            raise StopIteration
        self.count += 1
        self._size += len(piece)
        if not self._record and piece in ("\n", "\r\n"):
            self.begin_record()
            return piece
        self._record.append(piece)
        # A piece that is no whole line has half as many bytes, and a character has four at most.
        self.giant = self._size > GIANT_BYTES // 8
        return next(self) if self.giant else piece

    def take_record(self) -> tuple[int, str]:
        """The line where the giant record begins, and its text so far."""
        text, self.count = "".join(self._record), self._before
        self.giant = False
        return self.count + 1, text

    def go_on_behind(self, row: GiantRow) -> None:
        self.count += row.line_ends
        self.pieces = itertools.chain(io.StringIO(row.rest, newline="\n"), self.pieces)
        self.begin_record()


def csv_head(path: str, compression: str | None, format: str) -> Iterator[list[str]]:
    """The first records, column names first: of standard input only what can be seen without using it up.

    Of a giant record, what its fields begin with.
    """
    delimiter, begun = DELIMITERS[format], False
    with open_head(path) as file, contextlib.suppress(DamagedError, MalformedError):
        lines = _Lines(_stretches(read_blocks(file, compression, BLOCK_BYTES)))
        while not lines.ended:
            for _, row, problem in csv_records(lines, delimiter):
                if lines.giant:
                    break
                lines.begin_record()
                if problem and not begun:
                    raise _unreadable_header(path, row[0], problem)
                begun = True
                if not problem:
                    yield row
            if lines.giant:
                giant = GiantRow(lines.take_record()[1], lines.pieces, delimiter)
                yield giant.heads()
                lines.go_on_behind(giant)


def _unreadable_header(path: str, record: str, problem: str) -> InputError:
    hint = " Do its lines end with it? Convert it: tr '\\r' '\\n' < OLD > NEW" if "\r" in record else ""
    return InputError(f"{path}: its first record, which names the columns, can't be read: {problem}.{hint}")


def csv_header(path: str, compression: str | None, format: str) -> list[str]:
    """The column names in the first record."""
    return next(csv_head(path, compression, format), [])


def read_csv(slice: Slice, rules: TextRules, on_reject: OnReject) -> Iterator[Batch]:
    assert rules.text_column is not None
    names = csv_header(slice.path, slice.compression, slice.format)
    if rules.text_column not in names:
        raise no_such_column(slice.path, rules.text_column, names)
    reader = _Reader(slice, rules, on_reject, names)
    with open_bytes(slice.path) as file:
        if slice.start:
            file.seek(slice.start)
        size = None if slice.stop is None else slice.stop - slice.start
        blocks = _limited(read_blocks(file, slice.compression, BLOCK_BYTES), size)
        try:
            yield from reader.read(_Lines(_stretches(blocks)))
        except DamagedError as error:
            yield from reader.flush()
            stop_or_reject(make_damage_reject(slice, error), rules, on_reject)


def text_lines(file: IO[bytes], compression: str | None, size: int | None, path: str) -> Iterator[str]:
    """Lines with their ends; bytes that are no UTF-8 come as lone surrogates."""
    first = True
    for block in _whole_lines(_limited(read_blocks(file, compression, BLOCK_BYTES), size), path):
        text = block.removeprefix(BOM if first else b"").decode("utf-8", "surrogateescape")
        first = False
        yield from io.StringIO(text, newline="\n")


def _limited(blocks: Iterator[bytes], size: int | None) -> Iterator[bytes]:
    for block in blocks:
        yield block if size is None else block[:size]
        if size is not None:
            size -= len(block)
            if size <= 0:
                return


class _Noted:
    """Lines, and what was taken of them for the record at hand: as much as a reject keeps."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self.taken = lines, ""

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.taken += line[: max(0, KEPT_RECORD_CHARS + 1 - len(self.taken))]
            yield line


def csv_records(lines: Iterator[str], delimiter: str, before: int = 0) -> Iterator[tuple[int, list[str], str]]:
    """(line, fields, what is wrong); a record that csv can't read is one field as it stands there.

    `before`: how many lines came before these.
    """
    noted = _Noted(lines)
    reader = csv.reader(noted, delimiter=delimiter)
    while True:
        line, noted.taken = before + reader.line_num + 1, ""
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield line, [noted.taken.rstrip("\r\n")], _CSV_ERRORS.get(str(error).split(" - ")[0], str(error))
            continue
        except DamagedError as error:
            if noted.taken or error.cut is not None:
                error.cut = noted.taken.encode("utf-8", "surrogateescape") + (error.cut or b"")
                error.line = line
            raise
        if row is None:
            return
        if row:
            yield line, row, ""


def row_problem(row: list[str], problem: str, width: int) -> str:
    """What is wrong with a record of a file whose header has `width` names; empty when nothing is."""
    return problem or ("" if len(row) == width else f"{len(row)} fields where the header has {width}")


def _skip_record(lines: _Lines, delimiter: str) -> None:
    next(csv_records(lines, delimiter), None)
    if lines.giant:
        row = GiantRow(lines.take_record()[1], lines.pieces, delimiter)
        row.heads()
        lines.go_on_behind(row)
    lines.begin_record()


class _Reader:
    def __init__(self, slice: Slice, rules: TextRules, on_reject: OnReject, names: list[str]) -> None:
        self._slice, self._rules, self._on_reject = slice, rules, on_reject
        self._width, self._column = len(names), names.index(str(rules.text_column))
        self._gathered = _Gathered([], [])

    def read(self, lines: _Lines) -> Iterator[Batch]:
        delimiter = DELIMITERS[self._slice.format]
        if self._slice.start == 0:
            _skip_record(lines, delimiter)
        while not lines.ended:
            yield from self._read_rows(csv_records(lines, delimiter, lines.count), lines)
            yield from self.flush()
            if lines.giant:
                yield from self._read_giant(lines, delimiter)

    def _read_rows(self, rows: Iterator[tuple[int, list[str], str]], lines: _Lines) -> Iterator[Batch]:
        """Rows up to the end, or to a giant one."""
        size = 0
        for line, row, problem in rows:
            if lines.giant:
                return
            lines.begin_record()
            wrong = row_problem(row, problem, self._width)
            if wrong:
                self._reject(line, "bad_row", wrong, DELIMITERS[self._slice.format].join(row))
            else:
                self._gathered.add(row[self._column], line)
            # A row counts for something even without text: neither texts nor rejects may pile up.
            size += sum(map(len, row)) + _ROW_BYTES
            if size >= BATCH_BYTES // 2:
                yield from self.flush()
                size = 0

    def _read_giant(self, lines: _Lines, delimiter: str) -> Iterator[Batch]:
        line, begin = lines.take_record()
        row = GiantRow(begin, lines.pieces, delimiter)
        try:
            yield from open_batches(self._text_of(row))
        except MalformedError as error:
            row.end()
            self._reject(line, error.reason, error.detail, begin[: KEPT_RECORD_CHARS + 1])
        except DamagedError as damage:
            damage.cut, damage.line = begin[:KEPT_RECORD_CHARS].encode("utf-8", "surrogateescape"), line
            raise
        lines.go_on_behind(row)

    def _text_of(self, row: GiantRow) -> Iterator[pa.LargeStringArray]:
        head: bytes | None = None
        for part in gathered(self._column_of(row)):
            raw = part.encode("utf-8", "surrogateescape")
            head = raw[:HEAD_BYTES] if head is None else head
            yield require_array(raw, self._rules, head)

    def _column_of(self, row: GiantRow) -> Iterator[str]:
        number, size = -1, 0
        for field, part in row.parts():
            number, size = field, size + len(part) if field == number else len(part)
            if size > _LARGEST_FIELD:
                raise MalformedError("bad_row", f"field larger than field limit ({_LARGEST_FIELD})")
            if field == self._column:
                yield part
        wrong = row_problem([""] * (number + 1), "", self._width)
        if wrong:
            raise MalformedError("bad_row", wrong)

    def flush(self) -> Iterator[Batch]:
        """What has been gathered, as a batch."""
        gathered, self._gathered = self._gathered, _Gathered([], [])
        try:
            texts = pa.array(gathered.texts, pa.large_string())
        except UnicodeEncodeError:
            checked = map(self._checked, gathered.texts, gathered.lines)
            texts = pa.array([text for text in checked if text is not None], pa.large_string())
        yield Batch(texts, bytes_read=gathered.size)

    def _checked(self, text: str, line: int) -> str | None:
        decoded, problem = decode_text(text.encode("utf-8", "surrogateescape"), self._rules)
        if decoded is None:
            self._reject(line, "not_utf8", problem, text)
        return decoded

    def _reject(self, line: int, reason: str, detail: str, record: str) -> None:
        shown = record.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        reject = Reject(self._slice.path, reason, detail, shown, line=line, origin=self._slice.start)
        stop_or_reject(reject, self._rules, self._on_reject)
