"""Stores of chosen tokens, without text or a tokenizer: what tests of the loader, of exports and of imports read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from milldam.loader.stores import Store
from milldam.stores.kinds import KINDS
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

EOS = 0
Documents = Sequence[Sequence[int]]


def write_shards(
    folder: Path, shards: Iterable[tuple[str, Tokens]], *, dtype: str = "uint16", vocab_size: int, **more: Any
) -> Store:
    """A store of shards, each of a split."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Shard] = []
    for split, tokens in shards:
        with ShardWriter(folder, split, dtype) as writer:
            writer.append(tokens)
            written.append(writer.commit())
    Manifest(dtype, vocab_size, {"name": "none", "eos": EOS}, "none", {}, {}, tuple(written), **more).write(folder)
    return Store(folder)


def write_store(
    folder: Path, shards: Sequence[Sequence[int]], *, dtype: str = "uint16", splits: Sequence[str] | None = None
) -> Store:
    """A store whose shards have documents of these lengths; tokens count up from 1, so that each tells its place.

    They start again at 60,000, and the last of each document is EOS. `splits`: the split of each shard; default train.
    """
    made, position = [], 0
    for number, lengths in enumerate(shards):
        flat = np.arange(position, position + sum(lengths)) % 60_000 + 1
        position += len(flat)
        flat[np.cumsum(lengths, dtype=np.int64) - 1] = EOS
        split = "train" if splits is None else splits[number]
        made.append((split, Tokens(flat.astype(dtype), np.array(lengths, np.int64))))
    return write_shards(folder, made, dtype=dtype, vocab_size=60_001)


def store_of(
    folder: Path, splits: Mapping[str, Documents], *, dtype: str = "uint16", vocab_size: int = 60_000, shards: int = 2
) -> Store:
    """A store of the documents of each split, in so many shards."""
    made = []
    for split, documents in splits.items():
        each = max(1, -(-len(documents) // shards))
        for some in (documents[first : first + each] for first in range(0, len(documents), each)):
            flat = np.array([token for document in some for token in document], dtype)
            made.append((split, Tokens(flat, np.array([len(document) for document in some], np.int64))))
    return write_shards(folder, made, dtype=dtype, vocab_size=vocab_size)


def documents_of(path: Path, split: str | None = None) -> list[list[int]]:
    return [document.tolist() for document in Store(path, split=split)]


def random_documents(lengths: Sequence[int], seed: int = 0, vocab_size: int = 60_000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def flat_tokens(store: Store) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All tokens of a store in order."""
    parts = [np.asarray(tokens, np.int64) for tokens in store.shard_tokens()]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def shard_file(folder: Path, number: int, ending: str) -> Path:
    """A file of a shard, by its number in the manifest."""
    manifest = next(path for kind in KINDS if (path := folder / kind.manifest).exists())
    return folder / f"{json.loads(manifest.read_bytes())['shards'][number]['name']}.{ending}"
