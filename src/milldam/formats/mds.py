"""MosaicML's MDS: `shard.00000.mds` ... and `index.json`, which `streaming.StreamingDataset(local=OUT)` reads.

A sample is {"tokens": array}. Rows of `seq_len` tokens have a fixed shape ("ndarray:int32:2048": no bytes besides the
tokens), documents each their own ("ndarray:int32"). llm-foundry's text dataset trains on rows of `seq_len`. Of a store
of several splits each has its folder: `StreamingDataset(local=OUT, split="train")`. Uncompressed, so that samples are
read in place; the index has the xxh3 of each shard, for `validate_hash="xxh3_128"`. Written, not read.

    count u32, offsets u32[count + 1] from the start of the file, the columns as JSON, the samples

All little-endian. A sample of fixed shape is its tokens; else: size u32 of what follows, a byte (1 << 2 | log2 of the
length's width), the length in 1, 2 or 4 bytes, the tokens.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from milldam.files import NewFile
from milldam.files import write_file as write_small
from milldam.formats import rows
from milldam.formats.rows import RowFormat, Rows
from milldam.formats.writing import Export, OutputFile

SUFFIXES = ()
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, rows.OPTIONS, rows.DTYPES
_HASH = "xxh3_128"
_FILE_BYTES = 1 << 32
"""The range of an offset."""
_OFFSET_BYTES, _WIDEST_HEADER = 4, 9


def _write_samples(new: NewFile, rows: Rows, file: OutputFile) -> None:
    """All rows of a file; documents have a header each before their tokens."""
    columns = json.dumps(_columns(rows.dtype, rows.seq_len), sort_keys=True).encode()
    lengths = rows.lengths_of(file.first, file.rows)
    sizes = lengths * rows.dtype.itemsize
    if rows.seq_len is None:
        sizes += 5 + _widths(lengths)
    first = 4 * (len(sizes) + 2) + len(columns)
    new.write(struct.pack("<I", len(sizes)))
    new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
    new.write(columns)
    for block in rows.blocks(file):
        tokens, of_each = block["input_ids"]
        assert of_each is not None
        new.write(tokens.data if rows.seq_len is not None else _with_headers(tokens, of_each))


def _widths(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bytes of the narrowest number that says each length: 1, 2 or 4."""
    return np.where(lengths < 1 << 8, 1, np.where(lengths < 1 << 16, 2, 4))


def _with_headers(tokens: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of documents, each after its header."""
    widths, data_sizes = _widths(lengths), lengths * tokens.itemsize
    headers = np.zeros((len(lengths), _WIDEST_HEADER), np.uint8)  # of which each document uses the first bytes
    headers[:, :4] = (1 + widths + data_sizes).astype("<u4").view(np.uint8).reshape(-1, 4)
    headers[:, 4] = 1 << 2 | widths >> 1  # 1, 2, 4 -> 0, 1, 2
    headers[:, 5:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    ends = (5 + widths + data_sizes).cumsum()
    begins = ends - data_sizes - widths - 5
    used = np.arange(_WIDEST_HEADER) < (5 + widths)[:, None]
    places = (begins[:, None] + np.arange(_WIDEST_HEADER))[used]
    samples = np.empty(int(ends[-1]), np.uint8)
    is_data = np.ones(len(samples), np.bool_)
    is_data[places] = False
    samples[places] = headers[used]
    samples[is_data] = tokens.view(np.uint8)
    return samples.data


def _columns(dtype: np.dtype[Any], seq_len: int | None) -> dict[str, Any]:
    return {
        "column_encodings": [f"ndarray:{dtype.name}" + ("" if seq_len is None else f":{seq_len}")],
        "column_names": ["tokens"],
        "column_sizes": [None if seq_len is None else seq_len * dtype.itemsize],
        "compression": None,
        "format": "mds",
        "hashes": [_HASH],
        "size_limit": None,
        "version": 2,
    }


_ROWS = RowFormat(
    lambda number, files: f"shard.{number:05d}.mds", _OFFSET_BYTES + _WIDEST_HEADER, _write_samples, _FILE_BYTES
)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    shards = []
    for one in made:
        raw = {"basename": one["file"], "bytes": one["bytes"], "hashes": {_HASH: one["xxh3"]}}
        columns = _columns(export.dtype, export.seq_len)
        shards.append(columns | {"raw_data": raw, "samples": one["rows"], "zip_data": None})
    write_small(folder / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
