"""What the user names -> pieces in a fixed order. No token is read.

A folder that an index describes (state.json, index.json) is read as that says. Else all is read: the files in it and
those of the folders in it, each by its index or file by file. Folders with an index are splits; of plain files the
splits show in the names (train.bin, val.bin, fineweb_train_000001.bin). What lies deeper is not passed over in silence:
it is an error that names it. Files that belong to no split belong to train where others have one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError
from milldam.files import stays_in_folder
from milldam.importers.pieces import Piece
from milldam.importers.settings import ImportSettings
from milldam.input_files import is_ours, nearby
from milldam.loader.foreign import foreign_path
from milldam.stores.tokens.manifest import NAME as MANIFEST

_SUFFIXES = {
    ".npy": "npy", ".bin": "nanogpt", ".idx": "megatron", ".parquet": "parquet", ".pq": "parquet",
    ".arrow": "hf", ".feather": "hf",
}  # fmt: skip
_SPLIT = re.compile(r"(?:^|[_.-])(train|validation|valid|val|test|eval)(?=[_.-]|$)")
_FLAT = ("npy", "nanogpt", "megatron")
_TRAIN = "train"
_KNOWN = (
    "Known are .npy, .bin (nanoGPT, llm.c), .bin with .idx (Megatron), .parquet, .arrow, "
    "and the folders of save_to_disk, MDS and litdata."
)


def find_pieces(settings: ImportSettings) -> list[Piece]:
    """Everything to read, in order; those of one split together."""
    found = [piece for source in settings.sources for piece in _pieces_of(source)]
    for piece in found:
        if settings.format not in (None, piece.kind) and not (settings.format in _FLAT and piece.kind in _FLAT):
            raise ConfigError(f"{piece.path}: is {piece.kind}, and --from {settings.format} is asked for.")
    if all(piece.split is None for piece in found):
        return [replace(piece, split=settings.split or _TRAIN) for piece in found]
    named = [replace(piece, split=piece.split or _TRAIN) for piece in found]
    splits = list(dict.fromkeys(str(piece.split) for piece in named))
    for split in splits:
        if not stays_in_folder(split, hidden=False):
            raise InputError(f'The source has a split "{split}", which is no name for files; refused.')
    if settings.split is not None:
        if settings.split not in splits:
            raise ConfigError(f'No split "{settings.split}" in the source; it has {", ".join(splits)}.')
        return [piece for piece in named if piece.split == settings.split]
    order = [_TRAIN, *splits]
    return sorted(named, key=lambda piece: order.index(str(piece.split)))


def _pieces_of(source: Path) -> list[Piece]:
    if (source / MANIFEST).exists():
        raise ConfigError(f"{source}: is a store of milldam already. Nothing is to be imported.")
    if source.is_file() or not source.exists():
        return [_plain_file(source)]
    if (source / "dataset_dict.json").is_file():
        return [
            piece
            for name in _read_json(source / "dataset_dict.json").get("splits", [])
            for piece in _saved(source, name)
        ]
    found = list(_indexed(source, None)) or [*_plain_files(source), *_in_folders(source)]
    if not found:
        raise InputError(f"{source}: no tokens in it that milldam knows.\n{_KNOWN}")
    return found


def _saved(source: Path, name: Any) -> list[Piece]:
    """A split of a DatasetDict; what the index names must be there."""
    folder = _inside(source, name)
    found = list(_indexed(folder, name))
    if not found and not (folder / "state.json").is_file():
        raise InputError(f"{folder}: no data set in it, though dataset_dict.json names it. Is the folder whole?")
    return found


def _in_folders(source: Path) -> list[Piece]:
    """What the folders in a folder hold, each by its index or file by file."""
    inner = sorted(path for path in source.iterdir() if path.is_dir() and _is_input(path))
    found = []
    for folder in inner:
        pieces = list(_indexed(folder, folder.name))
        if not pieces:
            pieces = list(_plain_files(folder, _split_of(folder, len(inner))))
            _refuse_deeper(source, folder)
        found += pieces
    return found


def _is_input(folder: Path) -> bool:
    return not folder.name.startswith(".") and not is_ours(str(folder))


def _refuse_deeper(source: Path, folder: Path) -> None:
    """Whoever names a folder means all that is in it: what would be left out is said."""
    for inner in folder.iterdir():
        below = inner.rglob("*") if inner.is_dir() and _is_input(inner) else iter(())
        deeper = next((path for path in below if path.suffix in _SUFFIXES and path.is_file()), None)
        if deeper is not None:
            raise InputError(
                f"{source}: {deeper.relative_to(source)} lies deeper than one folder, and would be left out.\n"
                f"Name the folders to read: milldam import {inner} ..."
            )


def _plain_file(source: Path) -> Piece:
    pair = foreign_path(source)
    path = source if pair is None else pair
    if not path.is_file():
        raise InputError(f"{source}: no such file or folder.{nearby(str(source))}")
    kind = _SUFFIXES.get(path.suffix)
    if kind is None:
        raise InputError(f"{source}: no tokens that milldam knows.\n{_KNOWN}")
    return Piece(_flat_kind(path, kind), path.with_suffix(".bin") if kind == "megatron" else path, None)


def _flat_kind(path: Path, kind: str) -> str:
    return "megatron" if kind == "nanogpt" and path.with_suffix(".idx").is_file() else kind


def _plain_files(folder: Path, split: str | None = None) -> Iterator[Piece]:
    """The files of a folder by their endings; an index of Megatron goes with its tokens."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    paths = [path for path in paths if _SUFFIXES.get(path.suffix, "megatron") != "megatron"]
    splits = [_split_in(path.stem) or split for path in paths]
    for path, name in zip(paths, splits, strict=True):
        yield Piece(_flat_kind(path, _SUFFIXES[path.suffix]), path, name)


def _split_of(folder: Path, folders: int) -> str | None:
    """A folder is a split when it is called so, or is one of several."""
    return folder.name if folders > 1 or _split_in(folder.name) else None


def _split_in(stem: str) -> str | None:
    """The split that a name says.

    >>> _split_in("fineweb_train_000001"), _split_in("val"), _split_in("part-00000")
    ('train', 'val', None)
    """
    match = _SPLIT.search(stem)
    return match[1] if match else None


# ---- folders with an index ----


def _indexed(folder: Path, split: str | None) -> Iterator[Piece]:
    if (folder / "state.json").is_file():
        yield from _saved_data_set(folder, split)
    elif (folder / "index.json").is_file():
        index = _read_json(folder / "index.json")
        if "shards" in index:
            yield from (_mds_shard(folder, split, shard) for shard in index["shards"])
        elif "chunks" in index:
            config = index.get("config") or {}
            for chunk in index["chunks"]:
                yield Piece("litdata", _inside(folder, chunk["filename"]), split, {"config": config, "chunk": chunk})
        else:
            raise InputError(f"{folder / 'index.json'}: neither of MDS nor of litdata.")


def _saved_data_set(folder: Path, split: str | None) -> Iterator[Piece]:
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(f"{folder}: its rows are chosen by indices. Save it again with .flatten_indices().")
    for file in state.get("_data_files", []):
        yield Piece("hf", _inside(folder, file["filename"]), split)


def _mds_shard(folder: Path, split: str | None, shard: dict[str, Any]) -> Piece:
    raw, packed = shard["raw_data"], shard.get("zip_data")
    path = _inside(folder, raw["basename"])
    if not path.exists() and packed:
        path = _inside(folder, packed["basename"])
    return Piece("mds", path, split, {"shard": shard})


def _inside(folder: Path, name: Any) -> Path:
    """An index may come from anywhere: it must not make us read files elsewhere."""
    if not stays_in_folder(name):
        raise InputError(f'{folder}: its index names the file "{name}", which leaves the folder; refused.')
    return folder / str(name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not an index that milldam knows.")
    return value
