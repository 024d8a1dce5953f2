"""Documents of a stream, from the mapped files beside its tokens: where they lie, which of their tokens are trained on,
and their labels.

All files of a kind lie side by side in one stretch of addresses, so that a question about any number of positions in
any number of files is a handful of numpy calls. Holds some numbers for each file; what it touches of the files is the
kernel's page cache. `Documents` takes about 3 us for each halving of the largest file's documents, for some dozens of
positions at once.

A document's number is that in all files of the stream, as `store[number]` has it, also in a part of the stream.

A `.spans` file (docs/format.md) has, for each document, stretches of its tokens in ascending order. Of a piece of a
document only the stretches that reach into it are read, found by bisection: the cost does not grow with the turns of
a conversation that other rows have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from milldam.choices import Side
from milldam.errors import ConfigError, StoreError
from milldam.loader.permutation import Int64s
from milldam.loader.reading import map_side_by_side, ranges
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import HEADER, Index

NO_LOSS = -100
"""The label that losses of torch and HF leave out."""
_STEP = 2
"""Bytes between two places where a number of an index may begin: its arrays begin at even bytes, not at round ones."""
_NEXT = 8 // _STEP
_WIDTH = 8


def document_extents(stream: TokenStream, side: Side | None = None) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the documents of a stream begin and end, counted from its first token, or those of one side of its pairs; a
    bounded number at a time. One that the begin or the end of the stream cuts is a shorter document; empty ones are
    left out."""
    position = number = 0
    held = stream.hold_indexes()
    for file, path in zip(stream.files, require_documents(stream), strict=True):
        if position >= stream.stop or position + file.tokens <= stream.first:
            position += file.tokens
            continue
        index = Index.map(path)
        index.check_ends(file.tokens * stream.dtype.itemsize)
        for lengths in index.length_blocks():
            borders = np.clip(np.concatenate(([position], position + lengths.cumsum())), stream.first, stream.stop)
            position += int(lengths.sum())
            some = borders[1:] > borders[:-1]
            begins, ends = borders[:-1][some] - stream.first, borders[1:][some] - stream.first
            mine = slice(None) if side is None else slice((get_args(Side).index(side) - number) % 2, None, 2)
            number += len(begins)
            yield begins[mine], ends[mine]
    del held


def require_documents(stream: TokenStream) -> list[Path]:
    """The index files of a stream, or an error when its documents are not known."""
    paths: list[Path] = []
    for file in stream.files:
        if file.index is None:
            raise ConfigError(
                f"{stream.name}: where its documents begin and end is not known ({file.path.name} has no index), so "
                "it can't be packed. windows() reads it without documents."
            )
        paths.append(file.index)
    return paths


def as_bytes(path: Path, what: str = "index", least: int = HEADER.size) -> TokenFile:
    """A file beside the tokens as a file of bytes, to be mapped."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path}: can't be read as an {what} ({error.strerror}).") from None
    if size < least:
        raise StoreError(f"{path}: {size:,} bytes are not an {what}. Make it again.")
    return TokenFile(path, size)


def damaged_index(name: str) -> StoreError:
    return StoreError(
        f"{name}: damaged: an index (.idx) names documents that are not there. `milldam verify` says which one."
    )


def _before(counts: npt.ArrayLike) -> Int64s:
    """(counts + 1,): the sum of those before each, and of all."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


class Documents:
    """Where the documents of a stream lie: `find` by position, `begins` by number."""

    def __init__(self, stream: TokenStream) -> None:
        self._held = stream.hold_indexes()
        files = [as_bytes(path) for path in require_documents(stream)]
        self._space, begins = map_side_by_side(files, 1)
        counts: list[tuple[int, int]] = []
        for at, file, tokens in zip(begins.tolist(), files, stream.files, strict=True):
            index = Index.parse(memoryview(self._space)[at : at + file.tokens], file.path)
            index.check_ends(tokens.tokens * stream.dtype.itemsize)
            counts.append((len(index.lengths), len(index.documents) - 1))
        sequences, documents = np.array(counts, np.int64).reshape(-1, 2).T
        self._name = stream.name
        # numbers[k]: the 8 bytes from byte k * _STEP on; an array of strides, no copy
        self._numbers = np.ndarray(((len(self._space) - 8) // _STEP + 1,), "<i8", self._space, 0, (_STEP,))
        self._shift = stream.dtype.itemsize.bit_length() - 1
        self._token_begins = _before([file.tokens for file in stream.files])
        self._token_ends = self._token_begins[1:]
        self.firsts = _before(documents)
        """(files + 1,): the first document of each file, and the end."""
        self._offsets_at = (begins + HEADER.size + 4 * sequences) // _STEP
        self._documents_at = self._offsets_at + _NEXT * sequences
        self._last_sequence, self._last_document = sequences - 1, documents - 1
        equal = bool(np.all(self._last_sequence == self._last_document))
        self._simple = equal and not any(file.empty_documents for file in stream.files)
        """Every document is one sequence, so the one's number is the other's."""

    def __len__(self) -> int:
        """Documents in all files of the stream."""
        return int(self.firsts[-1])

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

    def find(self, positions: Int64s) -> Int64s:
        """The document that each position lies in."""
        file = self._token_ends.searchsorted(positions, side="right")
        byte = (positions - self._token_begins[file]) << self._shift
        number = self._last_up_to(byte, self._offsets_at[file], self._last_sequence[file])
        if not self._simple:
            number = self._last_up_to(number, self._documents_at[file], self._last_document[file])
        return number + self.firsts[file]

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
        file = self.firsts[1:].searchsorted(documents, side="right")
        number = documents - self.firsts[file]
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


# ---- which tokens are trained on ----


@dataclass(frozen=True, slots=True)
class Losses:
    """Where pieces have a loss: stretches of positions, counted from the begin of each piece."""

    counts: Int64s
    """Stretches of each piece."""
    begins: Int64s
    ends: Int64s

    @classmethod
    def clipped(cls, counts: Int64s, begins: Int64s, ends: Int64s) -> Losses:
        """Without the stretches that are empty."""
        some = ends > begins
        if some.all():
            return cls(counts, begins, ends)
        owners = np.arange(len(counts)).repeat(counts)[some]
        return cls(np.bincount(owners, minlength=len(counts)), begins[some], ends[some])

    @classmethod
    def everywhere(cls, reach: Int64s, *, shifted: bool, first: int = 1) -> Losses:
        """Of pieces of which every token is trained on; arguments as for `TrainedTokens.losses`."""
        return cls.clipped(np.ones_like(reach), np.full(len(reach), first - shifted), reach)

    def at(self, places: Int64s) -> tuple[Int64s, Int64s]:
        """Begins and ends, counted from where pieces at ascending places are counted from."""
        shift = places.repeat(self.counts)
        return self.begins + shift, self.ends + shift


def mark(begins: Int64s, ends: Int64s, mask: Bools) -> None:
    """True in ascending stretches of a flat mask, False elsewhere."""
    borders = np.zeros(2 * len(begins) + 2, np.int64)
    borders[1:-1:2], borders[2:-1:2], borders[-1] = begins, ends, len(mask)
    inside = np.zeros(len(borders) - 1, np.bool_)
    inside[1::2] = True
    mask[:] = inside.repeat(np.diff(borders))


def mask_labels(labels: Array, mask: Bools) -> None:
    np.copyto(labels, NO_LOSS, where=~mask)


class TrainedTokens:
    """The stretches of a stream's documents: `losses` of pieces of them."""

    def __init__(self, stream: TokenStream, documents: Documents) -> None:
        self._held = stream.hold_indexes()
        self._name, self._firsts = stream.name, documents.firsts
        files = []
        for file in stream.files:
            if file.spans is None:
                raise StoreError(
                    f"{stream.name}: damaged: {file.path.name} has no .spans beside it, and others have one."
                )
            files.append(as_bytes(file.spans, "array of stretches", _WIDTH))
        self._space, begins = map_side_by_side(files, 1)
        self._numbers: Int64s = np.frombuffer(self._space, "<i8")
        # begins_at: where the begins of each file's documents lie; pairs_at: and its pairs
        self._begins_at = begins // _WIDTH
        self._pairs_at = self._begins_at + np.diff(self._firsts) + 1
        sizes = np.array([file.tokens for file in files]) // _WIDTH - np.diff(self._firsts) - 1
        # What lies behind a file that is too short is that of the next one.
        if (sizes < 0).any() or (sizes % 2).any() or (self._numbers[self._pairs_at - 1] * 2 != sizes).any():
            raise self._damaged()
        self._pairs = sizes // 2

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{self._name}: damaged: a file of stretches (.spans) does not belong to its documents. "
            "`milldam verify` says which one."
        )

    def losses(
        self, documents: Int64s, piece_begins: Int64s, reach: Int64s, *, shifted: bool, first: int = 1
    ) -> Losses:
        """Where pieces have a loss. The label at a position is the token there, or with `shifted` the one behind it.

        piece_begins   where each piece begins within its document
        reach          how far into each piece there are labels
        first          the first token of a piece that can be a label: nothing within the piece comes before token 0
        """
        file = self._firsts.searchsorted(documents, side="right") - 1
        at, pairs = self._begins_at[file] + documents - self._firsts[file], self._pairs_at[file]
        low, high = self._numbers[at], self._numbers[at + 1]
        if (low < 0).any() or (high < low).any() or (high > self._pairs[file]).any():
            raise self._damaged()
        stop = self._first_above(pairs, 0, piece_begins + reach - 1 + shifted, low, high)
        low = self._first_above(pairs, 1, piece_begins + first, low, stop)
        counts = stop - low
        which = pairs.repeat(counts) + 2 * ranges(low, counts)
        begins, ends = self._numbers[which], self._numbers[which + 1]
        # Only the ends of a file are checked when it is opened.
        leads = np.zeros(len(begins) + 1, np.bool_)
        leads[counts.cumsum() - counts] = True
        rising = (begins[1:] >= ends[:-1]) | leads[1:-1]
        if not rising.all() or (begins < 0).any() or (ends <= begins).any():
            raise self._damaged()
        shift = (piece_begins + shifted).repeat(counts)
        begins = np.maximum(begins - shift, first - shifted)
        return Losses.clipped(counts, begins, np.minimum(ends - shift, reach.repeat(counts)))

    def _first_above(self, pairs: Int64s, column: int, wanted: Int64s, low: Int64s, high: Int64s) -> Int64s:
        """The first of the pairs [low, high) of each whose number in a column is above the wanted; all are halved
        together."""
        low, high = low.copy(), high.copy()
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            open_still = low < high
            # Where nothing is left to halve, what is read does not matter.
            at = np.minimum(pairs + 2 * middle + column, len(self._numbers) - 1)
            above = self._numbers[at] > wanted
            np.copyto(high, middle, where=open_still & above)
            np.copyto(low, middle + 1, where=open_still & ~above)
        return low
