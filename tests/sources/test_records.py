"""Bytes become blocks of whole records: each record in the slice where it begins, wherever slices and blocks are
cut.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import small_blocks

from milldam.sources.records import LAST, PART, WHOLE, BlankLine, Block, Boundary, record_blocks

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


def blocks_of(data: bytes, boundary: Boundary, ranges: list[tuple[int, int | None]]) -> Iterator[list[Block]]:
    for start, stop in ranges:
        yield list(record_blocks(io.BytesIO(data), None, boundary, start, stop))


SIZES = st.tuples(st.integers(9, 40), st.integers(9, 60))


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


@given(cut=cut_data("a", " ", "\n", "\n\n", "\r\n", "x" * 150), sizes=st.tuples(st.just(300), st.integers(300, 700)))
def test_paragraphs_come_once_in_order_from_any_slices(
    cut: tuple[bytes, list[tuple[int, int | None]]], sizes: tuple[int, int]
) -> None:
    """Several blank lines in a row, and lines of spaces, are where slices are aligned."""
    check_slices(*cut, PARAGRAPH, sizes)


def check_slices(data: bytes, ranges: list[tuple[int, int | None]], boundary: Boundary, sizes: tuple[int, int]) -> None:
    with small_blocks(*sizes):
        slices = list(blocks_of(data, boundary, ranges))
    assert b"".join(block.data for blocks in slices for block in blocks) == data
    position = 0
    for (start, stop), blocks in zip(ranges, slices, strict=True):
        for block in blocks:
            check_block(block, data, position, boundary)
            position += len(block.data)
        assert not blocks or blocks[0].origin >= start
        assert not blocks or stop is None or blocks[0].origin < stop


def check_block(block: Block, data: bytes, position: int, boundary: Boundary) -> None:
    assert block.line == 1 + data.count(b"\n", block.origin, position)
    after = position + len(block.data)
    if block.kind != PART and after < len(data):
        assert re.search(ENDS[boundary], data[:after]), "the block does not end where a record ends"


@given(lines=st.lists(st.integers(0, 50), max_size=12), sizes=SIZES)
def test_a_large_record_comes_in_parts_and_its_last_part_is_marked(lines: list[int], sizes: tuple[int, int]) -> None:
    """Whole records stay whole; parts are followed by parts until the last, which ends the record."""
    data = b"".join(b"x" * n + b"\n" for n in lines)
    with small_blocks(*sizes):
        kinds = [block.kind for block in record_blocks(io.BytesIO(data), None, LINE, 0, None)]
    inside = False
    for kind in kinds:
        assert (kind in (PART, LAST)) if inside else (kind in (PART, WHOLE))
        inside = kind == PART
    assert not inside
    assert PART in kinds or all(n <= sum(sizes) for n in lines)


def test_memory_is_bounded_for_a_record_of_any_size() -> None:
    """No block is larger than a giant and a block together."""
    data = b"x" * 5000 + b"\n" + b"y\n" * 500
    with small_blocks(32, 100):
        sizes = [len(block.data) for block in record_blocks(io.BytesIO(data), None, LINE, 0, None)]
    assert max(sizes) <= 132
    assert sum(sizes) == len(data)


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
