"""Packed rows: samples of seq_len tokens made of documents, or pieces of them, whose boundaries are kept.

wrapped    row k is tokens [k * seq_len, (k + 1) * seq_len) of the stream: nothing is made before it is read
best_fit   a document is cut only when it is longer than a row, or left out then; what stays free is padded: see
           `row_pieces`

Where the data says which tokens are trained on (conversations), all others have no loss: see `boundaries`.

Which pieces rows are made of is looked up for thousands of them at once (`row_pieces`); a batch is then written by a
kernel (native/rows.c), out of mapped tokens, or of those that are read for it. Holds the batch,
and what was looked up: some 130 bytes for each of 65,536 pieces, or for those of one batch where that has more; of
conversations 8,192, and 16 bytes for each trained stretch.

A batch is a dict. Each of these is (rows, seq_len):

input_ids      tokens, and the data's pad id
labels         form="shifted": the next token of the same document, also where a row's end cuts it;
               form="hf": input_ids, since models of HF transformers shift by themselves; -100 where there is no loss
position_ids   from 0 on in every piece
document_ids   the number of the document (int64), -1 on padding: attention is between equal numbers
loss_mask      False where the target lies in another document or is not trained on, and on padding

And for attention over rows end to end: `cu_seqlens`, where pieces begin, and the end (int32; padding is a piece of its
own), and `max_seqlen`, the longest of them. A row never holds two pieces of a document side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import numpy.typing as npt

from milldam.choices import Side
from milldam.errors import ConfigError
from milldam.loader.boundaries import document_extents, mark, mask_labels, require_documents
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import MappedReader, Reader, TokenArray, Way, end_to_end
from milldam.loader.row_pieces import (
    ALGORITHM,
    BestFitRows,
    RowFinder,
    RowPieces,
    StreamRows,
    TooLong,
    TooLongDocuments,
    WrappedRows,
    count_too_long,
)
from milldam.loader.samples import NoSamplesError, ReadPart, StreamSamples, at_least, one_of
from milldam.loader.types import Bools, LabelForm, PackedBatch, PackedRow, State
from milldam.native import kernel

if TYPE_CHECKING:
    from milldam.loader.views import RowForms, Trainable

Strategy = Literal["wrapped", "best_fit"]

_LONGEST_ROW = 2**31 - 1


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
        if self.side is not None and self.strategy == "wrapped":
            raise ConfigError("side: wrapped rows have the tokens of both sides of a pair. Use best_fit.")
        if self.too_long != "split" and self.strategy == "wrapped":
            raise ConfigError("too_long: wrapped rows cut documents wherever a row is full; leave it out.")
        if self.pad_last and self.strategy == "best_fit":
            raise ConfigError("pad_last: best_fit pads every row that is not full; leave it out.")

    @classmethod
    def chosen(cls, *, chat: bool, seq_len: int, **options: Unpack[RowForms]) -> RowRules:
        """The rules with what is not said as suits the data: conversations are neither cut nor split."""
        given: dict[str, Any] = {**options}
        best_fit = chat and not options.get("pad_last")
        given["strategy"] = options.get("strategy") or ("best_fit" if best_fit else "wrapped")
        whole = chat and given["strategy"] == "best_fit"
        given["too_long"] = options.get("too_long") or ("drop" if whole else "split")
        return cls(seq_len=seq_len, **given)

    @property
    def facts(self) -> State:
        """What decides which row has which number."""
        own: State = {"strategy": self.strategy, "seq_len": self.seq_len}
        if self.side is not None:
            own["side"] = self.side
        if self.strategy == "wrapped":
            return own | {"pad_last": self.pad_last}
        return own | {"buffer": self.buffer, "algorithm": ALGORITHM, "too_long": self.too_long}


class PackedRows(StreamSamples[PackedRow, PackedBatch]):
    """Rows of a stream: `rows[k]`, `len(rows)`, `rows.batches(16)`; what is in a batch: see the module.

    >>> rows = store.packed(128, strategy="best_fit", too_long="cut")
    >>> batch = next(rows.batches(4, seed=0))
    >>> batch["input_ids"].shape, batch["loss_mask"].dtype
    ((4, 128), dtype('bool'))
    """

    _signed, _kind = True, "packed"

    def __init__(self, data: Trainable, rules: RowRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules = rules
        require_documents(self._stream)
        if not self._stream.tokens:
            raise NoSamplesError(f"{self._stream.name}: has no tokens to make rows of.")
        if rules.too_long in ("drop", "refuse"):
            self._refuse_too_long()
        made_by = WrappedRows if rules.strategy == "wrapped" else BestFitRows
        self._rows: StreamRows = made_by(self._stream, rules)

    @cached_property
    def too_long(self) -> TooLongDocuments:
        """The documents that are longer than a row."""
        documents = document_extents(self._stream, self.rules.side)
        return count_too_long((ends - begins for begins, ends in documents), self.rules.seq_len)

    def _refuse_too_long(self) -> None:
        found = self.too_long
        if found.documents and self.rules.too_long == "refuse":
            raise ConfigError(f"{self._stream.name}: {self.told_too_long()}")
        if found.documents == found.of_documents:
            raise NoSamplesError(f"{self._stream.name}: {self.told_too_long()}")

    def told_too_long(self) -> str:
        """How many documents are too long, and what to do about it."""
        return self.too_long.told("seq_len", self.rules.seq_len, self.rules.too_long)

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: PackedBatch | None = None) -> PackedBatch:
        return self._look_up(numbers, dtype)(slice(0, len(numbers)), out)

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[PackedBatch]:
        return RowReading(self._rows, self._reader, numbers, RowForm(self.rules.seq_len, self.rules.form, dtype))

    def _lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        return self._rows.lie(stretches)

    def __repr__(self) -> str:
        rules = self.rules
        return f"PackedRows({self._stream.name}: {len(self):,} of {rules.seq_len:,} tokens, {rules.strategy})"


_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")


@dataclass(frozen=True, slots=True)
class RowForm:
    """What a batch looks like, whatever rows are in it."""

    seq_len: int
    labels: LabelForm
    dtype: npt.DTypeLike

    def empty_batch(self, rows: int, out: Any) -> dict[str, Any]:
        """Arrays to be written: the first rows of those that may be overwritten, or new ones."""
        if out is not None:
            return {name: out[name][:rows] for name in _PER_TOKEN}
        number = np.dtype(self.dtype)
        if number not in (np.int32, np.int64):
            raise ConfigError(f"dtype: {number}; labels of packed rows need int32 or int64.")
        # One block for all: the C library gives smaller ones back to the system after every batch, and getting their
        # pages anew costs more than what is written there.
        size = rows * self.seq_len
        block = np.empty(size * (8 + 3 * number.itemsize + 1), np.uint8)
        wide, narrow = 8 * size, number.itemsize * size
        numbers = block[wide : wide + 3 * narrow].view(number).reshape(3, rows, self.seq_len)
        return {
            "input_ids": numbers[0],
            "labels": numbers[1],
            "position_ids": numbers[2],
            "document_ids": block[:wide].view(np.int64).reshape(rows, self.seq_len),
            "loss_mask": block[wide + 3 * narrow :].view(np.bool_).reshape(rows, self.seq_len),
        }


class RowReading:
    """Batches of rows that are looked up together: `reading(slice(16, 32), out)`."""

    def __init__(self, rows: RowFinder, reader: Reader, numbers: Int64s, form: RowForm) -> None:
        self._rows, self._reader, self._form = rows, reader, form
        self._outline = rows.outline(numbers)
        # (rows + 1,): pieces of all rows before
        self._pieces_before = np.concatenate(([0], self._outline.counts.cumsum()))
        self._first, self._stop = 0, 0
        self._found: _Found | None = None

    def __call__(self, part: slice, out: PackedBatch | None) -> PackedBatch:
        first, stop = part.start, min(part.stop, len(self._outline))
        batch = self._form.empty_batch(stop - first, out)
        found = self._found
        if found is None or first < self._first or stop > self._stop:
            found = self._look_up(first, stop)
        found.write(batch, first - self._first, stop - self._first)
        return cast(PackedBatch, batch)

    def _look_up(self, first: int, stop: int) -> _Found:
        """Look up the rows of a batch and of those that follow, as long as these are no more than so many pieces."""
        most = int(self._pieces_before[first]) + self._rows.pieces_at_once
        rows = int(self._pieces_before.searchsorted(most, side="right")) - 1 - first
        size = stop - first
        self._first, self._stop = first, first + max(1, rows // size) * size
        # What was looked up before is let go first.
        self._found = None
        self._found = _Found(self._rows.pieces(self._outline[self._first : self._stop]), self._reader, self._form)
        return self._found


_SHIFTED, _SAME, _SAME_UNMASKED = range(3)
"""Labels, as the kernel (native/rows.c) knows them."""


class _Found:
    """Rows that were looked up, from which batches are written."""

    def __init__(self, pieces: RowPieces, reader: Reader, form: RowForm) -> None:
        self._table, self._reader, self._seq_len = pieces.table, reader, form.seq_len
        same = _SAME if pieces.losses is None else _SAME_UNMASKED
        self._labels = _SHIFTED if form.labels == "shifted" else same
        token, number = reader.dtype, np.dtype(form.dtype)
        types = (token.type, np.int64, int, *(number.type,) * 3, np.int64, np.bool_, np.int32)
        self._fill = kernel(f"fill_rows_{token}_{number}", *types)
        # (rows + 1,): the first piece of each row, and the end
        piece_at = np.concatenate(([0], pieces.counts.cumsum()))
        self._piece_at: list[int] = piece_at.tolist()
        self._mapped, self._in_two = self._places()
        self._losses: tuple[Int64s, Int64s] | None = None
        """Where stretches with a loss begin and end, counted from the first row on, where not all is trained on."""
        if pieces.losses is not None:
            lengths, counts = pieces.table[:, 1], pieces.losses.counts
            shift = (lengths.cumsum() - lengths).repeat(counts)
            self._losses = pieces.losses.begins + shift, pieces.losses.ends + shift
            self._loss_at: list[int] = np.concatenate(([0], counts.cumsum()))[piece_at].tolist()

    def _places(self) -> tuple[Int64s | None, Bools | None]:
        """The pieces with their places among mapped tokens, and which of them lie in two files, if any do."""
        if not isinstance(self._reader, MappedReader):
            return None, None
        real, starts, lengths = self._taken(self._table)
        places = self._reader.places(starts, lengths)
        table = self._table.copy()
        table[real, 0] = places
        in_two = real.copy()
        in_two[real] = places < 0
        return table, in_two if in_two.any() else None

    def _taken(self, table: Int64s) -> tuple[Bools, Int64s, Int64s]:
        """Which pieces are no padding; where these begin, and their tokens with one behind them that is a label."""
        real = table[:, 0] >= 0
        starts, lengths, _, goes_on = table[real].T
        return real, starts, lengths + goes_on if self._labels == _SHIFTED else lengths

    def write(self, batch: dict[str, Any], first: int, stop: int) -> None:
        """The rows [first, stop), into the arrays of a batch."""
        tokens, table = self._source(slice(self._piece_at[first], self._piece_at[stop]))
        borders = batch["cu_seqlens"] = np.empty(len(table) + 1, np.int32)
        batch["max_seqlen"] = self._fill(tokens, table, self._labels, *(batch[name] for name in _PER_TOKEN), borders)
        if self._losses is not None:
            mask, before = batch["loss_mask"].reshape(-1), first * self._seq_len
            begins, ends = (some[self._loss_at[first] : self._loss_at[stop]] - before for some in self._losses)
            mark(begins, ends, mask)
            mask_labels(batch["labels"].reshape(-1), mask)

    def _source(self, mine: slice) -> tuple[TokenArray, Int64s]:
        """Tokens, and pieces with their places among them: all that are mapped, or those that are read for these."""
        if self._mapped is not None and (self._in_two is None or not self._in_two[mine].any()):
            assert isinstance(self._reader, MappedReader)
            return self._reader.tokens, self._mapped[mine]
        table = self._table[mine].copy()
        real, starts, lengths = self._taken(table)
        table[real, 0] = lengths.cumsum() - lengths
        return self._reader.runs(*end_to_end(starts, lengths)), table
