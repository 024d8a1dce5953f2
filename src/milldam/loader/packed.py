"""Packed rows: samples of seq_len tokens made of documents, or pieces of them, whose boundaries are kept.

wrapped    row k is tokens [k * seq_len, (k + 1) * seq_len) of the stream: nothing is made before it is read
best_fit   a document is cut only when it is longer than a row, or left out then; what stays free is padded: see
           `row_index`

Where the data says which tokens are trained on (conversations), all others have no loss: see `trained`.

Which pieces rows are made of is looked up for thousands of them at once (`row_pieces`); a batch is then written by some
two dozen numpy calls, whatever is in it, or by a kernel where the tokens are mapped. Holds the batch, and what was
looked up: some 130 bytes for each of 65,536 pieces, or for those of one batch where that has more; of conversations
8,192, and 16 bytes for each trained stretch.

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
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, get_args

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.boundaries import NO_LOSS, document_lengths, mark, mask_labels, require_documents
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import MappedReader, Reader, Way
from milldam.loader.row_index import ALGORITHM, TooLong, TooLongDocuments, count_too_long
from milldam.loader.row_pieces import BestFitRows, RowFinder, RowPieces, StreamRows, WrappedRows
from milldam.loader.samples import NoSamplesError, ReadPart, StreamSamples, at_least
from milldam.loader.types import Array, Bools, PackedBatch, PackedRow, State
from milldam.native import Kernel, kernel

if TYPE_CHECKING:
    from milldam.loader.views import RowForms, Trainable

Strategy = Literal["wrapped", "best_fit"]
LabelForm = Literal["shifted", "hf"]

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

    def __post_init__(self) -> None:
        for name, rest in {"seq_len": f", up to {_LONGEST_ROW:,}", "buffer": " documents"}.items():
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1, rest))
        if self.seq_len > _LONGEST_ROW:
            raise ConfigError(f"seq_len: {self.seq_len:,}; use 1 or more, up to {_LONGEST_ROW:,}.")
        if self.strategy not in ("wrapped", "best_fit"):
            raise ConfigError(f'strategy: "{self.strategy}"; use wrapped or best_fit.')
        if self.form not in ("shifted", "hf"):
            raise ConfigError(f'form: "{self.form}"; use shifted or hf.')
        if self.too_long not in get_args(TooLong):
            raise ConfigError(f'too_long: "{self.too_long}"; use {", ".join(get_args(TooLong))}.')
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

    _signed = True

    def __init__(self, data: Trainable, rules: RowRules, way: Way = "auto") -> None:
        super().__init__(data.stream(), way)
        self._data, self.rules = data, rules
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
        return count_too_long(document_lengths(self._stream), self.rules.seq_len)

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
    def identity(self) -> State:
        own: State = {"kind": "packed", "samples": len(self)}
        return own | self.rules.facts | self._stream.identity

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

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self._data, self.rules, self._way)

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

    @property
    def span(self) -> int:
        """Tokens that a whole row takes of the stream."""
        return self.seq_len + (self.labels == "shifted")

    def empty_batch(self, rows: int, out: Any) -> dict[str, Any]:
        """Arrays to be written: the first rows of those that may be overwritten, or new ones."""
        if out is not None:
            return {name: out[name][:rows] for name in _PER_TOKEN}
        number = np.dtype(self.dtype)
        if number.kind != "i" or number.itemsize < 4:
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


class _Found:
    """Pieces of rows, as batches need them: tokens are counted through, from the first token of the first row on."""

    def __init__(self, pieces: RowPieces, reader: Reader, form: RowForm) -> None:
        self._lengths, self._documents, self._padding = pieces.lengths, pieces.documents, pieces.padding
        self._pieces, self._reader, self._form, self._seq_len = pieces, reader, form, form.seq_len
        self._borders = np.concatenate(([0], pieces.lengths.cumsum()))
        """Where pieces begin, and the end."""
        piece_at = np.concatenate(([0], pieces.counts.cumsum()))
        self._table = _Table.of(pieces, reader, form, self._borders, piece_at)
        self._piece_at: list[int] = piece_at.tolist()
        """The first piece of each row, and the end."""
        self._longest: list[int] = np.maximum.reduceat(pieces.lengths, piece_at[:-1]).tolist()
        """The longest piece of each row."""
        self._without, self._marks_at = self._borders[:-1], self._piece_at
        """Tokens without loss but for padding, and the first of each row among them (or among `_losses`)."""
        if form.labels == "shifted":
            ends = ~pieces.goes_on
            self._without = self._borders[1:][ends] - 1
            self._marks_at = np.concatenate(([0], ends.cumsum()))[piece_at].tolist()
        self._some_padding = bool(pieces.padding.any())
        self._losses: tuple[Int64s, Int64s] | None = None
        """Where stretches with a loss begin and end, where not all tokens are trained on."""
        if pieces.losses is not None:
            shift = self._borders[:-1].repeat(pieces.losses.counts)
            self._losses = pieces.losses.begins + shift, pieces.losses.ends + shift
            self._marks_at = np.concatenate(([0], pieces.losses.counts.cumsum()))[piece_at].tolist()

    @cached_property
    def _tokens(self) -> _RowTokens:
        return _RowTokens(self._pieces, self._reader, self._form)

    def write(self, batch: dict[str, Any], first: int, stop: int) -> None:
        """The rows [first, stop), into the arrays of a batch."""
        mine = slice(self._marks_at[first], self._marks_at[stop])
        if self._table is None or not self._table.write(batch, first, stop):
            self._write_by_numpy(batch, first, stop, mine)
        if self._losses is not None:
            labels, mask, before = batch["labels"].reshape(-1), batch["loss_mask"].reshape(-1), first * self._seq_len
            mark(self._losses[0][mine] - before, self._losses[1][mine] - before, mask)
            mask_labels(labels, mask)

    def _write_by_numpy(self, batch: dict[str, Any], first: int, stop: int, mine: slice) -> None:
        self._tokens.write(batch["input_ids"], batch["labels"], first, stop)
        labels, positions, documents, mask = (batch[name].reshape(-1) for name in _PER_TOKEN[1:])
        begin, end, before = self._piece_at[first], self._piece_at[stop], first * self._seq_len
        lengths, borders = self._lengths[begin:end], self._borders[begin : end + 1] - before
        np.subtract(_counting(len(positions)), borders[:-1].repeat(lengths), out=positions, casting="unsafe")
        documents[:] = self._documents[begin:end].repeat(lengths)
        if self._losses is None:
            without = self._without[mine] - before
            labels[without] = NO_LOSS
            mask.fill(True)
            mask[without] = False
            if self._some_padding:
                self._mask_padding(batch, self._padding[first:stop])
        batch["cu_seqlens"] = borders.astype(np.int32)
        batch["max_seqlen"] = max(self._longest[first:stop])

    def _mask_padding(self, batch: dict[str, Any], padding: Int64s) -> None:
        for row in padding.nonzero()[0].tolist():
            padded = slice(self._seq_len - int(padding[row]), None)
            batch["labels"][row, padded], batch["loss_mask"][row, padded] = NO_LOSS, False


_SHIFTED, _SAME, _SAME_UNMASKED = range(3)


@dataclass(frozen=True, slots=True)
class _Table:
    """Pieces of rows as a kernel takes them, out of mapped tokens."""

    fill: Kernel
    tokens: Array
    pieces: Int64s
    """(pieces, 4): place of its first token or -1 - its padding, length, document, whether it goes on."""
    piece_at: list[int]
    form: int
    by_start: Bools | None
    """Which rows have a stretch that lies in two files; None: no row."""

    @classmethod
    def of(cls, pieces: RowPieces, reader: Reader, form: RowForm, borders: Int64s, piece_at: Int64s) -> _Table | None:
        """None where there is no kernel for it.

        borders: (pieces + 1,), piece_at: (rows + 1,)
        """
        fill = _fill_kernel(reader.tokens.dtype, np.dtype(form.dtype)) if isinstance(reader, MappedReader) else None
        if fill is None:
            return None
        assert isinstance(reader, MappedReader)
        runs = pieces.runs
        run_at = runs.counts.cumsum() - runs.counts
        before = runs.lengths.cumsum() - runs.lengths
        # (runs,): where each begins when rows are counted through; the token behind a row is at its end
        begins = before - (before[run_at] - np.arange(len(run_at)) * form.seq_len).repeat(runs.counts)
        run = begins.searchsorted(borders[:-1], side="right") - 1
        places = reader.places(runs.starts, runs.lengths)
        table = np.stack(
            (places[run] + borders[:-1] - begins[run], pieces.lengths, pieces.documents, pieces.goes_on), 1
        )
        padded = pieces.padding > 0
        table[piece_at[1:][padded] - 1, 0] = -1 - pieces.pad_ids[padded]
        same = _SAME if pieces.losses is None else _SAME_UNMASKED
        by_start = np.logical_or.reduceat(places < 0, run_at) if (places < 0).any() else None
        labels = _SHIFTED if form.labels == "shifted" else same
        return cls(fill, reader.tokens, table, piece_at.tolist(), labels, by_start)

    def write(self, batch: dict[str, Any], first: int, stop: int) -> bool:
        """Write the rows [first, stop), unless one of them has to be read by its start."""
        if self.by_start is not None and self.by_start[first:stop].any():
            return False
        mine = self.pieces[self.piece_at[first] : self.piece_at[stop]]
        borders = batch["cu_seqlens"] = np.empty(len(mine) + 1, np.int32)
        arrays = (batch[name] for name in _PER_TOKEN)
        batch["max_seqlen"] = self.fill(self.tokens, mine, len(mine), self.form, *arrays, borders)
        return True


def _fill_kernel(token: np.dtype[Any], number: np.dtype[Any]) -> Kernel | None:
    if token not in (np.uint16, np.int32) or number not in (np.int32, np.int64):
        return None
    types = (token.type, np.int64, int, int, *(number.type,) * 3, np.int64, np.bool_, np.int32)
    return kernel(f"fill_rows_{token}_{number}", *types)


class _RowTokens:
    """The tokens of rows, and those behind them as labels."""

    def __init__(self, pieces: RowPieces, reader: Reader, form: RowForm) -> None:
        runs = pieces.runs
        self._reader, self._form, self._starts, self._lengths = reader, form, runs.starts, runs.lengths
        self._places = reader.places(runs.starts, runs.lengths)
        self._some_by_start = bool((self._places < 0).any())
        run_at = np.concatenate(([0], runs.counts.cumsum()))
        self._run_at: list[int] = run_at.tolist()
        """The first run of each row, and the end."""
        self._padding, self._pad_ids = pieces.padding, pieces.pad_ids
        self._taken = np.add.reduceat(runs.lengths, run_at[:-1])
        """Tokens that are read for each row."""
        self._has_behind: Bools = self._taken + pieces.padding > form.seq_len
        """Whether the token behind a row is one of them."""
        self._odd: Bools = (runs.counts != 1) | (self._taken != form.span)
        """Which rows are not a stretch of `span` tokens each."""
        self._some_odd = bool(self._odd.any())

    def write(self, ids: Array, labels: Array, first: int, stop: int) -> None:
        """Write the rows [first, stop); labels behind which there is no token of the stream are left as they are."""
        seq_len, span = self._form.seq_len, self._form.span
        mine = slice(self._run_at[first], self._run_at[stop])
        if not self._some_odd or not self._odd[first:stop].any():
            rows = self._read_rows(mine, span)
            np.copyto(ids, rows[:, :seq_len], casting="unsafe")
            np.copyto(labels, rows[:, span - seq_len :], casting="unsafe")
            return
        tokens = self._read_runs(mine)
        ends = self._taken[first:stop].cumsum()
        self._spread(tokens, ends, ids, first)
        if span == seq_len:
            labels[:] = ids
            return
        labels.reshape(-1)[:-1] = ids.reshape(-1)[1:]
        rows_on = self._has_behind[first:stop].nonzero()[0]
        labels[rows_on, -1] = tokens[ends[rows_on] - 1]

    def _read_rows(self, mine: slice, span: int) -> Array:
        if self._some_by_start and self._places[mine].min() < 0:
            return self._reader.rows(self._starts[mine], span)
        return self._reader.rows_at(self._places[mine], span)

    def _read_runs(self, mine: slice) -> Array:
        if self._some_by_start and self._places[mine].min() < 0:
            return self._reader.runs(self._starts[mine], self._lengths[mine])
        return self._reader.runs_at(self._places[mine], self._lengths[mine])

    def _spread(self, tokens: Array, ends: Int64s, ids: Array, first: int) -> None:
        """Copy what was read to its rows, in one go up to where a row is padded or the token behind it was read."""
        seq_len, flat = self._form.seq_len, ids.reshape(-1)
        source, target = 0, 0
        for row in (self._taken[first : first + len(ids)] != seq_len).nonzero()[0].tolist():
            begin, behind = (row + 1) * seq_len - int(self._padding[first + row]), (row + 1) * seq_len
            np.copyto(flat[target:begin], tokens[source : source + begin - target], casting="unsafe")
            flat[begin:behind] = self._pad_ids[first + row]
            source, target = int(ends[row]), behind
        np.copyto(flat[target:], tokens[source:], casting="unsafe")


@lru_cache(maxsize=2)
def _counting(size: int) -> Int64s:
    """0 to size - 1, kept for the next batch of that size."""
    numbers = np.arange(size)
    numbers.flags.writeable = False
    return numbers
