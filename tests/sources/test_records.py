"""Bytes become blocks of whole records: each record in the slice where it begins, wherever slices and blocks are
cut.
"""

from __future__ import annotations

import io
import itertools
import re
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import small_blocks

from milldam.sources.records import BlankLine, Block, Boundary, record_blocks

LINE, SIGN, PARAGRAPH = Boundary(b"\n"), Boundary(b"<|>"), BlankLine()
ENDS = {LINE: rb"\n\Z", SIGN: rb"<\|>\Z", PARAGRAPH: rb"(?:\A|\n)[ \t\r]*\n\Z"}
"""What the bytes before the start of a record look like."""


def contents(*tokens: str) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(tokens), max_size=60).map(lambda parts: "".join(parts).encode())


def edges_of(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size - 1), max_size=6, unique=True).map(sorted) if size > 1 else st.just([])


@st.composite
def cut_data(draw: st.DrawFn, *tokens: str) -> tuple[bytes, list[tuple[int, int | None]]]:
    """Some bytes, and ranges that cover them."""
    data = draw(contents(*tokens))
    edges: list[int | None] = [0, *draw(edges_of(len(data))), None]
    return data, list(zip([edge or 0 for edge in edges[:-1]], edges[1:], strict=True))


def blocks_of(
    data: bytes, boundary: Boundary, ranges: list[tuple[int, int | None]], most: int = 1 << 20
) -> Iterator[list[Block]]:
    for start, stop in ranges:
        yield list(record_blocks(io.BytesIO(data), None, boundary, start, stop, most))


SIZES = st.tuples(st.integers(9, 40), st.integers(3, 60))


@given(cut=cut_data("a", "é", "bb", "\n", "\r\n"), sizes=SIZES)
def test_lines_come_once_in_order_from_any_slices(
    cut: tuple[bytes, list[tuple[int, int | None]]], sizes: tuple[int, int]
) -> None:
    """Joined, the blocks of all slices are the file; no slice begins inside a line."""
    check_slices(*cut, LINE, sizes)


@given(cut=cut_data("a", "<", "|", ">", "<|>", "\n"), sizes=SIZES)
def test_stretches_between_separators_come_once_in_order_from_any_slices(
    cut: tuple[bytes, list[tuple[int, int | None]]], sizes: tuple[int, int]
) -> None:
    """A separator may lie across the edge of a slice or of a block."""
    check_slices(*cut, SIGN, sizes)


@given(
    cut=cut_data("a", " ", "\n", "\n\n", "\r\n", "x" * 150), sizes=st.tuples(st.integers(9, 300), st.integers(3, 700))
)
def test_paragraphs_come_once_in_order_from_any_slices(
    cut: tuple[bytes, list[tuple[int, int | None]]], sizes: tuple[int, int]
) -> None:
    """Several blank lines in a row, and lines of spaces, are where slices are aligned."""
    check_slices(*cut, PARAGRAPH, sizes)


def check_slices(data: bytes, ranges: list[tuple[int, int | None]], boundary: Boundary, sizes: tuple[int, int]) -> None:
    """Sizes of a block, and of the largest record."""
    block_bytes, most = sizes
    with small_blocks(block_bytes):
        slices = list(blocks_of(data, boundary, ranges, most))
    position = 0
    for (start, stop), blocks in zip(ranges, slices, strict=True):
        for block in blocks:
            check_block(block, data, position, boundary, most)
            position += block.size
        assert not blocks or blocks[0].origin >= start
        assert not blocks or stop is None or blocks[0].origin < stop
    assert position == len(data)


def check_block(block: Block, data: bytes, position: int, boundary: Boundary, most: int) -> None:
    after = position + block.size
    here = data[position:after]
    assert block.line == 1 + data.count(b"\n", block.origin, position)
    assert block.line_ends == here.count(b"\n")
    assert after == len(data) or re.search(ENDS[boundary], data[:after]), "it does not end where a record ends"
    edges = [0, *boundary.ends(here), len(here)]
    largest = max(stop - start for start, stop in itertools.pairwise(edges))
    if block.too_large:
        assert largest == len(here) == block.too_large > most
        assert here.startswith(block.data) and block.data
    else:
        assert block.data == here
        assert largest <= most


@pytest.mark.parametrize("lines", [1, 500])
def test_memory_is_bounded_for_a_record_of_any_size(lines: int) -> None:
    """Of one that is too large no more is held than may be, and a block."""
    data = b"y\n" * lines + b"x" * 50_000_000 + b"\n" + b"y\n" * lines
    file = io.BytesIO(data)
    tracemalloc.start()
    try:
        found = [(block.size, block.too_large) for block in record_blocks(file, None, LINE, 0, None, 3_000_000)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [(2 * lines, 0), (50_000_001, 50_000_001), (2 * lines, 0)]
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("separator", "splittable"), [(b"\n", True), (b"<|>", True), (b"abab", False), (b"\n\n", False), (b"aXa", False)]
)
def test_a_separator_that_overlaps_itself_cannot_be_split_at_any_byte(separator: bytes, splittable: bool) -> None:
    """In "ababab" it depends on where one begins to read."""
    assert Boundary(separator).splittable is splittable


def test_a_slice_without_the_start_of_a_record_is_empty() -> None:
    """A line that covers a whole slice belongs to the slice where it begins."""
    data = b"short\n" + b"x" * 100 + b"\nend\n"
    slices = list(blocks_of(data, LINE, [(0, 3), (3, 50), (50, 80), (80, None)]))
    assert [[block.data for block in blocks] for blocks in slices] == [
        [b"short\n"],
        [b"x" * 100 + b"\n"],
        [],
        [b"end\n"],
    ]
