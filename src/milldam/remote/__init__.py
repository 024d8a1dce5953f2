"""Stores at fsspec addresses (s3://, gs://, hf://, ...), read through a cache of shards on this machine.

fsspec is loaded when the first file is read; nothing of this is loaded for stores that lie here.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
from milldam.files import user_cache
from milldam.input_files import is_address
from milldam.memory import parse_size
from milldam.stores.place import Folder, Place

DEFAULT_BYTES = 50 * 10**9


def place_at(
    store: str | Path,
    *,
    cache: str | int | None = None,
    cache_dir: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Place:
    """A store's place: a folder of this machine, or an address with its cache.

    cache             bytes of shards to keep on this machine; default 50 GB, or half of the free disk if that is less
    cache_dir         default MILLDAM_CACHE, else ~/.cache/milldam
    storage_options   options of fsspec's file system that the environment does not set
    """
    if not is_address(store):
        for name, value in (("cache", cache), ("cache_dir", cache_dir), ("storage_options", storage_options)):
            if value is not None:
                raise ConfigError(f"{name}: {store} is on this machine; leave it out.")
        return Folder(Path(store))
    from milldam.remote.place import RemotePlace

    folder = (Path(cache_dir) if cache_dir is not None else user_cache()).expanduser().absolute()
    size = default_bytes(folder) if cache is None else parse_size(cache)
    if size < 1:
        raise ConfigError(f"cache: {cache}; use a size such as 10GB.")
    return RemotePlace(str(store), size, folder, storage_options or {})


def default_bytes(folder: Path, pattern: str = "shards/*") -> int:
    """50 GB, or half of what the disk has free, what the cache takes of it already (files like `pattern`) included."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    taken = 0
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process has made room meanwhile
            taken += path.stat().st_size
    return max(1, min(DEFAULT_BYTES, (shutil.disk_usage(there).free + taken) // 2))
