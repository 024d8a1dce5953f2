"""What comes of packing: the figures alone, or the rows on disk.

`plan_rows` reads indexes only. `write_rows` writes a folder that is itself a store (docs/format.md): its documents are
the rows, and `np.memmap(folder / "train-….bin", dtype).reshape(-1, seq_len)` is the rows of a shard. Its
manifest names the store it was made from by fingerprint, and is written last: a write that was killed starts again.

Rows of pieces in, shards of a store out: a document is a row, its sequences are the pieces in it.

Padding is a sequence of its own, the last of its row. Tokens are read as training reads them, about a million at a
time (one row, when rows are longer); lengths wait in temporary files for the index. Memory does not grow with a shard.
"""

from __future__ import annotations

import contextlib
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.files import NewFile, explain_os_errors, has_size, remove_temporaries, sync_folder, write_file
from milldam.loader.boundaries import document_lengths
from milldam.loader.reading import Reader, end_to_end, open_reader
from milldam.loader.stores import Store
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import Cutter, Rows, best_fit_rows, wrapped_rows
from milldam.stores.tokens.format import DTYPE_CODES, HEADER, MAGIC, MAX_SEQUENCE, VERSION, Int64s
from milldam.stores.tokens.manifest import NAME, Manifest, Shard
from milldam.stores.tokens.writer import commit_shard

if TYPE_CHECKING:
    from milldam.rules import PackingRules

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
        tokens = reader.runs(*end_to_end(pieces.starts, pieces.lengths))
        padded = padding > 0
        if padded.any():
            padded_rows = np.full((len(rows), row_len), self.form.pad_id, self.form.dtype)
            padded_rows[np.arange(row_len) < (row_len - padding)[:, None]] = tokens
            tokens = padded_rows
        self._bin.write(tokens.data)
        lengths = np.insert(pieces.lengths, ends[padded], padding[padded])
        begins = self.rows * row_len + np.cumsum(lengths) - lengths
        self._index.add(rows.counts + padded, begins * np.dtype(self.form.dtype).itemsize, lengths)

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


_SHARD_FILE = re.compile(r"[A-Za-z]\w*-[0-9a-f]{32}\.(bin|idx)")


@dataclass(frozen=True, slots=True)
class Packed:
    """How a split was packed. Tokens and padding fill the rows; tokens and tail are the whole split."""

    strategy: str
    seq_len: int
    rows: int
    tokens: int
    """Tokens in the rows, padding not counted."""
    padding: int
    tail: int
    """Tokens at the very end that fill no row and are left out."""
    cut_documents: int
    """Documents that lie in more than one row, or whose end is in the tail."""

    @property
    def efficiency(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens / (self.rows * self.seq_len) if self.rows else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"efficiency": round(self.efficiency, 6)}


class _Packing:
    """Packs one split; counts what passes."""

    def __init__(self, stream: TokenStream, rules: PackingRules, seq_len: int) -> None:
        _check(rules, seq_len)
        self._stream, self._rules, self._row = stream, rules, seq_len
        self._cutter = Cutter(seq_len, wrapped=rules.strategy == "wrapped")
        self._counted_rows = self._counted_tokens = 0

    def rows(self) -> Iterator[Rows]:
        pieces = self._cutter(document_lengths(self._stream))
        if self._rules.strategy == "wrapped":
            made = wrapped_rows(pieces, self._row, pad_last=self._rules.pad_last)
        else:
            made = best_fit_rows(pieces, self._row, buffer=self._rules.buffer)
        for rows in made:
            self._counted_rows += len(rows)
            self._counted_tokens += int(rows.pieces.lengths.sum())
            yield rows

    def figures(self) -> Packed:
        """Once all rows have passed."""
        rows, tokens = self._counted_rows, self._counted_tokens
        return Packed(
            strategy=self._rules.strategy,
            seq_len=self._row,
            rows=rows,
            tokens=tokens,
            padding=rows * self._row - tokens,
            tail=self._stream.tokens - tokens,
            cut_documents=self._cutter.cut_documents,
        )


def _check(rules: PackingRules, seq_len: int) -> None:
    if not 1 <= seq_len <= MAX_SEQUENCE:
        raise ConfigError(f"seq_len: {seq_len:,} is not a row length; use 1 to {MAX_SEQUENCE:,}.")
    if rules.buffer < 1:
        raise ConfigError(f"packing: buffer: {rules.buffer} documents; at least 1 has to be looked at.")


def pack(store_path: str | Path, rules: PackingRules, seq_len: int, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Figures of every split by name; with a folder, the rows are written there, padded with EOS (0 without one)."""
    store = Store(store_path)
    if folder is None:
        packed = {split: plan_rows(store_path, split, rules, seq_len) for split in store.splits}
    else:
        pad_id = store.manifest.tokenizer.get("eos") or 0
        packed = write_rows(store_path, folder, rules, seq_len=seq_len, pad_id=pad_id)
    return {split: figures.as_dict() for split, figures in packed.items()}


def plan_rows(store_path: str | Path, split: str, rules: PackingRules, seq_len: int) -> Packed:
    """The figures of packing a split, without reading or writing a token."""
    packing = _Packing(Store(store_path, split=split).stream(), rules, seq_len)
    for _ in packing.rows():
        pass
    return packing.figures()


def write_rows(
    store_path: str | Path, folder: Path, rules: PackingRules, *, seq_len: int, pad_id: int
) -> dict[str, Packed]:
    """Write the rows of every split into a folder, unless they lie there already; the figures by split.

    Call it while holding the lock of the run: what another write left there is removed.
    """
    _check(rules, seq_len)
    store = Store(store_path)
    if not 0 <= pad_id < store.vocab_size:
        raise ConfigError(f"pad id {pad_id:,} is outside the vocabulary of {store.vocab_size:,} tokens.")
    wanted = _settings(store, rules, seq_len, pad_id)
    found = _read_finished(folder)
    if found is not None and _is_current(found, wanted, store.manifest, folder):
        return {split: _from_dict(figures) for split, figures in found.settings["packed"].items()}
    _clear(folder)
    form = RowForm(store.manifest.dtype, seq_len, pad_id)
    shards: list[Shard] = []
    packed: dict[str, Packed] = {}
    for split in store.splits:
        stream = store.named_part(split).stream()
        packing = _Packing(stream, rules, seq_len)
        shards += write_shards(stream, split, packing.rows(), form, folder)
        packed[split] = packing.figures()
    _finish(folder, store, wanted | {"packed": {name: one.as_dict() for name, one in packed.items()}}, shards)
    return packed


def _settings(store: Store, rules: PackingRules, seq_len: int, pad_id: int) -> dict[str, Any]:
    """All that the rows follow from."""
    counts = Counter(shard.split for shard in store.shards)
    own = {"pad_last": rules.pad_last} if rules.strategy == "wrapped" else {"buffer": rules.buffer}
    return {
        "packing": {"strategy": rules.strategy} | own,
        "seq_len": seq_len,
        "pad_id": pad_id,
        "source": store.fingerprint,
        "source_splits": {split: counts[split] for split in store.splits},
    }


def _read_finished(folder: Path) -> Manifest | None:
    """The manifest of rows that were written before; another kind of store is not ours to replace."""
    if not (folder / NAME).exists():
        return None
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return None
    if "packed" not in manifest.settings:
        raise MismatchError(f"{folder}: holds a store of documents, not rows. Choose another folder for the rows.")
    return manifest


def _is_current(found: Manifest, wanted: dict[str, Any], source: Manifest, folder: Path) -> bool:
    same = {name: value for name, value in found.settings.items() if name != "packed"} == wanted
    if not same or (found.tokenizer, found.dtype) != (source.tokenizer, source.dtype):
        return False
    return all(has_size(folder / name, record["bytes"]) for name, record in found.files())


def _from_dict(figures: dict[str, Any]) -> Packed:
    return Packed(**{name: value for name, value in figures.items() if name != "efficiency"})


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


def _finish(folder: Path, store: Store, settings: dict[str, Any], shards: list[Shard]) -> None:
    source = store.manifest
    write_file(folder / "tokenizer.json", (store.path / "tokenizer.json").read_bytes())
    size = sum(shard.bin["bytes"] for shard in source.shards)
    Manifest(
        dtype=source.dtype,
        vocab_size=source.vocab_size,
        tokenizer=source.tokenizer,
        encoder=source.encoder,
        settings=settings,
        input={"files": len(source.shards), "bytes": size, "fingerprint": source.fingerprint},
        shards=tuple(shards),
    ).write(folder)
