"""Arrays in one file that is mapped where it is read: processes share its pages, and none holds a copy.

A line of JSON that says what follows, then the arrays, each at a multiple of 64 bytes. The file appears whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.files import NewFile

_ALIGNED = 64
Array = npt.NDArray[Any]


def write_arrays(path: Path, arrays: dict[str, Array], *, durable: bool, **facts: Any) -> dict[str, Any]:
    """Size and hash of the file. `durable`: nobody compares them before it is read."""
    told = {name: [one.dtype.str, len(one)] for name, one in arrays.items()}
    head = json.dumps({"facts": facts, "arrays": told}).encode()
    head += b" " * (-(len(head) + 1) % _ALIGNED) + b"\n"
    with NewFile(path) as new:
        new.write(head)
        for one in arrays.values():
            new.write(np.ascontiguousarray(one).view(np.uint8).data)
            new.write(bytes(-new.size % _ALIGNED))
        return new.commit() if durable else new.put_in_place()


def map_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays, read when they are looked at, and the facts."""
    try:
        with path.open("rb") as file:
            head = file.readline()
        told = json.loads(head)
        flat = np.memmap(path, np.uint8, "r")
        arrays, at = {}, len(head)
        for name, (dtype, count) in told["arrays"].items():
            size = np.dtype(dtype).itemsize * count
            arrays[name] = np.asarray(flat[at : at + size]).view(dtype)
            at += size + -size % _ALIGNED
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{path}: can't be read ({error}). Run the same command again to rebuild it.") from None
    return arrays, told["facts"]
