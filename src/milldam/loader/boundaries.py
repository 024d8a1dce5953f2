"""Documents of a stream: position -> document, from the mapped index files.

All index files lie side by side in one stretch of addresses, so that a question about any number of positions in any
number of files is a handful of numpy calls. Holds some numbers for each file; what it touches of the indexes is the
kernel's page cache. About 3 us for each halving of the largest file's documents, for some dozens of positions at once.

A document's number is that in all files of the stream, as `store[number]` has it, also in a part of the stream.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milldam.errors import ConfigError, StoreError
from milldam.loader.permutation import Int64s
from milldam.loader.reading import map_side_by_side
from milldam.loader.stream import TokenFile, TokenStream
from milldam.stores.tokens.format import HEADER, Index

_STEP = 2
"""Bytes between two places where a number of an index may begin: its arrays begin at even bytes, not at round ones."""
_NEXT = 8 // _STEP


def document_lengths(stream: TokenStream) -> Iterator[Int64s]:
    """Tokens of the documents of a stream in order, a bounded number at a time.

    A document that the begin or the end of the stream cuts is a shorter document; empty ones are left out.
    """
    begin = 0
    held = stream.hold_indexes()
    for file, path in zip(stream.files, require_documents(stream), strict=True):
        if begin < stream.stop and begin + file.tokens > stream.first:
            index = Index.map(path)
            index.check_ends(file.tokens * stream.dtype.itemsize)
            for lengths in index.length_blocks():
                ends = begin + lengths.cumsum()
                inside = np.minimum(ends, stream.stop) - np.maximum(ends - lengths, stream.first)
                yield inside[inside > 0]
                begin = int(ends[-1])
        else:
            begin += file.tokens
    del held


class Documents:
    """Where the documents of a stream lie: `find` by position, `begins` by number."""

    def __init__(self, stream: TokenStream) -> None:
        self._held = stream.hold_indexes()
        files = [as_bytes(path) for path in require_documents(stream)]
        self._space, begins = map_side_by_side(files, 1)
        indexes = [_Places(self._space, int(at), file) for at, file in zip(begins, files, strict=True)]
        for index, file in zip(indexes, stream.files, strict=True):
            index.check_ends(file.tokens * stream.dtype.itemsize)
        self._name = stream.name
        # numbers[k]: the 8 bytes from byte k * _STEP on; an array of strides, no copy
        self._numbers = np.ndarray(((len(self._space) - 8) // _STEP + 1,), "<i8", self._space, 0, (_STEP,))
        self._shift = stream.dtype.itemsize.bit_length() - 1
        self._token_ends = _totals([file.tokens for file in stream.files])[1:]
        self._token_begins = _totals([file.tokens for file in stream.files])
        self._document_ends = _totals([index.documents for index in indexes])[1:]
        self._document_begins = _totals([index.documents for index in indexes])
        self._offsets_at = np.array([index.offsets_at for index in indexes]) // _STEP
        self._documents_at = np.array([index.documents_at for index in indexes]) // _STEP
        self._last_sequence = np.array([index.sequences - 1 for index in indexes])
        self._last_document = np.array([index.documents - 1 for index in indexes])
        equal = bool(np.all(self._last_sequence == self._last_document))
        self._simple = equal and not any(file.empty_documents for file in stream.files)
        """Every document is one sequence, so the one's number is the other's."""

    @property
    def firsts(self) -> Int64s:
        """(files + 1,): the first document of each file, and the end."""
        return self._document_begins

    def extents(self, documents: Int64s) -> tuple[Int64s, Int64s]:
        """Where documents begin in the stream, and their tokens."""
        # Documents lie end to end, over the borders of files as well.
        ends = np.full(len(documents), self._token_begins[-1])
        followed = documents + 1 < len(self)
        ends[followed] = self.begins(documents[followed] + 1)
        begins = self.begins(documents)
        if (ends < begins).any():
            raise damaged_index(self._name)
        return begins, ends - begins

    def __len__(self) -> int:
        """Documents in all files of the stream."""
        return int(self._document_begins[-1])

    def find(self, positions: Int64s) -> Int64s:
        """The document that each position lies in."""
        file = self._token_ends.searchsorted(positions, side="right")
        byte = (positions - self._token_begins[file]) << self._shift
        found = self._last_up_to(byte, self._offsets_at[file], self._last_sequence[file])
        if not self._simple:
            found = self._last_up_to(found, self._documents_at[file], self._last_document[file])
        return found + self._document_begins[file]

    def _last_up_to(self, wanted: Int64s, first: Int64s, last: Int64s) -> Int64s:
        """In each ascending array of `last` + 1 numbers from place `first` on, the last that is not above the wanted.

        All are halved together: by steps of a falling power of two, each taken where it does not lead too far.
        """
        at, end, ahead = first.copy(), first + _NEXT * last, np.empty_like(first)
        for power in range(int(last.max()).bit_length() - 1, -1, -1):
            np.minimum(np.add(at, _NEXT << power, out=ahead), end, out=ahead)
            reached = self._numbers[ahead] <= wanted
            # By arithmetic: what chooses by a mask waits for every guess of the processor that was wrong.
            ahead -= at
            ahead *= reached
            at += ahead
        at -= first
        at //= _NEXT
        return at

    def begins(self, documents: Int64s) -> Int64s:
        """Where documents begin in the stream."""
        file = self._document_ends.searchsorted(documents, side="right")
        number = documents - self._document_begins[file]
        if not self._simple:
            number = self._numbers[self._documents_at[file] + _NEXT * number]
            # Only the ends of an index are checked when it is opened.
            self._require(number, self._last_sequence[file] + 1)
        offset = self._numbers[self._offsets_at[file] + _NEXT * number] >> self._shift
        self._require(offset, self._token_ends[file] - self._token_begins[file])
        begins: Int64s = offset + self._token_begins[file]
        return begins

    def _require(self, numbers: Int64s, most: Int64s) -> None:
        if (numbers < 0).any() or (numbers > most).any():
            raise damaged_index(self._name)


def damaged_index(name: str) -> StoreError:
    return StoreError(
        f"{name}: damaged: an index (.idx) names documents that are not there. `milldam verify` says which one."
    )


def _totals(counts: list[int]) -> Int64s:
    return np.fromiter(itertools.accumulate(counts, initial=0), np.int64, len(counts) + 1)


class _Places:
    """Where the arrays of an index file lie among the side by side mapped ones, in bytes."""

    def __init__(self, space: mmap.mmap, begin: int, file: TokenFile) -> None:
        index = Index.parse(memoryview(space)[begin : begin + file.tokens], file.path)
        self.check_ends = index.check_ends
        self.sequences, self.documents = len(index.lengths), len(index.documents) - 1
        self.offsets_at = begin + HEADER.size + 4 * self.sequences
        self.documents_at = self.offsets_at + 8 * self.sequences


def require_documents(stream: TokenStream) -> list[Path]:
    """The index files of a stream, or an error when its documents are not known."""
    found: list[Path] = []
    for file in stream.files:
        if file.index is None:
            raise ConfigError(
                f"{stream.name}: where its documents begin and end is not known ({file.path.name} has no index), so "
                "it can't be packed. windows() reads it without documents."
            )
        found.append(file.index)
    return found


def as_bytes(path: Path, what: str = "index", least: int = HEADER.size) -> TokenFile:
    """A file beside the tokens as a file of bytes, to be mapped."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path}: can't be read as an {what} ({error.strerror}).") from None
    if size < least:
        raise StoreError(f"{path}: {size:,} bytes are not an {what}. Make it again.")
    return TokenFile(path, size)
