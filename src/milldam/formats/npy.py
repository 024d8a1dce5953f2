"""numpy's .npy: all tokens as one 1-D array of integers, for `np.load(mmap_mode="r")`.

The header says byte order and dtype; numpy reads it as a literal, nothing in it is run. `tokenize --format npy` leaves
X.npy.json beside its file, with what a manifest says of a store. Holds a block of tokens at a time.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.lib import format as npy_format

from milldam.checked import checked, read_json
from milldam.errors import InputError, StoreError
from milldam.formats.foreign import ForeignFile, read_flat
from milldam.formats.writing import Export, FileRecord, OutputFile, flat_files, write_flat
from milldam.loader.stream import TokenFile
from milldam.stores.kinds import Facts

if TYPE_CHECKING:
    from milldam.run.engine import Progress

SUFFIXES = (".npy",)
SHAPE, ALL_SPLITS, OPTIONS = "file", False, ("dtype",)
DTYPES = ("uint16", "int32", "uint32", "int64")
_HEADERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
read, files = read_flat, flat_files


def open_file(path: Path, wanted: np.dtype[Any] | None) -> ForeignFile:
    with path.open("rb") as opened:
        try:
            version = npy_format.read_magic(opened)
            shape, _, dtype = _HEADERS[version](opened)
        except KeyError:
            raise InputError(f"{path}: .npy version {version}, which plain integers do not need.") from None
        except Exception as error:  # a damaged header may fail anywhere in numpy's parsers
            raise InputError(f"{path}: not a .npy file ({error}).") from None
        first = opened.tell()
    if dtype.kind not in "iu":
        what = "Python objects, which are never loaded" if dtype.hasobject else str(dtype)
        raise InputError(f"{path}: holds {what}. Tokens are a 1-D array of integers.")
    if len(shape) != 1:
        raise InputError(
            f"{path}: a {len(shape)}-D array of shape {shape}. Tokens are a 1-D array: save array.reshape(-1)."
        )
    size, expected = path.stat().st_size, first + shape[0] * dtype.itemsize
    if size != expected:
        raise InputError(f"{path}: {size:,} bytes where its header says {expected:,}. Make it again.")
    if first % dtype.itemsize:
        raise InputError(f"{path}: its tokens begin at byte {first}, which is not aligned. Save it again with numpy.")
    file, facts = TokenFile(path, shape[0], first), read_sidecar(path)
    if facts is None:
        return ForeignFile("numpy", file, dtype, wanted)
    there, written = f"{shape[0]} tokens of {dtype.name}", f"{facts['tokens']} tokens of {facts['dtype']}"
    if there != written:
        raise StoreError(
            f"{path}: {there}, and {sidecar_path(path).name} beside it says {written}: it belongs to another file. "
            "Make both again, or remove the .json."
        )
    return ForeignFile("numpy", file, dtype, wanted, vocab_size=facts["vocab_size"], tokenizer=facts["tokenizer"])


def write_file(export: Export, file: OutputFile, progress: Progress) -> FileRecord:
    return write_flat(export, file, progress, npy_header(export.dtype, file.tokens))


def npy_header(dtype: np.dtype[Any], count: int) -> bytes:
    """The first bytes of an .npy file that holds one array of so many numbers."""
    header = io.BytesIO()
    shape = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy_format.write_array_header_1_0(header, shape)
    return header.getvalue()


class Sidecar(TypedDict):
    """The fields of X.npy.json that are read; it has more, as the manifest of a store."""

    dtype: str
    tokens: int
    fingerprint: str
    vocab_size: int
    tokenizer: Facts
    settings: dict[str, Any]
    input: Facts


def sidecar_path(npy: Path) -> Path:
    return npy.with_name(npy.name + ".json")


def read_sidecar(npy: Path) -> Sidecar | None:
    """None when there is no such file, or it is not ours."""
    path = sidecar_path(npy)
    try:
        facts = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(facts, dict) or facts.get("format") != "milldam npy":
        return None
    return checked(Sidecar, facts, path)
