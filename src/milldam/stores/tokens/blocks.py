"""Rows and stretches of tokens in blocks of bounded size: what is held at a time of a store that is read or made."""

from __future__ import annotations

from collections.abc import Iterator

from milldam.stores.tokens.format import Int64s

BLOCK_TOKENS = 1 << 20


def in_blocks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the blocks of a stretch."""
    for at in range(start, start + count, BLOCK_TOKENS):
        yield at, min(at + BLOCK_TOKENS, start + count)


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


def is_giant(lengths: Int64s) -> bool:
    """Whether rows are one that is better read and written in pieces."""
    return len(lengths) == 1 and int(lengths[0]) > BLOCK_TOKENS
