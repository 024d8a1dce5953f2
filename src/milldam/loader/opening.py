"""Opens a path for training: a store, or a file of another tool. Nothing is tokenized here, and nothing is guessed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from milldam.errors import ConfigError, InputError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign
from milldam.input_files import bare_name, nearby
from milldam.loader.stores import Store
from milldam.stores.kinds import TOKENS, store_kind


def open_data(
    path: str | Path,
    *,
    split: str | None = None,
    dtype: npt.DTypeLike | None = None,
    cache: str | int | None = None,
    cache_dir: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Store | ForeignFile:
    """Open what can be trained on, in milliseconds whatever its size.

    a folder with milldam.json      a store
    X.npy                           one 1-D array of integers
    X.bin and X.idx, or X           a file pair of Megatron-LM
    X.bin alone                     nanoGPT (uint16, or `dtype`); llm.c, known by its header
    s3://bucket/corpus.milldam      a store at an address; `cache`, `cache_dir`, `storage_options`: see `milldam.remote`
    """
    remote = {"cache": cache, "cache_dir": cache_dir, "storage_options": storage_options}
    if "://" in str(path) or any(value is not None for value in remote.values()):
        # Only stores at an address pay for the module.
        from milldam.remote import place_at

        place = place_at(path, **remote)  # type: ignore[arg-type]
        if dtype is not None:
            raise ConfigError(f"{place.name}: a store knows its dtype; leave dtype out.")
        store = Store(place, split=split)
        if place.origin is not None:
            # Now, rather than at the first shard that has to be fetched.
            place.origin.require_room(max((shard.bin["bytes"] for shard in store.shards), default=0))
        return store
    path = Path(path)
    kind, foreign = store_kind(path), foreign_path(path)
    if kind is TOKENS:
        if dtype is not None:
            raise ConfigError(f"{path}: a store knows its dtype; leave dtype out.")
        return Store(path, split=split)
    if kind is None and foreign is not None:
        file = open_foreign(foreign, dtype)
        if split is not None:
            file.named_part(split)
        return file
    if path.is_dir():
        raise StoreError(TOKENS.missing_in(path))
    if not path.exists():
        raise StoreError(f"{path}: no such file or folder.{nearby(str(path))}")
    out = path.with_name(f"{bare_name(path.name)}.milldam")
    command = f"milldam tokenize {shlex.quote(str(path))} -o {shlex.quote(str(out))} --tokenizer ..."
    raise InputError(
        f"{path}: neither a store nor .npy, .bin or .idx. Open the store that was made from it"
        + (f": {out}" if out.exists() else f", or make it: {command}")
    )
