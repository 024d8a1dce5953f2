"""A store as rows in files of about `shard_size`: how hf, parquet and mds are written.

A row is a document, or with `seq_len` exactly so many tokens, end to end across documents; tokens at the end that fill
no row are left out and counted. Which rows go into which file follows from the store's index and the options alone, so
every file is a unit. A store of several splits becomes a folder for each.

A row has `input_ids`. Of a store of conversations it also has what is trained on, in formats with columns for it:

labels             the id where a token is trained on, else -100
assistant_masks    1 where it is, else 0
attention_mask     of conversations one by one: all ones. axolotl takes rows as tokenized by it
position_ids       of packed rows (those of `store.packed(seq_len, form="hf")`): from 0 on in every conversation
seq_lengths        of packed rows: tokens of each piece, padding as a piece of its own; what TRL's collator takes
label, prompt_ids, completion_ids    where documents have labels, as TRL's KTOTrainer makes them: the last trained
                   stretch is the completion, the prompt is what precedes it

A pair gives `prompt_ids`, `chosen_ids` and `rejected_ids` instead, as TRL's DPOTrainer makes them.

Memory: blocks of a million tokens, or one row where a document is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, Setting
from milldam.files import NewFile
from milldam.formats.columns import NO_LOSS, spans_of
from milldam.formats.writing import Export, FileRecord, OutputFile, block_as, document_lengths
from milldam.loader.reading import open_reader, ranges
from milldam.loader.types import Array, Bools, PackedBatch, PackedRow
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import cut_blocks

if TYPE_CHECKING:
    from milldam.loader.samples import Samples
    from milldam.run.engine import Progress

OPTIONS = ("seq_len", "dtype", "shard_size")
DTYPES = ("int32", "uint16", "uint32", "int64")
"""int32 is what the tools' own tokenizing writes; any of their readers takes it. uint16 halves the files."""
MOST_ROWS = 1 << 20
"""Of a file: bounds what is held of documents of a token or two."""
MOST_TOKENS = 2**31 - 1
"""Of a row: what an offset of Arrow can say."""
_BESIDE_ROWS = 1 << 16
"""Bytes of a file that is bounded, for what it has besides rows."""
_ROWS_AT_ONCE = 1 << 16
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
Columns = dict[str, tuple[Array, Int64s | None]]
"""Of some rows: the values of each column end to end, and how many each row has; None: one a row."""


class Rows:
    """The rows of a split as columns; `masked`: with what is trained on."""

    def __init__(self, export: Export, split: str, *, masked: bool) -> None:
        self.store, self.dtype, self.seq_len = export.parts[split], export.dtype, export.seq_len
        self.masked, self._side = masked and self.store.has_spans, export.side
        stream = self.store.stream()
        self._in_pairs = self.masked and stream.pairs and self.seq_len is None and self._side is None
        signed = self.dtype if self.dtype.kind == "i" else np.dtype(np.int32 if self.dtype.itemsize < 4 else np.int64)
        bits, places = (np.dtype(np.int8), True), (np.dtype(np.int32), True)
        self.types: dict[str, tuple[np.dtype[Any], bool]] = {"input_ids": (self.dtype, True)}
        """Each column's dtype, and whether it holds lists."""
        if self._in_pairs:
            self.types = dict.fromkeys(_PAIR, (self.dtype, True))
        elif self.masked:
            self.types |= {"labels": (signed, True), "assistant_masks": bits}
            if self.seq_len is not None:
                self.types |= {"position_ids": places, "seq_lengths": places}
            else:
                self.types["attention_mask"] = bits
                if stream.has_labels:
                    self.types |= dict.fromkeys(("prompt_ids", "completion_ids"), (self.dtype, True))
                    self.types["label"] = np.dtype(np.bool_), False

    @cached_property
    def packed(self) -> Samples[PackedRow, PackedBatch]:
        assert self.seq_len is not None
        return self.store.packed(self.seq_len, form="hf", side=self._side, read="pread")

    @cached_property
    def _whole(self) -> Any:
        if self._in_pairs:
            return self.store.pairs(read="pread")
        return self.store.conversations(side=self._side, read="pread")

    def lengths(self) -> Iterator[Int64s]:
        """Tokens of each row in order, many at a time."""
        if self.seq_len is None and not self.masked:
            yield from document_lengths(self.store)
            return
        if self.masked:
            rows = len(self._whole if self.seq_len is None else self.packed)
        else:
            rows = self.store.tokens // (self.seq_len or 1)
        for first in range(0, rows, _ROWS_AT_ONCE):
            yield self.lengths_of(first, min(_ROWS_AT_ONCE, rows - first))

    def lengths_of(self, first: int, rows: int) -> Int64s:
        if self.seq_len is not None:
            return np.full(rows, self.seq_len, np.int64)
        if self.masked:
            lengths: Int64s = self._whole.lengths(np.arange(first, first + rows)).sum(axis=1)
            return lengths
        found = []
        for shard in self.store.shards:
            if first < shard.documents and rows:
                stop = min(shard.documents, first + rows)
                found.append(self.store.open_index(shard).document_lengths(first, stop))
                rows -= stop - first
            first = max(0, first - shard.documents)
        return np.concatenate(found)

    def blocks(self, file: OutputFile) -> Iterator[Columns]:
        """The rows of a file, about a million tokens at a time, or one row that has more."""
        # Exactly the bytes that are asked for: nothing stays mapped, whatever the size of the store.
        reader = None if self.masked else open_reader(self.store.stream(), "pread")
        lengths, position = self.lengths_of(file.first, file.rows), file.start
        for begin, stop in cut_blocks(lengths):
            if reader is None:
                numbers = np.arange(file.first + begin, file.first + stop)
                columns = self._documents(numbers) if self.seq_len is None else self._packed(numbers)
                yield {name: (values.astype(self.types[name][0]), each) for name, (values, each) in columns.items()}
                continue
            some, count = lengths[begin:stop], int(lengths[begin:stop].sum())
            tokens = reader.runs(np.array([position]), np.array([count])) if count else np.empty(0, self.dtype)
            yield {"input_ids": (np.ascontiguousarray(block_as(tokens, self.dtype)), some)}
            position += count

    def _packed(self, numbers: Int64s) -> Columns:
        batch = self.packed.read(numbers)
        assert self.seq_len is not None
        lengths = np.full(len(numbers), self.seq_len)
        borders = batch["cu_seqlens"].astype(np.int64)
        # A piece never crosses the end of its row.
        pieces = np.bincount(borders[:-1] // self.seq_len, minlength=len(numbers))
        columns: Columns = {
            name: (batch[name].reshape(-1), lengths) for name in ("input_ids", "labels", "position_ids")
        }
        columns["assistant_masks"] = (batch["labels"] != NO_LOSS).reshape(-1), lengths
        return columns | {"seq_lengths": (np.diff(borders), pieces)}

    def _documents(self, numbers: Int64s) -> Columns:
        if self._in_pairs:
            pairs = self._whole.__getitems__(numbers.tolist())
            parts = {name: [pair[name] for pair in pairs] for name in _PAIR}
            return {name: (np.concatenate(ids), np.array([*map(len, ids)], np.int64)) for name, ids in parts.items()}
        ids, trained, lengths = self._whole.flat(numbers)
        labels = np.where(trained, ids.astype(np.int64), NO_LOSS)
        columns: Columns = {"input_ids": (ids, lengths), "labels": (labels, lengths)}
        columns |= {"assistant_masks": (trained, lengths), "attention_mask": (np.ones(len(ids), np.int8), lengths)}
        if "label" in self.types:
            columns |= {"label": (self._whole.labels_of(numbers), None)} | _last_answers(ids, trained, lengths)
        return columns


def _last_answers(ids: Array, trained: Bools, lengths: Int64s) -> Columns:
    """The last trained stretch of each document, and all before it; what lies behind is neither."""
    spans = spans_of(trained, lengths)
    some = spans.counts > 0
    last = np.repeat(lengths[:, None], 2, axis=1)  # without a stretch all is prompt
    last[some] = spans.pairs[spans.counts.cumsum()[some] - 1]
    begins = lengths.cumsum() - lengths
    prompts, answers = last[:, 0], last[:, 1] - last[:, 0]
    return {
        "prompt_ids": (ids[ranges(begins, prompts)], prompts),
        "completion_ids": (ids[ranges(begins + prompts, answers)], answers),
    }


# ---- which rows go where ----


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a tool stores rows: gives `files` and `write_file` of its format."""

    file_name: Callable[[int, int], str]
    """Of file number k of n."""
    row_bytes: int
    """Bytes of a row besides its tokens, at most."""
    write: Callable[[NewFile, Rows, OutputFile], None]
    """Puts the rows of a file into it."""
    file_bytes: int | None = None
    """A file must be smaller than this."""
    masked: bool = False
    """It has columns for what is trained on."""

    def files(self, export: Export) -> Iterator[OutputFile]:
        """The files of every split."""
        for split, store in export.parts.items():
            lengths = Rows(export, split, masked=self.masked).lengths()
            cut = list(self._cut(lengths, export.dtype.itemsize, export.shard_size))
            first = start = 0
            for number, (rows, tokens) in enumerate(cut):
                name = self.file_name(number, len(cut))
                name = f"{split}/{name}" if export.has_splits else name
                yield OutputFile(name, split, tokens, tokens * store.dtype.itemsize, start, rows, first)
                first, start = first + rows, start + tokens

    def _cut(self, blocks: Iterator[Int64s], width: int, size: int) -> Iterator[tuple[int, int]]:
        """(rows, tokens) of file after file: each ends before the row that would exceed the size."""
        most = None if self.file_bytes is None else self.file_bytes - _BESIDE_ROWS
        size = size if most is None else min(size, most)
        rows = tokens = used = 0
        for lengths in blocks:
            costs = lengths * width + self.row_bytes
            too_large = most is not None and int(costs.max(initial=0)) > most
            if too_large or int(lengths.max(initial=0)) > MOST_TOKENS:
                what = f"A document of {int(lengths.max()):,} tokens is more than a row of this format holds."
                raise ConfigError(f"{what} Cut the tokens into rows with ", Setting("seq_len"), ".")
            # Sums up to each row, from 0 on.
            cost_ends, token_ends = (np.concatenate(([0], values.cumsum())) for values in (costs, lengths))
            first = 0
            while first < len(lengths):
                fit = int(cost_ends.searchsorted(cost_ends[first] + size - used, side="right")) - 1
                stop = max(min(fit, first + MOST_ROWS - rows), first + (rows == 0))
                rows, tokens = rows + stop - first, tokens + int(token_ends[stop] - token_ends[first])
                used += int(cost_ends[stop] - cost_ends[first])
                if stop < len(lengths):
                    yield rows, tokens
                    rows = tokens = used = 0
                first = stop
        if rows:
            yield rows, tokens

    def write_file(self, export: Export, file: OutputFile, progress: Progress) -> FileRecord:
        with NewFile(export.folder / file.name) as new:
            self.write(new, Rows(export, file.split, masked=self.masked), file)
            return new.commit()
