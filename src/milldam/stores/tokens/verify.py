"""What is special to shards of tokens: ids in the vocabulary, indexes that cover the tokens, stretches within them.

Reads every file once, in blocks: constant memory. At an address, one index at a time is a temporary file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import StoreError
from milldam.stores.place import BLOCK_BYTES, Place
from milldam.stores.tokens.format import BLOCK_DOCUMENTS, Index, SpanTable
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.verify import wrong_bytes, wrong_size


def problems(place: Place, manifest: Manifest) -> Iterator[str]:
    # Equal shards share their files.
    for shard in {shard.name: shard for shard in manifest.shards}.values():
        names = [(f"{shard.name}.{ending}", record) for ending, record in shard.files.items()]
        found = [problem for one in names if (problem := wrong_size(place, *one)) is not None]
        yield from found or _contents(place, manifest, shard)


def _contents(place: Place, manifest: Manifest, shard: Shard) -> Iterator[str]:
    name, dtype, wrong = f"{shard.name}.bin", np.dtype(manifest.dtype), list[int]()

    def look_at(block: bytes) -> None:
        # Blocks are a multiple of any dtype's width, but for what a damaged file has at its end.
        ids = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        if not wrong and len(ids):
            wrong.extend(id for id in (int(ids.min()), int(ids.max())) if not 0 <= id < manifest.vocab_size)

    problem = wrong_bytes(place, name, shard.bin, see=look_at)
    if problem is None and wrong:
        problem = f"{place.name}/{name}: token id {wrong[0]} outside the vocabulary of {manifest.vocab_size:,}"
    if problem is not None:
        yield problem
    yield from _index(place, f"{shard.name}.idx", shard, manifest.dtype)
    if manifest.chat is not None and shard.spans is None:
        yield f"{place.name}/{shard.name}.spans: missing: the store has conversations"
    if shard.labels is not None:
        name = f"{shard.name}.labels"
        problem = wrong_bytes(place, name, shard.labels)
        if problem is None and shard.labels["bytes"] != shard.documents:
            problem = f"{place.name}/{name}: {shard.labels['bytes']:,} labels of {shard.documents:,} documents"
        if problem is not None:
            yield problem


def _index(place: Place, name: str, shard: Shard, dtype: str) -> Iterator[str]:
    path = Path(place.name) / name
    with place.spooled(name) as file:
        problem = wrong_bytes(place, name, shard.idx, blocks=iter(lambda: file.read(BLOCK_BYTES), b""))
        if problem is not None:
            yield problem
            return
        try:
            index = Index.parse(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
        except (StoreError, ValueError) as error:
            yield str(error)
            return
        if index.dtype != np.dtype(dtype):
            yield f"{path}: dtype {index.dtype} where the manifest says {dtype}"
        if not bool(np.all(index.documents[1:] > index.documents[:-1])):
            yield f"{path}: a document without a sequence"
        found = list(verify_arrays(str(path), index, shard.documents, shard.tokens))
        yield from found
        if shard.spans is not None and not found:
            yield from _spans(place, shard, shard.spans, index)


def _spans(place: Place, shard: Shard, record: dict[str, Any], index: Index) -> Iterator[str]:
    name = f"{shard.name}.spans"
    with place.spooled(name) as file:
        problem = wrong_bytes(place, name, record, blocks=iter(lambda: file.read(BLOCK_BYTES), b""))
        if problem is not None:
            yield problem
            return
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            table = SpanTable.parse(memoryview(buffer), shard.documents, f"{place.name}/{name}")
        except (StoreError, ValueError) as error:
            yield str(error)
            return
        yield from table.problems(index.length_blocks())


def verify_arrays(path: str, index: Index, documents: int, tokens: int) -> Iterator[str]:
    """What is wrong with an index of so many documents and tokens."""
    if len(index.documents) != documents + 1:
        yield f"{path}: {len(index.documents) - 1:,} documents where the manifest says {documents:,}"
    ascending = bool(np.all(index.documents[1:] >= index.documents[:-1]))
    if index.documents[0] != 0 or index.documents[-1] != len(index.lengths) or not ascending:
        yield f"{path}: document indices do not cover all sequences in order"
    position = 0
    for start in range(0, len(index.lengths), BLOCK_DOCUMENTS):
        lengths = index.lengths[start : start + BLOCK_DOCUMENTS].astype(np.int64)
        if lengths.min() < 0:
            yield f"{path}: a length below 0 near document {start:,}"
            return
        expected = position + np.concatenate(([0], np.cumsum(lengths)))
        if not np.array_equal(index.offsets[start : start + BLOCK_DOCUMENTS], expected[:-1] * index.dtype.itemsize):
            yield f"{path}: offsets do not follow from the lengths near document {start:,}"
            return
        position = int(expected[-1])
    if position != tokens:
        yield f"{path}: lengths add up to {position:,} tokens where there are {tokens:,}"
