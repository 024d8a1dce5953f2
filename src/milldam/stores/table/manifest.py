"""The manifest `milldam-table.json`: written last, and what makes a folder a table.

It holds nothing that differs between two runs of the same job. It may come from anywhere, so what a reader takes for
granted later (names, counts) is checked when it is read. Reading it needs no pyarrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from milldam.checked import checked
from milldam.errors import StoreError
from milldam.files import stays_in_folder
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
    """What all windows of question answering have in common (`milldam.qa.store.Form`); None: other rows."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def totals(self) -> dict[str, int]:
        return _Totals(self.shards).as_json()

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal rows in equal order, in equal columns."""
        return _Totals(self.shards).fingerprint(self.schema, self.qa)

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield shard.name, {"bytes": shard.bytes, "xxh3": shard.xxh3}

    def write(self, folder: Path, shards: Callable[[], Iterable[TableShard]] | None = None) -> dict[str, int]:
        """The totals. `shards`: gone through twice, in place of those that it holds; there may be a million."""
        listed = shards or (lambda: self.shards)
        totals = _Totals(listed())
        head: dict[str, Any] = {"totals": totals.as_json(), "fingerprint": totals.fingerprint(self.schema, self.qa)}
        head |= {"schema": asdict(self.schema), "settings": self.settings, "input": self.input, "counts": self.counts}
        if self.qa is not None:
            head |= {"tokenizer": self.tokenizer, "qa": self.qa}

        def blocks() -> Iterator[bytes]:
            yield TABLE.text(head | {"shards": []})[:-1]
            for number, shard in enumerate(listed()):
                yield f"{',' if number else ''}\n  {json.dumps(asdict(shard))}".encode()
            yield b"\n ]"

        TABLE.write_text(folder, blocks())
        return totals.as_json()

    @classmethod
    def read(cls, folder: Path) -> TableManifest:
        return read(Folder(folder))


class _Totals:
    """Sums over shards."""

    def __init__(self, shards: Iterable[TableShard]) -> None:
        self._rows = self._bytes = self._shards = 0
        self._digest = xxhash.xxh3_128()
        for shard in shards:
            self._rows, self._bytes = self._rows + shard.rows, self._bytes + shard.bytes
            self._shards += 1
            self._digest.update(shard.xxh3.encode())

    def as_json(self) -> dict[str, int]:
        return {"rows": self._rows, "bytes": self._bytes, "shards": self._shards}

    def fingerprint(self, schema: TableSchema, qa: dict[str, Any] | None) -> str:
        digest = self._digest.copy()
        digest.update(schema.ipc.encode() + (b"" if qa is None else json.dumps(qa).encode()))
        return digest.hexdigest()


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
