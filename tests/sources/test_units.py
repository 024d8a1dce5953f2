"""The plan: units of about a given size, made from the input alone, that together cover it once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import plan

from milldam.sources.batch import TextRules
from milldam.sources.listing import InputFile
from milldam.sources.units import (
    LARGEST_SHARD,
    SMALLEST_SHARD,
    Slice,
    Unit,
    by_bytes,
    by_parts,
    default_shard_size,
    plan_units,
    whole,
)

LINES = TextRules("line")


def a_file(size: int, name: str = "a.jsonl", format: str = "jsonl") -> InputFile:
    return InputFile(name, format, None, size, "")


@given(size=st.integers(0, 5000), shard_size=st.integers(1, 6000))
def test_byte_ranges_cover_a_file_once_without_gaps(size: int, shard_size: int) -> None:
    """Each range begins where the one before ends; the last goes to the end, however the file grows."""
    slices = list(by_bytes(a_file(size), shard_size))
    assert slices[0].start == 0
    assert slices[-1].stop is None
    assert [slice.stop for slice in slices[:-1]] == [slice.start for slice in slices[1:]]
    assert sum(slice.size for slice in slices) == size


@given(size=st.integers(0, 5000), shard_size=st.integers(1, 6000))
def test_byte_ranges_are_even_and_near_the_size_asked_for(size: int, shard_size: int) -> None:
    """No range is more than half as large again as the shard size, and none differs much from its neighbours."""
    sizes = [slice.size for slice in by_bytes(a_file(size), shard_size)]
    assert max(sizes) <= shard_size * 1.5 + 1
    assert max(sizes) - min(sizes) <= 1


@given(parts=st.lists(st.integers(1, 50), max_size=30), shard_size=st.integers(1, 200))
def test_numbered_parts_are_covered_once_in_order(parts: list[int], shard_size: int) -> None:
    """Row groups are gathered until they reach the shard size, none is lost and none comes twice."""
    slices = list(by_parts(a_file(sum(parts)), parts, shard_size))
    numbers = [n for slice in slices for n in range(slice.start, slice.stop or 0)]
    assert numbers == list(range(len(parts)))
    assert all(slice.size >= shard_size for slice in slices[:-1])
    assert sum(slice.size for slice in slices) == sum(parts)


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40), shard_size=st.integers(1, 400))
def test_units_hold_all_slices_in_order_and_stay_near_the_size(sizes: list[int], shard_size: int) -> None:
    """Small files are gathered, up to a quarter more than the shard size; a larger file stands alone."""
    files = [a_file(size, str(n)) for n, size in enumerate(sizes)]
    units = list(plan_units(files, shard_size, lambda file, _: [whole(file)]))
    assert [slice.path for unit in units for slice in unit.slices] == [file.path for file in files]
    assert [unit.index for unit in units] == list(range(len(units)))
    assert all(unit.size <= shard_size * 1.25 or len(unit.slices) == 1 for unit in units)


def test_formats_are_not_mixed_in_a_unit() -> None:
    """A unit is read by one reader."""
    files = [a_file(1, "a", "txt"), a_file(1, "b", "txt"), a_file(1, "c", "jsonl")]
    units = list(plan_units(files, 100, lambda file, _: [whole(file)]))
    assert [[slice.path for slice in unit.slices] for unit in units] == [["a", "b"], ["c"]]


def test_a_unit_holds_a_bounded_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty files must not become one unit that fills the memory."""
    monkeypatch.setattr("milldam.sources.units.FILES_PER_UNIT", 3)
    units = list(plan_units([a_file(0, str(n)) for n in range(7)], 100, lambda file, _: [whole(file)]))
    assert [len(unit.slices) for unit in units] == [3, 3, 1]


def test_a_unit_survives_the_way_through_json() -> None:
    """Plans are kept on disk between a run and its resumption."""
    unit = Unit(3, (Slice("a", "jsonl", None, 5, 9, 4), Slice("b", "csv", "gz", size=7)))
    assert Unit.from_json(json.loads(json.dumps(unit.as_json()))) == unit
    assert unit.size == 11


@pytest.mark.parametrize("original", [0, 2])
def test_a_unit_remembers_its_data_set_and_copy_through_json(original: int) -> None:
    """The first copy of the first data set says nothing of it, so that its plan is as it always was."""
    unit = Unit(3, (Slice("a", "jsonl", None),), dataset=2, copy=1, original=original)
    assert Unit.from_json(json.loads(json.dumps(unit.as_json()))) == unit
    assert set(Unit(0, ()).as_json()) == {"index", "slices"}


def test_the_units_of_a_data_set_are_numbered_from_where_the_last_one_ended() -> None:
    """And carry its number and copy, each of them."""
    files = [a_file(10, str(n)) for n in range(5)]
    units = list(plan_units(files, 16, lambda file, _: [whole(file)], first_index=7, dataset=2, copy=1))
    assert [unit.index for unit in units] == [7, 8, 9]
    assert {(unit.dataset, unit.copy) for unit in units} == {(2, 1)}


@pytest.mark.parametrize(
    ("total", "expected"),
    [(0, SMALLEST_SHARD), (10**9, 10**9 // 16), (10**13, LARGEST_SHARD)],
)
def test_the_default_shard_size_follows_the_input_within_limits(total: int, expected: int) -> None:
    """A sixteenth of the input, but no less than 16 MB and no more than 256 MB."""
    assert default_shard_size(total) == expected


@pytest.mark.parametrize(
    ("name", "rules", "units"),
    [
        ("a.txt", TextRules("file"), 1),
        ("a.txt", LINES, 10),
        ("a.txt", TextRules("paragraph"), 10),
        ("a.txt", TextRules(separator="<|>"), 10),
        ("a.txt", TextRules(separator="abab"), 1),
        ("a.jsonl", TextRules(text_column="text"), 10),
        ("a.jsonl.gz", TextRules(text_column="text"), 1),
    ],
)
def test_what_can_be_cut_is_cut(tmp_path: Path, name: str, rules: TextRules, units: int) -> None:
    """Not: a document per file, a compressed stream, or a separator that overlaps itself."""
    (tmp_path / name).write_bytes(b"x" * 1000)
    assert len(plan(tmp_path / name, rules, shard_size=100)) == units


def test_the_plan_is_the_same_every_time(tmp_path: Path) -> None:
    """Nothing but names and sizes goes into it."""
    for n in range(20):
        (tmp_path / f"{n}.txt").write_bytes(b"x\n" * (n * 30))
    assert plan(tmp_path, LINES, 200) == plan(tmp_path, LINES, 200)
