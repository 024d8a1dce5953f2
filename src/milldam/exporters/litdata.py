"""litdata: `chunk-0-0.bin` ... and `index.json`, which `litdata.StreamingDataset(OUT)` reads.

With `seq_len` the format of tokens, for `StreamingDataset(OUT, item_loader=TokensLoader(block_size=seq_len))`: blocks
never cross chunks, so every chunk holds whole rows and nothing is lost between two. Without it a document is an item,
a 1-D tensor. Of a store of several splits each has its folder.

A chunk: item count u32, offsets u32[items + 1] from the chunk's begin, the items. An item of the token format is its
tokens; else size u32 and the tokens. All little-endian.
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
from milldam.files import NewFile, hash_bytes, write_file
from milldam.stores.tokens.blocks import is_giant

if TYPE_CHECKING:
    from milldam.loader.stores import Store

NAME, KIND, ALL_SPLITS = "litdata", "folder", True
OPTIONS = ("seq_len", "dtype", "shard_size")
_TENSOR_CODES = {"int32": 16, "uint16": 20, "int64": 18}
"""litdata's numbers for dtypes of torch."""
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
"""torch's description of a sample that is one tensor and no dict or list of them."""
_OFFSET_BYTES, _SIZE_BYTES = 4, 4


def check(store: Store, out: Path, options: Options) -> None:
    check_rows(store, options, tuple(_TENSOR_CODES), NAME)


def write(export: Export) -> dict[str, Any]:
    return write_rows(export, _Chunks())


class _Chunks:
    row_bytes, file_bytes = _OFFSET_BYTES + _SIZE_BYTES, 1 << 32

    def file_name(self, number: int, files: int) -> str:
        return f"chunk-0-{number}.bin"

    def write_file(self, new: NewFile, rows: FileRows) -> None:
        header = _SIZE_BYTES if rows.part.seq_len is None else 0
        sizes = header + rows.lengths * rows.part.dtype.itemsize
        first = 4 * (len(sizes) + 2)
        new.write(struct.pack("<I", len(sizes)))
        new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
        for block in _items(rows):
            new.write(block.data)

    def write_index(self, part: Part, made: list[dict[str, Any]]) -> None:
        in_rows = part.seq_len is not None
        chunks = [
            {
                "chunk_bytes": one["bytes"],
                "chunk_size": one["rows"],
                "dim": one["tokens"] if in_rows else None,
                "filename": one["file"],
            }
            for one in made
        ]
        config = {
            "chunk_bytes": max((one["bytes"] for one in made), default=0),
            "chunk_size": None,
            "compression": None,
            "data_format": [f"no_header_tensor:{_TENSOR_CODES[part.dtype.name]}"],
            "data_spec": json.dumps([1, _LEAF]),
            "encryption": None,
            "item_loader": "TokensLoader" if in_rows else "PyTreeLoader",
        }
        # litdata names its cache by this and puts nothing else into it: it must change with the content, not the clock.
        updated = hash_bytes("".join(one["xxh3"] for one in made).encode())[:16]
        index = {"chunks": chunks, "config": config, "updated_at": updated}
        write_file(part.folder / "index.json", json.dumps(index, sort_keys=True).encode())


def _items(rows: FileRows) -> Iterator[np.ndarray[Any, Any]]:
    width = rows.part.dtype.itemsize
    for start, lengths in rows.blocks():
        if rows.part.seq_len is not None:
            yield from rows.pieces(start, int(lengths.sum()))
            continue
        # headers: (rows, 4)
        headers = (lengths * width).astype("<u4").view(np.uint8).reshape(-1, 4)
        if is_giant(lengths):
            yield np.ascontiguousarray(headers)
            yield from rows.pieces(start, int(lengths[0]))
        else:
            sizes = np.full_like(lengths, _SIZE_BYTES)
            yield with_headers(rows.tokens(start, int(lengths.sum())), lengths, headers, sizes)
