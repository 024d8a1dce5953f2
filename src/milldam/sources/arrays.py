"""Arrow arrays of text: built without a Python object per document, checked, and cut to a bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.sources.batch import TOO_LARGE, Batch, Reading, Reject, too_large
from milldam.sources.decoding import HEAD_BYTES, decode_text
from milldam.text.arrays import groups, text_offsets

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
