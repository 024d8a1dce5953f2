"""Bytes -> text, by the rule for what is no UTF-8: reject the record, replace it, drop it, or stop.

"drop" removes the bytes that are no UTF-8, and halves of surrogate pairs that JSON's escapes leave. A document whose
first bytes show another encoding (UTF-16's or UTF-32's mark, many zeros, or a third of them would go) is rejected all
the same. Only the head counts, so the verdict is the same however a document is cut.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

from milldam.sources.batch import MalformedError, TextRules

HEAD_BYTES = 4096
"""Of a document: they show its encoding."""
_FEW = 12
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_OTHER_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def decode_text(data: bytes, rules: TextRules) -> tuple[str | None, str]:
    """Text of bytes by the rules, and what is wrong with them when there is none."""
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        if rules.invalid_utf8 == "replace":
            return data.decode("utf-8", errors="replace"), ""
        head = data[:HEAD_BYTES]
        lost = _is_lost(len(head), len(head.decode("utf-8", "ignore").encode())) or other_encoding(head) is not None
        if rules.invalid_utf8 == "drop" and not lost:
            return data.decode("utf-8", errors="ignore"), ""
        return None, describe_encoding(data, error)


def _is_lost(size: int, kept: int) -> bool:
    """Whether so much of a text is no UTF-8 that the rest is garbage; of a few characters, any are worth keeping."""
    return not kept or (size > _FEW and 3 * kept < 2 * size)


def describe_encoding(data: bytes, error: UnicodeDecodeError, before: int = 0) -> str:
    """What the bytes are likely to be instead of UTF-8.

    `data`: the head of the document at least; `before`: its bytes before those in which the error was found.
    """
    other = other_encoding(data)
    if other is not None:
        return other
    latin = f"byte 0x{error.object[error.start]:02x} at {before + error.start}: not UTF-8"
    is_printable = all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in data[:HEAD_BYTES])
    return f"{latin}; perhaps Latin-1: iconv -f ISO-8859-1 -t UTF-8" if is_printable else latin


def other_encoding(data: bytes) -> str | None:
    """What the first bytes show when they are in no way UTF-8."""
    for name, marks in _OTHER_MARKS.items():
        if data.startswith(marks):
            return f"{name} (it begins with its byte order mark); convert it: iconv -f {name} -t UTF-8"
    sample = data[:HEAD_BYTES]
    many = sample.count(0) > len(sample) // 4
    return "not UTF-8; many zero bytes: UTF-16, UTF-32 or binary data" if many else None


# ---- JSON ----


def parse_json(data: bytes, rules: TextRules) -> Any:
    """The value of a JSON text; raises MalformedError.

    A document in it is yet to go through `mended`: with "drop", what is no UTF-8 stays in it as lone surrogates, so
    that an escape never comes about by what is dropped from its middle.
    """
    drop = rules.invalid_utf8 == "drop"
    text, problem = (data.decode("utf-8", "surrogateescape"), "") if drop else decode_text(data, rules)
    if text is None:
        raise MalformedError("not_utf8", problem)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = decode_text(data, rules)[1] if drop else ""  # what is no JSON may be no text either
        raise MalformedError(*(("not_utf8", problem) if problem else ("bad_json", str(error)))) from None


def mended(text: str, rules: TextRules) -> str:
    """A document that UTF-8 can hold: JSON's escapes may leave half of a surrogate pair."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    if rules.invalid_utf8 == "replace":
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if rules.invalid_utf8 != "drop":
        raise MalformedError("not_utf8", "an escaped surrogate without its other half")
    kept = text.encode("utf-8", "ignore")
    if _is_lost(len(text), len(kept)):
        raise MalformedError("not_utf8", "so much of the text is not UTF-8 that it must be another encoding")
    return kept.decode("utf-8")
