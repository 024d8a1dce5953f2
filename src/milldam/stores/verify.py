"""Check a store of any kind against its own manifest: sizes and hashes of all files, then what is special to its kind.

tokens   ids in the vocabulary, indexes that cover the tokens, stretches within them
table    the columns of the manifest, rows that Arrow can read, as many as it says

Reads every file once, in blocks, wherever the store lies: constant memory. Of a store at an address nothing goes into
the cache; one index at a time is a temporary file. Yields a problem at a time, each a sentence that names the file.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from milldam.errors import StoreError
from milldam.files import has_size, hash_bytes
from milldam.stores.kinds import TABLE, TOKENS, Kind, StoreManifest, store_kind
from milldam.stores.place import BLOCK_BYTES, Folder, Place
from milldam.stores.tokens.format import BLOCK_DOCUMENTS, Index, SpanTable
from milldam.stores.tokens.manifest import Manifest, Shard

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.stores.table.manifest import TableManifest, TableShard

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
    """What lies at a place. Raises StoreError when it is no store."""
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


def wrong_size(place: Place, name: str, record: dict[str, Any]) -> str | None:
    """What is wrong with the size of a file."""
    size = place.size(name)
    if size is None:
        return f"{place.name}/{name}: missing"
    said = f"{size:,} bytes where the manifest says {record['bytes']:,}"
    return None if size == record["bytes"] else f"{place.name}/{name}: {said}"


def wrong_bytes(
    place: Place,
    name: str,
    record: dict[str, Any],
    *,
    blocks: Iterable[bytes] | None = None,
    see: Callable[[bytes], object] | None = None,
) -> str | None:
    """What is wrong with size or hash of a file. `blocks`: its bytes, if they are at hand; `see`: gets each block."""
    problem, digest = wrong_size(place, name, record), xxhash.xxh3_128()
    if problem is not None:
        return problem
    for block in place.blocks(name) if blocks is None else blocks:
        digest.update(block)
        if see is not None:
            see(block)
    return None if digest.hexdigest() == record["xxh3"] else f"{place.name}/{name}: {CHANGED}"


# ---- tokens ----


def _token_problems(place: Place, manifest: Manifest) -> Iterator[str]:
    dtype = np.dtype(manifest.dtype)
    # Equal shards share their files.
    for shard in {shard.name: shard for shard in manifest.shards}.values():
        names = [(f"{shard.name}.{ending}", record) for ending, record in shard.files.items()]
        sizes = [problem for one in names if (problem := wrong_size(place, *one)) is not None]
        yield from sizes
        if sizes:
            continue
        if problem := _wrong_ids(place, f"{shard.name}.bin", shard.bin, dtype, manifest.vocab_size):
            yield problem
        yield from _index_problems(place, shard, dtype)
        if manifest.chat is not None and shard.spans is None:
            yield f"{place.name}/{shard.name}.spans: missing: the store has conversations"
        if shard.labels is not None:
            name, size = f"{shard.name}.labels", shard.labels["bytes"]
            if problem := wrong_bytes(place, name, shard.labels):
                yield problem
            elif size != shard.documents:
                yield f"{place.name}/{name}: {size:,} labels of {shard.documents:,} documents"


def _wrong_ids(place: Place, name: str, record: dict[str, Any], dtype: np.dtype[Any], vocab_size: int) -> str | None:
    wrong = list[int]()

    def look_at(block: bytes) -> None:
        # Blocks are a multiple of any dtype's width, but for what a damaged file has at its end.
        ids = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        if not wrong and len(ids):
            wrong.extend(id for id in (int(ids.min()), int(ids.max())) if not 0 <= id < vocab_size)

    problem = wrong_bytes(place, name, record, see=look_at)
    if problem is None and wrong:
        return f"{place.name}/{name}: token id {wrong[0]} outside the vocabulary of {vocab_size:,}"
    return problem


def _index_problems(place: Place, shard: Shard, dtype: np.dtype[Any]) -> Iterator[str]:
    path = f"{place.name}/{shard.name}"
    with _mapped(place, f"{shard.name}.idx", shard.idx) as buffer:
        try:
            index = Index.parse(buffer(), f"{path}.idx")
        except StoreError as error:
            yield str(error)
            return
        if index.dtype != dtype:
            yield f"{path}.idx: dtype {index.dtype} where the manifest says {dtype}"
        if not bool(np.all(index.documents[1:] > index.documents[:-1])):
            yield f"{path}.idx: a document without a sequence"
        problems = list(verify_arrays(f"{path}.idx", index, shard.documents, shard.tokens))
        yield from problems
        if shard.spans is None or problems:
            return
        with _mapped(place, f"{shard.name}.spans", shard.spans) as buffer:
            try:
                table = SpanTable.parse(memoryview(buffer()), shard.documents, f"{path}.spans")
            except StoreError as error:
                yield str(error)
                return
            yield from table.problems(index.length_blocks())


@contextlib.contextmanager
def _mapped(place: Place, name: str, record: dict[str, Any]) -> Iterator[Callable[[], mmap.mmap | bytes]]:
    """What gives a file mapped; StoreError when its bytes are wrong."""
    with place.spooled(name) as file:

        def buffer() -> mmap.mmap | bytes:
            problem = wrong_bytes(place, name, record, blocks=iter(lambda: file.read(BLOCK_BYTES), b""))
            if problem is not None:
                raise StoreError(problem)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if record["bytes"] else b""

        yield buffer


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


# ---- tables ----


def _table_problems(place: Place, manifest: TableManifest) -> Iterator[str]:
    schema = manifest.schema.to_arrow(f"{place.name}/{TABLE.manifest}")
    # Equal units share a shard.
    whole = True
    for shard in dict.fromkeys(manifest.shards):
        record = {"bytes": shard.bytes, "xxh3": shard.xxh3}
        problem = wrong_bytes(place, shard.name, record) or _wrong_rows(f"{place.name}/{shard.name}", shard, schema)
        if problem is not None:
            whole = False
            yield problem
    if whole and manifest.qa is not None:
        # Only then are they read: what does not have its bytes says nothing about its contents.
        yield from import_module("milldam.qa.verify").problems(place)


def _wrong_rows(path: str, shard: TableShard, schema: pa.Schema) -> str | None:
    import pyarrow as pa

    from milldam.stores.table.reader import as_schema

    rows = 0
    try:
        with pa.memory_map(path) as file:
            reader = pa.ipc.open_stream(file)
            try:
                as_schema(reader.schema.empty_table(), schema)
            except pa.ArrowException:
                columns = ", ".join(f"{field.name} ({field.type})" for field in reader.schema)
                return f"{path}: other columns than the manifest says: {columns}"
            for batch in reader:
                batch.validate(full=True)
                as_schema(pa.Table.from_batches([batch]), schema)
                rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{path}: can't be read ({error})"
    return f"{path}: {rows:,} rows where the manifest says {shard.rows:,}" if rows != shard.rows else None
