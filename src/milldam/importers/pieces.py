"""A file to read: the least that is read in order, and where a resumed import begins again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import InputError
from milldam.input_files import version_of
from milldam.stores.tokens.writer import Tokens

TokenArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: str
    """Which module reads it."""
    path: Path
    split: str | None
    """None: the source has no splits."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What an index beside it says of it."""


@dataclass(frozen=True, slots=True)
class ReadRules:
    column: str | None
    dtype: str | None
    scratch: Path
    """A folder for what has to be decompressed."""


@dataclass(frozen=True, slots=True)
class PieceFile:
    """A piece as the run folder lists it."""

    path: str
    size: int
    version: str


def listed(piece: Piece) -> Iterator[PieceFile]:
    """The files that a piece is read from, as they are now."""
    for path in (piece.path, piece.path.with_suffix(".idx")) if piece.kind == "megatron" else (piece.path,):
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}).") from None
        yield PieceFile(str(path), status.st_size, version_of(status))


def require_integers(dtype: np.dtype[Any], path: Path, what: str) -> np.dtype[Any]:
    if dtype.kind not in "iu":
        raise InputError(f"{path}: {what} holds {dtype}; tokens are integers.")
    return dtype


def no_tokens() -> Tokens:
    """Nothing, which ends an open document."""
    return Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))
