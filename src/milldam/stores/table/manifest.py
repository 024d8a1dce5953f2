"""The manifest `milldam-table.json`: written last, and what makes a folder a table.

It holds nothing that differs between two runs of the same job. It may come from anywhere, so what a reader takes for
granted later (names, counts) is checked when it is read. Reading it needs no pyarrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.checked import checked
from milldam.errors import StoreError
from milldam.files import hash_bytes, stays_in_folder
from milldam.stores.kinds import TABLE, InputFacts, TokenizerFacts
from milldam.stores.place import Folder, Place

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

        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(ipc)))

    def to_arrow(self, path: str | Path = "schema") -> pa.Schema:
        """The columns; StoreError when they can't be read, or are not those for people."""
        import pyarrow as pa

        try:
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.ipc, validate=True)))
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
class MadeUnit:
    """What became of a unit of input."""

    key: str
    """Everything that its rows depend on: function, parameters, schema, what it read."""
    read: int
    """Rows that the function was given."""
    shards: tuple[TableShard, ...]
    """None where no rows came out; several where the types of its columns changed on the way."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason -> records that could not be read, or on which the function failed."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True, slots=True)
class TableManifest:
    schema: TableSchema
    """Of all rows; a shard may have narrower types, which are cast when it is read."""
    settings: dict[str, Any]
    """Every setting that changes the rows or how they are cut into units; `function`: its name and hash, and the hashes
    of its parts."""
    input: InputFacts
    """Number, size and fingerprint of what was read."""
    units: tuple[MadeUnit, ...]
    tokenizer: TokenizerFacts | None = None
    """Of windows of question answering: that which made their ids."""
    qa: dict[str, Any] | None = None
    """Of windows of question answering: what `milldam.qa.store.Facts` says; None: other rows."""

    @property
    def shards(self) -> tuple[TableShard, ...]:
        """The files with rows, in order."""
        return tuple(shard for unit in self.units for shard in unit.shards)

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def totals(self) -> dict[str, int]:
        return {"rows": self.rows, "bytes": self.bytes, "shards": len(self.shards)}

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield shard.name, {"bytes": shard.bytes, "xxh3": shard.xxh3}

    @property
    def counts(self) -> dict[str, Any]:
        """`read`, `rows`, `rejected` (reason -> records)."""
        rejected: dict[str, int] = {}
        for unit in self.units:
            for reason, count in unit.rejected.items():
                rejected[reason] = rejected.get(reason, 0) + count
        return {"read": sum(unit.read for unit in self.units), "rows": self.rows, "rejected": rejected}

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal rows in equal order, in equal columns."""
        form = "" if self.qa is None else json.dumps(self.qa.get("form"))
        return hash_bytes((self.schema.ipc + form + "".join(shard.xxh3 for shard in self.shards)).encode())

    def write(self, folder: Path) -> None:
        told: dict[str, Any] = {"totals": self.totals, "fingerprint": self.fingerprint, "schema": asdict(self.schema)}
        told |= {"settings": self.settings, "input": self.input, "counts": self.counts}
        if self.qa is not None:
            told |= {"tokenizer": self.tokenizer, "qa": self.qa}
        TABLE.write(folder, told | {"units": [asdict(unit) for unit in self.units]})

    @classmethod
    def read(cls, folder: Path) -> TableManifest:
        return read(Folder(folder))


def read(place: Place) -> TableManifest:
    path = f"{place.name}/{NAME}"
    manifest = checked(TableManifest, TABLE.value(place), path)
    for shard in manifest.shards:
        if not stays_in_folder(shard.name):
            raise StoreError(f'{path}: the shard name "{shard.name}" leaves the folder; refused.')
    return manifest


def files_in(path: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of the files of a manifest that lies here."""
    return ((name, file["bytes"]) for name, file in read(Folder(path.parent, path)).files())
