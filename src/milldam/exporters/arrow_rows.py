"""Rows as Arrow record batches with one column, `input_ids`: straight from the tokens, no Python object for any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.exporters.rows import FileRows

if TYPE_CHECKING:
    import pyarrow as pa

COLUMN = "input_ids"
DTYPES = ("int32", "uint16", "uint32", "int64")
ROW_BYTES = 4
"""An offset."""


def schema(dtype: np.dtype[Any]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])


def batches(rows: FileRows) -> Iterator[pa.RecordBatch]:
    """About a million tokens each, or one row that has more."""
    import pyarrow as pa

    form = schema(rows.part.dtype)
    for start, lengths in rows.blocks():
        # offsets: (rows + 1,)
        offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
        tokens = pa.array(rows.tokens(start, int(offsets[-1])))
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), tokens)
        yield pa.record_batch([lists], schema=form)
