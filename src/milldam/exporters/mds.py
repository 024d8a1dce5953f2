"""MosaicML's MDS: `shard.00000.mds` ... and `index.json`, which `streaming.StreamingDataset(local=OUT)` reads.

A sample is {"tokens": array}. Rows of `seq_len` tokens have a fixed shape ("ndarray:int32:2048": no bytes besides the
tokens), documents each their own ("ndarray:int32"). llm-foundry's text data set trains on rows of `seq_len`. Of a store
of several splits each has its folder: `StreamingDataset(local=OUT, split="train")`. Uncompressed, so that samples are
read in place; the index has the xxh3 of each shard, for `validate_hash="xxh3_128"`.

A shard: sample count u32, offsets u32[samples + 1] from the shard's begin, the columns as JSON, the samples. A sample
of fixed shape is its tokens; else: size u32 of what follows, a byte (1 << 2 | log2 of the length's width), the length
in 1, 2 or 4 bytes, the tokens. All little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.exporters.job import Export, Options
from milldam.exporters.rows import FileRows, Part, check_rows, with_headers, write_rows
from milldam.files import NewFile, write_file
from milldam.stores.tokens.blocks import is_giant

if TYPE_CHECKING:
    from milldam.loader.stores import Store
    from milldam.stores.tokens.format import Int64s

NAME, KIND, ALL_SPLITS = "mds", "folder", True
OPTIONS = ("seq_len", "dtype", "shard_size")
COLUMN, HASH = "tokens", "xxh3_128"
_DTYPES = ("int32", "uint16", "uint32", "int64")
_WIDEST_HEADER = 9
_OFFSET_BYTES = 4


def check(store: Store, out: Path, options: Options) -> None:
    check_rows(store, options, _DTYPES, NAME)


def write(export: Export) -> dict[str, Any]:
    return write_rows(export, _Shards())


class _Shards:
    row_bytes, file_bytes = _OFFSET_BYTES + _WIDEST_HEADER, 1 << 32

    def file_name(self, number: int, files: int) -> str:
        return f"shard.{number:05d}.mds"

    def write_file(self, new: NewFile, rows: FileRows) -> None:
        columns = json.dumps(_columns(rows.part), sort_keys=True).encode()
        fixed = rows.part.seq_len is not None
        headers = np.zeros_like(rows.lengths) if fixed else _header_sizes(rows.lengths)
        first = 4 * (len(rows.lengths) + 2) + len(columns)
        sizes = headers + rows.lengths * rows.part.dtype.itemsize
        new.write(struct.pack("<I", len(sizes)))
        new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
        new.write(columns)
        for block in _samples(rows, fixed=fixed):
            new.write(block.data)

    def write_index(self, part: Part, made: list[dict[str, Any]]) -> None:
        columns = _columns(part)
        shards = [
            columns
            | {
                "raw_data": {"basename": one["file"], "bytes": one["bytes"], "hashes": {HASH: one["xxh3"]}},
                "samples": one["rows"],
                "zip_data": None,
            }
            for one in made
        ]
        write_file(part.folder / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())


def _columns(part: Part) -> dict[str, Any]:
    fixed = part.seq_len is not None
    encoding = f"ndarray:{part.dtype.name}" + (f":{part.seq_len}" if fixed else "")
    return {
        "column_encodings": [encoding],
        "column_names": [COLUMN],
        "column_sizes": [part.seq_len * part.dtype.itemsize if part.seq_len is not None else None],
        "compression": None,
        "format": "mds",
        "hashes": [HASH],
        "size_limit": None,
        "version": 2,
    }


def _header_sizes(lengths: Int64s) -> Int64s:
    return 5 + _length_widths(lengths)


def _length_widths(lengths: Int64s) -> Int64s:
    """Bytes of the narrowest number that says each length: 1, 2 or 4."""
    widths = np.ones_like(lengths)
    widths[lengths >= 1 << 8] = 2
    widths[lengths >= 1 << 16] = 4
    return widths


def _samples(rows: FileRows, *, fixed: bool) -> Iterator[np.ndarray[Any, Any]]:
    for start, lengths in rows.blocks():
        if fixed:
            yield from rows.pieces(start, int(lengths.sum()))
        elif is_giant(lengths):
            header, size = _headers(lengths, rows.part.dtype.itemsize)
            yield header[0, : size[0]]
            yield from rows.pieces(start, int(lengths[0]))
        else:
            headers, sizes = _headers(lengths, rows.part.dtype.itemsize)
            yield with_headers(rows.tokens(start, int(lengths.sum())), lengths, headers, sizes)


def _headers(lengths: Int64s, width: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Int64s]:
    """(rows, 9) bytes and how many of them each row uses."""
    widths = _length_widths(lengths)
    headers = np.zeros((len(lengths), _WIDEST_HEADER), np.uint8)
    headers[:, :4] = (1 + widths + lengths * width).astype("<u4").view(np.uint8).reshape(-1, 4)
    headers[:, 4] = 1 << 2 | widths >> 1  # 1, 2, 4 -> 0, 1, 2
    headers[:, 5:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return headers, 5 + widths
