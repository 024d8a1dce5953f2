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
from milldam.stores.kinds import TABLE, TOKENS, Kind, StoreManifest, store_kind
from milldam.stores.place import Folder, Place
from milldam.stores.tokens.format import BLOCK_DOCUMENTS, Index, SpanTable
from milldam.stores.tokens.manifest import Manifest, Shard

if TYPE_CHECKING:
    from milldam.stores.table.manifest import TableManifest

CHANGED = "its bytes have changed since it was written (hash differs)"
_TOKENIZER = "tokenizer.json"


def verify(where: str | Path | Place) -> Iterator[str]:
    """Every problem found; none means that the store is whole."""
    place = Folder(Path(where)) if isinstance(where, str | Path) else where
    kind, manifest = manifest_at(place)
    head = kind.head(place)
    if head.get("totals") != manifest.totals:
        yield f"{place.name}/{kind.manifest}: totals are not the sums over its shards"
    if head.get("fingerprint") != manifest.fingerprint:
        yield f"{place.name}/{kind.manifest}: the fingerprint is not that of its shards"
    yield from _tokenizer_problems(place, (getattr(manifest, "tokenizer", None) or {}).get("xxh3"))
    problems: dict[Kind, Callable[[Place, Any], Iterator[str]]] = {TOKENS: _token_problems, TABLE: _table_problems}
    yield from problems[kind](place, manifest)
    for file in kind.audit(place).values():
        # A store is whole without them: they stay where it was made.
        if place.size(file["name"]) is not None and (problem := wrong_bytes(place, file["name"], file)):
            yield problem


def manifest_at(place: Place) -> tuple[Kind, StoreManifest]:
    """The kind and manifest of the store at a place. Raises StoreError when it is no store."""
    kind = (None if place.folder is None else store_kind(place.folder)) or TOKENS
    return kind, kind.read_manifest(place)


def has_every_file(folder: Path, kind: Kind) -> bool:
    """Whether every file that the manifest of a folder names is there, of the size that it had; and its tokenizer."""
    place = Folder(folder)
    if any(_tokenizer_problems(place, kind.head(place).get("tokenizer", {}).get("xxh3"))):
        return False
    # By plain strings: there may be millions of files.
    return all(has_size(f"{folder}/{name}", size) for name, size in kind.files_in(folder / kind.manifest))


def _tokenizer_problems(place: Place, made_with: str | None) -> Iterator[str]:
    """`made_with`: its hash; None: made without one, so that nothing can be said of a file of that name."""
    if made_with is None:
        return
    path, data = f"{place.name}/{_TOKENIZER}", place.read(_TOKENIZER)
    if data is None:
        yield f"{path}: missing"
    elif hash_bytes(data) != made_with:
        yield f"{path}: not the tokenizer that made this store (its hash differs)"


def wrong_bytes(
    place: Place, name: str, record: dict[str, Any], see: Callable[[bytes], object] | None = None
) -> str | None:
    """The problem with size or hash of a file. `see`: gets each block."""
    size, digest = place.size(name), xxhash.xxh3_128()
    if size is None:
        return f"{place.name}/{name}: missing"
    if size != record["bytes"]:
        return f"{place.name}/{name}: {size:,} bytes where the manifest says {record['bytes']:,}"
    for block in place.blocks(name):
        digest.update(block)
        if see is not None:
            see(block)
    return None if digest.hexdigest() == record["xxh3"] else f"{place.name}/{name}: {CHANGED}"


# ---- tokens ----


def _token_problems(place: Place, manifest: Manifest) -> Iterator[str]:
    # Equal shards share their files.
    for shard in {shard.name: shard for shard in manifest.shards}.values():
        if manifest.chat is not None and shard.spans is None:
            yield f"{place.name}/{shard.name}.spans: missing: the store has conversations"
        wrong = list(_wrong_files(place, shard, manifest))
        yield from wrong
        if not wrong:
            try:
                yield from _index_problems(place, shard, np.dtype(manifest.dtype))
            except StoreError as error:
                yield str(error)


def _wrong_files(place: Place, shard: Shard, manifest: Manifest) -> Iterator[str]:
    """Problems with the bytes of a shard's files, its ids, and the number of its labels."""
    outside, dtype = set[int](), np.dtype(manifest.dtype)

    def see_ids(block: bytes) -> None:
        # Blocks are a multiple of any dtype's width, but for what a damaged file has at its end.
        ids = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        outside.update(id for id in (int(ids.min()), int(ids.max())) if not 0 <= id < manifest.vocab_size)

    for ending, record in shard.files.items():
        path = f"{place.name}/{shard.name}.{ending}"
        if problem := wrong_bytes(place, f"{shard.name}.{ending}", record, see_ids if ending == "bin" else None):
            yield problem
        elif ending == "bin" and outside:
            yield f"{path}: token id {min(outside)} outside the vocabulary of {manifest.vocab_size:,}"
        elif ending == "labels" and record["bytes"] != shard.documents:
            yield f"{path}: {record['bytes']:,} labels of {shard.documents:,} documents"


def _index_problems(place: Place, shard: Shard, dtype: np.dtype[Any]) -> Iterator[str]:
    """Problems within an index, and in the stretches that are trained on."""
    name = f"{place.name}/{shard.name}"
    path, index = f"{name}.idx", Index.parse(place.map(f"{shard.name}.idx", shard.idx), f"{name}.idx")
    if index.dtype != dtype:
        yield f"{path}: dtype {index.dtype} where the manifest says {dtype}"
    if len(index.documents) != shard.documents + 1:
        yield f"{path}: {len(index.documents) - 1:,} documents where the manifest says {shard.documents:,}"
    ascending = bool(np.all(index.documents[1:] > index.documents[:-1]))
    if index.documents[0] != 0 or index.documents[-1] != len(index.lengths) or not ascending:
        yield f"{path}: document indices do not cover all sequences in order"
        return
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
    if position != shard.tokens:
        yield f"{path}: lengths add up to {position:,} tokens where there are {shard.tokens:,}"
    elif shard.spans is not None and len(index.documents) == shard.documents + 1:
        spans = memoryview(place.map(f"{shard.name}.spans", shard.spans))
        yield from SpanTable.parse(spans, shard.documents, f"{name}.spans").problems(index.length_blocks())


# ---- tables ----


def _table_problems(place: Place, manifest: TableManifest) -> Iterator[str]:
    import pyarrow as pa

    from milldam.stores.table.reader import as_schema

    schema = manifest.schema.to_arrow(f"{place.name}/{TABLE.manifest}")
    # Equal units share a shard.
    for shard in dict.fromkeys(manifest.shards):
        path, rows = f"{place.name}/{shard.name}", 0
        if problem := wrong_bytes(place, shard.name, {"bytes": shard.bytes, "xxh3": shard.xxh3}):
            yield problem
            continue
        try:
            with pa.memory_map(path) as file:
                reader = pa.ipc.open_stream(file)
                as_schema(reader.schema.empty_table(), schema)
                for batch in reader:
                    batch.validate(full=True)
                    as_schema(pa.Table.from_batches([batch]), schema)
                    rows += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            yield f"{path}: other columns than the manifest says, or damaged ({error})"
            continue
        if rows != shard.rows:
            yield f"{path}: {rows:,} rows where the manifest says {shard.rows:,}"
