"""The manifest `milldam-table.json`: written last, and what makes a folder a table.

It holds nothing that differs between two runs of the same job. It may come from anywhere, so what a reader takes for
granted later (names, counts) is checked when it is read. Reading it needs no pyarrow.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import StoreError
from milldam.files import hash_bytes, json_bytes, stays_in_folder, write_file
from milldam.manifests import QA_MANIFEST, STORE_MANIFEST, TABLE_MANIFEST

if TYPE_CHECKING:
    import pyarrow as pa

NAME = TABLE_MANIFEST
IN_USE = "in-use"
"""In a table of the cache: whoever reads it holds a shared lock on this file."""
FORMAT = "milldam table"
FORMAT_VERSION = 1


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

    def to_arrow(self) -> pa.Schema:
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.ipc)))

    @property
    def hash(self) -> str:
        return hash_bytes(self.ipc.encode())


@dataclass(frozen=True, slots=True)
class TableShard:
    """A file of rows: an Arrow IPC stream."""

    name: str
    rows: int
    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class MadeUnit:
    """What became of a unit of input. Its shard is durable before this is recorded."""

    key: str
    """Everything that its rows depend on: function, parameters, schema, what it read."""
    read: int
    """Rows that the function was given."""
    shard: TableShard | None
    """None: no rows came out."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason -> records that could not be read, or on which the function failed."""

    @property
    def rows(self) -> int:
        return self.shard.rows if self.shard is not None else 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MadeUnit:
        shard = value["shard"]
        made = TableShard(**shard) if shard is not None else None
        return cls(value["key"], value["read"], made, value["rejected"])


@dataclass(frozen=True, slots=True)
class TableManifest:
    schema: TableSchema
    function: dict[str, Any]
    """What the function's result depends on: its name, hash, and the hashes of its parts."""
    settings: dict[str, Any]
    """Every setting that changes the rows or how they are cut into units."""
    input: dict[str, Any]
    """Number, size and fingerprint of what was read."""
    probe: dict[str, Any]
    """What the schema was inferred from."""
    units: tuple[MadeUnit, ...]

    @property
    def shards(self) -> tuple[TableShard, ...]:
        """The files with rows, in order."""
        return tuple(unit.shard for unit in self.units if unit.shard is not None)

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

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
        return hash_bytes((self.schema.ipc + "".join(shard.xxh3 for shard in self.shards)).encode())

    def write(self, folder: Path) -> None:
        write_file(folder / NAME, json_bytes(self.as_json()))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "totals": {"rows": self.rows, "bytes": self.bytes, "shards": len(self.shards)},
            "fingerprint": self.fingerprint,
            "schema": asdict(self.schema),
            "function": self.function,
            "settings": self.settings,
            "input": self.input,
            "probe": self.probe,
            "counts": self.counts,
            "units": [unit.as_json() for unit in self.units],
        }

    @classmethod
    def read(cls, folder: Path, name: str = NAME) -> TableManifest:
        path = folder / name
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(_not_a_table(folder)) from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: can't be read ({error}).") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise StoreError(f"{path}: not the manifest of a table.")
        if value.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{path}: table format {value.get('format_version')}; this milldam reads format {FORMAT_VERSION}. "
                "Upgrade milldam, or make the table again with overwrite."
            )
        try:
            return cls._parse(value)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError(f"{path}: damaged manifest ({error}).") from None

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> TableManifest:
        units = tuple(MadeUnit.from_json(unit) for unit in value["units"])
        for unit in units:
            _check_unit(unit)
        facts = {name: value[name] for name in ("function", "settings", "input", "probe")}
        return cls(schema=TableSchema(**value["schema"]), units=units, **facts)


def _check_unit(unit: MadeUnit) -> None:
    """Its shard is a file of this folder, and its counts are counts."""
    shard = unit.shard
    if not _is_count(unit.read):
        raise ValueError(f"a unit that read {unit.read} rows")
    if shard is None:
        return
    name = shard.name
    if not stays_in_folder(name):
        raise ValueError(f'the shard name "{name}" leaves the folder')
    if not (_is_count(shard.rows) and _is_count(shard.bytes)):
        raise ValueError(f"{name} has sizes that are no counts")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _not_a_table(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder."
    if (folder / STORE_MANIFEST).exists():
        return f"{folder}: a store of tokens, not a table. `milldam.open` opens it."
    if (folder / QA_MANIFEST).exists():
        return f"{folder}: a store of question-answering features, not a table. `milldam.qa.FeatureStore` opens it."
    if (folder / "run").exists():
        return f"{folder}: unfinished: a run was interrupted here. Run the same command again to go on."
    splits = sorted(path.parent.name for path in folder.glob(f"*/{NAME}"))
    if splits:
        return f"{folder}: no table itself, but of each split one: {', '.join(splits)}. Name {folder / splits[0]}, say."
    return f"{folder}: not a table (no {NAME} in it). `milldam.map` makes one."
