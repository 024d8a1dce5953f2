"""What `milldam.map` makes: Arrow shards with a manifest, opened memory-mapped.

manifest   `milldam-table.json`: schema, shards in order, what they were made from
formats    rows of Arrow as Python lists, numpy arrays or Arrow tables
reader     `Table`: rows, columns, batches, `to_arrow`, `to_hf`
summary    what the run that made it did: reused, changed, rejected, memory
verify     is every shard as it was written?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam.stores.table.manifest import TableManifest
    from milldam.stores.table.reader import Table

__all__ = ["Table", "TableManifest"]

_HOMES = {"Table": "reader", "TableManifest": "manifest"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'milldam.stores.table' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"milldam.stores.table.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
