"""Characters and lines, counted by the kernels as by Arrow and Python."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from milldam.sources.records import count_line_ends
from milldam.text.arrays import character_counts

TEXTS = st.lists(st.text(max_size=30) | st.text(st.sampled_from("aé你🙂\n"), min_size=200, max_size=800), max_size=6)


@given(texts=TEXTS, first=st.integers(0, 3))
def test_characters_are_counted_as_python_counts_them(texts: list[str], first: int) -> None:
    """Of slices too, and of none."""
    array = pa.array(texts, pa.large_string())[first:]
    assert character_counts(array).tolist() == [len(text) for text in texts[first:]]


@given(data=st.binary(max_size=50) | st.text(st.sampled_from("a\n"), max_size=2000).map(str.encode))
def test_line_ends_are_counted_as_python_counts_them(data: bytes) -> None:
    assert count_line_ends(data) == data.count(b"\n")
