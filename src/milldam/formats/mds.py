"""MosaicML's MDS: `shard.00000.mds` ... and `index.json`, which `streaming.StreamingDataset(local=OUT)` reads.

A sample is {"tokens": array}. Rows of `seq_len` tokens have a fixed shape ("ndarray:int32:2048": no bytes besides the
tokens), documents each their own ("ndarray:int32"). llm-foundry's text dataset trains on rows of `seq_len`. Of a store
of several splits each has its folder: `StreamingDataset(local=OUT, split="train")`. Uncompressed, so that samples are
read in place; the index has the xxh3 of each shard, for `validate_hash="xxh3_128"`. Written, not read.

    count u32, offsets u32[count + 1] from the file's begin, the columns as JSON, the samples

All little-endian. A sample of fixed shape is its tokens; else: size u32 of what follows, a byte (1 << 2 | log2 of the
length's width), the length in 1, 2 or 4 bytes, the tokens.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.files import NewFile
from milldam.files import write_file as write_small
from milldam.formats import rows
from milldam.formats.rows import FileRows, RowFormat
from milldam.formats.writing import Export
from milldam.loader.reading import TokenArray
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.reader import is_giant

Bytes = npt.NDArray[np.uint8]
SUFFIXES = ()
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, rows.OPTIONS, rows.DTYPES
_COLUMN, _HASH = "tokens", "xxh3_128"
_FILE_BYTES = 1 << 32
"""What an offset can say."""
_OFFSET_BYTES, _WIDEST_HEADER = 4, 9
_HEADERS_AT_A_TIME = 1 << 16


def _write_samples(new: NewFile, rows: FileRows) -> None:
    """All rows of a file; documents have a header each before their tokens."""
    width, fixed = rows.dtype.itemsize, rows.seq_len is not None
    columns = json.dumps(_columns(rows.dtype, rows.seq_len), sort_keys=True).encode()
    # Headers some at a time: their bytes take more than what is held of the rows.
    starts = range(0, 0 if fixed else len(rows.lengths), _HEADERS_AT_A_TIME)
    used = [_headers(width, rows.lengths[start : start + _HEADERS_AT_A_TIME])[1] for start in starts]
    sizes = rows.lengths * width + (np.concatenate(used) if used else 0)
    first = 4 * (len(sizes) + 2) + len(columns)
    new.write(struct.pack("<I", len(sizes)))
    new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
    new.write(columns)
    for start, lengths in rows.blocks():
        count = int(lengths.sum())
        if not fixed and not is_giant(lengths):
            new.write(_with_headers(rows.tokens(start, count), lengths, *_headers(width, lengths)).data)
            continue
        if not fixed:
            header, size = _headers(width, lengths)
            new.write(header[0, : size[0]].tobytes())
        for tokens in rows.chunks(start, count):
            new.write(tokens.data)


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


def _with_headers(tokens: TokenArray, lengths: Int64s, headers: Bytes, sizes: Int64s) -> Bytes:
    """The bytes of rows, each behind the first `sizes[k]` bytes of `headers[k]`. headers: (rows, widest)."""
    data_sizes = lengths * tokens.itemsize
    ends = (data_sizes + sizes).cumsum()
    begins = ends - data_sizes - sizes
    columns = np.arange(headers.shape[1])
    used = columns < sizes[:, None]
    places = (begins[:, None] + columns)[used]
    made = np.empty(int(ends[-1]), np.uint8)
    is_data = np.ones(len(made), np.bool_)
    is_data[places] = False
    made[places] = headers[used]
    made[is_data] = tokens.view(np.uint8)
    return made


_ROW_BYTES = _OFFSET_BYTES + _WIDEST_HEADER
_ROWS = RowFormat(lambda number, files: f"shard.{number:05d}.mds", _ROW_BYTES, _write_samples, _FILE_BYTES)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    shards = []
    for one in made:
        raw = {"basename": one["file"], "bytes": one["bytes"], "hashes": {_HASH: one["xxh3"]}}
        shards.append(
            _columns(export.dtype, export.seq_len) | {"raw_data": raw, "samples": one["rows"], "zip_data": None}
        )
    write_small(folder / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
