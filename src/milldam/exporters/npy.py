"""`OUT.npy`: all tokens as one 1-D array for `np.load(mmap_mode="r")`. Holds a block of tokens at a time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from milldam.errors import ConfigError
from milldam.exporters.growing import write_tokens
from milldam.exporters.job import Export, Options
from milldam.exporters.reading import chosen_dtype
from milldam.loader.foreign import read_sidecar, sidecar_path
from milldam.loader.stores import Store

NAME = "npy"
KIND = "file"
OPTIONS = ("dtype",)
DTYPES = ("uint16", "int32", "uint32", "int64")


def check(store: Store, out: Path, options: Options) -> None:
    if out.suffix != ".npy":
        raise ConfigError(f"-o {out}: npy is a file that ends in .npy.")
    _dtype(store, options)


def write(export: Export) -> dict[str, Any]:
    store = export.store
    dtype = _dtype(store, export.options)
    write_tokens(export, store, export.out.name, dtype, npy_header(dtype, store.tokens))
    return {"dtype": dtype.name}


def outdated(out: Path) -> tuple[Path, ...]:
    """What `tokenize --format npy` said of the file that is replaced."""
    return (sidecar_path(out),) if read_sidecar(out) is not None else ()


def npy_header(dtype: np.dtype[Any], count: int) -> bytes:
    """The first bytes of an .npy file that holds one array of so many numbers."""
    header = io.BytesIO()
    shape = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy_format.write_array_header_1_0(header, shape)
    return header.getvalue()


def _dtype(store: Store, options: Options) -> np.dtype[Any]:
    return chosen_dtype(store, options.dtype, store.dtype.name, DTYPES)
