"""npy, nanoGPT, llm.c and Megatron files -> blocks of tokens.

A flat file is one document, in blocks of a million tokens; a pair of Megatron has documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from milldam.importers.pieces import Piece, ReadRules
from milldam.loader.foreign import open_foreign
from milldam.loader.reading import Reader, open_reader
from milldam.stores.tokens.blocks import cut_blocks, in_blocks, is_giant
from milldam.stores.tokens.format import Index
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.loader.stream import TokenStream


def read(piece: Piece, rules: ReadRules) -> Iterator[Tokens]:
    # What says its dtype itself is not asked for another one.
    file = open_foreign(piece.path, rules.dtype if piece.kind == "nanogpt" else None)
    stream = file.stream()
    reader = open_reader(stream, "pread")
    if piece.kind == "megatron":
        yield from _documents(stream, reader)
    else:
        yield from _pieces(reader, 0, file.tokens)


def _pieces(reader: Reader, start: int, count: int) -> Iterator[Tokens]:
    """One document, open until its last block."""
    for begin, end in in_blocks(start, count):
        length = np.array([end - begin])
        yield Tokens(reader.runs(np.array([begin]), length), length, open=end < start + count)


def _documents(stream: TokenStream, reader: Reader) -> Iterator[Tokens]:
    path = stream.files[0].index
    assert path is not None
    index = Index.map(path)
    position = 0
    for lengths in index.length_blocks():
        for begin, end in cut_blocks(lengths):
            some, count = lengths[begin:end], int(lengths[begin:end].sum())
            if is_giant(some):
                yield from _pieces(reader, position, count)
            else:
                flat = reader.runs(np.array([position]), np.array([count])) if count else np.empty(0, stream.dtype)
                yield Tokens(flat, some)
            position += count
