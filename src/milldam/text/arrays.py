"""Arrow arrays of text, looked at as bytes: where each text begins, and how much there is. No copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.native import kernel


def text_offsets(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Where each text begins in its buffer, and the last ends. offsets: (texts + 1,)"""
    _, buffer, _ = texts.buffers()
    if buffer is None or not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]


def character_counts(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """How many characters each text has."""
    data = texts.buffers()[2] if len(texts) else None
    count = kernel("count_characters", np.uint8, np.int64, int, np.int64)
    if data is None or count is None:
        import pyarrow.compute as pc

        return np.asarray(pc.utf8_length(texts), dtype=np.int64)
    counts = np.empty(len(texts), np.int64)
    count(np.frombuffer(data, np.uint8), text_offsets(texts), len(texts), counts)
    return counts


def byte_count(texts: pa.LargeStringArray) -> int:
    offsets = text_offsets(texts)
    return int(offsets[-1] - offsets[0])
