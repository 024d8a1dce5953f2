"""Loops that numpy can't run fast, in C. Each has a twin in numpy with the same result, for where nothing was compiled.

`kernel` gives a function of the library, or None where the library is missing or was made from other C files. A C
function takes numpy arrays and counts, allocates nothing and keeps nothing; the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.native import build

Kernel = Callable[..., int]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, where it is to be had and of these C files."""
    if build.unwanted() or sys.byteorder != "little":
        return None
    try:
        found = ctypes.CDLL(str(build.LIBRARY))
        found.milldam_digest.restype = ctypes.c_char_p
        same: bool = found.milldam_digest().decode() == build.digest()
    except (OSError, AttributeError):
        return None
    return found if same else None


def kernel(name: str, *types: type) -> Kernel | None:
    """The C function `milldam_<name>`, which gives a whole number.

    `types` are those of its arguments: `int`, or what an array holds. An array of something else is refused, since C
    would read past its end.
    """
    found = library()
    if found is None:
        return None
    function = found[f"milldam_{name}"]
    kinds = [None if kind is int else np.dtype(kind) for kind in types]
    function.argtypes = [ctypes.c_int64 if kind is None else ctypes.c_void_p for kind in kinds]
    function.restype = ctypes.c_int64

    def call(*given: npt.NDArray[Any] | int) -> int:
        found: int = function(*[_argument(one, kind) for one, kind in zip(given, kinds, strict=True)])
        return found

    return call


def _argument(given: npt.NDArray[Any] | int, kind: np.dtype[Any] | None) -> int:
    if kind is None:
        return int(given)
    assert isinstance(given, np.ndarray)
    if given.dtype != kind or not given.flags.c_contiguous:
        raise TypeError(f"a kernel wants {kind} end to end, not {given.dtype}")
    return given.ctypes.data
