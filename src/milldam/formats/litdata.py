"""litdata: `chunk-0-0.bin` ... and `index.json`, which `litdata.StreamingDataset(OUT)` reads.

With `seq_len` the format of tokens, for `StreamingDataset(OUT, item_loader=TokensLoader(block_size=seq_len))`: blocks
never cross chunks, so every chunk holds whole rows and nothing is lost between two. Without it a document is an item,
a 1-D tensor. Of a store of several splits each has its folder.

A chunk is a file of samples (`milldam.formats.samples`). An item of the token format is its tokens; else size u32 and
the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError
from milldam.files import NewFile, hash_bytes
from milldam.files import write_file as write_small
from milldam.formats import rows, samples
from milldam.formats.finding import ReadRules, SourceFile, inside, read_index
from milldam.formats.rows import FileRows, RowFormat
from milldam.formats.samples import Bytes, Places
from milldam.formats.writing import Export
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens

SUFFIXES = ()
SHAPE, ALL_SPLITS, OPTIONS = "folder", True, rows.OPTIONS
_NUMPY_CODES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_TORCH_CODES = {
    11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
_WRITTEN_CODES = {"int32": 16, "uint16": 20, "int64": 18}
"""litdata's numbers for dtypes of torch, which has two for some."""
DTYPES = tuple(_WRITTEN_CODES)
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
"""torch's description of a sample that is one tensor and no dict or list of them."""
_SIZE_BYTES = 4


# ---- read ----


def indexed(folder: Path, split: str | None) -> list[SourceFile] | None:
    """The chunks that an index names; None: there is none of litdata."""
    index = read_index(folder / "index.json")
    if index is None or "chunks" not in index:
        return None
    facts = {"config": index.get("config") or {}}
    chunks = index["chunks"]
    return [SourceFile("litdata", inside(folder, one["filename"]), split, facts | {"chunk": one}) for one in chunks]


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    yield from samples.read_samples(source.path, partial(_find_items, source))


def _find_items(source: SourceFile, data: Bytes) -> Places:
    config = source.facts["config"]
    formats = config.get("data_format") or []
    if config.get("compression") or config.get("encryption"):
        raise InputError(f"{source.path}: compressed or encrypted chunks of litdata are not read. Write them plainly.")
    name, _, code = formats[0].partition(":") if len(formats) == 1 else ("", "", "")
    codes = {"no_header_tensor": _TORCH_CODES, "no_header_numpy": _NUMPY_CODES}.get(name, {})
    if not code.isdigit() or int(code) not in codes:
        raise InputError(
            f"{source.path}: samples of {', '.join(formats)}; "
            "tokens are samples of one 1-D tensor or array of integers."
        )
    dtype = np.dtype(codes[int(code)])
    offsets = samples.offsets_of(data, source.path, int(source.facts["chunk"]["chunk_size"]))
    begins, sizes = offsets[:-1], np.diff(offsets)
    if config.get("item_loader") != "TokensLoader":
        sizes, begins = samples.numbers_at(data, begins), begins + _SIZE_BYTES
    return Places(begins, sizes // dtype.itemsize, dtype)


# ---- write ----


def _write_items(new: NewFile, rows: FileRows) -> None:
    samples.write_samples(new, rows, partial(_headers, rows.dtype.itemsize) if rows.seq_len is None else None)


def _headers(width: int, lengths: Int64s) -> tuple[Bytes, Int64s]:
    """(rows, 4) bytes, all used."""
    sizes = np.ascontiguousarray((lengths * width).astype("<u4"))
    return sizes.view(np.uint8).reshape(-1, _SIZE_BYTES), np.full_like(lengths, _SIZE_BYTES)


_ROW_BYTES = samples.OFFSET_BYTES + _SIZE_BYTES
_ROWS = RowFormat(lambda number, files: f"chunk-0-{number}.bin", _ROW_BYTES, _write_items, samples.FILE_BYTES)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    in_rows = export.seq_len is not None
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
        "data_format": [f"no_header_tensor:{_WRITTEN_CODES[export.dtype.name]}"],
        "data_spec": json.dumps([1, _LEAF]),
        "encryption": None,
        "item_loader": "TokensLoader" if in_rows else "PyTreeLoader",
    }
    # litdata names its cache by this and puts nothing else into it: it must change with the content, not the clock.
    updated = hash_bytes("".join(one["xxh3"] for one in made).encode())[:16]
    index = {"chunks": chunks, "config": config, "updated_at": updated}
    write_small(folder / "index.json", json.dumps(index, sort_keys=True).encode())
