"""What the user names -> the files to import, in a fixed order. No token is read.

A folder that an index describes (state.json, dataset_dict.json) is read as that says. Else all is read: the files in it
and those of the folders in it, each by its index or file by file. Folders with an index are splits; of plain files the
splits show in the names (train.bin, val.bin, fineweb_train_000001.bin). What lies deeper is not passed over in silence:
it is an error that names it. Files that belong to no split belong to train where others have one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, Setting
from milldam.files import stays_in_folder
from milldam.formats import READ, load_format
from milldam.formats.foreign import OPENERS, foreign_path, opener_of
from milldam.input_files import is_ours, nearby
from milldam.stores.kinds import TOKENS, store_kind

USUAL_COLUMNS = ("input_ids", "tokens", "token_ids", "ids")


@dataclass(frozen=True, slots=True)
class SourceFile:
    format: str
    """The module here that reads it."""
    path: Path
    split: str | None
    """None: the source has no splits."""


@dataclass(frozen=True, slots=True)
class ReadRules:
    column: str | None
    dtype: str | None
    masks: str | None = None
    """The column that says what is trained on; "none": none is to; None: seen from the names."""


def choose_column(names: list[str], asked: str | None, path: Path) -> str:
    """The column that was asked for, one by its usual name, or the only one."""
    usual = [name for name in USUAL_COLUMNS if name in names]
    found = asked if asked is not None else usual[0] if usual else names[0] if len(names) == 1 else None
    if found is None or found not in names:
        what = f'no column "{asked}"' if asked is not None else "no column of a usual name"
        told = f"{path}: {what}; it has {', '.join(names)}. Say which one holds the ids with "
        raise InputError(told, Setting("column"), ".")
    return found


def read_index(path: Path) -> dict[str, Any] | None:
    """The object in an index; None when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not an index that milldam knows.")
    return value


def inside(folder: Path, name: object) -> Path:
    """A file that an index names. It may come from anywhere: it must not make us read files elsewhere."""
    if not stays_in_folder(name):
        raise InputError(f'{folder}: its index names the file "{name}", which leaves the folder; refused.')
    return folder / str(name)


_SPLIT = re.compile(r"(?:^|[_.-])(train|validation|valid|val|test|eval)(?=[_.-]|$)")
_TRAIN = "train"
_KNOWN = (
    "Known are .npy, .bin (nanoGPT, llm.c), .bin with .idx (Megatron), .parquet, .arrow, "
    "and the folders of save_to_disk."
)


def find_files(sources: Iterable[Path], format: str | None, split: str | None) -> list[SourceFile]:
    """Everything to read, in order; files of one split together. `format`, `split`: what the user asks for."""
    found = [file for source in sources for file in _files_of(source)]
    flat = OPENERS.values()
    for file in found:
        if format not in (None, file.format) and not (format in flat and file.format in flat):
            raise ConfigError(f"{file.path}: is {file.format}, and {format} is asked for.")
    if all(file.split is None for file in found):
        return [replace(file, split=split or _TRAIN) for file in found]
    named = [replace(file, split=file.split or _TRAIN) for file in found]
    splits = list(dict.fromkeys(str(file.split) for file in named))
    for name in splits:
        if not stays_in_folder(name, hidden=False):
            raise InputError(f'The source has a split "{name}", which is not a valid file name; refused.')
    if split is not None:
        if split not in splits:
            raise ConfigError(f'No split "{split}" in the source; it has {", ".join(splits)}.')
        return [file for file in named if file.split == split]
    order = [_TRAIN, *splits]
    return sorted(named, key=lambda file: order.index(str(file.split)))


def _files_of(source: Path) -> list[SourceFile]:
    if store_kind(source) is TOKENS:
        raise ConfigError(f"{source}: is a store of milldam already. Nothing is to be imported.")
    if source.is_file() or not source.exists():
        return [_plain_file(source)]
    found = _indexed(source, None) or [*_plain_files(source), *_in_folders(source)]
    if not found:
        raise InputError(f"{source}: no tokens in it that milldam knows.\n{_KNOWN}")
    return found


def _indexed(folder: Path, split: str | None) -> list[SourceFile]:
    """The files of a folder that an index describes; none where there is no index."""
    for name in READ:
        find = getattr(load_format(name), "indexed", None)
        found: list[SourceFile] | None = None if find is None else find(folder, split)
        if found is not None:
            return found
    if (folder / "index.json").is_file():
        raise InputError(f"{folder / 'index.json'}: an index of a format that is not imported, as MDS.\n{_KNOWN}")
    return []


def _in_folders(source: Path) -> Iterator[SourceFile]:
    """What the folders in a folder hold, each by its index or file by file."""
    inner = _folders_in(source)
    for folder in inner:
        found = _indexed(folder, folder.name)
        if not found:
            # A folder is a split when it is called so, or is one of several.
            split = folder.name if len(inner) > 1 or _split_in(folder.name) else None
            found = list(_plain_files(folder, split))
            # Whoever names a folder means all that is in it: what would be left out is said.
            for deep in (path for below in _folders_in(folder) for path in below.rglob("*")):
                if deep.suffix in _suffixes() and deep.is_file():
                    raise InputError(
                        f"{source}: {deep.relative_to(source)} is more than one folder deep and would be left out.\n"
                        f"Name the folders to read: milldam import {deep.parent} ..."
                    )
        yield from found


def _folders_in(folder: Path) -> list[Path]:
    """Those that may be input: neither hidden nor made by us."""
    folders = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path for path in folders if not is_ours(str(path)))


def _plain_file(source: Path) -> SourceFile:
    path = foreign_path(source) or source
    if not path.is_file():
        raise InputError(f"{source}: no such file or folder.{nearby(str(source))}")
    format = _suffixes().get(path.suffix)
    if format is None:
        raise InputError(f"{source}: no tokens that milldam knows.\n{_KNOWN}")
    return _by_name(path, format, None)


def _plain_files(folder: Path, split: str | None = None) -> Iterator[SourceFile]:
    """The files of a folder by their endings; an index of Megatron goes with its tokens."""
    suffixes = _suffixes()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        format = suffixes.get(path.suffix)
        if format not in (None, "megatron"):
            yield _by_name(path, str(format), _split_in(path.stem) or split)


def _by_name(path: Path, format: str, split: str | None) -> SourceFile:
    format = opener_of(path) if path.suffix in OPENERS else format
    return SourceFile(format, path.with_suffix(".bin") if format == "megatron" else path, split)


def _suffixes() -> dict[str, str]:
    """How names end -> format."""
    return {suffix: name for name in READ for suffix in load_format(name).SUFFIXES}


def _split_in(stem: str) -> str | None:
    """The split that a name says.

    >>> _split_in("fineweb_train_000001"), _split_in("val"), _split_in("part-00000")
    ('train', 'val', None)
    """
    match = _SPLIT.search(stem)
    return match[1] if match else None
