"""Stores of given tokens, without text or a tokenizer: what the loader's tests read from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from milldam.loader.stores import Store
from milldam.stores.kinds import KINDS
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

EOS = 0


def write_store(
    folder: Path, shards: Sequence[Sequence[int]], *, dtype: str = "uint16", splits: Sequence[str] | None = None
) -> Store:
    """A store whose shards have documents of the given lengths; tokens count up from 1, so that each says its place.

    They go round at 60,000, and the last of each document is EOS. `splits`: the split of each shard; default train.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Shard] = []
    position = 0
    for number, lengths in enumerate(shards):
        split = "train" if splits is None else splits[number]
        count = sum(lengths)
        flat = np.arange(position, position + count) % 60_000 + 1
        position += count
        ends = np.cumsum(lengths, dtype=np.int64) - 1
        flat[ends] = EOS
        with ShardWriter(folder, split, dtype) as writer:
            writer.append(Tokens(flat.astype(dtype), np.array(lengths, np.int64)))
            written.append(writer.commit())
    manifest = Manifest(
        dtype=dtype,
        vocab_size=60_001,
        tokenizer={"name": "counting", "eos": EOS},
        encoder="none",
        settings={},
        input={},
        shards=tuple(written),
    )
    manifest.write(folder)
    return Store(folder)


def flat_tokens(store: Store) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All tokens of a store in order."""
    parts = [np.asarray(tokens, np.int64) for tokens in store.shard_tokens()]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def shard_file(folder: Path, number: int, ending: str) -> Path:
    """A file of a shard, by its number in the manifest."""
    manifest = next(path for kind in KINDS if (path := folder / kind.manifest).exists())
    return folder / f"{json.loads(manifest.read_bytes())['shards'][number]['name']}.{ending}"
