"""Check a store against its own manifest: hashes, counts, indexes, token ids.

Reads every file once, in blocks: constant memory. Yields a problem at a time, each a sentence that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milldam.errors import StoreError
from milldam.files import hash_file
from milldam.store.format import Index
from milldam.store.manifest import Manifest, Shard

_BLOCK_TOKENS = 1 << 20
_BLOCK_DOCUMENTS = 1 << 17


def verify(folder: Path) -> Iterator[str]:
    """Every problem found; none means that the store is whole."""
    manifest = Manifest.read(folder)
    yield from _verify_tokenizer(folder, manifest)
    for shard in manifest.shards:
        problems = list(_verify_files(folder, shard))
        yield from problems
        if not problems:
            yield from _verify_index(folder / f"{shard.name}.idx", shard, manifest.dtype)
            yield from _verify_ids(folder / f"{shard.name}.bin", manifest)


def _verify_tokenizer(folder: Path, manifest: Manifest) -> Iterator[str]:
    path = folder / "tokenizer.json"
    if not path.exists():
        yield f"{path}: missing"
    elif hash_file(path) != manifest.tokenizer["xxh3"]:
        yield f"{path}: not the tokenizer that made this store (its hash differs)"


def _verify_files(folder: Path, shard: Shard) -> Iterator[str]:
    for suffix, record in (("bin", shard.bin), ("idx", shard.idx)):
        path = folder / f"{shard.name}.{suffix}"
        if not path.exists():
            yield f"{path}: missing"
        elif path.stat().st_size != record["bytes"]:
            yield f"{path}: {path.stat().st_size:,} bytes where the manifest says {record['bytes']:,}"
        elif hash_file(path) != record["xxh3"]:
            yield f"{path}: its bytes have changed since it was written (hash differs)"


def _verify_index(path: Path, shard: Shard, dtype: str) -> Iterator[str]:
    try:
        index = Index.map(path)
    except StoreError as error:
        yield str(error)
        return
    if index.dtype != np.dtype(dtype):
        yield f"{path}: dtype {index.dtype} where the manifest says {dtype}"
    if len(index.documents) != shard.documents + 1:
        yield f"{path}: {len(index.documents) - 1:,} documents where the manifest says {shard.documents:,}"
    ascending = bool(np.all(index.documents[1:] > index.documents[:-1]))
    if index.documents[0] != 0 or index.documents[-1] != len(index.lengths) or not ascending:
        yield f"{path}: document indices do not cover all sequences in order"
    yield from _verify_offsets(path, index, shard)


def _verify_offsets(path: Path, index: Index, shard: Shard) -> Iterator[str]:
    position = 0
    for start in range(0, len(index.lengths), _BLOCK_DOCUMENTS):
        lengths = index.lengths[start : start + _BLOCK_DOCUMENTS].astype(np.int64)
        expected = position + np.concatenate(([0], np.cumsum(lengths)))
        if not np.array_equal(index.offsets[start : start + _BLOCK_DOCUMENTS], expected[:-1] * index.dtype.itemsize):
            yield f"{path}: offsets do not follow from the lengths near document {start:,}"
            return
        position = int(expected[-1])
    if position != shard.tokens:
        yield f"{path}: lengths add up to {position:,} tokens where the manifest says {shard.tokens:,}"


def _verify_ids(path: Path, manifest: Manifest) -> Iterator[str]:
    with path.open("rb", buffering=0) as file:
        width = np.dtype(manifest.dtype).itemsize
        while block := file.read(_BLOCK_TOKENS * width):
            ids = np.frombuffer(block, manifest.dtype)
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= manifest.vocab_size:
                wrong = smallest if smallest < 0 else largest
                yield f"{path}: token id {wrong} outside the vocabulary of {manifest.vocab_size:,}"
                return
