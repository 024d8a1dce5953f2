"""Check a store against its own manifest: hashes, counts, indexes, token ids.

Reads every file once, in blocks, wherever the store lies: constant memory. Of a store at an address nothing goes into
the cache; one index at a time is a temporary file. Yields a problem at a time, each a sentence that names the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from milldam.errors import StoreError
from milldam.files import hash_bytes
from milldam.stores.tokens.format import BLOCK_DOCUMENTS, Index
from milldam.stores.tokens.manifest import NAME, Manifest, ManifestText, Shard
from milldam.stores.tokens.place import BLOCK_BYTES, Folder, Place

_TOKENIZER = "tokenizer.json"


def verify(folder: Path | Place) -> Iterator[str]:
    """Every problem found; none means that the store is whole."""
    place = Folder(folder) if isinstance(folder, Path) else folder
    manifest = Manifest.read_at(place)
    yield from _verify_head(place, manifest)
    yield from _verify_tokenizer(place, manifest)
    for shard in manifest.shards:
        tokens, index = _Tokens(place, shard, manifest), f"{shard.name}.idx"
        problems = [*_verify_size(place, tokens.name, shard.bin), *_verify_size(place, index, shard.idx)]
        yield from problems or tokens.verify()
        if not problems:
            yield from _verify_index(place, index, shard, manifest.dtype)


def _verify_head(place: Place, manifest: Manifest) -> Iterator[str]:
    """What the manifest says of all shards follows from them."""
    head, totals = ManifestText.at(place).head(), ("documents", "tokens", "text_bytes")
    if head.get("totals") != {name: getattr(manifest, name) for name in totals}:
        yield f"{place.name}/{NAME}: totals are not the sums over its shards"
    if head.get("fingerprint") != manifest.fingerprint:
        yield f"{place.name}/{NAME}: the fingerprint is not that of its shards"


def _verify_tokenizer(place: Place, manifest: Manifest) -> Iterator[str]:
    path, made_with = f"{place.name}/{_TOKENIZER}", manifest.tokenizer.get("xxh3")
    if made_with is None:
        # Made without one: then nothing can be said of a file of that name.
        return
    data = place.read(_TOKENIZER)
    if data is None:
        yield f"{path}: missing"
    elif hash_bytes(data) != made_with:
        yield f"{path}: not the tokenizer that made this store (its hash differs)"


def _verify_size(place: Place, name: str, record: dict[str, Any]) -> Iterator[str]:
    size = place.size(name)
    if size is None:
        yield f"{place.name}/{name}: missing"
    elif size != record["bytes"]:
        yield f"{place.name}/{name}: {size:,} bytes where the manifest says {record['bytes']:,}"


CHANGED = "its bytes have changed since it was written (hash differs)"


class _Tokens:
    """The token file of a shard: its hash and its ids, in one pass."""

    def __init__(self, place: Place, shard: Shard, manifest: Manifest) -> None:
        self.name = f"{shard.name}.bin"
        self._place, self._manifest, self._record = place, manifest, shard.bin
        self._wrong: int | None = None

    def verify(self) -> Iterator[str]:
        digest = xxhash.xxh3_128()
        for block in self._place.blocks(self.name):
            digest.update(block)
            self._look_at(block)
        path = f"{self._place.name}/{self.name}"
        if digest.hexdigest() != self._record["xxh3"]:
            yield f"{path}: {CHANGED}"
        elif self._wrong is not None:
            yield f"{path}: token id {self._wrong} outside the vocabulary of {self._manifest.vocab_size:,}"

    def _look_at(self, block: bytes) -> None:
        # Blocks are a multiple of any dtype's width, but for what a damaged file has at its end.
        ids = np.frombuffer(block, self._manifest.dtype, len(block) // np.dtype(self._manifest.dtype).itemsize)
        if self._wrong is None and len(ids):
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= self._manifest.vocab_size:
                self._wrong = smallest if smallest < 0 else largest


def _verify_index(place: Place, name: str, shard: Shard, dtype: str) -> Iterator[str]:
    path = Path(place.name) / name
    with place.spooled(name) as file:
        digest = xxhash.xxh3_128()
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != shard.idx["xxh3"]:
            yield f"{place.name}/{name}: {CHANGED}"
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
        yield from verify_arrays(str(path), index, shard.documents, shard.tokens)


def verify_arrays(path: str, index: Index, documents: int, tokens: int) -> Iterator[str]:
    """What is wrong with an index of so many documents and tokens."""
    if len(index.documents) != documents + 1:
        yield f"{path}: {len(index.documents) - 1:,} documents where the manifest says {documents:,}"
    ascending = bool(np.all(index.documents[1:] >= index.documents[:-1]))
    if index.documents[0] != 0 or index.documents[-1] != len(index.lengths) or not ascending:
        yield f"{path}: document indices do not cover all sequences in order"
    yield from _verify_offsets(path, index, tokens)


def _verify_offsets(path: str, index: Index, tokens: int) -> Iterator[str]:
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
