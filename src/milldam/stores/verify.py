"""Check a store of any kind against its own manifest: sizes and hashes of all files, then what is special to its kind.

tokens   ids in the vocabulary, indexes that cover the tokens, stretches within them
table    the columns of the manifest, rows that Arrow can read, as many as it says

Reads every file once, in blocks, wherever the store lies: constant memory. Of a store at an address only indexes go
through the cache. Yields a problem at a time, each a sentence that names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from milldam.errors import StoreError
from milldam.files import has_size, hash_bytes
from milldam.stores.kinds import TABLE, TOKENS, Kind, store_kind
from milldam.stores.place import Folder, Place
from milldam.stores.tokens.format import BLOCK_DOCUMENTS
from milldam.stores.tokens.manifest import Manifest, Shard

if TYPE_CHECKING:
    from milldam.stores.table.manifest import TableManifest
    from milldam.stores.tokens.reader import Store

_TOKENIZER = "tokenizer.json"


def verify(where: str | Path | Place) -> Iterator[str]:
    """Every problem found; none means that the store is whole."""
    place = Folder(Path(where)) if isinstance(where, str | Path) else where
    kind, manifest = manifest_at(place)
    facts = kind.facts(place.manifest(kind.manifest) or b"", place.name)
    for name, what in (("totals", "the sums over"), ("fingerprint", "that of")):
        if facts.get(name) != getattr(manifest, name):
            yield f"{place.name}/{kind.manifest}: {name}: not {what} its shards"
    yield from _tokenizer_problems(place, manifest)
    problems: dict[Kind, Callable[[Place, Any], Iterator[str]]] = {TOKENS: _token_problems, TABLE: _table_problems}
    yield from problems[kind](place, manifest)
    for file in (getattr(manifest, "audit", None) or {}).values():
        # A store is whole without them: they stay where it was made.
        if place.size(file["name"]) is not None:
            yield from _wrong_bytes(place, file["name"], file)


def manifest_at(place: Place) -> tuple[Kind, Any]:
    """The kind and manifest of the store at a place. Raises StoreError when it is no store."""
    kind = (None if place.folder is None else store_kind(place.folder)) or TOKENS
    return kind, kind.read(place)


def has_every_file(folder: Path, kind: Kind) -> bool:
    """Whether every file that the manifest of a folder names is there, of the size that it had; and its tokenizer."""
    place = Folder(folder)
    manifest = kind.read(place)
    # By plain strings: there may be many files.
    return not any(_tokenizer_problems(place, manifest)) and all(
        has_size(f"{folder}/{name}", record["bytes"]) for name, record in manifest.files()
    )


def _tokenizer_problems(place: Place, manifest: Any) -> Iterator[str]:
    """Of a store that was made without one, nothing can be said of a file of that name."""
    made_with = (manifest.tokenizer or {}).get("xxh3")
    data = None if made_with is None else place.read(_TOKENIZER)
    if made_with is not None and data is None:
        yield f"{place.name}/{_TOKENIZER}: missing"
    elif data is not None and hash_bytes(data) != made_with:
        yield f"{place.name}/{_TOKENIZER}: not the tokenizer that made this store (its hash differs)"


def _wrong_bytes(
    place: Place, name: str, record: dict[str, Any], see: Callable[[bytes], object] = lambda block: None
) -> Iterator[str]:
    """The problem with size or hash of a file. `see`: gets each block."""
    size, digest = place.size(name), xxhash.xxh3_128()
    if size is None:
        yield f"{place.name}/{name}: missing"
    elif size != record["bytes"]:
        yield f"{place.name}/{name}: {size:,} bytes where the manifest says {record['bytes']:,}"
    else:
        for block in place.blocks(name):
            digest.update(block)
            see(block)
        if digest.hexdigest() != record["xxh3"]:
            yield f"{place.name}/{name}: its bytes have changed since it was written (hash differs)"


def _token_problems(place: Place, manifest: Manifest) -> Iterator[str]:
    from milldam.stores.tokens.reader import Store

    store, outside = Store(place), set[int]()

    def see_ids(block: bytes) -> None:
        # Blocks are a multiple of any dtype's width, but for what a damaged file has at its end.
        ids = np.frombuffer(block, store.dtype, len(block) // store.dtype.itemsize)
        outside.update(id for id in (int(ids.min()), int(ids.max())) if not 0 <= id < manifest.vocab_size)

    # Equal shards share their files.
    for shard in {shard.name: shard for shard in manifest.shards}.values():
        path = f"{place.name}/{shard.name}"
        wrong = [] if manifest.chat is None or shard.spans else [f"{path}.spans: missing: the store has conversations"]
        for ending, record in shard.files.items():
            wrong += _wrong_bytes(place, f"{shard.name}.{ending}", record, *[see_ids] * (ending == "bin"))
        if outside:
            wrong += [f"{path}.bin: token id {min(outside)} outside the vocabulary of {manifest.vocab_size:,}"]
            outside.clear()
        if shard.labels is not None and shard.labels["bytes"] != shard.documents:
            wrong += [f"{path}.labels: {shard.labels['bytes']:,} labels of {shard.documents:,} documents"]
        yield from wrong
        if not wrong:
            try:
                _check_index(store, shard)
            except StoreError as error:
                yield str(error)


def _check_index(store: Store, shard: Shard) -> None:
    """Raise StoreError unless sequences follow each other, documents cover them, and stretches lie within these."""
    index = store.open_index(shard)
    if (np.diff(index.documents) <= 0).any():
        raise index.damaged("its documents do not cover all sequences in order")
    position = 0
    for start in range(0, len(index.lengths), BLOCK_DOCUMENTS):
        lengths = index.lengths[start : start + BLOCK_DOCUMENTS].astype(np.int64)
        ends = position + np.cumsum(lengths)
        if not np.array_equal(index.offsets[start : start + len(ends)], (ends - lengths) * index.dtype.itemsize):
            raise index.damaged(f"its offsets do not follow from the lengths near sequence {start:,}")
        position = int(ends[-1])
    spans, first = store.open_spans(shard), 0
    for lengths in index.length_blocks():
        if spans is not None:
            spans.some(first, lengths)
        first += len(lengths)


def _table_problems(place: Place, manifest: TableManifest) -> Iterator[str]:
    from milldam.stores.table.reader import Table

    assert isinstance(place, Folder)
    table = Table(place)
    # Equal units share a shard.
    for shard, number in {shard: number for number, shard in enumerate(manifest.shards)}.items():
        wrong = list(_wrong_bytes(place, shard.name, {"bytes": shard.bytes, "xxh3": shard.xxh3}))
        yield from wrong
        if not wrong:
            try:
                table.rows_of(number, 0, shard.rows)
            except StoreError as error:
                yield str(error)
