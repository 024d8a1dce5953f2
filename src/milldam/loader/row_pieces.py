"""Which documents rows are made of, and where their tokens lie: thousands of rows looked up together.

An `Outline` is found first, two numbers a row, from which the size of the answer follows; then the pieces of as many
rows as are wanted at a time. Some dozens of numpy calls each, whatever the number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from milldam.errors import StoreError
from milldam.loader.boundaries import Documents, Losses, TrainedTokens, Wanted, all_trained, damaged_index
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import ranges
from milldam.loader.row_index import RowSource, open_row_index
from milldam.loader.samples import NoSamplesError
from milldam.loader.stream import TokenStream
from milldam.loader.types import Bools

if TYPE_CHECKING:
    from milldam.loader.packed import RowRules

PADDING = -1
"""The document of padding."""
_PIECES_AT_ONCE = 1 << 16
_MASKED_PIECES_AT_ONCE = 1 << 13
"""Each of these comes with the stretches that it is trained on."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Rows by number, and how many pieces each has at most."""

    numbers: Int64s
    firsts: Int64s
    """The first document of each, or the first piece in the index of rows."""
    counts: Int64s

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice | Int64s) -> Outline:
        return Outline(self.numbers[part], self.firsts[part], self.counts[part])


@dataclass(frozen=True, slots=True)
class Runs:
    """Tokens of rows: stretches of the stream, row after row."""

    starts: Int64s
    lengths: Int64s
    """The last of a row with the token behind it, where that is a label."""
    counts: Int64s
    """How many each row has."""


@dataclass(frozen=True, slots=True)
class RowPieces:
    """The pieces of some rows, row after row, padding among them: each row's lengths add up to seq_len."""

    lengths: Int64s
    documents: Int64s
    """The document of each piece; PADDING for padding."""
    goes_on: Bools
    """Whether the token behind a piece is of the same document; then it ends with its row."""
    counts: Int64s
    """How many each row has."""
    padding: Int64s
    """Tokens of padding at the end of each row."""
    pad_ids: Int64s
    """What each row is padded with."""
    runs: Runs
    losses: Losses | None = None
    """Where each piece has a loss; None: wherever its next token is known."""

    def with_losses(self, *, shifted: bool) -> RowPieces:
        """The same, with the losses of data that is trained on as a whole."""
        if self.losses is not None:
            return self
        reach = np.where(self.documents == PADDING, 0, self.lengths - (shifted & ~self.goes_on))
        return replace(self, losses=all_trained(self.lengths, reach, shifted=shifted))


class RowFinder(ABC):
    """Looks up rows by number."""

    pieces_at_once = _PIECES_AT_ONCE
    """Pieces of rows that are looked up together, unless one batch has more."""

    @abstractmethod
    def outline(self, numbers: Int64s) -> Outline:
        """What decides how large the answer for these rows is."""

    @abstractmethod
    def pieces(self, rows: Outline) -> RowPieces:
        """All that there is to know of rows but their tokens."""


class StreamRows(RowFinder):
    """The rows of one stream."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        self._stream, self._row = stream, rules.seq_len
        self._shifted = rules.form == "shifted"
        if stream.has_spans:
            self.pieces_at_once = _MASKED_PIECES_AT_ONCE

    @cached_property
    def _documents(self) -> Documents:
        return Documents(self._stream)

    @cached_property
    def _trained(self) -> TrainedTokens | None:
        return TrainedTokens(self._stream, self._documents) if self._stream.has_spans else None

    def _finished(self, rows: RowPieces, begins: Int64s) -> RowPieces:
        """Rows with padding, and with losses where the data says what is trained on.

        begins: (pieces,), where pieces begin in the stream
        """
        if self._trained is not None:
            wanted = Wanted(rows.documents, begins - self._documents.begins(rows.documents), rows.lengths)
            reach = rows.lengths - (self._shifted & ~rows.goes_on)
            rows = replace(rows, losses=self._trained.losses(wanted, reach=reach, shifted=self._shifted))
        return _with_padding(rows)

    def _pad_ids(self, rows: int) -> Int64s:
        return np.full(rows, self._stream.pad_id)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        """Begins and lengths in the stream of what rows are made of."""


class WrappedRows(StreamRows):
    """The stream cut at every seq_len tokens."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        super().__init__(stream, rules)
        full, rest = divmod(stream.tokens, rules.seq_len)
        self._count = full + (rules.pad_last and rest > 0)
        if not self._count:
            raise NoSamplesError(
                f"{stream.name}: {stream.tokens:,} tokens are too few for one row of seq_len={rules.seq_len:,}. "
                "Use a shorter seq_len, or pad_last=True."
            )

    def __len__(self) -> int:
        return self._count

    def _starts(self, numbers: Int64s) -> Int64s:
        starts: Int64s = numbers * self._row + self._stream.first
        return starts

    def outline(self, numbers: Int64s) -> Outline:
        starts = self._starts(numbers)
        # The token behind a row tells whether its last document goes on; behind the stream there is none.
        behind = np.minimum(starts + self._row, self._stream.stop - 1)
        first, last = self._documents.find(np.concatenate((starts, behind))).reshape(2, -1)
        counts = last - first + 1
        if (counts < 1).any():
            raise damaged_index(self._stream.name)
        return Outline(numbers, first, counts)

    def pieces(self, rows: Outline) -> RowPieces:
        stop, starts, counts = self._stream.stop, self._starts(rows.numbers), rows.counts
        behind = starts + self._row
        row_ends = counts.cumsum()
        number = ranges(rows.firsts, counts)
        begins = self._documents.begins(number)
        begins[row_ends - counts] = starts
        lengths = np.empty_like(begins)
        np.subtract(begins[1:], begins[:-1], out=lengths[:-1])
        lengths[row_ends - 1] = np.minimum(behind, stop) - begins[row_ends - 1]
        goes_on = np.zeros(len(number), np.bool_)
        goes_on[row_ends - 1] = behind < stop
        if (lengths < 0).any():
            raise damaged_index(self._stream.name)
        # A document that begins right behind the row, and documents without tokens.
        some = lengths > 0
        if not some.all():
            counts = np.add.reduceat(some, row_ends - counts, dtype=np.int64)
            number, lengths, goes_on, begins = number[some], lengths[some], goes_on[some], begins[some]
        runs = Runs(starts, np.minimum(behind + self._shifted, stop) - starts, np.ones_like(starts))
        padding = np.maximum(behind - stop, 0)
        found = RowPieces(lengths, number, goes_on, counts, padding, self._pad_ids(len(rows)), runs)
        return self._finished(found, begins)

    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        starts = self._starts(stretches.firsts)
        ends = starts + stretches.counts * self._row + self._shifted
        return starts, np.minimum(ends, self._stream.stop) - starts


class BestFitRows(StreamRows):
    """Pieces as the index of rows says."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        super().__init__(stream, rules)
        self._index = open_row_index(RowSource(stream, rules.seq_len, rules.buffer, rules.too_long))

    def __len__(self) -> int:
        return len(self._index.documents) - 1

    def outline(self, numbers: Int64s) -> Outline:
        first = self._index.documents[numbers]
        counts = self._index.documents[numbers + 1] - first
        if (first < 0).any() or (counts < 1).any() or (first + counts > len(self._index.lengths)).any():
            raise self._damaged()
        return Outline(numbers, first, counts)

    def pieces(self, rows: Outline) -> RowPieces:
        begins, lengths = self._runs(rows)
        counts = rows.counts
        row_ends = counts.cumsum()
        padding = self._row - np.add.reduceat(lengths, row_ends - counts)
        self._check(begins, lengths, padding)
        documents, goes_on = self._documents_of(begins, lengths)
        runs = Runs(begins, lengths + (goes_on & self._shifted), counts)
        found = RowPieces(lengths, documents, goes_on, counts, padding, self._pad_ids(len(rows)), runs)
        return self._finished(found, begins)

    def _runs(self, rows: Outline) -> tuple[Int64s, Int64s]:
        """Begins and lengths of the pieces of rows."""
        which = ranges(rows.firsts, rows.counts)
        return self._index.offsets[which], self._index.lengths[which].astype(np.int64)

    def _check(self, begins: Int64s, lengths: Int64s, padding: Int64s) -> None:
        """Of the file of rows only the head is checked when it is opened."""
        inside = begins.min() >= self._stream.first and (begins + lengths).max() <= self._stream.stop
        if not inside or lengths.min() < 1 or padding.min() < 0:
            raise self._damaged()

    def _damaged(self) -> StoreError:
        return StoreError(f"{self._index.path}: is damaged. Remove it, and it is rebuilt.")

    def _documents_of(self, begins: Int64s, lengths: Int64s) -> tuple[Int64s, Bools]:
        """The document of each piece, and whether it goes on behind it: only one that fills its row can."""
        full = np.flatnonzero(lengths == self._row)
        behind = begins[full] + self._row
        found = self._documents.find(np.concatenate((begins, np.minimum(behind, self._stream.stop - 1))))
        documents = found[: len(begins)]
        goes_on = np.zeros(len(begins), np.bool_)
        goes_on[full] = (found[len(begins) :] == documents[full]) & (behind < self._stream.stop)
        return documents, goes_on

    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        return self._runs(self.outline(stretches.numbers))


def _with_padding(rows: RowPieces) -> RowPieces:
    """Pieces with the padding of each row as one more piece at its end."""
    padded = rows.padding > 0
    if not padded.any():
        return rows
    counts = rows.counts + padded
    at = counts.cumsum()[padded] - 1
    real = np.ones(len(rows.lengths) + len(at), np.bool_)
    real[at] = False
    lengths, documents = np.empty((2, len(real)), np.int64)
    goes_on = np.zeros(len(real), np.bool_)
    lengths[real], lengths[at] = rows.lengths, rows.padding[padded]
    documents[real], documents[at] = rows.documents, PADDING
    goes_on[real] = rows.goes_on
    losses = rows.losses
    if losses is not None:
        with_loss = np.zeros(len(real), np.int64)
        with_loss[real] = losses.counts
        losses = replace(losses, counts=with_loss)
    return RowPieces(lengths, documents, goes_on, counts, rows.padding, rows.pad_ids, rows.runs, losses)
