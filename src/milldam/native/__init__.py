"""Loops in C, for what numpy and Arrow can't run fast.

`kernel` gives a function of the library, which is compiled when milldam is installed, and in a source checkout again
when a C file has changed. A C function takes numpy arrays and counts, allocates nothing and keeps nothing; the
interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
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
def library() -> ctypes.CDLL:
    """The library of these C files, compiled now where it is missing or was made for another machine."""
    try:
        return ctypes.CDLL(str(build.library()))
    except OSError:
        if problem := build.build():
            raise ResourceError(f"milldam's loops in C can't be compiled. {build.ADVICE}\n{problem}") from None
        return ctypes.CDLL(str(build.library()))


def kernel(name: str, *types: type) -> Kernel:
    """The C function `milldam_<name>`, which gives a whole number.

    `types` are those of its arguments: `int`, or what an array holds. An array of something else is refused. C gets
    with each array the number of its entries, and refuses what it would read or write beyond them.
    """
    function = library()[f"milldam_{name}"]
    kinds = [None if kind is int else np.dtype(kind) for kind in types]
    pairs: list[list[Any]] = [[_INT] if kind is None else [ctypes.c_void_p, _INT] for kind in kinds]
    function.argtypes = [one for pair in pairs for one in pair]
    function.restype = _INT

    def call(*arguments: npt.NDArray[Any] | int) -> int:
        numbers: list[int] = []
        for one, kind in zip(arguments, kinds, strict=True):
            if not isinstance(one, np.ndarray):
                numbers.append(int(one))
            elif one.dtype != kind or not one.flags.c_contiguous:
                raise TypeError(f"a kernel wants {kind} end to end, not {one.dtype}")
            else:
                numbers += (one.ctypes.data, one.size)
        result: int = function(*numbers)
        if result == _REFUSED:
            raise ValueError(f"milldam_{name} in C refuses arrays that are too small for each other: {numbers}")
        return result

    return call
