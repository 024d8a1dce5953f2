"""MDS shards and litdata chunks -> blocks of tokens, a document a sample.

Both begin with the number of samples and where each lies; the files are mapped, and the tokens gathered from between
the bytes that belong to a sample. A compressed MDS shard (zstd, gz) is decompressed to disk first: its size in the
scratch folder, for as long as it is read. Columns that would have to be unpickled are not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import InputError
from milldam.importers.columns import choose_column
from milldam.importers.pieces import Piece, ReadRules, require_integers
from milldam.loader.permutation import Int64s
from milldam.loader.reading import ranges
from milldam.sources.compression import DamagedError, read_blocks
from milldam.stores.tokens.blocks import cut_blocks
from milldam.stores.tokens.writer import Tokens

Bytes = npt.NDArray[np.uint8]

_GATHERED = 1 << 17
"""Tokens at a time: each byte takes 8 while its place is worked out."""
_SHORTEST_SLICE = 64
"""Bytes of a sample, on average, from which a slice for each is quicker."""
_BLOCK = 1 << 20
_NUMPY_CODES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_TORCH_CODES = {
    11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
_MDS_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64",
}  # fmt: skip
_MDS_COMPRESSIONS = {"zstd": "zst", "gz": "gz", "bz2": "bz2"}


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of each sample lie."""

    begins: Int64s
    lengths: Int64s
    """In tokens."""
    dtype: np.dtype[Any]


def read(piece: Piece, rules: ReadRules) -> Iterator[Tokens]:
    with _mapped(piece, rules.scratch) as data:
        try:
            places = _mds(piece, data, rules) if piece.kind == "mds" else _litdata(piece, data)
        except IndexError:
            raise InputError(f"{piece.path}: its samples lie behind its end. Is it cut short?") from None
        if len(places.begins) and int((places.begins + places.lengths * places.dtype.itemsize).max()) > len(data):
            raise InputError(f"{piece.path}: its samples lie behind its end. Is it cut short?")
        yield from _gathered(data, places)


def _gathered(data: Bytes, places: _Places) -> Iterator[Tokens]:
    for first, stop in cut_blocks(places.lengths, _GATHERED):
        begins, lengths = places.begins[first:stop], places.lengths[first:stop]
        yield Tokens(_taken(data, begins, lengths * places.dtype.itemsize).view(places.dtype), lengths)


def _taken(data: Bytes, begins: Int64s, sizes: Int64s) -> Bytes:
    """The bytes of samples end to end: slices where that pays, else a place for each byte."""
    if int(sizes.sum()) < _SHORTEST_SLICE * len(sizes):
        return data[ranges(begins, sizes)]
    slices = [data[begin:end] for begin, end in zip(begins.tolist(), (begins + sizes).tolist(), strict=True)]
    return slices[0] if len(slices) == 1 else np.concatenate(slices)


@contextmanager
def _mapped(piece: Piece, scratch: Path) -> Iterator[Bytes]:
    compression = _compression(piece)
    try:
        if compression is None:
            yield _map(piece.path)
            return
        with tempfile.NamedTemporaryFile(dir=scratch) as unpacked, piece.path.open("rb") as packed:
            for block in read_blocks(packed, compression, _BLOCK):
                unpacked.write(block)
            unpacked.flush()
            yield _map(Path(unpacked.name))
    except OSError as error:
        raise InputError(f"{piece.path}: can't be read ({error.strerror}).") from None
    except DamagedError as error:
        raise InputError(f"{piece.path}: {error}.") from None


def _map(path: Path) -> Bytes:
    if path.stat().st_size < 8:
        raise InputError(f"{path}: {path.stat().st_size} bytes; not even the number of samples is there.")
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _compression(piece: Piece) -> str | None:
    shard = piece.facts.get("shard")
    if shard is None or piece.path.name == shard["raw_data"]["basename"]:
        return None
    name = str(shard.get("compression")).split(":")[0]
    if name not in _MDS_COMPRESSIONS:
        raise InputError(f"{piece.path}: compressed with {name}; milldam reads {', '.join(_MDS_COMPRESSIONS)}.")
    return _MDS_COMPRESSIONS[name]


def _offsets(data: Bytes, path: Path, samples: int) -> Int64s:
    """Bytes where samples begin, and the end of the last. (samples + 1,)"""
    found = int(data[:4].view("<u4")[0])
    if found != samples:
        raise InputError(f"{path}: {found:,} samples in it where the index says {samples:,}. Do they belong together?")
    return data[4 : 4 * (samples + 2)].view("<u4").astype(np.int64)


def _numbers(data: Bytes, places: Int64s, width: int) -> Int64s:
    """Unsigned numbers of so many bytes at any places."""
    gathered = np.ascontiguousarray(data[places[:, None] + np.arange(width)])
    return gathered.view(f"<u{width}").reshape(-1).astype(np.int64)


# ---- litdata ----


def _litdata(piece: Piece, data: Bytes) -> _Places:
    config = piece.facts["config"]
    formats = config.get("data_format") or []
    if config.get("compression") or config.get("encryption"):
        raise InputError(f"{piece.path}: compressed or encrypted chunks of litdata are not read. Write them plainly.")
    name, _, code = formats[0].partition(":") if len(formats) == 1 else ("", "", "")
    codes = {"no_header_tensor": _TORCH_CODES, "no_header_numpy": _NUMPY_CODES}.get(name, {})
    if not code.isdigit() or int(code) not in codes:
        raise InputError(
            f"{piece.path}: samples of {', '.join(formats)}; tokens are samples of one 1-D tensor or array of integers."
        )
    dtype = np.dtype(codes[int(code)])
    offsets = _offsets(data, piece.path, int(piece.facts["chunk"]["chunk_size"]))
    begins, sizes = offsets[:-1], np.diff(offsets)
    if config.get("item_loader") != "TokensLoader":
        sizes, begins = _numbers(data, begins, 4), begins + 4
    return _Places(begins, sizes // dtype.itemsize, dtype)


# ---- MDS ----


def _mds(piece: Piece, data: Bytes, rules: ReadRules) -> _Places:
    shard = piece.facts["shard"]
    names, encodings, fixed = shard["column_names"], shard["column_encodings"], shard["column_sizes"]
    wanted = names.index(choose_column(names, rules.column, piece.path))
    offsets = _offsets(data, piece.path, int(shard["samples"]))
    begins = offsets[:-1]
    # A sample: a u32 for each column without a fixed size, then the columns.
    heads = np.cumsum([0 if size else 4 for size in fixed])
    sizes = [
        np.full(len(begins), size) if size else _numbers(data, begins + heads[k] - 4, 4)
        for k, size in enumerate(fixed[: wanted + 1])
    ]
    at = begins + heads[-1] + sum(sizes[:wanted], np.zeros(len(begins), np.int64))
    return _array_places(piece, data, at, sizes[wanted], encodings[wanted], rules)


def _array_places(piece: Piece, data: Bytes, at: Int64s, sizes: Int64s, encoding: str, rules: ReadRules) -> _Places:
    kind, *given = encoding.split(":")
    if kind == "bytes":
        dtype = require_integers(np.dtype(rules.dtype or "uint16"), piece.path, "--dtype")
        return _Places(at, sizes // dtype.itemsize, dtype)
    if kind != "ndarray":
        raise InputError(f"{piece.path}: a column of {encoding}; tokens are ndarray or bytes. Say which with --column.")
    if given:
        dtype = np.dtype(given[0])
    else:
        dtype, at, sizes = _stated_dtype(piece, data, at), at + 1, sizes - 1
    require_integers(dtype, piece.path, encoding)
    if len(given) == 2:
        return _Places(at, sizes // dtype.itemsize, dtype)
    shapes = data[at]
    if ((shapes >> 2) != 1).any():
        raise InputError(f"{piece.path}: arrays of several dimensions; tokens are 1-D.")
    # The length's width, in its lowest bits: 1, 2, 4 or 8 bytes.
    head = 1 + (1 << (shapes & 3).astype(np.int64))
    return _Places(at + head, (sizes - head) // dtype.itemsize, dtype)


def _stated_dtype(piece: Piece, data: Bytes, at: Int64s) -> np.dtype[Any]:
    codes = np.unique(data[at])
    if len(codes) > 1 or (len(codes) == 1 and int(codes[0]) not in _MDS_CODES):
        raise InputError(f"{piece.path}: arrays that are no integers, or of several dtypes.")
    return np.dtype(_MDS_CODES[int(codes[0])] if len(codes) else "uint16")
