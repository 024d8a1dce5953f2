"""What flows out of a source: batches of valid UTF-8 text; and, aside, the records that could not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from milldam.errors import InputError

KEPT_RECORD_CHARS = 65_536


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
    """Row of a parquet or Arrow file, from 0."""

    def as_json(self) -> dict[str, Any]:
        place = {"line": self.line} if self.line is not None else {"row": self.row} if self.row is not None else {}
        truncated = {"record_truncated": True} if len(self.record) > KEPT_RECORD_CHARS else {}
        kept = self.record[:KEPT_RECORD_CHARS]
        what = {"file": self.file, **place, "reason": self.reason, "detail": self.detail, "record": kept}
        return what | truncated | ({"origin": self.origin} if self.origin else {})


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
    """"reject" the record, "replace" the bytes by U+FFFD, or stop ("strict")."""
    strict: bool = False
    """Stop at the first record that can't be read."""


class MalformedError(Exception):
    """A record that holds no usable document."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def decode_text(data: bytes, rules: TextRules) -> tuple[str | None, str]:
    """Text of bytes by the rules, and what is wrong with them when there is none."""
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        if rules.invalid_utf8 == "replace":
            return data.decode("utf-8", errors="replace"), ""
        return None, describe_encoding(data, error)


def without_surrogates(text: str, rules: TextRules) -> str:
    """Text that UTF-8 can hold: JSON's escapes may leave half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        if rules.invalid_utf8 != "replace":
            raise MalformedError("not_utf8", "an escaped surrogate without its other half") from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def describe_encoding(data: bytes, error: UnicodeDecodeError) -> str:
    """What the bytes are likely to be instead of UTF-8."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16 (it begins with its byte order mark); convert it: iconv -f UTF-16 -t UTF-8"
    sample = data[:4096]
    if sample.count(0) > len(sample) // 4:
        return "not UTF-8; many zero bytes: UTF-16 or binary data"
    latin = f"byte 0x{data[error.start]:02x} at {error.start}: not UTF-8"
    if all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in sample):
        return f"{latin}; perhaps Latin-1: iconv -f ISO-8859-1 -t UTF-8"
    return latin


def stop_or_reject(reject: Reject, rules: TextRules, on_reject: OnReject) -> None:
    """Hand a reject on, or end the run where the user asked for that."""
    if rules.strict or (rules.invalid_utf8 == "strict" and reject.reason == "not_utf8"):
        number = reject.row if reject.line is None else reject.line
        place = reject.file if number is None else f"{reject.file}:{number}"
        if reject.origin:
            place += f" (counted from byte {reject.origin:,})"
        option = "--strict" if rules.strict else "--invalid-utf8 strict"
        raise InputError(f"{place}: {reject.reason}: {reject.detail}\nLeave out {option} to set such records aside.")
    on_reject(reject)
