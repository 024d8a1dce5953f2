"""Paths that the user names -> the files to import, in a fixed order. No token is read.

A folder that an index describes (state.json, dataset_dict.json) is read as that says; of other folders everything is
read, their folders included. Folders are splits when they are called so, or are several; files when their names say so
(train.bin, val.bin, fineweb_train_000001.bin). Files that belong to no split belong to train where others have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from milldam.errors import ConfigError, InputError
from milldam.files import stays_in_folder
from milldam.formats import READ, load_format
from milldam.formats.foreign import OPENERS, foreign_path, opener_of
from milldam.input_files import is_ours, nearby
from milldam.stores.kinds import TOKENS, store_kind


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


_SPLIT = re.compile(r"(?:^|[_.-])(train|validation|valid|val|test|eval)(?=[_.-]|$)")
_TRAIN = "train"
_KNOWN = (
    "Known are .npy, .bin (nanoGPT, llm.c), .bin with .idx (Megatron), .parquet, .arrow, "
    "and the folders of save_to_disk."
)


def find_files(sources: Iterable[Path], format: str | None, split: str | None) -> list[SourceFile]:
    """Everything to read, in order; files of one split together. `format`, `split`: those that the user names."""
    suffixes = {suffix: name for name in READ for suffix in load_format(name).SUFFIXES}
    files = [file for source in sources for file in _files_of(source, suffixes)]
    flat = OPENERS.values()
    for file in files:
        if format not in (None, file.format) and not (format in flat and file.format in flat):
            raise ConfigError(f"{file.path}: is {file.format}, not {format}.")
    if all(file.split is None for file in files):
        return [replace(file, split=split or _TRAIN) for file in files]
    files = [replace(file, split=file.split or _TRAIN) for file in files]
    splits = list(dict.fromkeys(str(file.split) for file in files))
    for name in splits:
        if not stays_in_folder(name, hidden=False):
            raise InputError(f'The source has a split "{name}", which is not a valid file name; refused.')
    if split is not None:
        if split not in splits:
            raise ConfigError(f'No split "{split}" in the source; it has {", ".join(splits)}.')
        return [file for file in files if file.split == split]
    order = [_TRAIN, *splits]
    return sorted(files, key=lambda file: order.index(str(file.split)))


def _files_of(source: Path, suffixes: dict[str, str]) -> list[SourceFile]:
    if store_kind(source) is TOKENS:
        raise ConfigError(f"{source}: is already a milldam store. There is nothing to import.")
    if source.is_dir():
        files = list(_files_in(source, None, suffixes))
        if not files:
            raise InputError(f"{source}: no tokens in it that milldam knows.\n{_KNOWN}")
        return files
    path = foreign_path(source) or source
    if not path.is_file():
        raise InputError(f"{source}: no such file or folder.{nearby(str(source))}")
    if path.suffix not in suffixes:
        raise InputError(f"{source}: no tokens that milldam knows.\n{_KNOWN}")
    return [_by_name(path, suffixes[path.suffix], None)]


def _files_in(folder: Path, split: str | None, suffixes: dict[str, str]) -> Iterator[SourceFile]:
    """The files of a folder by its index, or by their endings; an index of Megatron goes with its tokens."""
    for name in READ:
        indexed = getattr(load_format(name), "indexed", None)
        if indexed is not None and (files := indexed(folder, split)) is not None:
            yield from files
            return
    if (folder / "index.json").is_file():
        raise InputError(f"{folder / 'index.json'}: an index of a format that is not imported, as MDS.\n{_KNOWN}")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in (path for path in paths if path.is_file()):
        format = suffixes.get(path.suffix)
        if format not in (None, "megatron"):
            match = _SPLIT.search(path.stem)
            yield _by_name(path, str(format), match[1] if match else split)
    inner = [path for path in paths if path.is_dir() and not is_ours(str(path))]
    for path in inner:
        is_split = split is None and (len(inner) > 1 or _SPLIT.search(path.name))
        yield from _files_in(path, path.name if is_split else split, suffixes)


def _by_name(path: Path, format: str, split: str | None) -> SourceFile:
    format = opener_of(path) if path.suffix in OPENERS else format
    return SourceFile(format, path.with_suffix(".bin") if format == "megatron" else path, split)
