"""Bytes -> text, by the rule for what is no UTF-8: reject the record, replace the bytes by U+FFFD, or drop them.

A document whose first bytes show another encoding (UTF-16's or UTF-32's mark, many zeros, or a third of them would go)
is rejected all the same. Only the head counts, so the verdict is the same however a document is cut.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

from milldam.sources.batch import TextRules
from milldam.sources.compression import DamagedError

HEAD_BYTES = 4096
"""Of a document: they show its encoding."""
ERRORS = {"drop": "ignore", "replace": "replace"}
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
        head = data[:HEAD_BYTES]
        kept = len(head.decode("utf-8", "ignore").encode())
        lost = not kept or (len(head) > _FEW and 3 * kept < 2 * len(head)) or other_encoding(head) is not None
        if rules.invalid_utf8 == "replace" or (rules.invalid_utf8 == "drop" and not lost):
            return data.decode("utf-8", ERRORS[rules.invalid_utf8]), ""
        return None, describe_encoding(head, error.start, data[error.start])


def describe_encoding(head: bytes, at: int, byte: int) -> str:
    """What a document is likely to be instead of UTF-8, by its head and the first byte that is wrong."""
    detail = f"byte 0x{byte:02x} at {at}: not UTF-8"
    is_printable = all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in head)
    return other_encoding(head) or detail + "; perhaps Latin-1: iconv -f ISO-8859-1 -t UTF-8" * is_printable


def other_encoding(head: bytes) -> str | None:
    """What the first bytes show when they are in no way UTF-8."""
    for name, marks in _OTHER_MARKS.items():
        if head.startswith(marks):
            return f"{name} (it begins with its byte order mark); convert it: iconv -f {name} -t UTF-8"
    many = head.count(0) > len(head) // 4
    return "not UTF-8; many zero bytes: UTF-16, UTF-32 or binary data" if many else None


def parse_json(data: bytes, rules: TextRules) -> Any:
    """The value of a JSON text; raises DamagedError. Its strings are yet to go through `mended`."""
    text, problem = decode_text(data, rules)
    if text is None:
        raise DamagedError("not_utf8", problem)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError("bad_json", str(error)) from None


def mended(text: str, rules: TextRules) -> str:
    """A text that UTF-8 can hold: JSON's escapes may leave half of a surrogate pair."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        if rules.invalid_utf8 not in ERRORS:
            raise DamagedError("not_utf8", "an escaped surrogate without its other half") from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", ERRORS[rules.invalid_utf8])
