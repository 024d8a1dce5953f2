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
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.files import NewFile, write_file
from milldam.formats.rows import Rows

if TYPE_CHECKING:
    from milldam.formats.exporting import Export, OutputFile

_HASH = "xxh3_128"


def write_mds(new: NewFile, rows: Rows, file: OutputFile) -> None:
    """Write all rows of a file; documents have a header each before their tokens."""
    columns = json.dumps(_columns(rows.dtype, rows.seq_len), sort_keys=True).encode()
    lengths = rows.lengths_of(file)
    sizes = lengths * rows.dtype.itemsize
    if rows.seq_len is None:
        sizes += 5 + np.where(lengths < 1 << 8, 1, np.where(lengths < 1 << 16, 2, 4))
    first = 4 * (len(sizes) + 2) + len(columns)
    new.write(struct.pack("<I", len(sizes)))
    new.write(np.concatenate(([first], first + sizes.cumsum())).astype("<u4").data)
    new.write(columns)
    for block in rows.blocks(file):
        tokens, of_each = block["input_ids"]
        assert of_each is not None
        data, begin, samples = tokens.tobytes(), 0, []
        for length in of_each.tolist() if rows.seq_len is None else ():
            end, width = begin + length * tokens.itemsize, 1 if length < 1 << 8 else 2 if length < 1 << 16 else 4
            header = struct.pack("<IB", 1 + width + end - begin, 1 << 2 | width >> 1)  # widths 1, 2, 4 -> 0, 1, 2
            samples += [header, length.to_bytes(width, "little"), data[begin:end]]
            begin = end
        new.write(b"".join(samples) if samples else data)


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


def complete_mds(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    """Write the index. `made`: of each file its name, rows, bytes and hash."""
    shards = []
    for one in made:
        raw = {"basename": one["file"], "bytes": one["bytes"], "hashes": {_HASH: one["xxh3"]}}
        columns = _columns(export.dtype, export.seq_len)
        shards.append(columns | {"raw_data": raw, "samples": one["rows"], "zip_data": None})
    write_file(folder / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
