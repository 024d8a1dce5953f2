"""The bytes of a shard's files (docs/format.md). `NAME.idx`: version 1 of the index that Megatron-LM reads.

    magic "MMIDIDX\\0\\0", version u64, dtype code u8, sequence count u64, document count u64,
    lengths i32[sequences], byte offsets i64[sequences], document indices i64[documents + 1]

A document is one sequence, or several when it is longer than an int32 can say. `NAME.spans`: which tokens of each
document are trained on.

    begins i64[documents + 1], then pairs i64[stretches, 2]

A pair is half-open: (first token, behind the last), counted from the document's own first token. All little-endian.
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


def write_index(new: NewFile, lengths: IO[bytes], dtype: str) -> None:
    """Write the index of documents whose token counts lie in `lengths` as int64."""
    sequences = sum(len(chunk) for chunk in _sequence_lengths(lengths))
    new.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], sequences, lengths.tell() // 8 + 1))
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
    for block in blocks_of(lengths, _CHUNK * 8):
        ends = sequence + np.cumsum(_sequences_of(np.frombuffer(block, "<i8")))
        new.write(ends.astype("<i8").data)
        sequence = int(ends[-1])


def _sequence_lengths(lengths: IO[bytes]) -> Iterator[Int64s]:
    for block in blocks_of(lengths, _CHUNK * 8):
        documents = np.frombuffer(block, "<i8")
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

    def between(self, first: int, stop: int | None) -> Spans:
        """Those of the documents [first, stop)."""
        keep = np.zeros(len(self.counts), np.bool_)
        keep[first:stop] = True
        return self.only(keep)

    @property
    def trained_tokens(self) -> int:
        return int((self.pairs[:, 1] - self.pairs[:, 0]).sum())


def write_spans(new: NewFile, counts: IO[bytes], pairs: IO[bytes]) -> None:
    """Write the stretches of documents, from how many each has and the pairs, both spooled as int64."""
    begin = 0
    new.write(bytes(8))
    for block in blocks_of(counts):
        ends = begin + np.cumsum(np.frombuffer(block, "<i8"))
        new.write(ends.astype("<i8").tobytes())
        begin = int(ends[-1])
    for block in blocks_of(pairs):
        new.write(block)


def blocks_of(spool: IO[bytes], size: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of a temporary file, from its begin."""
    spool.flush()
    spool.seek(0)
    while block := spool.read(size):
        yield block


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

    def document(self, number: int, length: int) -> Int64s:
        """(n, 2): the stretches of a document of so many tokens."""
        begin, end = int(self.begins[number]), int(self.begins[number + 1])
        if not 0 <= begin <= end <= len(self.pairs):
            raise StoreError(f"{self.path}: document {number:,} has no place in it. {_AGAIN}")
        pairs = self.pairs[begin:end].astype(np.int64)
        if not _in_order(pairs, np.array([end - begin]), np.array([length])).all():
            raise StoreError(f"{self.path}: the stretches of document {number:,} are not in order within it. {_AGAIN}")
        return pairs

    def some(self, first: int, stop: int) -> Spans:
        """Those of the documents from `first` up to `stop`."""
        begins = self.begins[first : stop + 1]
        return Spans(self.pairs[begins[0] : begins[-1]].astype(np.int64), np.diff(begins))

    def problems(self, lengths: Iterator[Int64s]) -> Iterator[str]:
        """Problems, given the tokens of all documents in blocks."""
        if (np.diff(self.begins) < 0).any():
            yield f"{self.path}: its documents are not in order"
            return
        first = 0
        for block in lengths:
            spans = self.some(first, first + len(block))
            wrong = ~_in_order(spans.pairs, spans.counts, block)
            if wrong.any():
                number = first + int(np.flatnonzero(wrong)[0])
                yield f"{self.path}: the stretches of document {number:,} are not in order within its tokens"
                return
            first += len(block)


_AGAIN = "It is damaged, or belongs to another file. Make it again."


def _in_order(pairs: Int64s, counts: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
    """Which documents have stretches that rise, do not touch, are not empty and lie within the document."""
    owner = np.repeat(np.arange(len(counts)), counts)
    bad = (pairs[:, 0] < 0) | (pairs[:, 0] >= pairs[:, 1]) | (pairs[:, 1] > lengths[owner])
    bad[1:] |= (owner[1:] == owner[:-1]) & (pairs[1:, 0] <= pairs[:-1, 1])
    fine = np.ones(len(counts), dtype=bool)
    fine[owner[bad]] = False
    return fine
