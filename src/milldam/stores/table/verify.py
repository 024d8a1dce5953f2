"""What is special to shards of a table: the columns of the manifest, rows that Arrow can read, as many as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from milldam.stores.place import Place
from milldam.stores.table.manifest import NAME, TableManifest, TableShard
from milldam.stores.table.reader import as_schema
from milldam.stores.verify import wrong_bytes


def problems(place: Place, manifest: TableManifest) -> Iterator[str]:
    folder = Path(place.name)
    schema = manifest.schema.to_arrow(folder / NAME)
    # Equal units share a shard.
    for shard in dict.fromkeys(manifest.shards):
        record = {"bytes": shard.bytes, "xxh3": shard.xxh3}
        problem = wrong_bytes(place, shard.name, record) or _wrong_rows(folder / shard.name, shard, schema)
        if problem is not None:
            yield problem


def _wrong_rows(path: Path, shard: TableShard, schema: pa.Schema) -> str | None:
    rows = 0
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_stream(file)
            try:
                as_schema(reader.schema.empty_table(), schema)
            except pa.ArrowException:
                return f"{path}: other columns than the manifest says: {_columns(reader.schema)}"
            for batch in reader:
                batch.validate(full=True)
                as_schema(pa.Table.from_batches([batch]), schema)
                rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{path}: can't be read ({error})"
    return f"{path}: {rows:,} rows where the manifest says {shard.rows:,}" if rows != shard.rows else None


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
