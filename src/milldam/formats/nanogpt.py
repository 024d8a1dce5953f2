"""nanoGPT's .bin: token ids end to end without a header, for `np.memmap(path, dtype=np.uint16)`; read also: llm.c's.

A store of several splits becomes a folder with a file each, as nanoGPT's `data/NAME/` is: train.bin, val.bin. Ids are
uint16; of a vocabulary beyond 65,536 they are uint32, as forks of nanoGPT for larger vocabularies have it: nanoGPT
itself must then be told so. No meta.pkl is made or read: pickles are code. Files of llm.c and modded-nanogpt have a
header of 1,024 bytes that says dtype and count. Holds a block of tokens at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, InputError, Setting
from milldam.formats.finding import ReadRules, SourceFile
from milldam.formats.foreign import ForeignFile, open_foreign
from milldam.formats.writing import (
    Export,
    FileRecord,
    OutputFile,
    flat_file,
    has_splits,
    one_document,
    split_parts,
    write_flat,
)
from milldam.loader.stream import TokenFile
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.loader.stores import Store
    from milldam.run.engine import Progress

SUFFIXES = (".bin",)
SHAPE, ALL_SPLITS, OPTIONS = "file", True, ("dtype",)
DTYPES = ("uint16", "uint32", "int32", "int64")
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number of the header -> version, dtype."""
_LLM_C_HEADER = 1024


# ---- open, read ----


def open_file(path: Path, asked: np.dtype[Any] | None) -> ForeignFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic in _LLM_C:
        return _open_llm_c(path, asked, magic, version, count)
    dtype = np.dtype("uint16") if asked is None else asked
    if size % dtype.itemsize:
        raise InputError(
            f"{path}: {size:,} bytes are not a whole number of tokens of {dtype}, {dtype.itemsize} bytes each. "
            "Is it cut short, or of another dtype? Say which, such as ",
            Setting("dtype", "int32"),
            ".",
        )
    return ForeignFile("nanoGPT", TokenFile(path, size // dtype.itemsize), dtype, asked)


def _open_llm_c(path: Path, asked: np.dtype[Any] | None, magic: int, version: int, count: int) -> ForeignFile:
    known, name = _LLM_C[magic]
    if version != known:
        raise InputError(f"{path}: a file of llm.c, version {version}; this milldam reads version {known}.")
    dtype = np.dtype(name)
    size, expected = path.stat().st_size, _LLM_C_HEADER + count * dtype.itemsize
    if size != expected:
        raise InputError(
            f"{path}: {size:,} bytes where {count:,} tokens of {name}, as its header says, take {expected:,} with it. "
            "Is it cut short? Make it again."
        )
    return ForeignFile("llm.c", TokenFile(path, count, _LLM_C_HEADER), dtype, asked)


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    yield from one_document(open_foreign(source.path, rules.dtype))


# ---- write ----


def check_out(store: Store, out: Path) -> None:
    if not has_splits(store) and out.suffix != ".bin":
        raise ConfigError(f"{out}: of one split, nanogpt is a file that ends in .bin, such as train.bin.")
    if has_splits(store) and out.suffix == ".bin":
        raise ConfigError(
            f"{out}: of several splits ({', '.join(store.splits)}), nanogpt is a folder with a file for each. "
            "Name a folder, or choose one split with ",
            Setting("split", store.splits[0]),
            ".",
        )


def files(export: Export) -> Iterator[OutputFile]:
    several = has_splits(export.store)
    for split in split_parts(export.store):
        name = file_name(split, export.store.splits) if several else export.out.name
        yield flat_file(export, name, split)


def write_file(export: Export, file: OutputFile, progress: Progress) -> FileRecord:
    return write_flat(export, file, progress)


def file_name(split: str, splits: tuple[str, ...]) -> str:
    """nanoGPT's name for the file of a split: it knows train.bin and val.bin.

    >>> file_name("validation", ("train", "validation")), file_name("test", ("train", "test"))
    ('val.bin', 'test.bin')
    """
    return "val.bin" if split == "validation" and "val" not in splits else f"{split}.bin"
