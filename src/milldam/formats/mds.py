"""MosaicML's MDS: `shard.00000.mds` ... and `index.json`, which `streaming.StreamingDataset(local=OUT)` reads.

A sample is {"tokens": array}. Rows of `seq_len` tokens have a fixed shape ("ndarray:int32:2048": no bytes besides the
tokens), documents each their own ("ndarray:int32"). llm-foundry's text dataset trains on rows of `seq_len`. Of a store
of several splits each has its folder: `StreamingDataset(local=OUT, split="train")`. Uncompressed, so that samples are
read in place; the index has the xxh3 of each shard, for `validate_hash="xxh3_128"`.

A shard is a file of samples (`milldam.formats.samples`) with its columns as JSON before them. A sample of fixed shape
is its tokens; else: size u32 of what follows, a byte (1 << 2 | log2 of the length's width), the length in 1, 2 or 4
bytes, the tokens. Read: a column of ndarray or of bytes, of any number of columns; zstd, gz and bz2 too. Columns that
would have to be unpickled are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.files import NewFile
from milldam.files import write_file as write_small
from milldam.formats import rows, samples
from milldam.formats.finding import ReadRules, SourceFile, choose_column, inside, read_index, require_integers
from milldam.formats.rows import FileRows, RowFormat
from milldam.formats.samples import Bytes, Places
from milldam.formats.writing import Export
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens

SUFFIXES = ()
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, rows.OPTIONS, rows.DTYPES
_COLUMN, _HASH = "tokens", "xxh3_128"
_WIDEST_HEADER = 9
_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64",
}  # fmt: skip
_COMPRESSIONS = {"zstd": "zst", "gz": "gz", "bz2": "bz2"}


# ---- read ----


def indexed(folder: Path, split: str | None) -> list[SourceFile] | None:
    """The shards that an index names; None: there is none of MDS."""
    index = read_index(folder / "index.json")
    return None if index is None or "shards" not in index else [_shard(folder, split, one) for one in index["shards"]]


def _shard(folder: Path, split: str | None, shard: dict[str, Any]) -> SourceFile:
    path, packed = inside(folder, shard["raw_data"]["basename"]), shard.get("zip_data")
    if not path.exists() and packed:
        path = inside(folder, packed["basename"])
    return SourceFile("mds", path, split, {"shard": shard})


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    find = partial(_find_samples, source, rules)
    yield from samples.read_samples(source.path, find, _compression(source), rules.scratch)


def _compression(source: SourceFile) -> str | None:
    shard = source.facts["shard"]
    if source.path.name == shard["raw_data"]["basename"]:
        return None
    name = str(shard.get("compression")).split(":")[0]
    if name not in _COMPRESSIONS:
        raise InputError(f"{source.path}: compressed with {name}; milldam reads {', '.join(_COMPRESSIONS)}.")
    return _COMPRESSIONS[name]


def _find_samples(source: SourceFile, rules: ReadRules, data: Bytes) -> Places:
    shard = source.facts["shard"]
    names, encodings, fixed = shard["column_names"], shard["column_encodings"], shard["column_sizes"]
    wanted = names.index(choose_column(names, rules.column, source.path))
    begins = samples.offsets_of(data, source.path, int(shard["samples"]))[:-1]
    # A sample: a u32 for each column without a fixed size, then the columns.
    heads = np.cumsum([0 if size else 4 for size in fixed])
    sizes = [
        np.full(len(begins), size) if size else samples.numbers_at(data, begins + heads[k] - 4)
        for k, size in enumerate(fixed[: wanted + 1])
    ]
    at = begins + heads[-1] + sum(sizes[:wanted], np.zeros(len(begins), np.int64))
    kind, *given = encodings[wanted].split(":")
    if kind == "bytes":
        dtype = np.dtype(rules.dtype or "uint16")
        return Places(at, sizes[wanted] // dtype.itemsize, dtype)
    if kind != "ndarray":
        told = f"{source.path}: a column of {encodings[wanted]}; tokens are ndarray or bytes. Say which with "
        raise InputError(told, Setting("column"), ".")
    return _arrays(source.path, data, at, sizes[wanted], given)


def _arrays(path: Path, data: Bytes, at: Int64s, sizes: Int64s, given: list[str]) -> Places:
    """Where arrays lie; `given`: what the index says of them, their dtype and shape or less."""
    if given:
        dtype = np.dtype(given[0])
    else:
        codes = np.unique(data[at])
        if len(codes) > 1 or (len(codes) == 1 and int(codes[0]) not in _CODES):
            raise InputError(f"{path}: arrays that are not integers, or of several dtypes.")
        dtype, at, sizes = np.dtype(_CODES[int(codes[0])] if len(codes) else "uint16"), at + 1, sizes - 1
    require_integers(dtype, path, "a column of ndarray")
    if len(given) == 2:
        return Places(at, sizes // dtype.itemsize, dtype)
    shapes = data[at]
    if ((shapes >> 2) != 1).any():
        raise InputError(f"{path}: arrays of several dimensions; tokens are 1-D.")
    # The length's width, in its lowest bits: 1, 2, 4 or 8 bytes.
    head = 1 + (1 << (shapes & 3).astype(np.int64))
    return Places(at + head, (sizes - head) // dtype.itemsize, dtype)


# ---- write ----


def _write_samples(new: NewFile, rows: FileRows) -> None:
    headers = partial(_headers, rows.dtype.itemsize) if rows.seq_len is None else None
    samples.write_samples(new, rows, headers, json.dumps(_columns(rows.dtype, rows.seq_len), sort_keys=True).encode())


def _headers(width: int, lengths: Int64s) -> tuple[Bytes, Int64s]:
    """(rows, 9) bytes and how many of them each row uses."""
    # Of the narrowest number that says each length: 1, 2 or 4 bytes.
    widths = np.ones_like(lengths)
    widths[lengths >= 1 << 8] = 2
    widths[lengths >= 1 << 16] = 4
    headers = np.zeros((len(lengths), _WIDEST_HEADER), np.uint8)
    headers[:, :4] = (1 + widths + lengths * width).astype("<u4").view(np.uint8).reshape(-1, 4)
    headers[:, 4] = 1 << 2 | widths >> 1  # 1, 2, 4 -> 0, 1, 2
    headers[:, 5:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return headers, 5 + widths


def _columns(dtype: np.dtype[Any], seq_len: int | None) -> dict[str, Any]:
    return {
        "column_encodings": [f"ndarray:{dtype.name}" + ("" if seq_len is None else f":{seq_len}")],
        "column_names": [_COLUMN],
        "column_sizes": [None if seq_len is None else seq_len * dtype.itemsize],
        "compression": None,
        "format": "mds",
        "hashes": [_HASH],
        "size_limit": None,
        "version": 2,
    }


_ROW_BYTES = samples.OFFSET_BYTES + _WIDEST_HEADER
_ROWS = RowFormat(lambda number, files: f"shard.{number:05d}.mds", _ROW_BYTES, _write_samples, samples.FILE_BYTES)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    shards = []
    for one in made:
        raw = {"basename": one["file"], "bytes": one["bytes"], "hashes": {_HASH: one["xxh3"]}}
        shards.append(
            _columns(export.dtype, export.seq_len) | {"raw_data": raw, "samples": one["rows"], "zip_data": None}
        )
    write_small(folder / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
