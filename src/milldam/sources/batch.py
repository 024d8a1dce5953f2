"""What flows out of a source: batches of valid UTF-8 text; and, aside, the records that could not be read.

`Reading` is what every reader is told: the rules, who gets the rejects; and for rows which columns, who is told where
they come from, and what may be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from milldam.errors import InputError, Setting, did_you_mean, nearest
from milldam.sources.rows import Places, Room
from milldam.sources.values import Floats, ValueField

KEPT_RECORD_CHARS = 65_536
_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents in input order."""

    texts: pa.LargeStringArray
    open: bool = False
    """The batch is one text, and its document goes on in the next batch."""
    cancel: bool = False
    """Forget the document that is open: the rest of it could not be read."""
    bytes_read: int = 0
    """Input bytes consumed since the batch before, for progress."""
    values: Floats | None = None
    """Where a field is asked for, its number for each text; of a document that comes in batches, with the last one."""


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
    """Row of a parquet or Arrow file, or item of a JSON array, from 0."""
    records: int = 1
    """How many records are lost with it: none where a file is damaged between two."""
    unproven_bytes: int | None = None
    """Of a damaged file alone: how many bytes were read from it that no checksum proves."""

    def as_json(self) -> dict[str, Any]:
        place = {"line": self.line} if self.line is not None else {"row": self.row} if self.row is not None else {}
        truncated = {"record_truncated": True} if len(self.record) > KEPT_RECORD_CHARS else {}
        kept = self.record[:KEPT_RECORD_CHARS]
        what = {"file": self.file, **place, "reason": self.reason, "detail": self.detail, "record": kept}
        damage = {} if self.unproven_bytes is None else {"records": self.records, "unproven_bytes": self.unproven_bytes}
        return what | truncated | damage | ({"origin": self.origin} if self.origin else {})


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


class MalformedError(Exception):
    """A record that holds no usable document."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


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
    room: Room | None = None
    """Is asked before a large row is held."""
    name: Callable[[str], str] = str
    """Path -> what the file is called in rows and messages."""
    value: ValueField | None = None
    """Of texts: the field whose numbers go with them."""

    def reject(self, reject: Reject, ahead: int | None = None) -> None:
        """Set a record aside, or end the run where the user asked for that.

        `ahead`: it would have been a row, behind so many that are still to be counted.
        """
        reject, rules = replace(reject, file=self.name(reject.file)), self.rules
        if rules.strict or (rules.invalid_utf8 == "strict" and reject.reason == "not_utf8"):
            number = reject.row if reject.line is None else reject.line
            place = reject.file if number is None else f"{reject.file}:{number}"
            if reject.origin:
                place += f" (counted from byte {reject.origin:,})"
            setting = Setting("strict", True) if rules.strict else Setting("invalid_utf8", "strict")
            said = f"{place}: {reject.reason}: {reject.detail}\nLeave out "
            raise InputError(said, setting, " to set such records aside.")
        self.on_reject(reject)
        if ahead is not None:
            self.places.skip(ahead)
