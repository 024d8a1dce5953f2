"""The manifest `milldam-table.json`: written last, and what makes a folder a table.

It holds nothing that differs between two runs of the same job. Reading it needs no pyarrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from milldam.checked import checked
from milldam.errors import StoreError
from milldam.stores.kinds import TABLE, InputFacts, ManifestText, TokenizerFacts
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

    def named_files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield self.name, {"bytes": self.bytes, "xxh3": self.xxh3}


SHARD = TableShard


@dataclass(frozen=True, slots=True)
class TableManifest:
    schema: TableSchema
    """Of all rows; a shard may have narrower types, which are cast when it is read."""
    settings: dict[str, Any]
    """Every setting that changes the rows or how they are cut into units; `function`: its name and hash, and the hashes
    of its parts."""
    input: InputFacts
    """Number, size and fingerprint of what was read."""
    counts: dict[str, Any]
    """`units`; `read`: rows that the function was given; `rejected`: reason -> records that could not be read, or on
    which it failed."""
    shards: tuple[TableShard, ...] = ()
    """The files with rows, in order."""
    tokenizer: TokenizerFacts | None = None
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
        return self._sums(self.shards)[0]

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal rows in equal order, in equal columns."""
        return self._sums(self.shards)[1]

    def _sums(self, shards: Iterable[TableShard]) -> tuple[dict[str, int], str]:
        """Totals and fingerprint of shards with these facts."""
        totals, digest = {"rows": 0, "bytes": 0, "shards": 0}, xxhash.xxh3_128()
        for shard in shards:
            totals["rows"] += shard.rows
            totals["bytes"] += shard.bytes
            totals["shards"] += 1
            digest.update(shard.xxh3.encode())
        digest.update(self.schema.ipc.encode() + (b"" if self.qa is None else json.dumps(self.qa).encode()))
        return totals, digest.hexdigest()

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield from shard.named_files()

    def write(self, folder: Path, shards: Callable[[], Iterable[TableShard]] | None = None) -> dict[str, int]:
        """The totals. `shards`: gone through twice, in place of those that it holds; there may be a million."""
        listed = shards or (lambda: self.shards)
        totals, fingerprint = self._sums(listed())
        facts: dict[str, Any] = {"totals": totals, "fingerprint": fingerprint, "schema": asdict(self.schema)}
        facts |= {"settings": self.settings, "input": self.input, "counts": self.counts}
        if self.qa is not None:
            facts |= {"tokenizer": self.tokenizer, "qa": self.qa}
        TABLE.write(folder, facts | {"shards": []}, ([json.dumps(asdict(shard)).encode()] for shard in listed()))
        return totals

    @classmethod
    def read(cls, folder: Path) -> TableManifest:
        return read(Folder(folder))


def read(place: Place) -> TableManifest:
    text = ManifestText(TABLE, place)
    facts = checked(TableManifest, text.head() | {"shards": []}, f"{place.name}/{NAME}")
    return replace(facts, shards=tuple(text.shards(TableShard)))
