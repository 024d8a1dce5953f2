"""The files of an export, each a unit of the job, and the tokens of a store in one large file.

Files are read, not mapped, so nothing stays resident: a block holds at most a million tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.choices import Side
from milldam.errors import StoreError
from milldam.files import NewFile, hash_bytes
from milldam.loader.reading import TokenArray, open_reader
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import in_blocks

if TYPE_CHECKING:
    from milldam.loader.stores import Store
    from milldam.run.engine import Progress

_WRITE_BYTES = 1 << 16
"""At a time: for aligned writes of 2 MB the kernel (6.18, ext4) looks for pages as large, which takes it twice to four
times the CPU time of small writes."""
FileRecord = dict[str, Any]
"""bytes and xxh3 of a file."""


@dataclass(frozen=True, slots=True)
class Export:
    """A store to export, and how."""

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

    @property
    def has_splits(self) -> bool:
        return has_splits(self.store)

    @property
    def parts(self) -> dict[str, Store]:
        """The splits to write, by name: the chosen one, or all of a store that has several."""
        store = self.store
        if has_splits(store):
            return {name: store.named_part(name) for name in store.splits}
        return {store.split_name or next(iter(store.splits), "train"): store}


def has_splits(store: Store) -> bool:
    """Whether a store has several splits, none of which was chosen."""
    return store.split_name is None and len(store.splits) > 1


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

    @property
    def key(self) -> str:
        return hash_bytes(json.dumps(self.as_json()).encode())[:16]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OutputFile:
        return cls(**value)


# ---- tokens ----


def token_blocks(store: Store) -> Iterator[TokenArray]:
    """The tokens of a store. A block is valid until the next is asked for."""
    reader = open_reader(store.stream(), "pread")
    extents = ((np.array([start]), np.array([end - start])) for start, end in in_blocks(0, store.tokens))
    blocks, ahead = itertools.tee(extents)
    next(ahead, None)
    for block, following in itertools.zip_longest(blocks, ahead):
        if reader.announces and following is not None:
            reader.announce(*following)  # the disk reads the next block while this one is written
        yield reader.runs(*block)


def document_lengths(store: Store) -> Iterator[Int64s]:
    """Tokens of the documents in order; one shard's index is mapped at a time."""
    for shard in store.shards:
        yield from store.open_index(shard).length_blocks()


def block_as(block: TokenArray, dtype: np.dtype[Any]) -> TokenArray:
    """The same tokens in another dtype. An id that it can't hold is an error, never another id."""
    if block.dtype == dtype:
        return block
    limits = np.iinfo(dtype)
    for id in (int(block.max(initial=0)), int(block.min(initial=0))):
        if not limits.min <= id <= limits.max:
            raise StoreError(
                f"Token id {id:,} does not fit {dtype.name}, though the vocabulary says that all do: the store is "
                "damaged. `milldam verify` says where."
            )
    return block.astype(dtype)


# ---- one large file ----


def flat_files(export: Export) -> Iterator[OutputFile]:
    """One file with all tokens of the chosen split: `files` of a format."""
    for split, store in export.parts.items():
        yield OutputFile(export.out.name, split, store.tokens, store.tokens * store.dtype.itemsize)


def write_flat(export: Export, file: OutputFile, progress: Progress, header: bytes = b"") -> FileRecord:
    """Write all tokens of a split after a header, durably: `write_file` of a format."""
    with NewFile(export.folder / file.name) as new:
        new.write(header)
        for block in token_blocks(export.parts[file.split]):
            data = block_as(block, export.dtype).data.cast("B")
            for at in range(0, len(data), _WRITE_BYTES):
                new.write(data[at : at + _WRITE_BYTES])
            progress.add(tokens=len(block), input_bytes=block.nbytes)
        return new.commit()
