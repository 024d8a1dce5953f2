"""Rows of pieces in, shards of a store out: a document is a row, its sequences are the pieces in it.

Padding is a sequence of its own, the last of its row. Tokens are read as training reads them, about a million at a
time (one row, when rows are longer); lengths wait in temporary files for the index. Memory does not grow with a shard.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from milldam.files import NewFile, explain_os_errors
from milldam.loader.reading import Reader, TokenArray, open_reader
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import Pieces, Rows
from milldam.stores.tokens.format import DTYPE_CODES, HEADER, MAGIC, VERSION, Int64s
from milldam.stores.tokens.manifest import Shard
from milldam.stores.tokens.writer import commit_shard

SHARD_BYTES = 256_000_000
_BATCH_TOKENS = 1 << 20
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowForm:
    """What all rows have in common."""

    dtype: str
    seq_len: int
    pad_id: int

    @property
    def shard_rows(self) -> int:
        return max(1, SHARD_BYTES // (self.seq_len * np.dtype(self.dtype).itemsize))


def write_shards(stream: TokenStream, split: str, rows: Iterator[Rows], form: RowForm, folder: Path) -> Iterator[Shard]:
    """Write rows to shards, each as it is finished."""
    reader = open_reader(stream)
    at_once = max(1, _BATCH_TOKENS // form.seq_len)
    writer: _RowShard | None = None
    try:
        for several in rows:
            while len(several):
                writer = writer or _RowShard(folder, split, form)
                most = min(at_once, form.shard_rows - writer.rows)
                writer.append(several[:most], reader)
                several = several[most:]
                if writer.rows == form.shard_rows:
                    yield writer.commit()
                    writer = None
        if writer is not None:
            yield writer.commit()
            writer = None
    finally:
        if writer is not None:
            writer.discard()


def _read(reader: Reader, pieces: Pieces) -> TokenArray:
    """The tokens of pieces, end to end; those that lie so in the source are read as one."""
    ends = pieces.starts + pieces.lengths
    first = np.flatnonzero(np.concatenate(([True], pieces.starts[1:] != ends[:-1])))
    return reader.runs(pieces.starts[first], np.add.reduceat(pieces.lengths, first))


class IndexColumns:
    """The arrays of an index (milldam.stores.tokens.format) whose documents are rows and whose sequences are pieces.

    They wait in temporary files, since how long each is shows only at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.rows = self.pieces = 0
        self._folder = folder
        with explain_os_errors(folder):
            columns = [tempfile.TemporaryFile(dir=folder) for _ in range(3)]  # noqa: SIM115 - closed in close
        self._lengths, self._offsets, self._counts = columns

    def add(self, counts: Int64s, offsets: Int64s, lengths: Int64s) -> None:
        """Add rows: how many pieces each has, and the pieces of all of them."""
        with explain_os_errors(self._folder):
            self._lengths.write(lengths.astype("<i4").data)
            self._offsets.write(offsets.astype("<i8").data)
            self._counts.write(counts.astype("<i8").data)
        self.rows += len(counts)
        self.pieces += len(lengths)

    def write(self, new: NewFile, dtype_code: int) -> None:
        new.write(HEADER.pack(MAGIC, VERSION, dtype_code, self.pieces, self.rows + 1))
        for column in (self._lengths, self._offsets):
            for block in self._blocks(column):
                new.write(block)
        piece = 0
        new.write(struct.pack("<q", 0))
        for block in self._blocks(self._counts):
            firsts = piece + np.frombuffer(block, "<i8").cumsum()
            new.write(firsts.astype("<i8").data)
            piece = int(firsts[-1])

    def _blocks(self, column: IO[bytes]) -> Iterator[bytes]:
        with explain_os_errors(self._folder):
            column.seek(0)
        while block := column.read(_COPY_BYTES):
            yield block

    def close(self) -> None:
        # On a full disk even closing may fail; that must not hide what went wrong before.
        for column in (self._lengths, self._offsets, self._counts):
            with contextlib.suppress(OSError):
                column.close()


class _RowShard:
    """One pair of files in the making; nothing appears under its name before `commit`."""

    def __init__(self, folder: Path, split: str, form: RowForm) -> None:
        self.split, self.form = split, form
        self._index_path = folder / f"{split}.idx"
        self._bin = NewFile(folder / f"{split}.bin")
        self._index = IndexColumns(folder)

    @property
    def rows(self) -> int:
        return self._index.rows

    def append(self, rows: Rows, reader: Reader) -> None:
        row_len, pieces = self.form.seq_len, rows.pieces
        ends = np.cumsum(rows.counts)
        padding = row_len - np.add.reduceat(pieces.lengths, ends - rows.counts)
        tokens = _read(reader, pieces)
        self._bin.write((self._padded(tokens, row_len - padding) if padding.any() else tokens).data)
        padded = padding > 0
        lengths = np.insert(pieces.lengths, ends[padded], padding[padded])
        begins = self.rows * row_len + np.cumsum(lengths) - lengths
        self._index.add(rows.counts + padded, begins * np.dtype(self.form.dtype).itemsize, lengths)

    def _padded(self, tokens: TokenArray, filled: Int64s) -> TokenArray:
        """(rows, tokens): each row's tokens, and padding behind them."""
        out = np.full((len(filled), self.form.seq_len), self.form.pad_id, self.form.dtype)
        ends = np.cumsum(filled)
        for row, begin, end in zip(out, (ends - filled).tolist(), ends.tolist(), strict=True):
            row[: end - begin] = tokens[begin:end]
        return out

    def commit(self) -> Shard:
        """Make both files durable under their names, the index last."""
        with NewFile(self._index_path) as new:
            self._index.write(new, DTYPE_CODES[self.form.dtype])
            name, records = commit_shard(self.split, {"bin": self._bin, "idx": new})
        self.discard()
        return Shard(name, self.split, self.rows, self.rows * self.form.seq_len, 0, 0, **records)

    def discard(self) -> None:
        """Close and remove what is not committed."""
        self._index.close()
        self._bin.__exit__(None, None, None)
