"""The bytes of a shard's index: version 1 of the index that Megatron-LM reads (docs/format.md).

    magic "MMIDIDX\\0\\0", version u64, dtype code u8, sequence count u64, document count u64,
    lengths i32[sequences], byte offsets i64[sequences], document indices i64[documents + 1]

All little-endian. A document is one sequence, or several when it is longer than an int32 can say.
Both directions stream: memory does not grow with the number of documents.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.files import NewFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"int32": 4, "uint16": 8}
"""What a store holds."""
_READABLE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
MAX_SEQUENCE = 2**31 - 1
_CHUNK = 1 << 17
BLOCK_DOCUMENTS = 1 << 16

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> str:
    """The narrowest dtype that both numpy users and the index format can hold.

    >>> token_dtype(50257), token_dtype(151936)
    ('uint16', 'int32')
    """
    return "uint16" if vocab_size <= 2**16 else "int32"


@dataclass(frozen=True, slots=True)
class IndexCounts:
    sequences: int
    documents: int


def write_index(new: NewFile, lengths: IO[bytes], dtype: str, counts: IndexCounts) -> None:
    """Write the index of `counts.documents` documents whose token counts lie in `lengths` as int64."""
    new.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], counts.sequences, counts.documents + 1))
    width = np.dtype(dtype).itemsize
    for chunk in _sequence_lengths(lengths):
        new.write(chunk.astype("<i4").data)
    position = 0
    for chunk in _sequence_lengths(lengths):
        starts = position + np.concatenate(([0], np.cumsum(chunk)))
        new.write((starts[:-1] * width).astype("<i8").data)
        position = int(starts[-1])
    sequence = 0
    new.write(struct.pack("<q", 0))
    for documents in _document_lengths(lengths):
        ends = sequence + np.cumsum(_sequences_of(documents))
        new.write(ends.astype("<i8").data)
        sequence = int(ends[-1])


def _document_lengths(lengths: IO[bytes]) -> Iterator[Int64s]:
    lengths.seek(0)
    while block := lengths.read(_CHUNK * 8):
        yield np.frombuffer(block, dtype="<i8")


def _sequence_lengths(lengths: IO[bytes]) -> Iterator[Int64s]:
    for documents in _document_lengths(lengths):
        parts = _sequences_of(documents)
        if parts.max(initial=1) == 1:
            yield documents
            continue
        split = np.full(int(parts.sum()), MAX_SEQUENCE, dtype=np.int64)
        split[np.cumsum(parts) - 1] = documents - (parts - 1) * MAX_SEQUENCE
        yield split


def _sequences_of(documents: Int64s) -> Int64s:
    """How many sequences each document takes: one, until it exceeds an int32."""
    return np.maximum(1, -(-documents // MAX_SEQUENCE))


def count_sequences(documents: Int64s) -> int:
    return int(_sequences_of(documents).sum())


@dataclass(frozen=True, slots=True)
class Index:
    """A mapped index file: arrays that are read from disk when they are touched."""

    dtype: np.dtype[np.generic]
    lengths: Int32s
    offsets: Int64s
    documents: Int64s
    """First sequence of each document, and one past the last."""
    path: str
    """What messages call the file."""

    @property
    def size(self) -> int:
        """Bytes of the tokens, as far as the index says."""
        if not len(self.offsets):
            return 0
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    def check_ends(self, size: int) -> None:
        """Documents and sequences must cover `size` bytes of tokens from end to end.

        The ends of the arrays, not every entry: an index of a billion documents is opened as quickly as a small one.
        What lies between is checked where it is used.
        """
        ends = (int(self.documents[0]), int(self.documents[-1]), int(self.offsets[0]) if len(self.offsets) else 0)
        if self.size != size:
            raise self.damaged(f"its documents end at byte {self.size:,}, and there are {size:,} bytes of tokens")
        if ends != (0, len(self.lengths), 0):
            raise self.damaged("its documents do not cover the tokens from end to end")

    def damaged(self, what: str) -> StoreError:
        return StoreError(f"{self.path}: {what}. It is damaged, or belongs to another file. Make it again.")

    def extent(self, number: int) -> tuple[int, int]:
        """(first token, end) of a document, both inside of the tokens."""
        first, stop = int(self.documents[number]), int(self.documents[number + 1])
        if not 0 <= first <= stop <= len(self.lengths):
            raise self.damaged(f"document {number:,} has the sequences {first:,} to {stop:,} of {len(self.lengths):,}")
        if first == stop:
            return 0, 0
        width = self.dtype.itemsize
        begin, end = int(self.offsets[first]), int(self.offsets[stop - 1]) + int(self.lengths[stop - 1]) * width
        if not 0 <= begin <= end <= self.size or begin % width:
            raise self.damaged(f"document {number:,} has the bytes {begin:,} to {end:,} of {self.size:,}")
        return begin // width, end // width

    def document_lengths(self, first: int = 0, stop: int | None = None) -> Int64s:
        """Tokens of the documents from `first` up to `stop`."""
        lengths = self._document_lengths(self.documents[first : None if stop is None else stop + 1])
        if len(lengths) and int(lengths.min()) < 0:
            raise self.damaged("a document with fewer than no tokens")
        return lengths

    def length_blocks(self) -> Iterator[Int64s]:
        """Tokens of all documents, a bounded number at a time; they must add up to what the index covers."""
        total = 0
        for first in range(0, len(self.documents) - 1, BLOCK_DOCUMENTS):
            lengths = self.document_lengths(first, first + BLOCK_DOCUMENTS)
            total += int(lengths.sum()) * self.dtype.itemsize
            if total > self.size:
                break
            yield lengths
        if total != self.size:
            raise self.damaged(f"the lengths of its documents do not add up to its {self.size:,} bytes of tokens")

    def _document_lengths(self, starts: Int64s) -> Int64s:
        if len(starts) and (starts == np.arange(starts[0], starts[0] + len(starts))).all():
            # One sequence a document.
            return self.lengths[starts[0] : starts[-1]].astype(np.int64)
        if starts[0] < 0 or starts[-1] > len(self.lengths) or (starts[1:] < starts[:-1]).any():
            raise self.damaged("its documents are not in order")
        # A zero at the end, since a document without a sequence may be the last.
        lengths = np.append(self.lengths[starts[0] : starts[-1]], np.int32(0))
        sums = np.add.reduceat(lengths, starts[:-1] - starts[0], dtype=np.int64)
        sums[starts[:-1] == starts[1:]] = 0
        return sums

    @classmethod
    def map(cls, path: Path) -> Index:
        try:
            with path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: can't be read as an index ({error}).") from None
        return cls.parse(buffer, path)

    @classmethod
    def parse(cls, buffer: mmap.mmap | memoryview | bytes, path: str | Path) -> Index:
        if len(buffer) < HEADER.size or buffer[:9] != MAGIC:
            raise StoreError(f"{path}: not a token index (its first bytes are not MMIDIDX).")
        _, version, code, sequences, documents = HEADER.unpack_from(buffer)
        if code in _FLOATS:
            raise StoreError(f"{path}: an index of {_FLOATS[code]} numbers, which are not tokens.")
        if version != VERSION or code not in _READABLE:
            raise StoreError(f"{path}: index version {version}, dtype code {code}; this milldam reads version 1.")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if sequences and len(buffer) == expected + sequences:
            # What Megatron's builder writes with multimodal=True: a mode (text, image, ...) of every sequence, as int8.
            raise StoreError(
                f"{path}: a multimodal index of Megatron-LM, with a mode for every sequence. milldam reads text alone: "
                "export the sequences of text to a pair of their own."
            )
        if documents == 0:
            raise StoreError(f"{path}: no document indices; not even the first, which is always 0. Make it again.")
        if len(buffer) != expected:
            raise StoreError(f"{path}: {len(buffer):,} bytes where its header says {expected:,}. Make it again.")
        at = HEADER.size
        return cls(
            np.dtype(_READABLE[code]),
            np.frombuffer(buffer, "<i4", sequences, at),
            np.frombuffer(buffer, "<i8", sequences, at + 4 * sequences),
            np.frombuffer(buffer, "<i8", documents, at + 12 * sequences),
            str(path),
        )
