"""What an export writes: its files, each a unit of the job, and what writing one needs to know."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.files import hash_bytes

if TYPE_CHECKING:
    from milldam.loader.stores import Store

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


@dataclass(frozen=True, slots=True)
class Writing:
    """A file that is being made."""

    export: Export
    file: OutputFile
    durable: FileRecord | None
    """What an earlier run left of it, where that was less than all."""
    checkpoint: Callable[[FileRecord], None]
    """Told what is durable of a file that is not whole yet."""

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
