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

from milldam.errors import ResourceError
from milldam.native import build

Kernel = Callable[..., int]
_INT, _REFUSED = ctypes.c_int64, -(1 << 63)


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

    `types` are those of its arguments: `int`, or what an array holds. An array of something else is refused. C gets
    with each array the number of its entries, and refuses what it would read or write beyond them.
    """
    found = library()
    if found is None:
        return None
    function = found[f"milldam_{name}"]
    kinds = [None if kind is int else np.dtype(kind) for kind in types]
    pairs: list[list[Any]] = [[_INT] if kind is None else [ctypes.c_void_p, _INT] for kind in kinds]
    function.argtypes = [one for pair in pairs for one in pair]
    function.restype = _INT

    def call(*arguments: npt.NDArray[Any] | int) -> int:
        numbers = [number for one, kind in zip(arguments, kinds, strict=True) for number in _numbers(one, kind)]
        result: int = function(*numbers)
        if result == _REFUSED:
            raise ValueError(f"milldam_{name} in C refuses arrays that are too small for each other: {numbers}")
        return result

    return call


def required(name: str, *types: type) -> Kernel:
    """The same of what has no twin."""
    found = kernel(name, *types)
    if found is None:
        problem = "milldam's library in C is missing, and evaluation sets can't be looked for without it. Install a C"
        raise ResourceError(f"{problem} compiler (or `pip install ziglang`), then install milldam again.")
    return found


def _numbers(argument: npt.NDArray[Any] | int, kind: np.dtype[Any] | None) -> tuple[int, ...]:
    """A number, or where an array is and how many entries it has."""
    if kind is None:
        return (int(argument),)
    assert isinstance(argument, np.ndarray)
    if argument.dtype != kind or not argument.flags.c_contiguous:
        raise TypeError(f"a kernel wants {kind} end to end, not {argument.dtype}")
    return argument.ctypes.data, argument.size
