"""What comes of packing: the figures alone, or the rows on disk.

The figures take the index alone. Written rows are a folder that is itself a store (docs/format.md): its documents are
the rows, and `np.memmap(folder / "train-….bin", dtype).reshape(-1, seq_len)` is the rows of a shard. Its
manifest names the store it was made from by fingerprint, and is written last: a write that was killed starts again.

Padding is a sequence of its own, the last of its row. Tokens are read as training reads them, about a million at a
time (one row, when rows are longer); lengths wait in temporary files for the index. Memory does not grow with a shard.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.files import NewFile, explain_os_errors, has_size, remove_temporaries, sync_folder, write_file
from milldam.loader.documents import document_extents
from milldam.loader.reading import end_to_end, open_reader
from milldam.loader.stores import Store
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import Cutter, best_fit_rows, wrapped_rows
from milldam.stores.kinds import commit_shard
from milldam.stores.tokens.format import DTYPE_CODES, HEADER, MAGIC, MAX_SEQUENCE, VERSION, Int64s
from milldam.stores.tokens.manifest import NAME, Manifest, Shard

if TYPE_CHECKING:
    from milldam.rules import PackingRules

SHARD_BYTES = 256_000_000
_BATCH_TOKENS = 1 << 20
_COPY_BYTES = 1 << 20
_SHARD_FILE = re.compile(r"[A-Za-z]\w*-[0-9a-f]{32}\.(bin|idx)")


def pack(store_path: str | Path, rules: PackingRules, seq_len: int, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Figures of every split by name; with a folder, the rows are written there, padded with EOS (0 without one).

    Of a split: `tokens` and `padding` fill the `rows`; `tokens` and `tail`, what fills no row and is left out, are the
    whole split. `cut_documents` lie in more than one row, or end in the tail. `efficiency`: what is not padding.

    Call it while holding the lock of the run: what another write left in the folder is removed.
    """
    if not 1 <= seq_len <= MAX_SEQUENCE:
        raise ConfigError(f"seq_len: {seq_len:,} is not a row length; use 1 to {MAX_SEQUENCE:,}.")
    if rules.buffer < 1:
        raise ConfigError(f"packing: buffer: {rules.buffer} documents; at least 1 has to be looked at.")
    store = Store(store_path)
    source, counts = store.manifest, Counter(shard.split for shard in store.shards)
    own = {"pad_last": rules.pad_last} if rules.strategy == "wrapped" else {"buffer": rules.buffer}
    settings = {  # all that the rows follow from
        "packing": {"strategy": rules.strategy} | own,
        "seq_len": seq_len,
        "pad_id": source.tokenizer.get("eos") or 0,
        "source": store.fingerprint,
        "source_splits": {split: counts[split] for split in store.splits},
    }
    if folder is not None:
        finished = _finished(folder, source, settings)
        if finished is not None:
            return finished
        _clear(folder)
    shards: list[Shard] = []
    packed: dict[str, dict[str, Any]] = {}
    for split in store.splits:
        stream = store.named_part(split).stream()
        if folder is None:
            packed[split] = _pack_split(stream, rules, seq_len, None)
            continue
        with contextlib.closing(_RowWriter(stream, split, seq_len, settings["pad_id"], folder)) as writer:
            packed[split] = _pack_split(stream, rules, seq_len, writer)
            writer.commit()
        shards += writer.shards
    if folder is not None:
        write_file(folder / "tokenizer.json", (store.path / "tokenizer.json").read_bytes())
        size = sum(shard.bin["bytes"] for shard in source.shards)
        Manifest(
            dtype=source.dtype,
            vocab_size=source.vocab_size,
            tokenizer=source.tokenizer,
            encoder=source.encoder,
            settings=settings | {"packed": packed},
            input={"files": len(source.shards), "bytes": size, "fingerprint": source.fingerprint},
            shards=tuple(shards),
        ).write(folder)
    return packed


def _pack_split(stream: TokenStream, rules: PackingRules, seq_len: int, writer: _RowWriter | None) -> dict[str, Any]:
    wrapped = rules.strategy == "wrapped"
    cutter = Cutter(seq_len, wrapped=wrapped)
    pieces = cutter(ends - begins for begins, ends in document_extents(stream))
    made = wrapped_rows(pieces, seq_len, pad_last=rules.pad_last) if wrapped else None
    rows = tokens = 0
    for some, counts in made or best_fit_rows(pieces, seq_len, buffer=rules.buffer):
        rows += len(counts)
        tokens += int(some[1].sum())
        if writer is not None:
            writer.add(some, counts)
    return {
        "strategy": rules.strategy,
        "seq_len": seq_len,
        "rows": rows,
        "tokens": tokens,
        "padding": rows * seq_len - tokens,
        "tail": stream.tokens - tokens,
        "cut_documents": cutter.cut_documents,
        "efficiency": round(tokens / (rows * seq_len), 6) if rows else 1.0,
    }


# ---- the folder ----


def _finished(folder: Path, source: Manifest, settings: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The figures of the same rows, where they were written before; another kind of store is not ours to replace."""
    if not (folder / NAME).exists():
        return None
    try:
        found = Manifest.read(folder)
    except StoreError:
        return None
    if "packed" not in found.settings:
        raise MismatchError(f"{folder}: holds a store of documents, not rows. Choose another folder for the rows.")
    packed: dict[str, dict[str, Any]] = found.settings["packed"]
    same = found.settings == settings | {"packed": packed}
    same &= (found.tokenizer, found.dtype) == (source.tokenizer, source.dtype)
    return packed if same and all(has_size(folder / name, one["bytes"]) for name, one in found.files()) else None


def _clear(folder: Path) -> None:
    """Take away the manifest first: from here on the folder passes for nothing finished."""
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).unlink(missing_ok=True)
        sync_folder(folder)
        remove_temporaries(folder)
        for path in folder.iterdir():
            if _SHARD_FILE.fullmatch(path.name):
                path.unlink()


# ---- shards ----


class _RowWriter:
    """Writes the rows of a split to shards; nothing appears under its name before its shard is full or `commit`."""

    def __init__(self, stream: TokenStream, split: str, seq_len: int, pad_id: int, folder: Path) -> None:
        self.shards: list[Shard] = []
        self._reader, self._dtype = open_reader(stream), np.dtype(stream.dtype)
        self._split, self._row, self._pad_id, self._folder = split, seq_len, pad_id, folder
        self._shard_rows = max(1, SHARD_BYTES // (seq_len * self._dtype.itemsize))
        self._open: tuple[NewFile, IndexColumns] | None = None

    def add(self, pieces: Int64s, counts: Int64s) -> None:
        while len(counts):
            if self._open is None:
                self._open = NewFile(self._folder / f"{self._split}.bin"), IndexColumns(self._folder)
            file, columns = self._open
            most = min(max(1, _BATCH_TOKENS // self._row), self._shard_rows - columns.rows)
            stop = int(counts[:most].sum())
            self._write(pieces[:, :stop], counts[:most], file, columns)
            pieces, counts = pieces[:, stop:], counts[most:]
            if columns.rows == self._shard_rows:
                self.commit()

    def _write(self, pieces: Int64s, counts: Int64s, file: NewFile, columns: IndexColumns) -> None:
        (starts, lengths), ends = pieces, np.cumsum(counts)
        padding = self._row - np.add.reduceat(lengths, ends - counts)
        tokens = self._reader.runs(*end_to_end(starts, lengths))
        padded = padding > 0
        if padded.any():
            padded_rows = np.full((len(counts), self._row), self._pad_id, self._dtype)
            padded_rows[np.arange(self._row) < (self._row - padding)[:, None]] = tokens
            tokens = padded_rows
        file.write(tokens.data)
        lengths = np.insert(lengths, ends[padded], padding[padded])
        begins = columns.rows * self._row + np.cumsum(lengths) - lengths
        columns.add(counts + padded, begins * self._dtype.itemsize, lengths)

    def commit(self) -> None:
        """Make both files of the open shard durable under their names, the index last."""
        if self._open is None:
            return
        file, columns = self._open
        with NewFile(self._folder / f"{self._split}.idx") as new:
            columns.write(new, DTYPE_CODES[self._dtype.name])
            name, records = commit_shard(self._split, {"bin": file, "idx": new})
        self.shards.append(Shard(name, self._split, columns.rows, columns.rows * self._row, 0, 0, **records))
        self.close()

    def close(self) -> None:
        """Remove what is not committed."""
        if self._open is not None:
            file, columns = self._open
            columns.close()
            file.discard()
            self._open = None


class IndexColumns:
    """The arrays of an index (milldam.stores.tokens.format) whose documents are rows and whose sequences are pieces.

    They wait in temporary files, since how long each is shows only at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.rows = self.pieces = 0
        self._folder = folder
        with explain_os_errors(folder):
            self._columns = [tempfile.TemporaryFile(dir=folder) for _ in range(3)]  # noqa: SIM115 - closed in close

    def add(self, counts: Int64s, offsets: Int64s, lengths: Int64s) -> None:
        """Add rows: how many pieces each has, and the pieces of all of them."""
        firsts = self.pieces + np.cumsum(counts)
        with explain_os_errors(self._folder):
            for column, values, kind in zip(
                self._columns, (lengths, offsets, firsts), ("<i4", "<i8", "<i8"), strict=True
            ):
                column.write(values.astype(kind).data)
        self.rows += len(counts)
        self.pieces += len(lengths)

    def write(self, new: NewFile, dtype_code: int) -> None:
        new.write(HEADER.pack(MAGIC, VERSION, dtype_code, self.pieces, self.rows + 1))
        for column, before in zip(self._columns, (b"", b"", bytes(8)), strict=True):
            new.write(before)
            with explain_os_errors(self._folder):
                column.seek(0)
            while block := column.read(_COPY_BYTES):
                new.write(block)

    def close(self) -> None:
        # On a full disk even closing may fail; that must not hide what went wrong before.
        for column in self._columns:
            with contextlib.suppress(OSError):
                column.close()


# ---- where documents begin in written rows ----


def read_boundaries(store: Store, first: int, last: int) -> tuple[Int64s, Int64s]:
    """The tokens of each piece of rows [first, last) of a store of rows, and how many pieces each row has; padding is
    a piece, the last of its row. From the index alone."""
    lengths, counts, start = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for shard in store.shards:
        begin, stop = max(first - start, 0), min(last - start, shard.documents)
        start += shard.documents
        if begin >= stop:
            continue
        index = store.open_index(shard)
        rows, sequences = index.document_lengths(begin, stop), index.documents[begin : stop + 1].astype(np.int64)
        lengths.append(index.lengths[int(sequences[0]) : int(sequences[-1])].astype(np.int64))
        counts.append(np.diff(sequences))
        if (rows != rows[0]).any() or not len(lengths[-1]) or int(lengths[-1].min()) < 0:
            raise index.damaged("its rows are not of one length")
    if len(counts) == 1:
        raise IndexError(f"rows {first:,} to {last:,} of a store of {len(store):,} rows")
    return np.concatenate(lengths), np.concatenate(counts)
