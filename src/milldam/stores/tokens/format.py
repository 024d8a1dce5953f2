"""The bytes of a shard's files (docs/format.md). `NAME.idx`: version 1 of the index that Megatron-LM reads.

    magic "MMIDIDX\\0\\0", version u64, dtype code u8, sequence count u64, document count u64,
    lengths i32[sequences], byte offsets i64[sequences], document indices i64[documents + 1]

A document is one sequence, or several when it is longer than an int32 can say. `NAME.spans`: which tokens of each
document are trained on.

    begins i64[documents + 1], then pairs i64[stretches, 2]

A pair is half-open: (first token, behind the last), counted from the document's own first token. All little-endian.
Both directions stream: memory does not grow with the number of documents, but for stretches that are written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.files import NewFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"int32": 4, "uint16": 8}
"""Dtypes of a store."""
_READABLE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
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


def write_index(new: NewFile, lengths: Int64s, dtype: str) -> None:
    """Write the index of documents of these token counts, some at a time: the array may be mapped."""

    def blocks() -> Iterator[tuple[Int64s, Int64s]]:
        """How many sequences documents have, one until they exceed an int32, and the tokens of each sequence."""
        for first in range(0, len(lengths), _CHUNK):
            documents = lengths[first : first + _CHUNK]
            counts = np.maximum(1, -(-documents // MAX_SEQUENCE))
            sequences = np.full(int(counts.sum()), MAX_SEQUENCE, np.int64)
            sequences[np.cumsum(counts) - 1] = documents - (counts - 1) * MAX_SEQUENCE
            yield counts, sequences

    total, width = sum(len(sequences) for _, sequences in blocks()), np.dtype(dtype).itemsize
    new.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], total, len(lengths) + 1))
    for _, sequences in blocks():
        new.write(sequences.astype("<i4").data)
    position = 0
    for _, sequences in blocks():
        ends = position + np.cumsum(sequences)
        new.write(((ends - sequences) * width).astype("<i8").data)
        position = int(ends[-1])
    new.write(bytes(8))
    before = 0
    for counts, _ in blocks():
        ends = before + np.cumsum(counts)
        new.write(ends.astype("<i8").data)
        before = int(ends[-1])


@dataclass(frozen=True, slots=True)
class Index:
    """A mapped index file: arrays that are read from disk when they are touched."""

    dtype: np.dtype[np.generic]
    lengths: Int32s
    offsets: Int64s
    documents: Int64s
    """First sequence of each document, and one past the last."""
    path: str
    """The file, for messages."""

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
        starts = self.documents[first : None if stop is None else stop + 1]
        if (starts == np.arange(starts[0], starts[0] + len(starts))).all():
            # One sequence a document.
            lengths = self.lengths[starts[0] : starts[-1]].astype(np.int64)
        else:
            if starts[0] < 0 or starts[-1] > len(self.lengths) or (starts[1:] < starts[:-1]).any():
                raise self.damaged("its documents are not in order")
            # A zero at the end, since a document without a sequence may be the last.
            sequences = np.append(self.lengths[starts[0] : starts[-1]], np.int32(0))
            lengths = np.add.reduceat(sequences, starts[:-1] - starts[0], dtype=np.int64)
            lengths[starts[:-1] == starts[1:]] = 0
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
        if version != VERSION or code not in _READABLE:
            raise StoreError(f"{path}: index version {version}, dtype code {code}; this milldam reads version 1.")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if documents == 0 or len(buffer) != expected:  # the first index of a document is always 0
            raise StoreError(f"{path}: {len(buffer):,} bytes where its header says {expected:,}. Make it again.")
        at = HEADER.size
        return cls(
            np.dtype(_READABLE[code]),
            np.frombuffer(buffer, "<i4", sequences, at),
            np.frombuffer(buffer, "<i8", sequences, at + 4 * sequences),
            np.frombuffer(buffer, "<i8", documents, at + 12 * sequences),
            str(path),
        )


@dataclass(frozen=True, slots=True)
class Spans:
    """The stretches of some documents that are trained on."""

    pairs: Int64s
    """(stretches, 2): half-open positions within each document."""
    counts: Int64s
    """Stretches of each document."""
    labels: npt.NDArray[np.uint8] | None = None
    """A label a document."""

    def only(self, keep: npt.NDArray[np.bool_]) -> Spans:
        """Those of the documents of a mask."""
        labels = None if self.labels is None else self.labels[keep]
        return Spans(self.pairs[np.repeat(keep, self.counts)], self.counts[keep], labels)

    @property
    def trained_tokens(self) -> int:
        return int((self.pairs[:, 1] - self.pairs[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class SpanTable:
    """A mapped file of stretches: arrays that are read from disk when they are touched."""

    begins: Int64s
    pairs: Int64s
    """(stretches, 2)."""
    path: str
    """The file, for messages."""

    @classmethod
    def parse(cls, buffer: memoryview | bytes, documents: int, path: str) -> SpanTable:
        head = 8 * (documents + 1)
        if len(buffer) < head or (len(buffer) - head) % 16:
            raise StoreError(
                f"{path}: {len(buffer):,} bytes can't be the stretches of {documents:,} documents. {_AGAIN}"
            )
        begins = np.frombuffer(buffer, "<i8", documents + 1)
        pairs = np.frombuffer(buffer, "<i8", offset=head).reshape(-1, 2)
        if begins[0] != 0 or begins[-1] != len(pairs):
            raise StoreError(f"{path}: its documents do not cover its {len(pairs):,} stretches. {_AGAIN}")
        return cls(begins, pairs, path)

    def some(self, first: int, lengths: Int64s) -> Spans:
        """Those of the documents from `first` on, of so many tokens each: they rise, do not touch, are not empty and
        lie within the document."""
        begins = self.begins[first : first + len(lengths) + 1]
        counts = np.diff(begins)
        if int(begins[0]) < 0 or int(begins[-1]) > len(self.pairs) or (counts < 0).any():
            raise StoreError(f"{self.path}: its documents are not in order. {_AGAIN}")
        pairs = self.pairs[begins[0] : begins[-1]].astype(np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        bad = (pairs[:, 0] < 0) | (pairs[:, 0] >= pairs[:, 1]) | (pairs[:, 1] > lengths[owner])
        bad[1:] |= (owner[1:] == owner[:-1]) & (pairs[1:, 0] <= pairs[:-1, 1])
        if bad.any():
            number = first + int(owner[bad][0])
            raise StoreError(f"{self.path}: the stretches of document {number:,} are not in order within it. {_AGAIN}")
        return Spans(pairs, counts)


_AGAIN = "It is damaged, or belongs to another file. Make it again."
