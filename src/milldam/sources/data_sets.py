"""What the user calls a dataset -> inputs to list, and which of its documents to take.

An ordinary path or address; a folder that HF `save_to_disk` wrote, here or at an address; a split of a folder, told by
HF's conventions, or a name on the Hub, whose files are read where they lie, never downloaded whole (these two need the
package `datasets`). Reads no data. A split is held as a list of paths: 17 MB for 100,000 files.
"""

from __future__ import annotations

import glob
import json
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.files import stays_in_folder
from milldam.input_files import is_address, kind_of, nearby, why_no_hub
from milldam.sources.compression import STDIN, open_bytes
from milldam.sources.splits import TRAIN, RowSlice, choose_splits, parse_split

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_ENDING = re.compile(r"\.[A-Za-z]\w*\Z")


# ---- looking it up ----


@dataclass(frozen=True, slots=True)
class Resolved:
    inputs: tuple[str, ...]
    """For `list_inputs`, in order."""
    input_format: str | None = None
    """For `list_inputs`: what the files are, when their names do not say."""
    rows: RowSlice | None = None
    """Which documents of all the inputs together; None: all."""


def resolve_data_set(path: str, split: str | None, subset: str | None, *, input_format: str | None = None) -> Resolved:
    """Look up a dataset.

    Raises ConfigError for a split or subset that can't be meant, InputError for a dataset or split that is not there.
    """
    if split is None and subset is None and os.path.isfile(path):
        return Resolved((path,), input_format)
    names, rows = (None, None) if split is None else parse_split(split)
    if _may_be_on_hub(path):
        groups = _found_splits(path, subset)
    elif subset is not None:
        raise ConfigError(f"{path}: subset is for datasets on the Hub; this one is not there. Name its folder in path.")
    elif (saved := _saved_splits(path)) is not None:
        chosen = choose_splits(names, saved, path)
        return Resolved(tuple(file for name in chosen for file in _saved_files(saved[name])), "arrow", rows)
    elif names is None:
        return Resolved((path,), input_format)
    else:
        # A file that is named is the user's word, as data_files is in HF: it is train whatever it is called.
        groups = _found_splits(path, None) if os.path.isdir(path) else {TRAIN: [path]}
    # A name may carry two splits: its file is taken once.
    wanted = dict.fromkeys(file for name in choose_splits(names, groups, path) for file in groups[name])
    return Resolved(tuple(wanted), input_format, rows)


def refuse_texts(paths: Sequence[str]) -> None:
    """Raises InputError where strings in a list are no paths: they may be meant as texts, and nobody guesses."""
    for path in paths:
        known = path == STDIN or is_address(path) or glob.has_magic(path) or os.path.lexists(os.path.expanduser(path))
        if not known and not ("/" in path and _may_be_on_hub(path)):
            shown = textwrap.shorten(path, 60, placeholder=" ...") or repr(path)
            raise InputError(
                f"{shown}: no such file or folder.{nearby(path) if len(path) < 256 else ''}\nStrings in a list are "
                'paths. To tokenize texts, give an iterator, iter(texts), or rows, [{"text": ...}, ...].'
            )


# ---- what HF `save_to_disk` wrote ----


def _saved_splits(path: str) -> dict[str, str] | None:
    """The folder of each split; None when the path is no such folder."""
    splits = _read_json(path, "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        return {str(name): _join(path, str(name)) for name in splits}
    state = _read_json(path, "state.json")
    if "_data_files" not in state:
        return None
    return {state.get("_split") or TRAIN: path}


def _saved_files(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in its order."""
    state = _read_json(folder, "state.json")
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise InputError(
            f"{folder}: its rows are chosen or shuffled by an index file, which milldam does not follow.\n"
            "Save it again with datasets: dataset.flatten_indices().save_to_disk(...)"
        )
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise InputError(f"{folder}: no dataset in it: its state.json lists no files. Save it again.")
    return [_join(folder, str(file["filename"])) for file in files]


def _join(folder: str, name: str) -> str:
    if not stays_in_folder(name):
        raise InputError(f'{folder}: it lists "{name}", which is not a file in it. Save it again.')
    return f"{folder.rstrip('/')}/{name}"


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """An object from a small file; empty when there is no such file."""
    remote = is_address(folder)
    if folder == STDIN or (remote and (glob.has_magic(folder) or kind_of(folder) is not None)):
        return {}
    try:
        with open_bytes(f"{folder.rstrip('/')}/{name}") as file:
            value = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except InputError as error:
        if isinstance(error.__cause__, PermissionError):
            return {}  # so do some stores call what does not exist
        raise
    except ValueError as error:
        raise InputError(f"{folder}/{name}: not JSON ({error}). Save the dataset again.") from None
    return value if isinstance(value, dict) else {}


# ---- folders and the Hub, by the package datasets ----


def _may_be_on_hub(path: str) -> bool:
    """Whether a path that does not exist may be the name of a dataset: `name` or `user/name`, without an ending."""
    here = path == STDIN or is_address(path) or glob.has_magic(path) or os.path.lexists(path)
    return not here and _HUB_NAME.fullmatch(path) is not None and _ENDING.search(path) is None


def _found_splits(path: str, subset: str | None) -> dict[str, list[str]]:
    """The files of each split of a folder, or of a dataset on the Hub, by HF's conventions."""
    missing = f"{path}: no such file or folder.{nearby(path)}\nNor can a dataset of that name be opened on the Hub: "
    failed = f"{path}: its splits can't be told: " if os.path.isdir(path) else missing
    try:
        from datasets import load_dataset_builder
    except ImportError:
        raise InputError(f'{failed}pip install "milldam[hf]"') from None
    silence = None if os.path.isdir(path) else why_no_hub(path, "README.md", repo_type="dataset")
    if silence is not None:
        raise InputError(f"{failed}{silence}.")
    try:
        data_files = load_dataset_builder(path, name=subset).config.data_files
    except Exception as error:  # the network, the Hub and datasets have error types of their own
        reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise InputError(failed, reason) from None
    if not data_files:
        raise InputError(f"{path}: this dataset has no data files.\nSave it with datasets: save_to_disk(...)")
    return {str(split): [str(file) for file in files] for split, files in data_files.items()}
