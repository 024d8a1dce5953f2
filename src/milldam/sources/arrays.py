"""Bytes -> text, by the rule for what is no UTF-8: reject the record, replace the bytes by U+FFFD, or drop them. And
Arrow arrays of text, checked and cut to a bounded size.

A document whose first bytes show another encoding (UTF-16's or UTF-32's mark, many zeros, or a third of them would go)
is rejected all the same. Only the head counts, so the verdict is the same however a document is cut.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.sources.batch import TOO_LARGE, Batch, Reading, Reject, TextRules, too_large
from milldam.sources.compression import DamagedError
from milldam.text.arrays import groups, text_offsets

HEAD_BYTES = 4096
"""Of a document: they show its encoding."""
ERRORS = {"drop": "ignore", "replace": "replace"}
_FEW = 12
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_OTHER_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
BATCH_BYTES = 2 << 20

Int64s = npt.NDArray[np.int64]
MakeReject = Callable[[int, str, str, bytes], Reject]
"""(position in the array, reason, detail, the record's bytes) -> a reject that says where."""


def checked_text(array: pa.Array, reading: Reading, make_reject: MakeReject) -> tuple[pa.LargeStringArray, Int64s]:
    """The same documents as valid UTF-8 without nulls, and which these are; what is neither, or too large, goes to the
    rejects."""
    raw, most = array.cast(pa.large_binary()), reading.rules.max_document_bytes
    offsets = text_offsets(raw)
    sizes = np.diff(offsets)
    if array.null_count == 0 and sizes.max(initial=0) <= most:
        try:
            return array.cast(pa.large_string()), np.arange(len(array))
        except pa.ArrowInvalid:
            pass
    kept: list[str] = []
    positions: list[int] = []
    for position, size in enumerate(sizes.tolist()):
        text, reason = None, "not_utf8"
        if size > most:
            begin = int(offsets[position])
            reason, problem = TOO_LARGE, too_large(size, most)
            record = raw.buffers()[2][begin : begin + HEAD_BYTES].to_pybytes()
        elif (record := raw[position].as_py()) is None:
            reason, problem, record = "no_text", "the text is null", b""
        else:
            text, problem = decode_text(record, reading.rules)
        if text is None:
            reading.reject(make_reject(position, reason, problem, record))
        else:
            kept.append(text)
            positions.append(position)
    return pa.array(kept, pa.large_string()), np.array(positions, np.int64)


def batches_of(batch: Batch) -> Iterator[Batch]:
    """The texts of a block in slices of at most `BATCH_BYTES`, without a copy; a larger document stands alone. One
    batch without texts when there are none, so that rejects do not pile up."""
    parts, start = list(groups(batch.texts, BATCH_BYTES)) or [batch.texts], 0
    for texts in parts:
        part = slice(start, start + len(texts))
        columns = None if batch.columns is None else batch.columns[part]
        origins = None if batch.origins is None else batch.origins[part]
        yield Batch(texts, bytes_read=batch.bytes_read // len(parts), columns=columns, origins=origins)
        start = part.stop


def kept_columns(names: tuple[str, ...], records: Sequence[Any]) -> pa.RecordBatch | None:
    """Fields of records as columns. Where the values of one have no type in common, it is of texts: JSON, but for those
    that are texts already.

    >>> kept_columns(("id", "meta.by"), [{"id": 1, "meta": {"by": "me"}}, {"id": 2}]).to_pylist()
    [{'id': 1, 'meta.by': 'me'}, {'id': 2, 'meta.by': None}]
    """

    def as_text(value: Any) -> str:
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else json.dumps(value)

    columns = []
    for name in names:
        values = list(records)
        for part in name.split("."):
            values = [value.get(part) if isinstance(value, dict) else None for value in values]
        try:
            column = pa.array(values)
        except (ValueError, OverflowError, TypeError):  # as Arrow's errors are
            column = pa.array([None if value is None else as_text(value) for value in values], pa.large_string())
        columns.append(column.cast(pa.large_string()) if pa.types.is_string(column.type) else column)
    return pa.record_batch(columns, names=list(names)) if names else None


# ---- bytes ----


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
