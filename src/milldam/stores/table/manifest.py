"""The manifest `milldam-table.json`: written last, and what makes a folder a table.

It holds nothing that differs between two runs of the same job. Reading it needs no pyarrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import StoreError
from milldam.files import hash_bytes
from milldam.stores.kinds import TABLE, Facts
from milldam.stores.place import Folder

if TYPE_CHECKING:
    import pyarrow as pa

NAME = TABLE.manifest
IN_USE = "in-use"
"""In a table of the cache: whoever reads it holds a shared lock on this file."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The columns, as JSON can hold them."""

    columns: dict[str, str]
    """Name -> type, for people."""
    ipc: str
    """The schema as Arrow writes it, in base 64."""

    @classmethod
    def of(cls, schema: pa.Schema) -> TableSchema:
        ipc = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return cls({field.name: str(field.type) for field in schema}, ipc)

    @staticmethod
    def read(ipc: str) -> pa.Schema:
        """The columns of what is known to be sound."""
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(ipc, validate=True)))

    def to_arrow(self, path: str | Path = "schema") -> pa.Schema:
        """The columns; StoreError when they can't be read, or are not those for people."""
        import pyarrow as pa

        try:
            schema = self.read(self.ipc)
        except (ValueError, OSError, pa.ArrowException) as error:
            raise StoreError(f"{path}: damaged: schema.ipc can't be read ({error}). Make the table again.") from None
        if TableSchema.of(schema).columns != self.columns:
            raise StoreError(f"{path}: damaged: schema.columns are not those of schema.ipc. Make the table again.")
        return schema


@dataclass(frozen=True, slots=True)
class TableShard:
    """A file of rows: an Arrow IPC stream."""

    name: str
    rows: int
    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class TableManifest:
    schema: TableSchema
    """Of all rows; a shard may have narrower types, which are cast when it is read."""
    settings: dict[str, Any]
    """Every setting that changes the rows or how they are cut into units; `function`: its name and hash, and the hashes
    of its parts."""
    input: Facts
    """Number, size and fingerprint of what was read."""
    counts: dict[str, Any]
    """`units`; `read`: rows that the function was given; `rejected`: reason -> records that could not be read, or on
    which it failed."""
    shards: tuple[TableShard, ...] = ()
    """The files with rows, in order."""
    tokenizer: Facts | None = None
    """Of windows of question answering: that which made their ids."""
    qa: dict[str, Any] | None = None
    """Common facts of all windows of question answering (`milldam.qa.store.Form`); None: other rows."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def totals(self) -> dict[str, int]:
        return {"rows": self.rows, "bytes": self.bytes, "shards": len(self.shards)}

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal rows in equal order, in equal columns."""
        parts = [*(shard.xxh3 for shard in self.shards), self.schema.ipc]
        return hash_bytes("".join([*parts, "" if self.qa is None else json.dumps(self.qa)]).encode())

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((shard.name, {"bytes": shard.bytes, "xxh3": shard.xxh3}) for shard in self.shards)

    def write(self, folder: Path) -> None:
        facts: dict[str, Any] = {"totals": self.totals, "fingerprint": self.fingerprint, "schema": asdict(self.schema)}
        facts |= {"settings": self.settings, "input": self.input, "counts": self.counts}
        if self.qa is not None:
            facts |= {"tokenizer": self.tokenizer, "qa": self.qa}
        TABLE.write(folder, facts | {"shards": []}, map(asdict, self.shards))

    @classmethod
    def read(cls, folder: Path) -> TableManifest:
        manifest: TableManifest = TABLE.read(Folder(folder))
        return manifest
