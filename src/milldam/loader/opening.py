"""Opens a path for training: a store, a file of another tool, or the store or array made from an input.

Nothing is tokenized here, and nothing is guessed in silence.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign, read_sidecar
from milldam.input_files import NO_INPUT, add_input, bare_name, files_below, is_ours, nearby, version_of
from milldam.loader.stores import Store
from milldam.stores.kinds import TOKENS, store_kind
from milldam.stores.tokens.manifest import Manifest

log = logging.getLogger("milldam")


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
    corpus.txt, other input         corpus.milldam or corpus.npy beside it, if it was made from it as it is now
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
    if not path.exists():
        raise StoreError(f"{path}: no such file or folder.{nearby(str(path))}")
    # "." and ".." are no names, and the result of a folder is recognised by its name.
    result = _result_of(path if path.name not in ("", "..") else path.resolve())
    # Another file than the caller named: shown also where nobody has set up logging.
    log.warning(f"{path}: using {result}, made from it and up to date")
    return open_data(result, split=split, dtype=dtype)


def _result_of(path: Path) -> Path:
    """The store or array beside an input that was made from it as it is now: same names, sizes, modification times.

    So input and result may move together, by what keeps the times: `mv`, `cp -p`, `rsync -a`.
    """
    files, name = [str(path)], bare_name(path.name)
    if path.is_dir():
        files, name = list(files_below(path)), path.name
        if not files or is_ours(str(path)):
            raise StoreError(TOKENS.missing_in(path))
    input = NO_INPUT
    for file in files:
        status = os.stat(file)
        input = add_input(input, file, status.st_size, version_of(status))
    store, npy = (path.with_name(name + ending) for ending in (".milldam", ".npy"))
    command = f"milldam tokenize {shlex.quote(str(path))} -o {shlex.quote(str(store))} --tokenizer ..."
    for result in (store, npy):
        if result.exists():
            sidecar = None if result == store else read_sidecar(npy)
            made_from = Manifest.read(store).input if result == store else sidecar and sidecar["input"]
            if made_from and made_from.get("fingerprint") == input["fingerprint"]:
                return result
    if stale := " and ".join(str(result) for result in (store, npy) if result.exists()):
        raise MismatchError(
            f"{path}: {stale}: not made from it as it is now (its files differ by name, size or time of modification, "
            f"or it isn't known what it was made from).\nMake it again: {command}"
        )
    raise InputError(
        f"{path}: neither a store nor .npy, .bin or .idx, and nothing beside it was prepared from it (looked for "
        f"{store.name}, {npy.name}).\nMake it: {command}"
    )
