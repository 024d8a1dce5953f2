"""JSON arrays, and JSON over several lines, are read as JSON lines are: streamed, item by item."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, plan, read, small_blocks

from milldam.sources.records import as_json_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],:\n é') | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\]}', max_size=3), inner, max_size=4),
)
LAYOUTS = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": 0, "ensure_ascii": False}])


def lines_of(text: str, size: int = 1 << 20) -> list[Any]:
    data = text.encode()
    blocks = (data[start : start + size] for start in range(0, len(data), size))
    return [json.loads(line) for line in b"".join(as_json_lines(blocks, 1 << 20)).split(b"\n") if line.strip()]


# ---- well formed ----


@given(items=st.lists(VALUES, min_size=1, max_size=6), layout=LAYOUTS, size=st.integers(1, 60))
def test_the_items_of_an_array_come_a_line_each(items: list[Any], layout: dict[str, Any], size: int) -> None:
    """Whatever they hold, however they are laid out and wherever blocks are cut."""
    assert lines_of(json.dumps(items, **layout), size) == items


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_gives_the_documents_of_the_same_json_lines(tmp_path: Path, name: str) -> None:
    """One unit, however large: only JSON lines can be cut."""
    texts = [f'{number} "quoted" \\ and\nlines é' for number in range(300)]
    data = json.dumps([{"id": number, "text": text} for number, text in enumerate(texts)], indent=2).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with small_blocks(1000):
        result = read(tmp_path / name, shard_size=500)
    assert (result.texts, result.rejects, result.units) == (texts, [], 1)


def test_json_lines_named_json_are_cut(tmp_path: Path) -> None:
    """As those named .jsonl are."""
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(500)))
    result = read(path, shard_size=1000)
    assert result.units > 5
    assert result.texts == [str(number) for number in range(500)]
    assert {slice.format for unit in plan(path, TEXT, 1000) for slice in unit.slices} == {"jsonl"}


# ---- broken ----


@pytest.mark.parametrize(
    "broken", ['{"text": tru}', '{"text": "he said "hi" to me"}', "nothing", '{"x": {"y": 1}', '{"text']
)
def test_what_follows_a_broken_item_is_set_aside_with_it(tmp_path: Path, broken: str) -> None:
    """It can't be told where its item ends: the file is damaged from there on."""
    good = [json.dumps({"text": text}) for text in "abc"]
    (tmp_path / "a.json").write_text("[\n" + ",\n".join([*good, broken, *good]) + "\n]\n")
    result = read(tmp_path / "a.json")
    assert result.texts == list("abc")
    assert [(reject.reason, reject.damaged) for reject in result.rejects] == [("truncated", True)]


def test_a_line_end_in_a_string_costs_its_item_alone(tmp_path: Path) -> None:
    """With its number."""
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "a\nb"}, {"text": "c"}]')
    result = read(tmp_path / "a.json")
    assert result.texts == ["a", "c"]
    assert [(reject.reason, reject.row, reject.line) for reject in result.rejects] == [("bad_json", 1, None)]
