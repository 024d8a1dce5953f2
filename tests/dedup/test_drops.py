"""Drop files: written in order, read per unit, applied to batches of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.dedup import drops
from milldam.dedup.drops import BLOOM, EXACT, NEAR, UNKNOWN, DropSet, DropWriter, Original, drop_file_name
from milldam.text.arrays import Verdicts

Drops = dict[tuple[int, int], tuple[int, int]]


def write_drops(path: Path, found: Drops, batch: int = 1000) -> Path:
    """A drop file with what is dropped, some at a time."""
    rows = np.array([(*where, *of) for where, of in sorted(found.items())], dtype=np.int64).reshape(-1, 4)
    with DropWriter(path) as writer:
        for start in range(0, len(rows), batch):
            writer.add(*rows[start : start + batch].T)
        assert writer.dropped == len(found)
        writer.commit()
    return path


def reasons(drop_set: DropSet, documents: int, batch: int) -> list[str | None]:
    """The reason for each document of a unit, asked for in batches."""
    found: list[str | None] = []
    for start in range(0, documents, batch):
        verdicts = Verdicts(min(batch, documents - start))
        drop_set.apply(start, verdicts)
        found += [verdicts.reason(k) for k in range(len(verdicts.codes))]
    return found


DROPS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 30)),
    st.tuples(st.sampled_from([0, 1, -1, -2, UNKNOWN]), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=30)
@given(exact=DROPS, near=DROPS, batch=st.integers(1, 40), groups=st.integers(1, 8))
def test_every_dropped_document_has_its_reason(
    tmp_path_factory: pytest.TempPathFactory, exact: Drops, near: Drops, batch: int, groups: int
) -> None:
    """For any unit, batch and row group size; exact comes before near."""
    folder = tmp_path_factory.mktemp("drops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drops, "_GROUP_ROWS", groups)
        write_drops(folder / drop_file_name(NEAR, 0), near)
        write_drops(folder / drop_file_name(EXACT, 0), {at: of for at, of in exact.items() if at[1] % 2})
        write_drops(folder / drop_file_name(EXACT, 1), {at: of for at, of in exact.items() if not at[1] % 2})
    for unit in range(5):
        drop_set = DropSet.load(folder, unit)
        expected = [reason_of((unit, row), exact, near) for row in range(35)]
        assert reasons(drop_set, 35, batch) == expected
        originals = [drop_set.of(row) for row in range(35)]
        assert [one.reason if one else None for one in originals] == expected


def reason_of(at: tuple[int, int], exact: Drops, near: Drops) -> str | None:
    for found, name in ((exact, "duplicate"), (near, "near_duplicate")):
        if at in found:
            of_unit = found[at][0]
            return "seen_before" if of_unit < 0 and of_unit != UNKNOWN else name
    return None


def test_it_says_what_a_document_duplicates(tmp_path: Path) -> None:
    """Another document, an earlier run, or nothing where that is not known."""
    write_drops(tmp_path / drop_file_name(EXACT, 0), {(2, 1): (0, 7), (2, 2): (-3, 0)})
    write_drops(tmp_path / drop_file_name(BLOOM, 0), {(2, 3): (UNKNOWN, 0)})
    write_drops(tmp_path / drop_file_name(NEAR, 0), {(2, 4): (1, 1 << 39)})
    drop_set = DropSet.load(tmp_path, 2)
    assert drop_set.of(0) is None
    assert drop_set.of(1) == Original("duplicate", 0, 7)
    assert drop_set.of(2) == Original("seen_before", indexed_run=2)
    assert drop_set.of(3) == Original("duplicate")
    assert drop_set.of(4) == Original("near_duplicate", 1, 1 << 39)


def test_an_earlier_reason_stays(tmp_path: Path) -> None:
    """What was dropped before dedup keeps its reason."""
    write_drops(tmp_path / drop_file_name(EXACT, 0), {(0, 0): (0, 0), (0, 1): (0, 0)})
    verdicts = Verdicts(2)
    verdicts.drop_one(1, "too_short")
    DropSet.load(tmp_path, 0).apply(0, verdicts)
    assert [verdicts.reason(k) for k in range(2)] == ["duplicate", "too_short"]


def test_without_drop_files_nothing_is_dropped(tmp_path: Path) -> None:
    """An empty folder is an empty drop set."""
    assert reasons(DropSet.load(tmp_path, 0), 5, 2) == [None] * 5


def test_drops_out_of_order_are_refused(tmp_path: Path) -> None:
    """Within a call and between calls; a document can be dropped once."""
    rows = np.array([1, 2])
    for unit in ([1, 0], [0, 0], [3, 3]):
        with pytest.raises(ValueError, match="in the order"), DropWriter(tmp_path / "d.parquet") as writer:
            writer.add(np.array([0, 0]), rows, rows, rows)
            writer.add(np.array(unit), rows[::-1], rows, rows)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_of_a_drop_file_do_not_depend_on_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One drop at a time or all at once."""
    monkeypatch.setattr(drops, "_GROUP_ROWS", 4)
    found = {(unit, row): (0, 0) for unit in range(1, 4) for row in range(10)}
    files = [write_drops(tmp_path / f"{batch}.parquet", found, batch) for batch in (1, 4, 7, 100)]
    assert len({path.read_bytes() for path in files}) == 1
    assert pq.read_metadata(files[0]).num_row_groups == 8


@pytest.mark.parametrize("size", [7, 10, 64, 1000])
def test_row_groups_that_units_share_are_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The groups at both ends of a unit have rows of its neighbours, with any row numbers."""
    monkeypatch.setattr(drops, "_GROUP_ROWS", size)
    found = {(unit, row): (0, 0) for unit in range(1, 5) for row in range(100)}
    write_drops(tmp_path / drop_file_name(EXACT, 0), found)
    read: list[int] = []
    inner = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda file, k: (read.append(k), inner(file, k))[1])
    assert reasons(DropSet.load(tmp_path, 2), 100, 3) == ["duplicate"] * 100
    # Each once, and the two at the ends once more.
    assert len(read) <= len(set(read)) + 2


def test_only_the_row_groups_of_a_unit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through a unit in order reads each of its row groups once, and no other."""
    monkeypatch.setattr(drops, "_GROUP_ROWS", 10)
    write_drops(tmp_path / drop_file_name(EXACT, 0), {(unit, row): (0, 0) for unit in range(1, 5) for row in range(50)})
    read: list[int] = []
    inner = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda file, k: (read.append(k), inner(file, k))[1])
    assert reasons(DropSet.load(tmp_path, 2), 50, 3) == ["duplicate"] * 50
    assert sorted(set(read)) == [5, 6, 7, 8, 9]
    # A batch may end in one group and the next begin there.
    assert len(read) == 5
