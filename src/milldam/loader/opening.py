"""What a path is, and how it is opened for training: a store here or at an address, or a file of another tool.

Nothing is guessed and nothing is tokenized: of an input the message says what makes a store of it.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from milldam.errors import ConfigError, InputError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign
from milldam.input_files import bare_name, files_below, kind_of, nearby
from milldam.loader.stores import Store
from milldam.stores.kinds import TOKENS, store_kind

STORE_ENDING = ".milldam"


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
    asked = {"cache": cache, "cache_dir": cache_dir, "storage_options": storage_options}
    if "://" in str(path) or any(value is not None for value in asked.values()):
        return _open_remote(path, split, dtype, asked)
    given = Path(path)
    kind, foreign = store_kind(given), foreign_path(given)
    if kind is None and foreign is not None:
        file = open_foreign(foreign, dtype)
        if split is not None:
            file.named_part(split)
        return file
    if kind is None and not given.is_dir():
        raise _no_data(given)
    if kind is not TOKENS and (kind is not None or next(files_below(given), None) is None or _is_unfinished(given)):
        raise StoreError(TOKENS.missing_in(given))
    if kind is None:
        raise InputError(f"{given}: a folder of input, not a store.{_how_to_open(given)}")
    if dtype is not None:
        raise ConfigError(f"{given}: a store knows its dtype; leave dtype out.")
    return Store(given, split=split)


def _open_remote(path: str | Path, split: str | None, dtype: npt.DTypeLike | None, asked: dict[str, Any]) -> Store:
    """A store at an address: only those who have one pay for what reads it."""
    from milldam.remote import place_at

    place = place_at(path, **asked)
    if dtype is not None:
        raise ConfigError(f"{place.name}: a store knows its dtype; leave dtype out.")
    store = Store(place, split=split)
    if place.origin is not None:
        # Now, rather than at the first shard that has to be fetched.
        place.origin.require_room(max((shard.bin["bytes"] for shard in store.shards), default=0))
    return store


def _is_unfinished(folder: Path) -> bool:
    return folder.suffix == STORE_ENDING or (folder / "run" / "lock").exists()


def _no_data(given: Path) -> Exception:
    """Why a path that is no folder can't be opened."""
    if given.is_file():
        known = "input" if kind_of(given.name) is not None else "neither a store nor .npy, .bin or .idx"
        return InputError(f"{given}: {known}, not a store.{_how_to_open(given)}")
    if any(glob.iglob(str(given))):
        made = f"{Path(given.parts[0]).stem if len(given.parts) > 1 else 'corpus'}{STORE_ENDING}"
        told = "a pattern that several files have. What is opened is the store that was made of them."
        return InputError(f"{given}: {told}\nMake it: {_command_for(given, Path(made))}")
    return StoreError(f"{given}: no such file or folder.{nearby(str(given))}")


def _how_to_open(given: Path) -> str:
    """What was made of an input, where something of its name lies beside it; or else what makes it."""
    given = given if given.name not in ("", "..") else given.resolve()
    names = [given.name] if given.is_dir() else [bare_name(given.name), given.name]
    beside = [given.with_name(name + ending) for ending in (STORE_ENDING, ".npy") for name in names]
    for path in beside:
        if path.exists():
            return f' Open what was made from it: milldam.open("{path}")'
    return f"\nMake one: {_command_for(given, beside[0])}"


def _command_for(given: Path, out: Path) -> str:
    return f"milldam tokenize {shlex.quote(str(given))} -o {shlex.quote(str(out))} --tokenizer ..."
