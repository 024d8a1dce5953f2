"""What an export writes: its files, each a unit of the job; tokens of a store in blocks; one large file that grows.

Files are read, not mapped, so nothing stays resident: a block holds at most a million tokens. A file that is written
grows over several runs: after every CHECKPOINT_BYTES it is made durable, and that is recorded. A later run cuts it off
there and goes on, so at most that much is written twice, once it has seen by its hash that what is there is what was
written.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

CHECKPOINT_BYTES = 256_000_000
_WRITE_BYTES = 1 << 16
"""At a time: for aligned writes of 2 MB the kernel (6.18, ext4) looks for pages as large, which takes it twice to four
times the CPU time of small writes."""
FileRecord = dict[str, Any]
"""bytes and xxh3 of what is durable of a file."""


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
    """A file to make: a unit of the export."""

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


class Written(NamedTuple):
    """So much of a file is durable."""

    record: FileRecord
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Writing:
    """A file that is being made."""

    export: Export
    file: OutputFile
    durable: FileRecord | None
    """What an earlier run left of it, where that was less than all."""

    @property
    def path(self) -> Path:
        return self.export.folder / self.file.name

    @property
    def store(self) -> Store:
        """The split that it holds."""
        return split_parts(self.export.store)[self.file.split]


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


def token_blocks(store: Store, first: int = 0) -> Iterator[TokenArray]:
    """The tokens of a store from `first` on. A block is valid until the next is asked for."""
    reader = open_reader(store.stream(), "pread")
    blocks, ahead = itertools.tee(in_blocks(first, store.tokens - first))
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


def whole_split(name: str, split: str, store: Store) -> OutputFile:
    """A file with all tokens of a split."""
    return OutputFile(name, split, store.tokens, store.tokens * store.dtype.itemsize)


def write_tokens(writing: Writing, header: bytes = b"") -> Iterator[Written]:
    """All tokens of a split end to end behind a header, or what is left of them to write; durable every 256 MB."""
    dtype = writing.export.dtype
    with GrowingFile(writing) as file:
        if file.size == 0:
            file.write(header)
        first = (file.size - len(header)) // dtype.itemsize
        for block in token_blocks(writing.store, first):
            file.write(block_as(block, dtype).data)
            if file.unsynced >= CHECKPOINT_BYTES:
                yield Written(file.sync(), whole=False)
        yield Written(file.sync())


class GrowingFile:
    """A file of which some may be durable already; `size` says how much. Use it as a context manager."""

    def __init__(self, writing: Writing) -> None:
        self.path = writing.path
        self._hash = xxhash.xxh3_128()
        self.size = self._durable = 0 if writing.durable is None else self._usable(writing.durable)
        with explain_os_errors(self.path):
            # Not "append": that would write behind what is cut off here on some file systems.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            sync_folder(self.path.parent)

    def _usable(self, recorded: FileRecord) -> int:
        """What is recorded, unless the file is gone, shorter, or not as it was written: then it begins anew."""
        try:
            with self.path.open("rb", buffering=0) as file:
                found = hash_rest(file, int(recorded["bytes"]))
        except FileNotFoundError:
            return 0
        if found.hexdigest() != recorded["xxh3"]:
            return 0
        self._hash = found
        return int(recorded["bytes"])

    def write(self, data: bytes | memoryview) -> None:
        """Add whole tokens, or the header: a later run may go on behind them."""
        left = memoryview(data).cast("B")
        self.size += len(left)
        self._hash.update(left)
        with explain_os_errors(self.path):
            write_whole(self._file, left, _WRITE_BYTES)

    @property
    def unsynced(self) -> int:
        return self.size - self._durable

    def sync(self) -> FileRecord:
        """Make all of it durable."""
        with explain_os_errors(self.path):
            os.fsync(self._file)
        self._durable = self.size
        return {"bytes": self.size, "xxh3": self._hash.hexdigest()}

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
