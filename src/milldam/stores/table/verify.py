"""Check a table against its own manifest: sizes, hashes, row counts, columns.

Reads every file twice, in blocks and mapped: constant memory. Yields a problem at a time, each a sentence that names
the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from milldam.files import hash_file
from milldam.stores.table.manifest import NAME, TableManifest, TableShard


def verify(path: str | Path) -> Iterator[str]:
    """Every problem found; none means that the table is whole."""
    folder = Path(path)
    manifest = TableManifest.read(folder)
    schema = manifest.schema.to_arrow(folder / NAME)
    for shard in dict.fromkeys(manifest.shards):
        problem = _wrong_bytes(folder / shard.name, shard) or _wrong_rows(folder / shard.name, shard, schema)
        if problem is not None:
            yield problem


def _wrong_bytes(path: Path, shard: TableShard) -> str | None:
    if not path.exists():
        return f"{path}: missing"
    if path.stat().st_size != shard.bytes:
        return f"{path}: {path.stat().st_size:,} bytes where the manifest says {shard.bytes:,}"
    if hash_file(path) != shard.xxh3:
        return f"{path}: its bytes have changed since it was written (hash differs)"
    return None


def _wrong_rows(path: Path, shard: TableShard, schema: pa.Schema) -> str | None:
    rows = 0
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_stream(file)
            if not reader.schema.equals(schema):
                return f"{path}: other columns than the manifest says: {_columns(reader.schema)}"
            for batch in reader:
                batch.validate(full=True)
                rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{path}: can't be read ({error})"
    return f"{path}: {rows:,} rows where the manifest says {shard.rows:,}" if rows != shard.rows else None


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
