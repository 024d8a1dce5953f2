"""The plan: units of about a given size, made from the input alone, that together cover it once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.source_reading import plan

from milldam.sources.batch import TextRules
from milldam.sources.reading import slice_file
from milldam.sources.units import InputFile, Slice, Unit, plan_units, whole

LINES = TextRules("line")


def by_bytes(file: InputFile, shard_size: int) -> list[Slice]:
    return [replace(slice, state="") for slice in slice_file(file, shard_size, LINES)]


def a_file(size: int, name: str = "a.jsonl", format: str = "jsonl") -> InputFile:
    return InputFile(name, format, None, size, "")


@given(size=st.integers(0, 5000), shard_size=st.integers(4, 6000), more=st.integers(0, 9000))
def test_byte_ranges_keep_their_places_when_a_file_grows(size: int, shard_size: int, more: int) -> None:
    """They begin at multiples of the shard size; the last one, which changes, is no sliver."""
    slices, grown = list(by_bytes(a_file(size), shard_size)), list(by_bytes(a_file(size + more), shard_size))
    assert [slice.size for slice in slices[:-1]] == [shard_size] * (len(slices) - 1)
    assert shard_size // 4 <= slices[-1].size <= shard_size * 1.25 or len(slices) == 1
    assert grown[: len(slices) - 1] == slices[:-1]


def units_of(files: Iterable[InputFile], shard_size: int) -> list[Unit]:
    return list(plan_units(files, shard_size, lambda file, _: [whole(file)]))


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40), shard_size=st.integers(1, 400))
def test_units_hold_all_slices_in_order_and_stay_near_the_size(sizes: list[int], shard_size: int) -> None:
    """Small files are gathered, up to a quarter more than the shard size; one of a quarter stands alone."""
    files = [a_file(size, str(n)) for n, size in enumerate(sizes)]
    units = units_of(files, shard_size)
    assert [slice.path for unit in units for slice in unit.slices] == [file.path for file in files]
    assert [unit.index for unit in units] == list(range(len(units)))
    assert all(unit.size <= shard_size * 1.25 or len(unit.slices) == 1 for unit in units)
    assert all(len(unit.slices) == 1 for unit in units if any(4 * slice.size >= shard_size for slice in unit.slices))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    largest=st.sampled_from([20, 200, 900]),
    change=st.sampled_from(["add", "remove", "edit", "grow"]),
    folders=st.sampled_from(["data/{:05d}.txt", "{:03d}/x/text.txt"]),
)
def test_one_changed_file_changes_few_units(seed: int, largest: int, change: str, folders: str) -> None:
    """Among a thousand files, one that is added, removed or edited moves the ends near it alone."""
    random_ = random.Random(seed)
    sizes = {folders.format(k): random_.randint(1, largest) for k in range(0, 2000, 2)}
    changed, name = dict(sizes), random_.choice(list(sizes))
    if change == "add":
        changed = dict(sorted({**sizes, folders.format(random_.randrange(1000) * 2 + 1): 30}.items()))
    elif change == "remove":
        del changed[name]
    else:
        changed[name] += 1 if change == "edit" else 3000

    def found(sizes: dict[str, int]) -> set[tuple[Slice, ...]]:
        files = [a_file(size, name) for name, size in sizes.items()]
        return {unit.slices for unit in plan_units(files, 1000, by_bytes)}

    before, after = found(dict(sorted(sizes.items()))), found(dict(sorted(changed.items())))
    assert len(before) >= 15
    assert len(after - before) <= 8
    assert len(before - after) <= 8


def test_a_unit_holds_a_bounded_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty files must not become one unit that fills the memory."""
    monkeypatch.setattr("milldam.sources.units.FILES_PER_UNIT", 3)
    units = list(plan_units([a_file(0, str(n)) for n in range(7)], 100, lambda file, _: [whole(file)]))
    assert max(len(unit.slices) for unit in units) <= 3
    assert sum(len(unit.slices) for unit in units) == 7


@pytest.mark.parametrize("original", [0, 2])
def test_a_unit_remembers_its_data_set_and_copy_through_json(original: int) -> None:
    """The first copy of the first dataset says nothing of it, so that its plan is as it always was."""
    unit = Unit(3, (Slice("a", "jsonl", None),), dataset=2, copy=1, original=original)
    assert Unit.from_json(json.loads(json.dumps(unit.as_json()))) == unit
    assert set(Unit(0, ()).as_json()) == {"index", "slices"}


@pytest.mark.parametrize(
    ("name", "rules", "units"),
    [
        ("a.txt", TextRules("file"), 1),
        ("a.txt", LINES, 10),
        ("a.txt", TextRules("paragraph"), 10),
        ("a.txt", TextRules(separator="<|>"), 10),
        ("a.jsonl", TextRules(text_column="text"), 10),
        ("a.jsonl.gz", TextRules(text_column="text"), 1),
    ],
)
def test_what_can_be_cut_is_cut(tmp_path: Path, name: str, rules: TextRules, units: int) -> None:
    """Not: a document per file, or a compressed stream."""
    (tmp_path / name).write_bytes(b"x" * 1000)
    assert len(plan(tmp_path / name, rules, shard_size=100)) == units
