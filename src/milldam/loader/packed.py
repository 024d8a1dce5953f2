"""Packed rows: samples of seq_len tokens made of documents, or pieces of them, whose boundaries are kept.

wrapped    row k is tokens [k * seq_len, (k + 1) * seq_len) of the stream: nothing is made before it is read
best_fit   a document is cut only when it is longer than a row, or left out then; what stays free is padded. The rows
           are planned once, by streaming over the lengths of documents, and kept in a file, which is mapped

Where the data says which tokens are trained on (conversations), all others have no loss: see `documents`.

The pieces of thousands of rows are looked up together, some dozens of numpy calls; a batch is then written by a kernel
(native/rows.c), out of mapped tokens, or of those that are read for it. Holds the batch, and some 130 bytes for each of
about 65,536 pieces; of conversations 8,192, and 16 bytes for each trained stretch. Planning best-fit rows holds some
megabytes, whatever the number of documents, and takes about 1.5 us for each; the file has 12 bytes a piece and 8 a row.

A batch is a dict. Each of these is (rows, seq_len):

input_ids, labels   form="shifted": the next token of the same document, also where a row's end cuts it; form="hf":
                    input_ids, since models of HF transformers shift by themselves; -100 where there is no loss
position_ids        from 0 on in every piece
document_ids        the number of the document (int64), -1 on padding: attention is between equal numbers
loss_mask           False where the target lies in another document or is not trained on, and on padding

And over rows end to end: `cu_seqlens`, where pieces begin, and the end (int32; padding is a piece of its own), and
`max_seqlen`, the longest of them. A row never holds two pieces of a document side by side.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from milldam.choices import Side
from milldam.errors import ConfigError, ResourceError, StoreError
from milldam.files import NewFile, explain_os_errors, hash_bytes
from milldam.loader.documents import (
    Documents,
    Losses,
    TrainedTokens,
    damaged_index,
    document_extents,
    mark,
    mask_labels,
    require_documents,
)
from milldam.loader.permutation import Int64s
from milldam.loader.reading import MappedReader, Reader, TokenArray, Way, end_to_end, ranges
from milldam.loader.samples import NoSamplesError, ReadPart, StreamSamples, TooLongDocuments, at_least, one_of
from milldam.loader.stream import TokenStream
from milldam.loader.types import Bools, LabelForm, PackedBatch, PackedRow, State
from milldam.native import kernel
from milldam.packing.best_fit import Cutter, best_fit_rows
from milldam.packing.rows import IndexColumns
from milldam.stores.tokens.format import Index

if TYPE_CHECKING:
    from milldam.loader.views import Trainable

Strategy = Literal["wrapped", "best_fit"]
TooLong = Literal["drop", "cut", "split"]
"""A document that is longer than a row: no row has it, one row has its begin, or several rows have pieces of it."""

ALGORITHM = 1
"""Another number for every change of `best_fit_rows` that gives other rows."""
PADDING = -1
"""The document of padding."""
_OFFSETS_IN_TOKENS = 1
"""The code of a dtype of one byte in the file of rows: offsets count tokens, whatever their size."""
_LONGEST_ROW = 2**31 - 1
_PIECES_AT_ONCE, _MASKED_PIECES_AT_ONCE = 1 << 16, 1 << 13
"""Pieces that are looked up together, if rows have as many as on average; masked ones come with the stretches that are
trained on."""
log = logging.getLogger("milldam")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    seq_len: int
    strategy: Strategy = "wrapped"
    form: LabelForm = "shifted"
    pad_last: bool = False
    """wrapped: pad the last row instead of leaving its tokens out."""
    buffer: int = 10_000
    """best_fit: how many documents are looked at together."""
    too_long: TooLong = "split"
    """best_fit: what becomes of a document that is longer than a row."""
    side: Side | None = None
    """best_fit: which documents of pairs rows are made of."""

    def __post_init__(self) -> None:
        for name, rest in {"seq_len": f", up to {_LONGEST_ROW:,}", "buffer": " documents"}.items():
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1, rest))
        if self.seq_len > _LONGEST_ROW:
            raise ConfigError(f"seq_len: {self.seq_len:,}; use 1 or more, up to {_LONGEST_ROW:,}.")
        one_of("strategy", self.strategy, Strategy)
        one_of("form", self.form, LabelForm)
        one_of("too_long", self.too_long, TooLong)
        if self.strategy == "wrapped" and (self.side is not None or self.too_long != "split"):
            raise ConfigError("side, too_long: wrapped rows cut documents wherever a row is full. Use best_fit.")
        if self.strategy == "best_fit" and self.pad_last:
            raise ConfigError("pad_last: best_fit pads every row that is not full; leave it out.")

    @property
    def facts(self) -> State:
        """All that decides which row has which number."""
        own: State = {"strategy": self.strategy, "seq_len": self.seq_len}
        if self.side is not None:
            own["side"] = self.side
        if self.strategy == "wrapped":
            return own | {"pad_last": self.pad_last}
        return own | {"buffer": self.buffer, "algorithm": ALGORITHM, "too_long": self.too_long}


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


class PackedRows(StreamSamples[PackedRow, PackedBatch]):
    """Rows of a stream: `rows[k]`, `len(rows)`, `rows.batches(16)`; for the arrays of a batch see the module.

    >>> rows = store.packed(128, strategy="best_fit", too_long="cut")
    >>> batch = next(rows.batches(4, seed=0))
    >>> batch["input_ids"].shape, batch["loss_mask"].dtype
    ((4, 128), dtype('bool'))
    """

    _signed, _kind = True, "packed"

    def __init__(self, data: Trainable | TokenStream, rules: RowRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules, stream, row = rules, self._stream, rules.seq_len
        require_documents(stream)
        if not stream.tokens:
            raise NoSamplesError(f"{stream.name}: has no tokens to make rows of.")
        if rules.too_long == "drop" and self.too_long.documents == self.too_long.of_documents:
            raise NoSamplesError(f"{stream.name}: {self._too_long_message()}")
        self._index: Index | None = None
        if rules.strategy == "best_fit":
            self._index = open_row_index(stream, rules)
            self._count = len(self._index.documents) - 1
        else:
            full, rest = divmod(stream.tokens, row)
            self._count = full + (rules.pad_last and rest > 0)
            if not self._count:
                raise NoSamplesError(
                    f"{stream.name}: {stream.tokens:,} tokens are too few for one row of seq_len={row:,}. "
                    "Use a shorter seq_len, or pad_last=True."
                )

    @cached_property
    def too_long(self) -> TooLongDocuments:
        """The documents that are longer than a row."""
        documents = document_extents(self._stream, self.rules.side)
        return TooLongDocuments.count((ends - begins for begins, ends in documents), self.rules.seq_len)

    def _too_long_message(self) -> str:
        return self.too_long.message("seq_len", self.rules.seq_len, self.rules.too_long)

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return self._count

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[PackedBatch]:
        return RowReading(self.pieces, self.rows_at_once, self._reader, numbers, self.rules, dtype)

    def __repr__(self) -> str:
        rules = self.rules
        return f"PackedRows({self._stream.name}: {len(self):,} of {rules.seq_len:,} tokens, {rules.strategy})"

    # ---- the pieces of rows ----

    @cached_property
    def _documents(self) -> Documents:
        return Documents(self._stream)

    @cached_property
    def _trained(self) -> TrainedTokens | None:
        return TrainedTokens(self._stream, self._documents) if self._stream.has_spans else None

    @cached_property
    def rows_at_once(self) -> int:
        """Rows whose pieces are looked up together."""
        documents = len(self._documents) if self._index is None else len(self._index.lengths)
        pieces = _MASKED_PIECES_AT_ONCE if self._stream.has_spans else _PIECES_AT_ONCE
        return max(1, pieces // (documents // self._count + 1))

    def pieces(self, numbers: Int64s) -> RowPieces:
        """Everything about rows but their tokens."""
        table, counts, padding = self._wrapped(numbers) if self._index is None else self._best_fit(numbers, self._index)
        losses = None
        if self._trained is not None:
            begins, lengths, documents, goes_on = table.T
            shifted = self.rules.form == "shifted"
            reach = lengths - (shifted & (goes_on == 0))
            begins = begins - self._documents.begins(documents)
            losses = self._trained.losses(documents, begins, reach, shifted=shifted)
        some = padding > 0
        if some.any():
            # One more piece behind the others of each row that is not full.
            at, last = counts.cumsum()[some], np.zeros((some.sum(), 4), np.int64)
            last[:] = -1 - self._stream.pad_id, 0, PADDING, False
            last[:, 1] = padding[some]
            table, counts = np.insert(table, at, last, axis=0), counts + some
            losses = losses and replace(losses, counts=np.insert(losses.counts, at, 0))
        return RowPieces(table, counts, losses)

    def _wrapped(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """The pieces of rows, how many each row has, and its padding."""
        stop, starts = self._stream.stop, self._stretches(numbers)[0]
        behind = starts + self.rules.seq_len
        # The token behind a row tells whether its last document goes on; behind the stream there is none.
        places = np.concatenate((starts, np.minimum(behind, stop - 1)))
        first_document, last_document = self._documents.find(places).reshape(2, -1)
        counts = last_document - first_document + 1
        if (counts < 1).any():
            raise damaged_index(self._stream.name)
        last = counts.cumsum() - 1
        # begins, lengths, documents, goes_on
        table = np.zeros((int(last[-1]) + 1, 4), np.int64)
        table[:, 2] = ranges(first_document, counts)
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
        return table, counts, np.maximum(behind - stop, 0)

    def _best_fit(self, numbers: Int64s, index: Index) -> tuple[Int64s, Int64s, Int64s]:
        """The same, from the index of rows."""
        row, first, stop = self.rules.seq_len, self._stream.first, self._stream.stop
        begins, lengths, counts = self._stretches(numbers)
        padding = row - np.add.reduceat(lengths, counts.cumsum() - counts)
        # Only the head of the file was checked when it was opened.
        if begins.min() < first or (begins + lengths).max() > stop or lengths.min() < 1 or padding.min() < 0:
            raise _damaged(index)
        # A document that fills its row may go on behind it.
        full = np.flatnonzero(lengths == row)
        behind = begins[full] + row
        places = np.concatenate((begins, np.minimum(behind, stop - 1)))
        documents, documents_behind = np.split(self._documents.find(places), [len(begins)])
        goes_on = np.zeros(len(begins), np.bool_)
        goes_on[full] = (documents_behind == documents[full]) & (behind < stop)
        return np.stack((begins, lengths, documents, goes_on), axis=1), counts, padding

    def _stretches(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        if (index := self._index) is None:
            begins = numbers * self.rules.seq_len + self._stream.first
            ends = np.minimum(begins + self.rules.seq_len + (self.rules.form == "shifted"), self._stream.stop)
            return begins, ends - begins, np.ones_like(numbers)
        first = index.documents[numbers]
        counts = index.documents[numbers + 1] - first
        if (first < 0).any() or (counts < 1).any() or (first + counts > len(index.lengths)).any():
            raise _damaged(index)
        which = ranges(first, counts)
        return index.offsets[which], index.lengths[which].astype(np.int64), counts


def _damaged(index: Index) -> StoreError:
    return StoreError(f"{index.path}: is damaged. Remove it, and it is rebuilt.")


_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")
_SHIFTED, _SAME, _SAME_UNMASKED = range(3)
"""Labels, as the kernel (native/rows.c) knows them."""


class RowReading:
    """Batches of rows that are looked up together: `reading(slice(16, 32), out)`."""

    def __init__(
        self,
        pieces: Callable[[Int64s], RowPieces],
        rows_at_once: int,
        reader: Reader,
        numbers: Int64s,
        rules: RowRules,
        dtype: npt.DTypeLike,
    ) -> None:
        self._pieces, self._rows_at_once, self._reader, self._numbers = pieces, rows_at_once, reader, numbers
        self._seq_len, self._form, self._number = rules.seq_len, rules.form, np.dtype(dtype)
        token, number = reader.dtype, self._number
        if number not in (np.int32, np.int64):
            raise ConfigError(f"dtype: {number}; labels of packed rows need int32 or int64.")
        types = (token.type, np.int64, int, *(number.type,) * 3, np.int64, np.bool_, np.int32)
        self._fill = kernel(f"fill_rows_{token}_{number}", *types)
        self._first, self._stop = 0, 0

    def __call__(self, part: slice, out: PackedBatch | None) -> PackedBatch:
        first, stop = part.start, min(part.stop, len(self._numbers))
        if first < self._first or stop > self._stop:
            self._look_up(first, stop)
        batch = self._empty_batch(stop - first, out)
        first, stop = first - self._first, stop - self._first
        tokens, table = self._source(slice(self._piece_at[first], self._piece_at[stop]))
        borders = batch["cu_seqlens"] = np.empty(len(table) + 1, np.int32)
        batch["max_seqlen"] = self._fill(tokens, table, self._labels, *(batch[name] for name in _PER_TOKEN), borders)
        if self._losses is not None:
            mask, before = batch["loss_mask"].reshape(-1), first * self._seq_len
            begins, ends = (some[self._loss_at[first] : self._loss_at[stop]] - before for some in self._losses)
            mark(begins, ends, mask)
            mask_labels(batch["labels"].reshape(-1), mask)
        return cast(PackedBatch, batch)

    def _look_up(self, first: int, stop: int) -> None:
        """Look up the rows of a batch and of some that follow."""
        size = stop - first
        self._first, self._stop = first, first + max(1, self._rows_at_once // size) * size
        pieces = self._pieces(self._numbers[self._first : self._stop])
        self._table, losses = pieces.table, pieces.losses
        self._labels = _SHIFTED if self._form == "shifted" else _SAME if losses is None else _SAME_UNMASKED
        # (rows + 1,): the first piece of each row, and the end
        piece_at = np.concatenate(([0], pieces.counts.cumsum()))
        self._piece_at: list[int] = piece_at.tolist()
        # The pieces with their places among mapped tokens, and which of them lie in two files, if any do.
        self._mapped: Int64s | None = None
        self._in_two: Bools | None = None
        if isinstance(self._reader, MappedReader):
            real, starts, lengths = self._taken(self._table)
            places = self._reader.places(starts, lengths)
            self._mapped = self._table.copy()
            self._mapped[real, 0] = places
            if (places < 0).any():
                self._in_two = real.copy()
                self._in_two[real] = places < 0
        # Where stretches with a loss begin and end, counted from the first row on, where not all is trained on.
        self._losses: tuple[Int64s, Int64s] | None = None
        if losses is not None:
            lengths = self._table[:, 1]
            self._losses = losses.at(lengths.cumsum() - lengths)
            self._loss_at: list[int] = np.concatenate(([0], losses.counts.cumsum()))[piece_at].tolist()

    def _taken(self, table: Int64s) -> tuple[Bools, Int64s, Int64s]:
        """Which pieces are no padding; where these begin, and their tokens with one behind them that is a label."""
        real = table[:, 0] >= 0
        starts, lengths, _, goes_on = table[real].T
        return real, starts, lengths + goes_on if self._labels == _SHIFTED else lengths

    def _source(self, mine: slice) -> tuple[TokenArray, Int64s]:
        """Tokens, and pieces with their places among them: all that are mapped, or those that are read for these."""
        if self._mapped is not None and (self._in_two is None or not self._in_two[mine].any()):
            assert isinstance(self._reader, MappedReader)
            return self._reader.tokens, self._mapped[mine]
        table = self._table[mine].copy()
        real, starts, lengths = self._taken(table)
        table[real, 0] = lengths.cumsum() - lengths
        return self._reader.runs(*end_to_end(starts, lengths)), table

    def _empty_batch(self, rows: int, out: Any) -> dict[str, Any]:
        """Arrays to be written: the first rows of those that may be overwritten, or new ones."""
        if out is not None:
            return {name: out[name][:rows] for name in _PER_TOKEN}
        # One block for all: the C library gives smaller ones back to the system after every batch, and getting their
        # pages anew costs more than what is written there.
        size, number = rows * self._seq_len, self._number
        block = np.empty(size * (8 + 3 * number.itemsize + 1), np.uint8)
        wide, narrow = 8 * size, number.itemsize * size
        numbers = block[wide : wide + 3 * narrow].view(number).reshape(3, rows, self._seq_len)
        return {
            "input_ids": numbers[0],
            "labels": numbers[1],
            "position_ids": numbers[2],
            "document_ids": block[:wide].view(np.int64).reshape(rows, self._seq_len),
            "loss_mask": block[wide + 3 * narrow :].view(np.bool_).reshape(rows, self._seq_len),
        }


# ---- the file of best-fit rows ----
#
# It has the layout of a shard's index (milldam.stores.tokens.format): its documents are the rows, its sequences their
# pieces, and an offset is where a piece begins in the stream. Its name says by two hashes which place of the data it is
# for and what its rows follow from. It lies in the data's own cache folder, or, where that can't be written, in the
# user's.


def open_row_index(stream: TokenStream, rules: RowRules) -> Index:
    """The rows of a stream, from a file that was made before or is made now."""
    home = os.environ.get("XDG_CACHE_HOME")
    users = (Path(home) if home else Path.home() / ".cache") / "milldam" / "rows"
    folders = [users] if stream.cache is None else [stream.cache, users]
    for folder in folders:
        if (index := _map(_path_in(folder, stream, rules))) is not None:
            return index
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        return _make(_path_in(folder, stream, rules), stream, rules)
    raise ResourceError(
        f"{stream.name}: its rows have to be kept in a file, and neither of these can be written: "
        f"{', '.join(str(folder) for folder in folders)}. Set XDG_CACHE_HOME to a folder that can be."
    )


def _path_in(folder: Path, stream: TokenStream, rules: RowRules) -> Path:
    """The file for these rows; names for one place of the data begin alike, so that outdated files are recognised."""

    def key(*parts: object) -> str:
        return hash_bytes(json.dumps(parts).encode())[:12]

    place = os.path.relpath(stream.files[0].path.parent, folder)
    # A cache of stores at addresses has them all in one folder.
    name = Path(stream.name).name if stream.origin is None else stream.fingerprint
    data = key(place, name, stream.first, stream.stop, rules.facts)
    return folder / f"best_fit-{rules.seq_len}-{data}-{key(rules.facts, stream.identity)}.rows"


def _map(path: Path) -> Index | None:
    """The index in a file, when there is one and it is whole."""
    try:
        index = Index.map(path)
    except StoreError:
        return None
    ends = (int(index.documents[0]), int(index.documents[-1]))
    return index if len(index.documents) > 1 and ends == (0, len(index.lengths)) else None


def _make(path: Path, stream: TokenStream, rules: RowRules) -> Index:
    """Processes that start together all do it, to the same end."""
    begun = perf_counter()
    log.info("%s: making the best-fit rows of %d tokens", stream.name, rules.seq_len)
    with explain_os_errors(path), closing(IndexColumns(path.parent)) as columns, NewFile(path) as new:
        for (starts, lengths), counts in best_fit_rows(_pieces(stream, rules), rules.seq_len, buffer=rules.buffer):
            columns.add(counts, starts + stream.first, lengths)
        columns.write(new, _OFFSETS_IN_TOKENS)
        new.commit()
    for outdated in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
        if outdated != path:
            outdated.unlink(missing_ok=True)
    log.info("%s: made in %.1f s: %s", stream.name, perf_counter() - begun, path)
    return Index.map(path)


def _pieces(stream: TokenStream, rules: RowRules) -> Iterator[Int64s]:
    """Documents, or the pieces of those that are longer than a row; positions count from the stream's first token."""
    cutter = Cutter(rules.seq_len, wrapped=False)
    for begins, ends in document_extents(stream, rules.side):
        if rules.too_long == "split":
            yield from cutter.cut(begins, ends)
        else:
            pieces = np.stack([begins, np.minimum(ends - begins, rules.seq_len)])
            yield pieces if rules.too_long == "cut" else pieces[:, ends - begins <= rules.seq_len]
