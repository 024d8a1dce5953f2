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
from milldam.store.format import Int64s
from milldam.store.writer import Tokens

BLOCK_TOKENS = 1 << 20

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


def in_blocks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the blocks of a stretch."""
    for at in range(start, start + count, BLOCK_TOKENS):
        yield at, min(at + BLOCK_TOKENS, start + count)


def is_giant(lengths: Int64s) -> bool:
    """Whether a block is one row that is better read in pieces."""
    return len(lengths) == 1 and int(lengths[0]) > BLOCK_TOKENS


def cut_blocks(lengths: Int64s, most_tokens: int | None = None) -> Iterator[tuple[int, int]]:
    """(first, stop) of rows of about a block's tokens, or of so many, or one row that has more."""
    most_tokens = most_tokens or BLOCK_TOKENS
    ends = lengths.cumsum()
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(ends.searchsorted(before + most_tokens, side="right")))
        yield first, stop
        first = stop


def no_tokens() -> Tokens:
    """Nothing, which ends an open document."""
    return Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))
