"""What flows from a source to a sink: batches of valid UTF-8 text; and, aside, the records that could not be read.

`Reading` is what every reader gets: the rules, who takes the rejects, and which columns are wanted. Every row carries
its origin: the file of the unit and its number there.
"""

from __future__ import annotations

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
NUMBER_BITS = 40
"""A unit has fewer files than 2**23, and a file fewer records than 2**40."""
_NAMES_SHOWN = 20


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
    origins: Int64s | None = None
    """Of each text: number of its slice in the unit << `NUMBER_BITS` | its number in that slice, from 0; records that
    could not be read are counted too. A reader sets the numbers, or nothing where it rejects none."""

    rows: Int64s = field(default_factory=_none)
    """Where each document stands among the readable ones of its unit, from 0: (unit, row) names it in every pass."""
    number: int = 0
    """Which batch of the unit it is, from 1."""
    verdicts: Verdicts | None = None
    """What cleaning decided, and what is empty: dropped by the first step."""
    rejects: list[Reject] = field(default_factory=list)
    """Records on the way to it that could not be read."""
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
        self.origins = None if self.origins is None else self.origins[keep]
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
    """Line from 1, counted from byte `origin` of the file."""
    origin: int = 0
    row: int | None = None
    """Row of a table, or item of a JSON array, from 0; users are told it from 1, as lines."""
    damaged: bool = False
    """The file is damaged: what follows is not read."""

    @property
    def place(self) -> str:
        """For a message.

        >>> Reject("a.jsonl", "bad_json", "cut off", line=3).place
        'a.jsonl:3'
        """
        number = self.line if self.row is None else self.row + 1
        place = self.file if number is None else f"{self.file}:{number}"
        return place + (f" (counted from byte {self.origin:,})" if self.origin else "")

    def as_json(self) -> dict[str, Any]:
        place = {"line": self.line} if self.line is not None else {} if self.row is None else {"row": self.row + 1}
        value = {"file": self.file, **place, "reason": self.reason, "detail": self.detail}
        value["record"] = self.record[:KEPT_RECORD_CHARS]
        more = {"record_truncated": len(self.record) > KEPT_RECORD_CHARS, "damaged": self.damaged}
        return (
            value
            | {name: True for name, there in more.items() if there}
            | ({"origin": self.origin} if self.origin else {})
        )


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
    """"reject" the record, "replace" the bytes by U+FFFD, or "drop" them (see decoding.py)."""
    strict: bool = False
    """Stop at the first record that can't be read."""
    only_file: bool = False
    """There is no other input: a damaged table is an error, not set aside."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """A larger record is rejected: only a text file that is one document may be of any size."""

    @property
    def one_document(self) -> bool:
        """Whether a .txt file is one document."""
        return self.separator is None and self.documents == "file"


def too_large(size: int, most: int) -> str:
    return f"{size:,} bytes; the limit is {most:,} (max_document_bytes)"


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
    found = [f'"{name}"' for name in names]
    more = f" and {len(found) - _NAMES_SHOWN:,} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(found[:_NAMES_SHOWN]) + more or "none"


def require_columns(columns: Iterable[str] | None, there: list[str], path: str) -> None:
    """Raise InputError for a column of rows that is not there."""
    for name in columns or ():
        if name not in there:
            hint = did_you_mean(name, there)
            raise InputError(f'{path}: no column "{name}"; found {listed_names(there)}.{hint} Set columns.')


@dataclass(frozen=True, slots=True)
class Reading:
    """How slices are read."""

    rules: TextRules
    on_reject: OnReject
    columns: tuple[str, ...] | None = None
    """Of rows: those that are wanted; None: all."""
    name: Callable[[str], str] = str
    """Path -> what the file is called in rows and messages."""
    keep: tuple[str, ...] = ()
    """Fields that are read beside texts, dots for nested ones; null where a record has none. They change neither the
    texts nor how these are cut into batches."""

    def reject(self, reject: Reject) -> None:
        """Set a record aside, or end the run where the user asked for that."""
        reject = replace(reject, file=self.name(reject.file))
        if self.rules.strict:
            message = f"{reject.place}: {reject.reason}: {reject.detail}\nLeave out "
            raise InputError(message, Setting("strict", True), " to set such records aside.")
        self.on_reject(reject)
