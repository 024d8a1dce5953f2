"""The store: shards of flat tokens, their indexes, and the manifest that makes a folder a store."""

from __future__ import annotations

from milldam.stores.tokens.reader import Store, open_store
from milldam.stores.tokens.writer import ShardWriter

__all__ = ["ShardWriter", "Store", "open_store"]
