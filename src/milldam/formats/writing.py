"""What an export writes: its files, each a unit of the job; tokens of a store in blocks; pieces of one large file.

Files are read, not mapped, so nothing stays resident: a block holds at most a million tokens. A large file is written
in pieces of 256 MiB, each in its place and a unit of its own: several workers write one file, and a killed export loses
the pieces that it was at. Pieces begin where pages do, so that no two machines write into one.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from milldam.choices import Side
from milldam.errors import StoreError
from milldam.files import explain_os_errors, hash_bytes, hash_rest, sync_folder, write_whole
from milldam.loader.reading import Reader, TokenArray, open_reader
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import in_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.formats.foreign import ForeignFile
    from milldam.loader.stores import Store

PIECE_BYTES = 1 << 28
_WRITE_BYTES = 1 << 16
"""At a time: for aligned writes of 2 MB the kernel (6.18, ext4) looks for pages as large, which takes it twice to four
times the CPU time of small writes."""
FileRecord = dict[str, Any]
"""bytes and xxh3 of a file; of a piece also `at`, where it begins."""


@dataclass(frozen=True, slots=True)
class Export:
    """What is exported, and how."""

    store: Store
    """Of the chosen split, or the whole store where it has one split or the format takes several."""
    out: Path
    """Where the user wants it; nothing is written there."""
    folder: Path
    """Where the files are made, under the names that they will have; for a folder, what will be OUT."""
    dtype: np.dtype[Any]
    """Of the tokens to write."""
    seq_len: int | None
    """Tokens of a row; None: a document a row."""
    shard_size: int
    """Bytes of a file, about, in formats of several files."""
    side: Side | None = None
    """Of preference pairs: the documents to write."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to make, or a piece of it: a unit of the export."""

    name: str
    """Below the export's folder."""
    split: str
    tokens: int
    size: int
    """Bytes of input."""
    start: int = 0
    """Position of its first token in the split."""
    rows: int = 0
    first: int = 0
    """Number of its first row in the split."""
    documents_each: int = 1
    """Documents of a row, where it has whole ones: two of a pair."""

    @property
    def key(self) -> str:
        return hash_bytes(json.dumps(self.as_json()).encode())[:16]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OutputFile:
        return cls(**value)


def split_parts(store: Store) -> dict[str, Store]:
    """The splits that are meant, by name: the one that was chosen, or all of a store that has several."""
    if has_splits(store):
        return {name: store.named_part(name) for name in store.splits}
    return {store.split_name or next(iter(store.splits), "train"): store}


def has_splits(store: Store) -> bool:
    """Whether several are meant."""
    return store.split_name is None and len(store.splits) > 1


# ---- tokens in blocks ----


def one_document(file: ForeignFile) -> Iterator[Tokens]:
    """All of a file as one document, in blocks."""
    yield from stretch(open_reader(file.stream(), "pread"), 0, file.tokens)


def stretch(reader: Reader, start: int, count: int) -> Iterator[Tokens]:
    """One document, open until its last block."""
    for begin, end in in_blocks(start, count):
        length = np.array([end - begin])
        yield Tokens(reader.runs(np.array([begin]), length), length, open=end < start + count)


def token_blocks(store: Store, first: int = 0, count: int | None = None) -> Iterator[TokenArray]:
    """The tokens of a store, or so many from `first` on. A block is valid until the next is asked for."""
    reader = open_reader(store.stream(), "pread")
    blocks, ahead = itertools.tee(in_blocks(first, store.tokens if count is None else count))
    next(ahead, None)
    for block, following in itertools.zip_longest(blocks, ahead):
        if reader.announces and following is not None:
            # The disk reads the next block while this one is written.
            reader.announce(*_extent(*following))
        yield reader.runs(*_extent(*block))


def document_lengths(store: Store) -> Iterator[Int64s]:
    """Tokens of the documents in order; one shard's index is mapped at a time."""
    for shard in store.shards:
        yield from store.open_index(shard).length_blocks()


def lengths_of(store: Store, first: int, count: int) -> Int64s:
    """Tokens of so many documents from one on."""
    found = []
    for shard in store.shards:
        if first < shard.documents and count:
            stop = min(shard.documents, first + count)
            found.append(store.open_index(shard).document_lengths(first, stop))
            count -= stop - first
        first = max(0, first - shard.documents)
    return np.concatenate(found)


def _extent(start: int, end: int) -> tuple[Int64s, Int64s]:
    return np.array([start]), np.array([end - start])


def block_as(block: TokenArray, dtype: np.dtype[Any]) -> TokenArray:
    """The same tokens in another dtype. An id that it can't hold is an error, never another id."""
    if block.dtype == dtype:
        return block
    limits = np.iinfo(dtype)
    smallest, largest = int(block.min(initial=0)), int(block.max(initial=0))
    if smallest < limits.min or largest > limits.max:
        wrong = largest if largest > limits.max else smallest
        raise StoreError(
            f"Token id {wrong:,} does not fit {dtype.name}, though the vocabulary says that all do: the store is "
            "damaged. `milldam verify` says where."
        )
    return block.astype(dtype)


# ---- one large file ----


def flat_pieces(export: Export, name: str, split: str, header: bytes = b"") -> Iterator[OutputFile]:
    """The pieces of a file with all tokens of a split behind a header."""
    store, width = split_parts(export.store)[split], export.dtype.itemsize
    end = len(header) + store.tokens * width
    for at in range(0, end, PIECE_BYTES):
        start, stop = (max(0, edge - len(header)) // width for edge in (at, min(at + PIECE_BYTES, end)))
        yield OutputFile(name, split, stop - start, (stop - start) * store.dtype.itemsize, start)


def write_piece(export: Export, file: OutputFile, header: bytes = b"") -> FileRecord:
    """Write a piece of such a file, durably."""
    store, path, digest = split_parts(export.store)[file.split], export.folder / file.name, xxhash.xxh3_128()
    at = len(header) + file.start * export.dtype.itemsize if file.start else 0
    size = 0
    with explain_os_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as opened:
        opened.seek(at)
        blocks = (
            block_as(block, export.dtype).data.cast("B") for block in token_blocks(store, file.start, file.tokens)
        )
        for data in itertools.chain([memoryview(header)] if at == 0 else [], blocks):
            digest.update(data)
            write_whole(opened.fileno(), data, _WRITE_BYTES)
            size += len(data)
        os.fsync(opened.fileno())
        sync_folder(path.parent)
    return {"bytes": size, "xxh3": digest.hexdigest(), "at": at}


def is_written(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a file or piece is as it was recorded."""
    try:
        with (folder / record["name"]).open("rb", buffering=0) as file:
            file.seek(record.get("at", 0))
            return bool(hash_rest(file, record["bytes"]).hexdigest() == record["xxh3"])
    except FileNotFoundError:
        return False
