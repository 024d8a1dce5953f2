"""What a path is, and how it is opened for training: a store, a file of another tool, or what was made from an input.

Nothing is tokenized here, and nothing is guessed in silence. Of an input, what was made from it and lies beside it is
used when it is fresh, and logged: made from the same files, by name, size and time of modification. So input and result
may move together (by `mv`, `cp -p`, `rsync -a`: what keeps the time). What is stale is refused.
"""

from __future__ import annotations

import glob
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign
from milldam.formats.npy import read_sidecar
from milldam.input_files import InputState, bare_name, files_below, kind_of, nearby, version_of
from milldam.loader.stores import Store
from milldam.stores.kinds import TOKENS, store_kind
from milldam.stores.place import Folder

STORE_ENDING = ".milldam"
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
    corpus.txt, other input         what was made from it and lies beside it, when it is fresh
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
    if kind is None and not given.exists():
        raise _nothing_there(given)
    if kind is not None and kind is not TOKENS:
        raise StoreError(TOKENS.missing_in(given))
    if kind is None:
        # "." and ".." are no names, and what lies beside a folder is found by its name.
        found = _made_from(given if given.name not in ("", "..") else given.resolve())
        return open_data(found, split=split, dtype=dtype)
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


def _nothing_there(given: Path) -> Exception:
    if any(glob.iglob(str(given))):
        in_a_folder = len(given.parts) > 1 and not given.is_absolute()
        made = f"{Path(given.parts[0]).stem if in_a_folder else 'corpus'}{STORE_ENDING}"
        told = "a pattern that several files have. What is opened is the store that was made of them."
        return InputError(f"{given}: {told}\nMake it: {_command_for(given, Path(made))}")
    return StoreError(f"{given}: no such file or folder.{nearby(str(given))}")


def _made_from(given: Path) -> Path:
    """What was made from an input as it is now, and lies beside it; the store where there are several."""
    is_folder = given.is_dir()
    unfinished = given.suffix == STORE_ENDING or (given / "run" / "lock").exists()
    if is_folder and (unfinished or next(files_below(given), None) is None):
        raise StoreError(TOKENS.missing_in(given))  # it is no input
    names = [given.name] if is_folder else list(dict.fromkeys((bare_name(given.name), given.name)))
    beside = [given.with_name(name + ending) for ending in (STORE_ENDING, ".npy") for name in names]
    stale = []
    for path in (path for path in beside if path.exists()):
        try:
            is_fresh = _is_made_from(given, path)
        except OSError as error:
            raise InputError(f"{error.filename}: can't be read ({error.strerror}).") from None
        except StoreError as error:
            stale.append(str(error))
            continue
        if is_fresh:
            # Not the file that was asked for: to be seen also where nobody has set up logging.
            log.warning(f"{given}: using {path}, made from it and up to date")
            return path
        stale.append(f"{path}: not made from it as it is now: by name, size and time, its input differs")
    if stale:
        again = f"Make it again: {_command_for(given, beside[0])} --overwrite, or as it was made"
        listed = "\n".join(f"  {one}" for one in stale)
        raise MismatchError(f"{given}: the data beside it can't be used for it:\n{listed}\n{again}")
    looked = ", ".join(path.name for path in beside)
    known = is_folder or kind_of(given.name) is not None
    missing = f"there is nothing beside it that was prepared from it (looked for {looked})."
    if not known:
        raise InputError(f"{given}: neither a store nor .npy, .bin or .idx, and {missing}")
    raise InputError(f"{given}: {missing}\nMake it: {_command_for(given, beside[0])}")


def _is_made_from(given: Path, path: Path) -> bool:
    """Whether a store or an .npy file says that it was made from the input as it is now."""
    facts: Any = TOKENS.head(Folder(path)) if path.suffix == STORE_ENDING else read_sidecar(path) or {}
    settings = facts.get("settings") or {}
    any_format = any(one.get("input_format") for one in settings.get("datasets", ()) if isinstance(one, dict))
    state = InputState()
    for file in files_below(given, any_format=any_format) if given.is_dir() else [str(given)]:
        status = os.stat(file)
        state.add(file, status.st_size, version_of(status))
    known = (facts.get("input") or {}).get("fingerprint")
    return known is not None and known == state.as_json()["fingerprint"]


def _command_for(given: Path, out: Path) -> str:
    return f"milldam tokenize {shlex.quote(str(given))} -o {shlex.quote(str(out))} --tokenizer ..."
