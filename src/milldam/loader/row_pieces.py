"""Which documents rows are made of, and where their tokens lie: thousands of rows looked up together.

An `Outline` is found first, two numbers a row, from which the size of the answer follows; then the pieces of as many
rows as are wanted at a time. Some dozens of numpy calls each, whatever the number of rows.

The rows of best-fit packing are a file, made once by streaming, then mapped. It has the layout of a shard's index
(milldam.stores.tokens.format): its documents are the rows, its sequences their pieces, and an offset is where a piece
begins in the stream of tokens. Its name says by two hashes which place of the data it is for and what its rows follow
from; a file that is damaged is made anew. It lies in the data's own cache folder, or, where that can't be written, in
the user's.

Making it holds what `best_fit_rows` holds, whatever the number of documents: some megabytes. About 1.5 us a document,
and 12 bytes a piece and 8 a row on disk, twice that while it is made.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from milldam.errors import ResourceError, StoreError
from milldam.files import NewFile, explain_os_errors, hash_bytes
from milldam.loader.boundaries import (
    Documents,
    Losses,
    TrainedTokens,
    Wanted,
    all_trained,
    damaged_index,
    document_extents,
)
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import ranges
from milldam.loader.samples import NoSamplesError
from milldam.loader.stream import TokenStream
from milldam.loader.types import Bools
from milldam.packing.best_fit import Cutter, Pieces, Rows, best_fit_rows
from milldam.packing.rows import IndexColumns
from milldam.stores.tokens.format import Index

if TYPE_CHECKING:
    from milldam.loader.packed import RowRules


ALGORITHM = 1
"""Another number for every change of `best_fit_rows` that gives other rows."""
_OFFSETS_IN_TOKENS = 1
"""The code of a dtype of one byte: offsets count tokens, whatever their size."""

TooLong = Literal["drop", "cut", "split", "refuse"]
"""What becomes of a document that is longer than a row: no row has it, one row has its begin, several rows have pieces
of it, or it is an error."""

log = logging.getLogger("milldam")
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
class RowPieces:
    """The pieces of some rows, row after row, padding among them: each row's lengths add up to seq_len."""

    table: Int64s
    """(pieces, 4): where a piece begins in the stream, or -1 - the id that it is padding of; its length; its document,
    PADDING for padding; whether the token behind it is of the same document: then it ends with its row."""
    counts: Int64s
    """How many each row has."""
    losses: Losses | None = None
    """Where each piece has a loss; None: wherever its next token is known."""

    def padded(self, padding: Int64s, pad_id: int) -> RowPieces:
        """The same, with so many tokens of padding behind each row as one more piece."""
        some = padding > 0
        if not some.any():
            return self
        at, each = self.counts.cumsum()[some], np.zeros((some.sum(), 4), np.int64)
        each[:] = -1 - pad_id, 0, PADDING, False
        each[:, 1] = padding[some]
        losses = self.losses and replace(self.losses, counts=np.insert(self.losses.counts, at, 0))
        return RowPieces(np.insert(self.table, at, each, axis=0), self.counts + some, losses)

    def with_losses(self, *, shifted: bool) -> RowPieces:
        """The same, with the losses of data that is trained on as a whole."""
        if self.losses is not None:
            return self
        _, lengths, documents, goes_on = self.table.T
        reach = np.where(documents == PADDING, 0, lengths - (shifted & (goes_on == 0)))
        return replace(self, losses=all_trained(lengths, reach, shifted=shifted))


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

    def _finished(self, table: Int64s, counts: Int64s, padding: Int64s) -> RowPieces:
        """Rows with padding, and with losses where the data says what is trained on."""
        losses = None
        if self._trained is not None:
            begins, lengths, documents, goes_on = table.T
            wanted = Wanted(documents, begins - self._documents.begins(documents), lengths)
            reach = lengths - (self._shifted & (goes_on == 0))
            losses = self._trained.losses(wanted, reach=reach, shifted=self._shifted)
        return RowPieces(table, counts, losses).padded(padding, self._stream.pad_id)

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
        behind, last = starts + self._row, counts.cumsum() - 1
        # begins, lengths, documents, goes_on
        table = np.zeros((int(last[-1]) + 1, 4), np.int64)
        table[:, 2] = ranges(rows.firsts, counts)
        table[:, 0] = self._documents.begins(table[:, 2])
        table[last - counts + 1, 0] = starts
        table[:-1, 1] = np.diff(table[:, 0])
        table[last, 1] = np.minimum(behind, stop) - table[last, 0]
        table[last, 3] = behind < stop
        if (table[:, 1] < 0).any():
            raise damaged_index(self._stream.name)
        # A document that begins right behind the row, and documents without tokens.
        some = table[:, 1] > 0
        if not some.all():
            counts, table = np.add.reduceat(some, last - counts + 1, dtype=np.int64), table[some]
        return self._finished(table, counts, np.maximum(behind - stop, 0))

    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        starts = self._starts(stretches.firsts)
        ends = starts + stretches.counts * self._row + self._shifted
        return starts, np.minimum(ends, self._stream.stop) - starts


class BestFitRows(StreamRows):
    """Pieces as the index of rows says."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        super().__init__(stream, rules)
        self._index = open_row_index(stream, rules)

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
        padding = self._row - np.add.reduceat(lengths, rows.counts.cumsum() - rows.counts)
        self._check(begins, lengths, padding)
        documents, goes_on = self._documents_of(begins, lengths)
        return self._finished(np.stack((begins, lengths, documents, goes_on), axis=1), rows.counts, padding)

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


# ---- best-fit rows, as a file ----


def _path_in(folder: Path, stream: TokenStream, rules: RowRules) -> Path:
    """The file for these rows; names for one place of the data begin alike, so that what is outdated is found."""
    place = os.path.relpath(stream.files[0].path.parent, folder)
    # A cache of stores at addresses has them all in one folder.
    name = Path(stream.name).name if stream.origin is None else stream.fingerprint
    key = _hash([place, name, stream.first, stream.stop, rules.facts])
    return folder / f"best_fit-{rules.seq_len}-{key}-{_hash(rules.facts | stream.identity)}.rows"


def _made_rows(stream: TokenStream, rules: RowRules) -> Iterator[Rows]:
    """The rows themselves; pieces begin at positions of the stream's first token on."""
    documents = document_extents(stream, rules.side)
    pieces: Iterator[Pieces]
    if rules.too_long == "split":
        cutter = Cutter(rules.seq_len, wrapped=False)
        pieces = (piece for begins, ends in documents for piece in cutter.cut(begins, ends))
    else:
        pieces = _one_each(documents, rules.seq_len, cut=rules.too_long == "cut")
    return best_fit_rows(pieces, rules.seq_len, buffer=rules.buffer)


def _one_each(documents: Iterator[tuple[Int64s, Int64s]], seq_len: int, *, cut: bool) -> Iterator[Pieces]:
    """A piece for each document: those that are too long are cut or left out."""
    for begins, ends in documents:
        pieces = Pieces(begins, np.minimum(ends - begins, seq_len))
        yield pieces if cut else pieces[ends - begins <= seq_len]


@dataclass(frozen=True, slots=True)
class TooLongDocuments:
    """What is known of the documents that are longer than a limit."""

    documents: int = 0
    tokens: int = 0
    """All tokens of them."""
    longest: int = 0
    of_documents: int = 0
    """How many documents there are."""

    def told(self, limit: str, most: int | None, too_long: str, *, also: str = "") -> str:
        """What becomes of them, and what to do about it. `limit`: the setting that says how long is too long."""
        became = {"drop": "left out", "refuse": "refused", "cut": "cut there", "split": "split"}[too_long]
        others = "drop, cut, split or refuse" if limit == "seq_len" else "drop, cut or refuse"
        return (
            f"{self.documents:,} of {self.of_documents:,} documents are longer than {limit}={most:,} and are "
            f"{became}{also} ({self.tokens:,} tokens; the longest has {self.longest:,}). Use a larger {limit}, or "
            f"another too_long: {others}."
        )


def count_too_long(documents: Iterator[Int64s], most: int) -> TooLongDocuments:
    """Those of more tokens than so many; a look at all lengths, some milliseconds for a million."""
    count, tokens, longest, total = 0, 0, 0, 0
    for lengths in documents:
        long = lengths[lengths > most]
        count, tokens, total = count + len(long), tokens + int(long.sum()), total + len(lengths)
        longest = max(longest, int(long.max(initial=0)))
    return TooLongDocuments(count, tokens, longest, total)


def _hash(value: object) -> str:
    return hash_bytes(json.dumps(value).encode())[:12]


def _map(path: Path) -> Index | None:
    """The index in a file, when there is one and it is whole."""
    try:
        index = Index.map(path)
    except StoreError:
        return None
    ends = (int(index.documents[0]), int(index.documents[-1]))
    return index if len(index.documents) > 1 and ends == (0, len(index.lengths)) else None


def open_row_index(stream: TokenStream, rules: RowRules) -> Index:
    """The rows of a stream, from a file that was made before or is made now."""
    folders = list(_folders(stream))
    for folder in folders:
        found = _map(_path_in(folder, stream, rules))
        if found is not None:
            return found
    for folder in folders:
        if _is_writable(folder):
            return _make(_path_in(folder, stream, rules), stream, rules)
    raise ResourceError(
        f"{stream.name}: its rows have to be kept in a file, and neither of these can be written: "
        f"{', '.join(str(folder) for folder in folders)}. Set XDG_CACHE_HOME to a folder that can be."
    )


def _folders(stream: TokenStream) -> Iterator[Path]:
    if stream.cache is not None:
        yield stream.cache
    home = os.environ.get("XDG_CACHE_HOME")
    yield (Path(home) if home else Path.home() / ".cache") / "milldam" / "rows"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _make(path: Path, stream: TokenStream, rules: RowRules) -> Index:
    """Processes that start together all do it, to the same end."""
    begun = perf_counter()
    log.info("%s: making the best-fit rows of %d tokens", stream.name, rules.seq_len)
    with explain_os_errors(path), closing(IndexColumns(path.parent)) as columns, NewFile(path) as new:
        for rows in _made_rows(stream, rules):
            columns.add(rows.counts, rows.pieces.starts + stream.first, rows.pieces.lengths)
        columns.write(new, _OFFSETS_IN_TOKENS)
        new.commit()
    for outdated in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
        if outdated != path:
            outdated.unlink(missing_ok=True)
    made = _map(path)
    if made is None:
        raise ResourceError(f"{path}: was written, but not so that it can be read. Is the disk failing?")
    count, took = len(made.documents) - 1, perf_counter() - begun
    fill = 100 * int(made.lengths.sum(dtype=np.int64)) / (count * rules.seq_len)
    log.info("%s: %d rows, %.2f %% full, in %.1f s: %s", stream.name, count, fill, took, path)
    return made
