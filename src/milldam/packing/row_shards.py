"""Rows of pieces in, shards of a store out: a document is a row, its sequences are the pieces in it.

Padding is a sequence of its own, the last of its row. Tokens are copied from the mapped source, about a million at a
time (one row, when rows are longer); lengths wait in temporary files for the index. Memory does not grow with a shard.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.files import NewFile, explain_os_errors
from milldam.packing.pieces import Pieces, Rows, split_shards
from milldam.stores.tokens import Store
from milldam.stores.tokens.format import DTYPE_CODES, HEADER, MAGIC, VERSION, Int64s
from milldam.stores.tokens.manifest import Shard

SHARD_BYTES = 256_000_000
_BATCH_TOKENS = 1 << 20
_INDEX_CHUNK = 1 << 17
# Shorter runs are copied by an array of positions: a slice for each would cost more than its tokens.
_SHORTEST_SLICE = 64

Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class RowForm:
    """What all rows have in common."""

    dtype: str
    seq_len: int
    pad_id: int

    @property
    def shard_rows(self) -> int:
        return max(1, SHARD_BYTES // (self.seq_len * np.dtype(self.dtype).itemsize))


def write_shards(source: Store, split: str, rows: Iterator[Rows], form: RowForm, folder: Path) -> Iterator[Shard]:
    """Write rows to `SPLIT-00000`, `SPLIT-00001`, ...: each shard as it is finished."""
    stream = _Stream(source, split)
    writer: _RowShard | None = None
    number = 0
    try:
        for batch in (part for several in rows for part in several.parts(max(1, _BATCH_TOKENS // form.seq_len))):
            rest: Rows | None = batch
            while rest is not None:
                writer = writer or _RowShard(folder, f"{split}-{number:05d}", split, form)
                now, rest = _divide(rest, form.shard_rows - writer.rows)
                writer.append(now, stream)
                if writer.rows == form.shard_rows:
                    yield writer.commit()
                    writer, number = None, number + 1
        if writer is not None:
            yield writer.commit()
            writer = None
    finally:
        if writer is not None:
            writer.discard()


def _divide(rows: Rows, most: int) -> tuple[Rows, Rows | None]:
    if len(rows) <= most:
        return rows, None
    pieces = int(rows.counts[:most].sum())
    return Rows(rows.pieces[:pieces], rows.counts[:most]), Rows(rows.pieces[pieces:], rows.counts[most:])


class _Stream:
    """The tokens of a split by position, copied from the mapped shards."""

    def __init__(self, store: Store, split: str) -> None:
        self._folder, self._dtype = store.path, store.manifest.dtype
        self._shards = split_shards(store.manifest, split)
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)])

    def copy(self, pieces: Pieces, out: Tokens, places: Int64s) -> None:
        """Copy each piece to its place in `out`."""
        shard = np.searchsorted(self._starts, pieces.starts, side="right") - 1
        for k in np.unique(shard).tolist():
            here = shard == k
            inside = Pieces(pieces.starts[here] - self._starts[k], pieces.lengths[here])
            _copy(self._map(self._shards[k]), inside, out, places[here])

    def _map(self, shard: Shard) -> Tokens:
        path = self._folder / f"{shard.name}.bin"
        try:
            tokens = np.memmap(path, dtype=self._dtype, mode="r", shape=(shard.tokens,))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: can't be mapped ({error}). Make the store again.") from None
        return np.asarray(tokens)


def _copy(tokens: Tokens, pieces: Pieces, out: Tokens, places: Int64s) -> None:
    sources, places, lengths = _runs(pieces, places)
    total = int(lengths.sum())
    if total >= _SHORTEST_SLICE * len(lengths):
        for source, place, length in zip(sources.tolist(), places.tolist(), lengths.tolist(), strict=True):
            out[place : place + length] = tokens[source : source + length]
        return
    # offset: (tokens,), of each token in its run
    offset = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out[np.repeat(places, lengths) + offset] = tokens[np.repeat(sources, lengths) + offset]


def _runs(pieces: Pieces, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Pieces that follow each other both in the source and in the rows, joined."""
    moved = np.diff(pieces.starts - places) != 0
    apart = places[1:] != places[:-1] + pieces.lengths[:-1]
    first = np.flatnonzero(np.concatenate(([True], moved | apart)))
    return pieces.starts[first], places[first], np.add.reduceat(pieces.lengths, first)


class _RowShard:
    """One pair of files in the making; nothing appears under its name before `commit`."""

    def __init__(self, folder: Path, name: str, split: str, form: RowForm) -> None:
        self.name, self.split, self.form = name, split, form
        self.rows = self._sequences = 0
        self._index_path = folder / f"{name}.idx"
        self._bin = NewFile(folder / f"{name}.bin")
        with explain_os_errors(self._index_path):
            self._lengths = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in discard
            self._counts = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in discard

    def append(self, rows: Rows, stream: _Stream) -> None:
        row_len, pieces = self.form.seq_len, rows.pieces
        ends = np.cumsum(rows.counts)
        filled = np.add.reduceat(pieces.lengths, ends - rows.counts)
        padding = row_len - filled
        # Pieces lie end to end but for the padding of the rows before theirs.
        skipped = np.repeat(np.cumsum(padding) - padding, rows.counts)
        places = np.cumsum(pieces.lengths) - pieces.lengths + skipped
        out = np.full(len(rows) * row_len, self.form.pad_id, dtype=self.form.dtype)
        stream.copy(pieces, out, places)
        self._bin.write(out.data)
        padded = padding > 0
        lengths = np.insert(pieces.lengths, ends[padded], padding[padded])
        with explain_os_errors(self._index_path):
            self._lengths.write(lengths.astype("<i4").tobytes())
            self._counts.write((rows.counts + padded).astype("<i4").tobytes())
        self.rows += len(rows)
        self._sequences += len(lengths)

    def commit(self) -> Shard:
        """Make both files durable under their names, the index last."""
        bin_record = self._bin.commit()
        with NewFile(self._index_path) as new:
            self._write_index(new)
            idx_record = new.commit()
        self.discard()
        tokens = self.rows * self.form.seq_len
        return Shard(self.name, self.split, self.rows, tokens, 0, 0, bin_record, idx_record)

    def _write_index(self, new: NewFile) -> None:
        """The layout of milldam.stores.tokens.format, with several sequences to a document."""
        code, width = DTYPE_CODES[self.form.dtype], np.dtype(self.form.dtype).itemsize
        new.write(HEADER.pack(MAGIC, VERSION, code, self._sequences, self.rows + 1))
        for lengths in _chunks(self._lengths):
            new.write(lengths.data)
        position = 0
        for lengths in _chunks(self._lengths):
            stops = position + np.cumsum(lengths, dtype=np.int64)
            new.write(((stops - lengths) * width).astype("<i8").data)
            position = int(stops[-1])
        sequence = 0
        new.write(struct.pack("<q", 0))
        for counts in _chunks(self._counts):
            firsts = sequence + np.cumsum(counts, dtype=np.int64)
            new.write(firsts.astype("<i8").data)
            sequence = int(firsts[-1])

    def discard(self) -> None:
        """Close and remove what is not committed."""
        # On a full disk even closing may fail; that must not hide what went wrong before.
        with contextlib.suppress(OSError):
            self._lengths.close()
        with contextlib.suppress(OSError):
            self._counts.close()
        self._bin.__exit__(None, None, None)


def _chunks(file: IO[bytes]) -> Iterator[npt.NDArray[np.int32]]:
    with explain_os_errors(Path(str(file.name))):
        file.seek(0)
    while block := file.read(_INDEX_CHUNK * 4):
        yield np.frombuffer(block, dtype="<i4")
