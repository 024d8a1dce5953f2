"""Arrow arrays of text: built without a Python object per document, checked, and cut to a bounded size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.sources.batch import TOO_LARGE, Batch, Reading, Reject, too_large
from milldam.sources.decoding import HEAD_BYTES, decode_text
from milldam.text.arrays import text_offsets

BATCH_BYTES = 2 << 20

Bytes = npt.NDArray[np.uint8]
_INK = ~np.isin(np.arange(256), list(b" \t\r\n"))
MakeReject = Callable[[int, str, str, bytes], Reject]
"""(position in the array, reason, detail, the record's bytes) -> a reject that says where."""


def from_offsets(data: Bytes, offsets: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
    """An array of byte strings that lie end to end in `data`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def split_at(data: bytes, separator: bytes) -> pa.LargeBinaryArray:
    """The pieces between separators, empty ones included."""
    array = np.frombuffer(data, dtype=np.uint8)
    if len(separator) == 1:
        starts = np.flatnonzero(array == separator[0])
        texts = array[array != separator[0]]
    else:
        starts = np.array([match.start() for match in re.finditer(re.escape(separator), data)], dtype=np.int64)
        texts = np.delete(array, (starts[:, None] + np.arange(len(separator))).ravel())
    # Taking out separators moves everything behind them.
    moved = len(separator) * np.arange(len(starts))
    return from_offsets(texts, np.concatenate(([0], starts - moved, [len(texts)])).astype(np.int64))


def split_paragraphs(data: bytes) -> pa.LargeBinaryArray:
    """The stretches of lines between blank ones, each with its line ends."""
    array = np.frombuffer(data, dtype=np.uint8)
    stops = np.flatnonzero(array == 10) + 1
    if not len(stops) or stops[-1] != len(array):
        stops = np.append(stops, len(array))
    starts = np.concatenate(([0], stops[:-1]))
    ink = np.concatenate(([0], np.cumsum(_INK[array])))
    blank = ink[stops] == ink[starts]
    keep = np.repeat(~blank, stops - starts)
    kept = np.concatenate(([0], np.cumsum(keep)))
    begins = ~blank & np.concatenate(([True], blank[:-1]))
    return from_offsets(array[keep], np.append(kept[starts[begins]], kept[-1]).astype(np.int64))


def checked_text(array: pa.Array, reading: Reading, make_reject: MakeReject) -> pa.LargeStringArray:
    """The same documents as valid UTF-8 without nulls; what is neither, or too large, goes to the rejects."""
    raw, most = array.cast(pa.large_binary()), reading.rules.max_document_bytes
    offsets = text_offsets(raw)
    sizes = np.diff(offsets)
    if array.null_count == 0 and sizes.max(initial=0) <= most:
        try:
            return array.cast(pa.large_string())
        except pa.ArrowInvalid:
            pass
    kept: list[str] = []
    for position, size in enumerate(sizes.tolist()):
        text, reason = None, "not_utf8"
        if size > most:
            begin = int(offsets[position])
            reason, problem = TOO_LARGE, too_large(size, reading.rules)
            shown = raw.buffers()[2][begin : begin + HEAD_BYTES].to_pybytes()
        elif (shown := raw[position].as_py()) is None:
            reason, problem, shown = "no_text", "the text is null", b""
        else:
            text, problem = decode_text(shown, reading.rules)
        if text is None:
            reading.reject(make_reject(position, reason, problem, shown), ahead=len(kept))
        else:
            kept.append(text)
    return pa.array(kept, pa.large_string())


def bounded(array: pa.Array) -> Iterator[pa.Array]:
    """Slices of about `BATCH_BYTES`, without a copy; a larger document stands alone."""
    if array.nbytes <= BATCH_BYTES or len(array) <= 1:
        if len(array):
            yield array
        return
    half = len(array) // 2
    yield from bounded(array[:half])
    yield from bounded(array[half:])


def batches_of(texts: pa.LargeStringArray, bytes_read: int, columns: pa.RecordBatch | None = None) -> Iterator[Batch]:
    """The texts of a block in bounded batches; an empty one when there are none, so that rejects do not pile up."""
    parts, at = list(bounded(texts)) or [texts], 0
    for part in parts:
        some = None if columns is None else columns.slice(at, len(part))
        yield Batch(part, bytes_read=bytes_read // len(parts), columns=some)
        at += len(part)


def kept_columns(names: tuple[str, ...], records: Sequence[Any]) -> pa.RecordBatch | None:
    """Fields of records as columns. Where the values of one have no type in common, it is of texts: JSON, but for those
    that are texts already.

    >>> kept_columns(("id", "meta.by"), [{"id": 1, "meta": {"by": "me"}}, {"id": 2}]).to_pylist()
    [{'id': 1, 'meta.by': 'me'}, {'id': 2, 'meta.by': None}]
    """
    columns = []
    for name in names:
        values = list(records)
        for part in name.split("."):
            values = [value.get(part) if isinstance(value, dict) else None for value in values]
        try:
            column = pa.array(values)
        except (ValueError, OverflowError, TypeError):  # as Arrow's errors are
            column = pa.array([None if value is None else _as_text(value) for value in values], pa.large_string())
        columns.append(column.cast(pa.large_string()) if pa.types.is_string(column.type) else column)
    return pa.record_batch(columns, names=list(names)) if names else None


def _as_text(value: Any) -> str:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else json.dumps(value)
