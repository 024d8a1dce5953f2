"""The store: shards of flat tokens, their indexes, and the manifest that makes a folder a store."""

from __future__ import annotations

from milldam.store.reader import Store, open_store
from milldam.store.writer import ShardWriter

__all__ = ["ShardWriter", "Store", "open_store"]
