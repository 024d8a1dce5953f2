"""A store as rows in files of about `shard_size`: how hf, parquet and mds are written.

A row is a document, or, with `seq_len`, exactly so many tokens end to end over documents; tokens at the end that fill
no row are left out and counted. Which rows go into which file follows from the store's index and the options alone, and
is known before the first file is written. A store of several splits becomes a folder for each.

Every file is a unit, so that a killed export goes on with the files that it was at. Memory: blocks
of a million tokens, or one row where a document is longer and the format needs it whole; 8 bytes for each row of a file
(a file has at most a million).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from milldam.choices import Side
from milldam.errors import ConfigError, Setting
from milldam.files import NewFile
from milldam.formats.columns import MaskedRows
from milldam.formats.writing import (
    Export,
    FileRecord,
    OutputFile,
    block_as,
    document_lengths,
    has_splits,
    lengths_of,
    split_parts,
)
from milldam.loader.reading import TokenArray, open_reader
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import cut_blocks, in_blocks

if TYPE_CHECKING:
    from milldam.loader.stores import Store
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


class FileRows:
    """The rows of one file, in blocks."""

    def __init__(self, export: Export, file: OutputFile) -> None:
        self.export, self.file, self.store = export, file, split_parts(export.store)[file.split]
        self.dtype, self.seq_len = self.export.dtype, self.export.seq_len
        # Exactly the bytes that are asked for: nothing stays mapped, whatever the size of the store.
        self._reader = open_reader(self.store.stream(), "pread")
        if self.seq_len is not None:
            self.lengths = np.full(self.file.rows, self.seq_len, np.int64)
        elif self.file.documents_each > 1:
            each = self.file.documents_each
            documents = lengths_of(self.store, self.file.first * each, self.file.rows * each)
            sides = documents.reshape(-1, each)
            side = self.export.side
            self.lengths = sides.sum(axis=1) if side is None else sides[:, get_args(Side).index(side)]
        else:
            self.lengths = lengths_of(self.store, self.file.first, self.file.rows)

    def blocks(self) -> Iterator[tuple[int, Int64s]]:
        """(position, lengths) of whole rows: about a million tokens, or one row that has more."""
        position = self.file.start
        for first, stop in cut_blocks(self.lengths):
            lengths = self.lengths[first:stop]
            yield position, lengths
            position += int(lengths.sum())

    def tokens(self, start: int, count: int) -> TokenArray:
        """Tokens of the split from a position on; they may share memory with what is asked for next."""
        if not count:
            return np.empty(0, self.dtype)
        tokens = self._reader.runs(np.array([start]), np.array([count]))
        return np.ascontiguousarray(block_as(tokens, self.dtype))

    def chunks(self, start: int, count: int) -> Iterator[TokenArray]:
        """The same a million at a time, for a row of any length."""
        for begin, end in in_blocks(start, count):
            yield self.tokens(begin, end - begin)


# ---- which rows go where ----


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a tool has rows: `files` and `write_file` of its format."""

    file_name: Callable[[int, int], str]
    """Of file number k of n."""
    row_bytes: int
    """What a row takes besides its tokens, at most."""
    write: Callable[[NewFile, FileRows], None]
    """Puts the rows of a file into it."""
    file_bytes: int | None = None
    """A file must be smaller than this."""
    masked: bool = False
    """It has columns for what is trained on."""

    def files(self, export: Export) -> Iterator[OutputFile]:
        """The files of every split."""
        several, width = has_splits(export.store), export.store.dtype.itemsize
        for split, store in split_parts(export.store).items():
            masked = self.masked and store.has_spans
            lengths = (
                MaskedRows(store, export.seq_len, export.dtype, export.side).row_lengths()
                if masked
                else _row_lengths(store, export.seq_len)
            )
            each = 2 if masked and store.stream().pairs and export.seq_len is None else 1
            cut = list(_cut_files(lengths, export.dtype.itemsize, self, export.shard_size))
            first = start = 0
            for number, (rows, tokens) in enumerate(cut):
                name = self.file_name(number, len(cut))
                name = f"{split}/{name}" if several else name
                yield OutputFile(name, split, tokens, tokens * width, start, rows, first, each)
                first, start = first + rows, start + tokens

    def write_file(self, export: Export, file: OutputFile, progress: Progress) -> FileRecord:
        with NewFile(export.folder / file.name) as new:
            self.write(new, FileRows(export, file))
            return new.commit()


def _row_lengths(store: Store, seq_len: int | None) -> Iterator[Int64s]:
    """Tokens of each row in order, many at a time."""
    if seq_len is None:
        yield from document_lengths(store)
        return
    rows = store.tokens // seq_len
    for first in range(0, rows, MOST_ROWS):
        yield np.full(min(MOST_ROWS, rows - first), seq_len, np.int64)


def _cut_files(blocks: Iterator[Int64s], width: int, form: RowFormat, size: int) -> Iterator[tuple[int, int]]:
    """(rows, tokens) of file after file: each ends before the row that would exceed the size."""
    most = None if form.file_bytes is None else form.file_bytes - _BESIDE_ROWS
    size = size if most is None else min(size, most)
    rows = tokens = used = 0
    for lengths in blocks:
        costs = lengths * width + form.row_bytes
        too_large = most is not None and int(costs.max(initial=0)) > most
        if too_large or int(lengths.max(initial=0)) > MOST_TOKENS:
            what = f"A document of {int(lengths.max()):,} tokens is more than a row of this format holds."
            raise ConfigError(f"{what} Cut the tokens into rows with ", Setting("seq_len"), ".")
        cost_ends, token_ends = costs.cumsum(), lengths.cumsum()
        first = cost = seen = 0
        while first < len(lengths):
            fit = min(int(cost_ends.searchsorted(cost + size - used, side="right")), first + MOST_ROWS - rows)
            stop = fit if rows else max(fit, first + 1)
            if stop > first:
                rows, tokens = rows + stop - first, tokens + int(token_ends[stop - 1]) - seen
                used += int(cost_ends[stop - 1]) - cost
                cost, seen = int(cost_ends[stop - 1]), int(token_ends[stop - 1])
            if stop < len(lengths):
                yield rows, tokens
                rows = tokens = used = 0
            first = stop
    if rows:
        yield rows, tokens
