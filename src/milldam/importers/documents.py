"""Blocks of a piece -> documents: the source's own rows, or one stream that is cut behind, or before, each of an id.

The id stays with the document that it ends or begins. Where a resumed import goes on is said in what was taken of the
piece: rows, or tokens of a stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from milldam.importers.pieces import Piece, ReadRules
from milldam.stores.tokens.writer import Tokens

_READERS = {"npy": "flat", "nanogpt": "flat", "megatron": "flat", "hf": "columns", "parquet": "columns"}


def read_piece(piece: Piece, rules: ReadRules) -> Iterator[Tokens]:
    """All tokens of a piece in blocks, as its rows have them."""
    module: Any = importlib.import_module(f"milldam.importers.{_READERS.get(piece.kind, 'samples')}")
    yield from module.read(piece, rules)


@dataclass(frozen=True, slots=True)
class Border:
    """Where a stream is cut."""

    id: int
    begins: bool = False
    """Before the id, not behind it."""


def documents_of(piece: Piece, rules: ReadRules, border: Border | None, taken: int) -> Iterator[Tokens]:
    """The documents of a piece without those that were taken; those of a stream go on in the next piece."""
    blocks = read_piece(piece, rules)
    yield from _rows_behind(blocks, taken) if border is None else _cut(_tokens_behind(blocks, taken), border)


def _rows_behind(blocks: Iterator[Tokens], taken: int) -> Iterator[Tokens]:
    for tokens in blocks:
        closed = len(tokens.lengths) - tokens.open
        if taken > closed:
            taken -= closed
            continue
        if taken:
            begin = int(tokens.lengths[:taken].sum())
            tokens = Tokens(tokens.flat[begin:], tokens.lengths[taken:], tokens.open)
            taken = 0
        if len(tokens.lengths):
            yield tokens


def _tokens_behind(blocks: Iterator[Tokens], taken: int) -> Iterator[Tokens]:
    for tokens in blocks:
        dropped = min(taken, len(tokens.flat))
        taken -= dropped
        if dropped < len(tokens.flat):
            yield Tokens(tokens.flat[dropped:], np.array([len(tokens.flat) - dropped]))


def _cut(blocks: Iterator[Tokens], border: Border) -> Iterator[Tokens]:
    """A document that is open is ended by what comes next, even when that begins with a border: by nothing, then."""
    for tokens in blocks:
        ends = np.flatnonzero(tokens.flat == border.id) + (not border.begins)
        open_end = not len(ends) or ends[-1] < len(tokens.flat)
        edges = np.concatenate(([0], ends, [len(tokens.flat)] if open_end else []))
        yield Tokens(tokens.flat, np.diff(edges).astype(np.int64), open=bool(open_end))
