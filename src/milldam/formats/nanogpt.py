"""nanoGPT's .bin: token ids end to end without a header, for `np.memmap(path, dtype=np.uint16)`; read also: llm.c's.

A store of several splits becomes a folder with a file each, as nanoGPT's `data/NAME/` is: train.bin, val.bin. Ids are
uint16; of a vocabulary beyond 65,536 they are uint32, as forks of nanoGPT for larger vocabularies have it: nanoGPT
itself must then be told so. No meta.pkl is made or read: pickles are code. Files of llm.c and modded-nanogpt have a
header of 1,024 bytes that says dtype and count. Holds a block of tokens at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.formats.foreign import ForeignFile, read_flat
from milldam.formats.writing import Export, OutputFile, flat_files, write_flat
from milldam.loader.stream import TokenFile

SUFFIXES = (".bin",)
SHAPE, ALL_SPLITS, OPTIONS = "file", True, ("dtype",)
DTYPES = ("uint16", "uint32", "int32", "int64")
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number of the header -> version, dtype."""
_LLM_C_HEADER = 1024
read, write_file = read_flat, write_flat


def open_file(path: Path, wanted: np.dtype[Any] | None) -> ForeignFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if magic not in _LLM_C:
        dtype = np.dtype("uint16") if wanted is None else wanted
        if size % dtype.itemsize:
            raise InputError(
                f"{path}: {size:,} bytes are not a whole number of tokens of {dtype}, {dtype.itemsize} bytes each. "
                "Is it cut short, or of another dtype? Say which, such as ",
                Setting("dtype", "int32"),
                ".",
            )
        return ForeignFile("nanoGPT", TokenFile(path, size // dtype.itemsize), dtype, wanted)
    known, name = _LLM_C[magic]
    if version != known:
        raise InputError(f"{path}: a file of llm.c, version {version}; this milldam reads version {known}.")
    expected = _LLM_C_HEADER + count * np.dtype(name).itemsize
    if size != expected:
        raise InputError(
            f"{path}: {size:,} bytes where {count:,} tokens of {name}, as its header says, take {expected:,} with it. "
            "Is it cut short? Make it again."
        )
    return ForeignFile("llm.c", TokenFile(path, count, _LLM_C_HEADER), np.dtype(name), wanted)


def files(export: Export) -> Iterator[OutputFile]:
    """The file of each split; nanoGPT knows train.bin and val.bin."""
    for file in flat_files(export):
        is_val = file.split == "validation" and "val" not in export.store.splits
        yield replace(file, name=f"{'val' if is_val else file.split}.bin") if export.has_splits else file
