"""Stores of given documents, and the documents of any store: what the tests of exports and imports compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from milldam.loader.stores import Store
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

Documents = Sequence[Sequence[int]]


def store_of(
    folder: Path, splits: Mapping[str, Documents], *, dtype: str = "uint16", vocab_size: int = 60_000, shards: int = 2
) -> Store:
    """A store of the documents of each split, in so many shards."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Shard] = []
    for split, documents in splits.items():
        each = max(1, -(-len(documents) // shards))
        for first in range(0, len(documents), each):
            some = documents[first : first + each]
            flat = np.array([token for document in some for token in document], dtype)
            lengths = np.array([len(document) for document in some], np.int64)
            with ShardWriter(folder, split, dtype) as writer:
                writer.append(Tokens(flat, lengths))
                written.append(writer.commit())
    tokenizer = {"name": "none", "eos": 0}
    Manifest(dtype, vocab_size, tokenizer, "none", {}, {}, tuple(written)).write(folder)
    return Store(folder)


def documents_of(path: Path, split: str | None = None) -> list[list[int]]:
    return [document.tolist() for document in Store(path, split=split)]


def random_documents(lengths: Sequence[int], seed: int = 0, vocab_size: int = 60_000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
