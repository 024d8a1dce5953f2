"""The files of a shard of windows (docs/format.md, "A feature store").

A column is a file of rows of one fixed size, one row a window, so row k begins at k times the size: no index. What is
one number a window lies together in the column `numbers`, so that a batch takes one read for all of them. Everything is
little-endian and without a header.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from milldam.stores.kinds import TokenDtype

if TYPE_CHECKING:
    from milldam.qa.sources import Example
    from milldam.qa.spans import Chosen

NUMBERS = (
    "length",
    "start_positions",
    "end_positions",
    "cls_index",
    "context_begin",
    "context_tokens",
    "segment",
    "segments",
    "example",
)
"""The int32 of a row of `numbers`, in order. `example` counts in the shard; a store adds the examples before it."""

FIRST_WINDOW, IDS = "first_window.bin", "ids.bin"
TEXTS, TEXTS_INDEX = "texts.bin", "texts.idx"
CONTEXTS, CONTEXTS_INDEX = "contexts.bin", "contexts.idx"
OTHER_FILES = (FIRST_WINDOW, IDS, TEXTS, TEXTS_INDEX, CONTEXTS, CONTEXTS_INDEX)
"""The files of a shard that are not columns of windows, by the end of their names."""


@dataclass(frozen=True, slots=True)
class Column:
    """A file of rows, one a window."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of a row."""

    @property
    def file(self) -> str:
        """The end of its files' names."""
        return f"{self.name}.bin"

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def elements(self) -> int:
        """Of a row."""
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.elements * self.stored.itemsize

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class MemoryTokens:
    """The ids of memory tokens, in order."""

    read: tuple[int, ...]
    write: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.read)


@dataclass(frozen=True, slots=True)
class FeatureForm:
    """What all windows of a store have in common."""

    max_seq_length: int
    token_dtype: TokenDtype
    pad_id: int
    pad_type: int
    pad_left: bool

    @property
    def columns(self) -> tuple[Column, ...]:
        length = self.max_seq_length
        return (
            Column("input_ids", self.token_dtype, (length,)),
            Column("token_type_ids", "uint8", (length,)),
            Column("offsets", "int32", (length, 2)),
            Column("numbers", "int32", (len(NUMBERS),)),
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The ends of the names of a shard's files."""
        return (*(column.file for column in self.columns), *OTHER_FILES)

    def sizes(self, windows: int, examples: int) -> dict[str, int]:
        """Bytes of the files whose size follows from the numbers of windows and examples, by the end of their names."""
        sizes = {column.file: windows * column.row_bytes for column in self.columns}
        return sizes | {FIRST_WINDOW: 8 * (examples + 1), TEXTS_INDEX: 8 * (examples + 1), IDS: 8 * examples}

    def attention_mask(
        self, lengths: npt.NDArray[Any], dtype: npt.DTypeLike, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """(windows, L): 1 on the tokens of windows that have so many, 0 on padding."""
        length = self.max_seq_length
        mask = np.empty((len(lengths), length), dtype) if out is None else out[: len(lengths)]
        # (L,): how far each token is from the side that has no padding
        places = np.arange(length)[::-1] if self.pad_left else np.arange(length)
        np.less(places, lengths[:, None], out=mask)
        return mask

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def encode_example(example: Example, chosen: Chosen, context: int) -> bytes:
    """An example without its context, as JSON. Half a surrogate pair is written as JSON escapes it."""
    value = {
        "id": example.id,
        "title": example.title,
        "question": example.question,
        "answers": [{"text": answer.text, "start": answer.start} for answer in example.answers],
        "chosen": {"text": chosen.text, "start": chosen.start, "stop": chosen.stop} if chosen else None,
        "status": chosen.status,
        "context": context,
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def encode_context(context: str) -> bytes:
    return context.encode("utf-8", "surrogatepass")


def hash_id(example_id: str) -> int:
    """What the index of ids has of one: 64 bits, so that two ids may share it."""
    return int(xxhash.xxh3_64_intdigest(example_id.encode("utf-8", "surrogatepass")))
