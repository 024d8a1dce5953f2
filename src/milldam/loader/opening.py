"""Opens a path for training: a store, a file of another tool, or the store or array made from an input.

Nothing is tokenized here, and nothing is guessed in silence. For an input, the result that lies beside it is used and
logged if it is fresh: made from the same files, by name, size and time of modification. So input and result may move
together (by `mv`, `cp -p`, `rsync -a`, which keep the time). A stale one is refused.
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
from milldam.input_files import NO_INPUT, add_input, bare_name, files_below, kind_of, nearby, version_of
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
    if kind is None and foreign is not None:
        file = open_foreign(foreign, dtype)
        if split is not None:
            file.named_part(split)
        return file
    if kind is None and not path.exists():
        if any(glob.iglob(str(path))):
            in_a_folder = len(path.parts) > 1 and not path.is_absolute()
            out = f"{Path(path.parts[0]).stem if in_a_folder else 'corpus'}{STORE_ENDING}"
            pattern = "a pattern that several files have. What is opened is the store that was made of them."
            raise InputError(f"{path}: {pattern}\nMake it: {_command_for(path, Path(out))}")
        raise StoreError(f"{path}: no such file or folder.{nearby(str(path))}")
    if kind is not None and kind is not TOKENS:
        raise StoreError(TOKENS.missing_in(path))
    if kind is None:
        # "." and ".." are no names, and the result of a folder is recognised by its name.
        result = _result_of(path if path.name not in ("", "..") else path.resolve())
        return open_data(result, split=split, dtype=dtype)
    if dtype is not None:
        raise ConfigError(f"{path}: a store knows its dtype; leave dtype out.")
    return Store(path, split=split)


def _result_of(path: Path) -> Path:
    """The result of an input as it is now, from beside it; the store where there are several."""
    is_folder = path.is_dir()
    unfinished = path.suffix == STORE_ENDING or (path / "run" / "lock").exists()
    if is_folder and (unfinished or next(files_below(path), None) is None):
        raise StoreError(TOKENS.missing_in(path))  # it is no input
    names = [path.name] if is_folder else list(dict.fromkeys((bare_name(path.name), path.name)))
    beside = [path.with_name(name + ending) for ending in (STORE_ENDING, ".npy") for name in names]
    stale = []
    for result in (result for result in beside if result.exists()):
        try:
            is_fresh = _is_result_of(path, result)
        except OSError as error:
            raise InputError(f"{error.filename}: can't be read ({error.strerror}).") from None
        except StoreError as error:
            stale.append(str(error))
            continue
        if is_fresh:
            # Another file than the caller named: shown also where nobody has set up logging.
            log.warning(f"{path}: using {result}, made from it and up to date")
            return result
        stale.append(f"{result}: not made from it as it is now: by name, size and time, its input differs")
    if stale:
        again = f"Make it again: {_command_for(path, beside[0])} --overwrite, or as it was made"
        listed = "\n".join(f"  {one}" for one in stale)
        raise MismatchError(f"{path}: the data beside it can't be used for it:\n{listed}\n{again}")
    looked = ", ".join(result.name for result in beside)
    missing = f"there is nothing beside it that was prepared from it (looked for {looked})."
    if not is_folder and kind_of(path.name) is None:
        raise InputError(f"{path}: neither a store nor .npy, .bin or .idx, and {missing}")
    raise InputError(f"{path}: {missing}\nMake it: {_command_for(path, beside[0])}")


def _is_result_of(path: Path, result: Path) -> bool:
    """Whether a store or an .npy file says that it was made from the input as it is now."""
    facts: Any = TOKENS.head(Folder(result)) if result.suffix == STORE_ENDING else read_sidecar(result) or {}
    settings = facts.get("settings") or {}
    any_format = any(one.get("input_format") for one in settings.get("datasets", ()) if isinstance(one, dict))
    state = NO_INPUT
    for file in files_below(path, any_format=any_format) if path.is_dir() else [str(path)]:
        status = os.stat(file)
        state = add_input(state, file, status.st_size, version_of(status))
    known = (facts.get("input") or {}).get("fingerprint")
    return known is not None and known == state["fingerprint"]


def _command_for(path: Path, out: Path) -> str:
    return f"milldam tokenize {shlex.quote(str(path))} -o {shlex.quote(str(out))} --tokenizer ..."
