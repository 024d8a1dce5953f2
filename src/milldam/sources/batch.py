"""What flows from a source to a sink: batches of valid UTF-8 text; and, aside, the records that could not be read.

`Reading` is what every reader is told: the rules, who gets the rejects; and for rows which columns, who is told where
they come from, and what may be held.

Where the rows of a unit come from: the file of each, and its number there.

A reader says where a file begins and which records it leaves out; who works on the rows asks for the place of some.
What lies before the rows that are worked on is forgotten: it holds a mark for each file and each gap of about a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean, nearest
from milldam.text.arrays import Verdicts

if TYPE_CHECKING:
    from milldam.chat.reading import Sides
    from milldam.stores.tokens.format import Spans

Int64s = npt.NDArray[np.int64]


def _none() -> Int64s:
    return np.empty(0, np.int64)


KEPT_RECORD_CHARS = 65_536
MAX_DOCUMENT_BYTES = 32 << 20
TOO_LARGE = "too_large"
_NAMES_SHOWN, _PLACES_SHOWN = 20, 3


class Dropped(NamedTuple):
    """Documents of a batch that a step dropped."""

    stage: str
    reason: str
    rows: Int64s
    texts: pa.LargeStringArray
    """Of the batch as it was."""
    places: Int64s
    """Where they stood in it."""


@dataclass(slots=True)
class Batch:
    """The one thing that flows from a reader to a sink: documents of a unit in input order, with all that is known of
    them so far. A reader of texts sets the first four fields, who reads a unit the next ones, steps the rest."""

    texts: pa.LargeStringArray
    """Of conversations one for each, the sides of a pair end to end."""
    pieces: Iterator[tuple[str, int]] | None = None
    """The batch is one document larger than a document may be, a text file; its whole text, piece by piece, each with
    the input bytes that it took. `texts` holds the beginning of it at most."""
    bytes_read: int = 0
    """Input bytes consumed since the batch before, for progress."""
    columns: pa.RecordBatch | None = None
    """The fields that `Reading.keep` asks for, a row for each text; None where there are none."""

    rows: Int64s = field(default_factory=_none)
    """Where each document stands among the readable ones of its unit, from 0: (unit, row) names it in every pass."""
    number: int = 0
    """Which batch of the unit it is, from 1."""
    verdicts: Verdicts | None = None
    """What cleaning decided, and what is empty: dropped by the first step."""
    rejects: list[Reject] = field(default_factory=list)
    """Records on the way to it that could not be read."""
    marks: tuple[Mark, ...] = ()
    """Which file each row is from, and its number there."""
    sides: Sides | None = None
    """Of conversations: what is trained on."""
    prompts: pa.LargeStringArray | None = None
    """Of conversations: what was asked, where something goes by it."""
    counts: Counter[str] = field(default_factory=Counter)
    """What is told of conversations."""

    ids: npt.NDArray[Any] | None = None
    """The tokens of all documents, end to end; a pair is two documents."""
    lengths: Int64s = field(default_factory=_none)
    spans: Spans | None = None
    """Which tokens are trained on; None: all."""
    splits: Int64s = field(default_factory=_none)
    """The number of each document's split."""
    facts: npt.NDArray[Any] | None = None
    """What shards, splits and limits need to know of each document (judging.FACTS)."""
    text_size: tuple[int, int] | None = None
    """Bytes and characters of a document in pieces."""
    dropped: list[Dropped] = field(default_factory=list)

    def narrow(self, verdicts: Verdicts, stage: str) -> Batch:
        """Only the documents that are kept, in every field; the others are noted with their reasons."""
        for code, reason in enumerate(verdicts.reasons, start=1):
            places = np.flatnonzero(verdicts.codes == code)
            if len(places):
                self.dropped.append(Dropped(stage, reason, self.rows[places], self.texts, places))
        return self.only(verdicts.keep)

    def only(self, keep: npt.NDArray[np.bool_]) -> Batch:
        """The documents of a mask, in every field."""
        if keep.all():
            return self
        mask = pa.array(keep)
        self.texts, self.rows = self.texts.filter(mask), self.rows[keep]
        self.columns = None if self.columns is None else self.columns.filter(mask)
        self.prompts = None if self.prompts is None else self.prompts.filter(mask)
        self.verdicts = None if self.verdicts is None else self.verdicts.only(keep)
        documents = keep
        if self.sides is not None:
            documents, self.sides = np.repeat(keep, self.sides.count), self.sides.only(keep)
        if self.ids is not None:
            self.ids, self.lengths = self.ids[np.repeat(documents, self.lengths)], self.lengths[documents]
            self.spans = None if self.spans is None else self.spans.only(documents)
        if self.facts is not None:
            self.splits, self.facts = self.splits[documents], self.facts[documents]
        return self

    @property
    def first_row(self) -> int:
        return int(self.rows[0]) if len(self.rows) else 0


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that could not be read, with enough to find and mend it."""

    file: str
    reason: str
    detail: str
    record: str = ""
    line: int | None = None
    """Line counted from byte `origin` of the file, from 1."""
    origin: int = 0
    row: int | None = None
    """Row of a parquet or Arrow file, or item of a JSON array, from 0; users are told it from 1, as lines."""
    records: int = 1
    """How many records are lost with it: none where a file is damaged between two."""
    damaged: bool = False
    """The file is damaged; what follows is not read."""

    @property
    def place(self) -> str:
        """For a message.

        >>> Reject("a.jsonl", "bad_json", "cut off", line=3).place
        'a.jsonl: line 3'
        """
        number = f": line {self.line}" if self.line is not None else "" if self.row is None else f": row {self.row + 1}"
        return self.file + number + (f" (counted from byte {self.origin:,})" if self.origin else "")

    def as_json(self) -> dict[str, Any]:
        place = {"line": self.line} if self.line is not None else {} if self.row is None else {"row": self.row + 1}
        value = {"file": self.file, **place, "reason": self.reason, "detail": self.detail}
        value["record"] = self.record[:KEPT_RECORD_CHARS]
        if len(self.record) > KEPT_RECORD_CHARS:
            value["record_truncated"] = True
        if self.damaged:
            value["records"] = self.records
        return value | ({"origin": self.origin} if self.origin else {})


OnReject = Callable[[Reject], None]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How to find the documents in a file, and what to do with bytes that are not UTF-8."""

    documents: str = "file"
    """In .txt files: a document per "file", "line" or "paragraph", or cut at `separator`."""
    separator: str | None = None
    text_column: str | None = None
    """The field that holds the text; dots for nested fields. None: the one obvious candidate."""
    invalid_utf8: str = "reject"
    """"reject" the record, "replace" the bytes by U+FFFD, "drop" them (see decoding.py), or stop ("strict")."""
    strict: bool = False
    """Stop at the first record that can't be read."""
    only_file: bool = False
    """There is no other input: a damaged table is an error, not set aside."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """A larger record is rejected: only a text file that is one document may be of any size."""


class MalformedError(Exception):
    """A record that holds no usable document."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def too_large(size: int, rules: TextRules) -> str:
    return f"{size:,} bytes; the limit is {rules.max_document_bytes:,} (max_document_bytes)"


def no_such_column(path: str, wanted: str, there: Iterable[str], setting: str = "text_column") -> InputError:
    """The error for a text column that a file does not have."""
    near = nearest(wanted, there)
    advice = "Did you mean " if near is not None else "Choose one with "
    return InputError(
        f'{path}: no text in a field "{wanted}"; found text in {listed_names(there)}. {advice}',
        Setting(setting, near),
        "?" if near is not None else ".",
    )


def listed_names(names: Iterable[str]) -> str:
    """
    >>> listed_names(["id", "title"])
    '"id", "title"'
    """
    found = list(names)
    more = f" and {len(found) - _NAMES_SHOWN:,} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(f'"{name}"' for name in found[:_NAMES_SHOWN]) + more or "none"


def require_columns(columns: Iterable[str] | None, there: list[str], path: str) -> None:
    """Raise InputError for a column of rows that is not there."""
    missing = next((name for name in columns or () if name not in there), None)
    if missing is not None:
        found = ", ".join(f'"{name}"' for name in there) or "none"
        raise InputError(f'{path}: no column "{missing}"; found {found}.{did_you_mean(missing, there)} Set columns.')


# ---- where the rows of a unit come from ----


@dataclass(frozen=True, slots=True)
class Place:
    """A run of rows of one file."""

    file: str
    first: int
    """Its number in the file, from 0 (users are told it from 1); records that could not be read are counted too."""
    last: int
    origin: int = 0
    """Rows are counted from this byte of the file: a piece of a large file, before which nothing was read."""

    def __str__(self) -> str:
        """
        >>> print(Place("a.jsonl", 3, 3), Place("a.jsonl", 0, 9, 64), sep="; ")
        row 4 of a.jsonl; rows 1 to 10 of a.jsonl, counted from byte 64
        """
        first, last = self.first + 1, self.last + 1
        rows = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        return f"{rows} of {self.file}" + (f", counted from byte {self.origin:,}" if self.origin else "")


@dataclass(frozen=True, slots=True)
class Mark:
    at: int
    """From this row of the unit on."""
    file: str
    row: int
    origin: int = 0

    def row_at(self, at: int) -> int:
        """The number in the file of a row of the unit, no mark between."""
        return self.row + at - self.at


@dataclass(slots=True)
class Places:
    """Of one unit, while it is read."""

    before: int = 0
    """Rows that are read and passed over before the unit begins."""
    lines: bool = False
    """Blank lines count: numbers of rows are those of lines."""
    _marks: list[Mark] = field(default_factory=list)
    _read: int = 0

    def begin(self, file: str, row: int = 0, origin: int = 0, ahead: int = 0) -> None:
        """The next row to come, or the one `ahead` of it, is this one of this file. `origin`: the byte from which its
        rows are counted."""
        at, last = self._read + ahead, self._marks[-1] if self._marks else None
        if last is None or (last.file, last.row_at(at), last.origin) != (file, row, origin):
            self._marks.append(Mark(at, file, row, origin))

    def skip(self, ahead: int) -> None:
        """A record is left out, behind `ahead` more rows."""
        if self._marks:
            at, last = self._read + ahead, self._marks[-1]
            self._marks.append(Mark(at, last.file, last.row_at(at) + 1, last.origin))

    def count(self, rows: int) -> None:
        """So many rows came."""
        self._read += rows

    def forget(self, begin: int) -> None:
        """No row before this one of the unit will be asked for."""
        first = bisect_right(self._marks, begin + self.before, key=lambda mark: mark.at) - 1
        del self._marks[: max(0, first)]

    def passed(self, rows: int) -> tuple[Mark, ...]:
        """So many rows came: their marks, for who asks for places later than they are read."""
        end = self._read + max(1, rows)
        self.forget(self._read - self.before)
        self._read += rows
        return tuple(mark for mark in self._marks if mark.at < end)

    def of(self, begin: int, end: int) -> list[Place]:
        """The places of rows `begin` to `end` of the unit; none where its reader does not say."""
        begin, end = begin + self.before, end + self.before
        stops = [mark.at for mark in self._marks[1:]] + [end]
        found: list[Place] = []
        for mark, stop in zip(self._marks, stops, strict=False):
            first, last = max(begin, mark.at), min(end, stop)
            if first < last:
                found.append(Place(mark.file, mark.row_at(first), mark.row_at(last - 1), mark.origin))
        return found


def shown(places: list[Place]) -> str:
    """For a message: rows of one file together, and the first few files.

    >>> shown([Place("a", 5, 6), Place("a", 8, 9), Place("b", 0, 3)])
    'rows 6 to 10 of a; rows 1 to 4 of b'
    """
    joined: list[Place] = []
    for place in places:
        if joined and (joined[-1].file, joined[-1].origin) == (place.file, place.origin):
            joined[-1] = Place(place.file, joined[-1].first, place.last, place.origin)
        else:
            joined.append(place)
    more = f"; and of further files: {len(joined) - _PLACES_SHOWN}" if len(joined) > _PLACES_SHOWN else ""
    return "; ".join(map(str, joined[:_PLACES_SHOWN])) + more


# ---- what every reader is told ----


@dataclass(frozen=True, slots=True)
class Reading:
    """How slices are read."""

    rules: TextRules
    on_reject: OnReject
    spool: str | None = None
    """A folder for what must go through the disk."""
    columns: tuple[str, ...] | None = None
    """Of rows: those that are wanted; None: all."""
    places: Places = field(default_factory=Places)
    """Is told where rows come from."""
    name: Callable[[str], str] = str
    """Path -> what the file is called in rows and messages."""
    keep: tuple[str, ...] = ()
    """Fields that are read beside texts, dots for nested ones; null where a record has none. They change neither the
    texts nor how these are cut into batches."""

    def reject(self, reject: Reject, ahead: int | None = None) -> None:
        """Set a record aside, or end the run where the user asked for that.

        `ahead`: it would have been a row, behind so many that are still to be counted.
        """
        reject, rules = replace(reject, file=self.name(reject.file)), self.rules
        if rules.strict or (rules.invalid_utf8 == "strict" and reject.reason == "not_utf8"):
            number = reject.as_json().get("row", reject.line)
            place = reject.file if number is None else f"{reject.file}:{number}"
            if reject.origin:
                place += f" (counted from byte {reject.origin:,})"
            setting = Setting("strict", True) if rules.strict else Setting("invalid_utf8", "strict")
            said = f"{place}: {reject.reason}: {reject.detail}\nLeave out "
            raise InputError(said, setting, " to set such records aside.")
        self.on_reject(reject)
        if ahead is not None:
            self.places.skip(ahead)
