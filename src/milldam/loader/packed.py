"""Packed rows: samples of seq_len tokens made of documents, or pieces of them, whose boundaries are kept.

wrapped    row k is tokens [k * seq_len, (k + 1) * seq_len) of the stream: nothing is made before it is read
best_fit   a document is cut only when it is longer than a row; what stays free is padded: see `row_index`

A batch is a dict. Each of these is (rows, seq_len):

input_ids      tokens, and the data's pad id
labels         form="shifted": the next token of the same document, also where a row's end cuts it;
               form="hf": input_ids, since models of HF transformers shift by themselves; -100 where there is no loss
position_ids   from 0 on in every piece
document_ids   the number of the document (int64), -1 on padding: attention is between equal numbers
loss_mask      False where the target lies in another document, and on padding

And for attention over rows end to end: `cu_seqlens`, where pieces begin, and the end (int32; padding is a piece of its
own), and `max_seqlen`, the longest of them. A row never holds two pieces of a document side by side.

Made by some dozens of numpy calls a batch, whatever is in it; holds the batch and about as much again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError
from milldam.loader.boundaries import Documents, damaged_index, require_documents
from milldam.loader.order import Stretches
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way, ranges
from milldam.loader.row_index import ALGORITHM, RowSource, open_row_index
from milldam.loader.samples import StreamSamples, at_least
from milldam.loader.stream import TokenStream
from milldam.loader.types import Array, Bools, PackedBatch, PackedRow, State

if TYPE_CHECKING:
    from milldam.loader.views import Trainable

Strategy = Literal["wrapped", "best_fit"]
LabelForm = Literal["shifted", "hf"]

NO_LOSS = -100
"""The label that losses of torch and HF leave out."""
PADDING = -1
"""The document of padding."""
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

    def __post_init__(self) -> None:
        for name, rest in {"seq_len": f", up to {_LONGEST_ROW:,}", "buffer": " documents"}.items():
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1, rest))
        if self.seq_len > _LONGEST_ROW:
            raise ConfigError(f"seq_len: {self.seq_len:,}; use 1 or more, up to {_LONGEST_ROW:,}.")
        if self.strategy not in ("wrapped", "best_fit"):
            raise ConfigError(f'strategy: "{self.strategy}"; use wrapped or best_fit.')
        if self.form not in ("shifted", "hf"):
            raise ConfigError(f'form: "{self.form}"; use shifted or hf.')
        if self.pad_last and self.strategy == "best_fit":
            raise ConfigError("pad_last: best_fit pads every row that is not full; leave it out.")


@dataclass(frozen=True, slots=True)
class RowPieces:
    """The pieces of some rows, row after row, padding among them: each row's lengths add up to seq_len."""

    lengths: Int64s
    documents: Int64s
    """The document of each piece; PADDING for padding."""
    goes_on: Bools
    """Whether the token behind a piece is of the same document; then it ends with its row."""


class PackedRows(StreamSamples[PackedRow, PackedBatch]):
    """Rows of a stream: `rows[k]`, `len(rows)`, `rows.batches(16)`; what is in a batch: see the module."""

    _signed = True

    def __init__(self, data: Trainable, rules: RowRules, way: Way = "auto") -> None:
        super().__init__(data.stream(), way)
        self._data, self.rules = data, rules
        require_documents(self._stream)
        if not self._stream.tokens:
            raise ConfigError(f"{self._stream.name}: has no tokens to make rows of.")
        self._rows: _Rows = (_Wrapped if rules.strategy == "wrapped" else _BestFit)(self._stream, rules)

    @property
    def identity(self) -> State:
        rules = self.rules
        own: State = {"kind": "packed", "strategy": rules.strategy, "seq_len": rules.seq_len, "samples": len(self)}
        return own | self._rows.identity | self._stream.identity

    @property
    def sample_tokens(self) -> int:
        return self.rules.seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: PackedBatch | None = None) -> PackedBatch:
        batch = _empty_batch(len(numbers), self.rules.seq_len, dtype, out)
        pieces, behind = self._rows.read(numbers, self._reader, batch["input_ids"])
        return _describe(batch, pieces, behind, self.rules.form)

    def _lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        return self._rows.lie(stretches)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self._data, self.rules, self._way)

    def __repr__(self) -> str:
        rules = self.rules
        return f"PackedRows({self._stream.name}: {len(self):,} of {rules.seq_len:,} tokens, {rules.strategy})"


class _Rows(ABC):
    """Where the tokens of rows lie, and which documents they are of."""

    identity: State

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        self._stream, self._row = stream, rules.seq_len
        self._shifted = rules.form == "shifted"

    @cached_property
    def _documents(self) -> Documents:
        return Documents(self._stream)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, numbers: Int64s, reader: Reader, ids: Array) -> tuple[RowPieces, Array]:
        """Write the tokens of rows into `ids`; their pieces, and the token behind each that goes on."""

    @abstractmethod
    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        """Begins and lengths in the stream of what rows are made of."""


class _Wrapped(_Rows):
    """The stream cut at every seq_len tokens."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        super().__init__(stream, rules)
        full, rest = divmod(stream.tokens, rules.seq_len)
        self._count = full + (rules.pad_last and rest > 0)
        self.identity = {"pad_last": rules.pad_last}
        if not self._count:
            raise ConfigError(
                f"{stream.name}: {stream.tokens:,} tokens are too few for one row of seq_len={rules.seq_len:,}. "
                "Use a shorter seq_len, or pad_last=True."
            )

    def __len__(self) -> int:
        return self._count

    def _starts(self, numbers: Int64s) -> Int64s:
        starts: Int64s = numbers * self._row + self._stream.first
        return starts

    def read(self, numbers: Int64s, reader: Reader, ids: Array) -> tuple[RowPieces, Array]:
        starts = self._starts(numbers)
        pieces = self._pieces(starts)
        span = self._row + self._shifted
        behind = np.zeros(len(numbers), ids.dtype)
        whole = starts + span <= self._stream.stop
        if whole.all():
            _take(reader.rows(starts, span), ids, behind)
        else:
            self._read_to_the_end(starts, whole, reader, ids, behind)
        row_goes_on = pieces.lengths.cumsum()[pieces.goes_on] // self._row - 1
        return pieces, behind[row_goes_on]

    def _read_to_the_end(self, starts: Int64s, whole: Bools, reader: Reader, ids: Array, behind: Array) -> None:
        """The same where some rows are the last one, behind which there may be no token, or which is padded."""
        for row in range(len(starts)):
            if whole[row]:
                _take(reader.rows(starts[row : row + 1], self._row + self._shifted), ids[row:][:1], behind[row:][:1])
            else:
                tokens = reader.runs(starts[row : row + 1], np.array([self._stream.stop - starts[row]]))
                ids[row, : len(tokens)] = tokens
                ids[row, len(tokens) :] = self._stream.pad_id

    def _pieces(self, starts: Int64s) -> RowPieces:
        stop, documents = self._stream.stop, self._documents
        # The token behind a row tells whether its last document goes on; behind the stream there is none.
        behind = starts + self._row
        first, last = documents.find(np.concatenate((starts, np.minimum(behind, stop - 1)))).reshape(2, -1)
        counts = last - first + 1
        if (counts < 1).any():
            raise damaged_index(self._stream.name)
        ends = counts.cumsum()
        number = ranges(first, counts)
        begins = documents.begins(number)
        begins[ends - counts] = starts
        lengths = np.empty_like(begins)
        np.subtract(begins[1:], begins[:-1], out=lengths[:-1])
        lengths[ends - 1] = np.minimum(behind, stop) - begins[ends - 1]
        goes_on = np.zeros(len(number), np.bool_)
        goes_on[ends - 1] = behind < stop
        if (lengths < 0).any():
            raise damaged_index(self._stream.name)
        # A document that begins right behind the row, and documents without tokens.
        some = lengths > 0
        if not some.all():
            number, lengths, goes_on = number[some], lengths[some], goes_on[some]
        padding = np.maximum(behind - stop, 0)
        if not padding.any():
            return RowPieces(lengths, number, goes_on)
        row = np.arange(len(starts)).repeat(counts)[some]
        return _with_padding(lengths, number, goes_on, np.bincount(row), padding)

    def lie(self, stretches: Stretches) -> tuple[Int64s, Int64s]:
        starts = self._starts(stretches.firsts)
        ends = starts + stretches.counts * self._row + self._shifted
        return starts, np.minimum(ends, self._stream.stop) - starts


def _take(rows: Array, ids: Array, behind: Array) -> None:
    """Rows of tokens, with or without the one behind."""
    length = ids.shape[1]
    np.copyto(ids, rows[:, :length], casting="unsafe")
    if rows.shape[1] > length:
        np.copyto(behind, rows[:, length], casting="unsafe")


class _BestFit(_Rows):
    """Pieces as the index of rows says."""

    def __init__(self, stream: TokenStream, rules: RowRules) -> None:
        super().__init__(stream, rules)
        self._index = open_row_index(RowSource(stream, rules.seq_len, rules.buffer))
        self.identity = {"buffer": rules.buffer, "algorithm": ALGORITHM}

    def __len__(self) -> int:
        return len(self._index.documents) - 1

    def read(self, numbers: Int64s, reader: Reader, ids: Array) -> tuple[RowPieces, Array]:
        begins, lengths, counts = self._pieces(numbers)
        row_firsts = counts.cumsum() - counts
        padding = self._row - np.add.reduceat(lengths, row_firsts)
        self._check(begins, lengths, padding)
        documents, goes_on = self._documents_of(begins, lengths)
        more = goes_on & self._shifted
        taken = lengths + more
        tokens = reader.runs(begins, taken)
        behind = tokens[taken.cumsum()[more] - 1].astype(ids.dtype)
        if not padding.any() and not more.any():
            np.copyto(ids.reshape(-1), tokens, casting="unsafe")
        else:
            self._spread(tokens, np.add.reduceat(taken, row_firsts), padding, ids)
        return _with_padding(lengths, documents, goes_on, counts, padding), behind

    def _spread(self, tokens: Array, taken: Int64s, padding: Int64s, ids: Array) -> None:
        """Copy what was read to its rows, where tokens behind them lie in between, or rows are padded."""
        begins, fills = taken.cumsum() - taken, self._row - padding
        for row, (begin, fill) in enumerate(zip(begins.tolist(), fills.tolist(), strict=True)):
            ids[row, :fill] = tokens[begin : begin + fill]
            ids[row, fill:] = self._stream.pad_id

    def _pieces(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Begins and lengths of the pieces of rows, and how many each has."""
        first = self._index.documents[numbers]
        counts = self._index.documents[numbers + 1] - first
        if (first < 0).any() or (counts < 1).any() or (first + counts > len(self._index.lengths)).any():
            raise self._damaged()
        which = ranges(first, counts)
        return self._index.offsets[which], self._index.lengths[which].astype(np.int64), counts

    def _check(self, begins: Int64s, lengths: Int64s, padding: Int64s) -> None:
        """Of the file of rows only the head is checked when it is opened."""
        inside = begins.min() >= self._stream.first and (begins + lengths).max() <= self._stream.stop
        if not inside or lengths.min() < 1 or padding.min() < 0:
            raise self._damaged()

    def _damaged(self) -> StoreError:
        return StoreError(f"{self._index.path}: is damaged. Remove it, and it is made again.")

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
        begins, lengths, _ = self._pieces(stretches.numbers)
        return begins, lengths


def _with_padding(lengths: Int64s, documents: Int64s, goes_on: Bools, counts: Int64s, padding: Int64s) -> RowPieces:
    """Pieces with the padding of each row as one more piece at its end."""
    padded = padding > 0
    if not padded.any():
        return RowPieces(lengths, documents, goes_on)
    at = (counts + padded).cumsum()[padded] - 1
    total = len(lengths) + len(at)
    real = np.ones(total, np.bool_)
    real[at] = False
    all_lengths, all_documents = np.empty((2, total), np.int64)
    all_go_on = np.zeros(total, np.bool_)
    all_lengths[real], all_lengths[at] = lengths, padding[padded]
    all_documents[real], all_documents[at] = documents, PADDING
    all_go_on[real] = goes_on
    return RowPieces(all_lengths, all_documents, all_go_on)


_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")


def _empty_batch(rows: int, seq_len: int, dtype: npt.DTypeLike, out: Any) -> dict[str, Any]:
    """Arrays to be written: the first rows of those that may be overwritten, or new ones."""
    if out is not None:
        return {name: out[name][:rows] for name in _PER_TOKEN}
    number = np.dtype(dtype)
    if number.kind != "i" or number.itemsize < 4:
        raise ConfigError(f"dtype: {number}; labels of packed rows need int32 or int64.")
    # One block for all: the C library gives smaller ones back to the system after every batch, and getting their
    # pages anew costs more than what is written there.
    size = rows * seq_len
    block = np.empty(size * (8 + 3 * number.itemsize + 1), np.uint8)
    wide, narrow = 8 * size, number.itemsize * size
    numbers = block[wide : wide + 3 * narrow].view(number).reshape(3, rows, seq_len)
    return {
        "input_ids": numbers[0],
        "labels": numbers[1],
        "position_ids": numbers[2],
        "document_ids": block[:wide].view(np.int64).reshape(rows, seq_len),
        "loss_mask": block[wide + 3 * narrow :].view(np.bool_).reshape(rows, seq_len),
    }


@lru_cache(maxsize=2)
def _counting(size: int) -> Int64s:
    """0 to size - 1, kept for the next batch of that size."""
    numbers = np.arange(size)
    numbers.flags.writeable = False
    return numbers


def _describe(batch: dict[str, Any], pieces: RowPieces, behind: Array, form: LabelForm) -> PackedBatch:
    """Fill in all that follows from the tokens and their pieces."""
    ids, labels, positions, documents, mask = (batch[name].reshape(-1) for name in _PER_TOKEN)
    lengths, ends = pieces.lengths, pieces.lengths.cumsum()
    begins = ends - lengths
    np.subtract(_counting(len(ids)), begins.repeat(lengths), out=positions, casting="unsafe")
    documents[:] = pieces.documents.repeat(lengths)
    mask[:] = True
    if form == "shifted":
        labels[:-1] = ids[1:]
        last = ends - 1
        labels[last[pieces.goes_on]] = behind
        without = last[~pieces.goes_on]
    else:
        labels[:] = ids
        without = begins
    padding = (pieces.documents == PADDING).nonzero()[0]
    if len(padding):
        without = np.concatenate((without, ranges(begins[padding], lengths[padding])))
    labels[without] = NO_LOSS
    mask[without] = False
    batch["cu_seqlens"] = np.concatenate((begins[:1], ends), dtype=np.int32, casting="unsafe")
    batch["max_seqlen"] = int(lengths.max())
    return cast(PackedBatch, batch)
