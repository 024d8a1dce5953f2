"""Plain text becomes documents: per file, line, paragraph or stretch between separators, at any size of shard and
block.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import read, small_blocks

from milldam.sources.batch import TextRules

LINE, PARAGRAPH, SIGN = TextRules("line"), TextRules("paragraph"), TextRules(separator="<|>")
SHARDS = st.integers(1, 200)
BLOCKS = st.integers(12, 60)
WORDS = ("a", "bc ", "é", "你好", "🙂", " ", "\t", "x" * 20, " " * 20)


def texts(*more: str) -> st.SearchStrategy[str]:
    """Text of pieces that are likely to lie across an edge."""
    return st.lists(st.sampled_from([*WORDS, *more]), max_size=80).map("".join)


def written(folder: Path, content: str | bytes, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def no_blanks(documents: list[str]) -> list[str]:
    return [document for document in documents if document.strip()]


def naive_lines(text: str) -> list[str]:
    return no_blanks([line.removesuffix("\r") for line in text.split("\n")])


def naive_paragraphs(text: str) -> list[str]:
    """Stretches of lines that are not blank."""
    lines = [line for line in re.split(r"(?<=\n)", text) if line]
    groups = itertools.groupby(lines, key=lambda line: not line.strip(" \t\r\n"))
    return no_blanks(["".join(group).strip("\r\n") for blank, group in groups if not blank])


def naive_stretches(text: str) -> list[str]:
    return no_blanks(text.split("<|>"))


# ---- several documents in a file ----


@given(text=texts("\n", "\r\n", "\n\n"), shard_size=SHARDS, block=BLOCKS)
def test_lines_of_any_shards_are_the_lines_of_the_file(tmp_path: Path, text: str, shard_size: int, block: int) -> None:
    """Each line once, in order, without its end, whatever the sizes; blank lines are no documents."""
    check_against(naive_lines, tmp_path, text, LINE, shard_size, block)


@given(text=texts("<|>", "<", "|", ">", "\n"), shard_size=SHARDS, block=BLOCKS)
def test_stretches_of_any_shards_are_those_of_the_file(tmp_path: Path, text: str, shard_size: int, block: int) -> None:
    """Each stretch between separators once, in order, as it stands."""
    check_against(naive_stretches, tmp_path, text, SIGN, shard_size, block)


@given(
    text=texts("\n", "\r\n", "\n\n", "\n \n", "y" * 150),
    shard_size=SHARDS,
    block=st.integers(20, 600),
)
def test_paragraphs_of_any_shards_are_those_of_the_file(tmp_path: Path, text: str, shard_size: int, block: int) -> None:
    """Each stretch of lines between blank ones once, in order, without the line ends around it."""
    check_against(naive_paragraphs, tmp_path, text, PARAGRAPH, shard_size, block)


def check_against(
    naive: Callable[[str], list[str]],
    folder: Path,
    text: str,
    rules: TextRules,
    shard_size: int,
    block: int,
) -> None:
    path = written(folder, text)
    with small_blocks(block):
        result = read(path, rules, shard_size)
    assert result.texts == naive(text)
    assert result.rejects == []


# ---- what is no UTF-8 ----


def test_each_of_two_equal_bad_lines_is_rejected_with_its_own_place(tmp_path: Path) -> None:
    """A place is where the record is, not where its like is."""
    result = read(written(tmp_path, b"ok\nb\xff\nfine\nb\xff\n"), LINE)
    assert [reject.line for reject in result.rejects] == [2, 4]


# ---- a document per file ----


@given(sizes=st.lists(st.integers(0, 120), min_size=1, max_size=12), shard_size=st.integers(1, 300))
def test_files_are_documents_in_order_at_any_size(tmp_path: Path, sizes: list[int], shard_size: int) -> None:
    """Small ones are gathered, large ones flow in parts; the order is that of the names."""
    for old in tmp_path.iterdir():
        old.unlink()
    contents = [(f"{n}é🙂" * size)[:size] for n, size in enumerate(sizes)]
    for n, content in enumerate(contents):
        written(tmp_path, content, f"{n:03}.txt")
    with small_blocks(24):
        assert read(tmp_path, TextRules("file"), shard_size).texts == contents
