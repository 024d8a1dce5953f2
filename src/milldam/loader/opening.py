"""What a path is, and how it is opened: a store, a file of another tool, or an input with what was prepared from it.

Nothing is guessed in silence: of an input, what is used is logged; what is stale, or of which nobody can tell, is
refused. Nothing is tokenized here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy.typing as npt

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign
from milldam.input_files import files_below, kind_of, nearby
from milldam.loader.freshness import STORE_ENDING, Prepared, command_for, places, prepared_beside
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
    corpus.txt, other input         what was prepared from it and lies beside it, when it is fresh
    s3://bucket/corpus.milldam      a store at an address; `cache`, `cache_dir`, `storage_options`: see `milldam.remote`
    """
    asked = {"cache": cache, "cache_dir": cache_dir, "storage_options": storage_options}
    if "://" in str(path) or any(value is not None for value in asked.values()):
        return _open_remote(path, split, dtype, asked)
    given = Path(path)
    kind = store_kind(given)
    if kind is TOKENS:
        return _open_one(given, split, dtype)
    if kind is not None:
        raise StoreError(TOKENS.missing_in(given))
    foreign = foreign_path(given)
    if foreign is not None:
        return _open_one(foreign, split, dtype)
    if not given.exists():
        raise StoreError(f"{given}: no such file or folder.{_hint(given)}")
    # "." and ".." are no names, and what lies beside a folder is found by its name.
    return _open_for(given if given.name not in ("", "..") else given.resolve(), split, dtype)


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


def _open_one(path: Path, split: str | None, dtype: npt.DTypeLike | None) -> Store | ForeignFile:
    """A store or a file of another tool, by its own name."""
    if not path.is_dir():
        file = open_foreign(path, dtype)
        if split is not None:
            file.named_part(split)
        return file
    if dtype is not None:
        raise ConfigError(f"{path}: a store knows its dtype; leave dtype out.")
    return Store(path, split=split)


def _hint(given: Path) -> str:
    there = [path for path in places(given) if path.exists()] if given.name else []
    return f' Did you mean "{there[0]}"?' if there else nearby(str(given))


# ---- what was prepared from an input ----


def _open_for(given: Path, split: str | None, dtype: npt.DTypeLike | None) -> Store | ForeignFile:
    if given.is_dir() and (given.suffix == STORE_ENDING or (given / "run" / "lock").exists()):
        Manifest.read(given)  # raises, and says what is wrong with it
    try:
        beside = prepared_beside(given)
    except OSError as error:
        raise InputError(f"{error.filename}: can't be read ({error.strerror}).") from None
    fresh = [one for one in beside if one.problem is None]
    if not fresh:
        _refuse(given, beside)
    chosen = fresh[0]
    passed_over = "".join(f"; {one.path.name} is not used: {one.problem}" for one in beside if one.problem)
    # Not the file that was asked for: to be seen also where nobody has set up logging.
    log.warning(f"{given}: using {chosen.path}, {chosen.tokens:,} tokens, made from it and up to date{passed_over}")
    data = _open_one(chosen.path, split, dtype)
    data.found_for = given
    return data


def _refuse(given: Path, beside: list[Prepared]) -> NoReturn:
    if not beside:
        _refuse_bare(given)
    listed = "\n".join(f"  {one.path}: {one.problem}" for one in beside)
    raise MismatchError(
        f"{given}: the data beside it can't be used for it:\n{listed}\n"
        f"Make it: {beside[0].command}\n"
        f'Or use it as it is, by its own name: milldam.open("{beside[0].path}")'
    )


def _refuse_bare(given: Path) -> NoReturn:
    """Nothing prepared lies beside it."""
    if given.is_dir() and next(files_below(given), None) is None:
        Manifest.read(given)  # raises: it is neither a store nor input
    looked = places(given)
    missing = (
        f"there is nothing beside it that was prepared from it (looked for {', '.join(path.name for path in looked)})."
    )
    if given.is_file() and kind_of(given.name) is None:
        raise InputError(f"{given}: neither a store nor .npy, .bin or .idx, and {missing}")
    raise InputError(f"{given}: {missing}\nMake it: {command_for(given, looked[0])}")
