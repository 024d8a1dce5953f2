"""Drop files: written in order, read per unit, applied to batches of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.dedup.drops import (
    BLOOM,
    EXACT,
    NEAR,
    UNKNOWN,
    DropSet,
    DropWriter,
    Original,
    drop_file_name,
    drops_in,
    place_of,
    unit_and_row,
)
from milldam.text.arrays import Verdicts

Place = tuple[int, int]
Drops = dict[Place, Place]
"""(unit, row) of what is dropped -> that of what is kept; the row of what has none is 0."""


def write_drops(path: Path, found: Drops, batch: int = 1000) -> Path:
    """A drop file with what is dropped, some at a time."""
    rows = np.array([(*where, *of) for where, of in sorted(found.items())], dtype=np.int64).reshape(-1, 4)
    with DropWriter(path) as writer:
        for start in range(0, len(rows), batch):
            unit, row, of_unit, of_row = rows[start : start + batch].T
            writer.add(place_of(unit, row), place_of(of_unit, of_row))
        assert writer.dropped == len(found)
        writer.commit()
    return path


def read_drops(path: Path) -> dict[Place, tuple[Place, int]]:
    """What a drop file says, with similarities; in its order."""
    found = {}
    for drops in drops_in(path):
        for place, of, similarity in drops.tolist():
            unit, row = unit_and_row(of) if of >= 0 else (of, 0)
            found[tuple(unit_and_row(place))] = (unit, row), similarity
    assert list(found) == sorted(found)
    return found


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
@given(exact=DROPS, near=DROPS, batch=st.integers(1, 40))
def test_every_dropped_document_has_its_reason(
    tmp_path_factory: pytest.TempPathFactory, exact: Drops, near: Drops, batch: int
) -> None:
    """For any unit and batch; exact comes before near. A unit without drops has none."""
    folder = tmp_path_factory.mktemp("drops")
    write_drops(folder / drop_file_name(NEAR, 0), near, batch)
    write_drops(folder / drop_file_name(EXACT, 0), {at: of for at, of in exact.items() if at[1] % 2}, batch)
    write_drops(folder / drop_file_name(EXACT, 1), {at: of for at, of in exact.items() if not at[1] % 2})
    for unit in range(5):
        drop_set = DropSet(folder, unit)
        expected = [reason_of((unit, row), exact, near) for row in range(35)]
        assert reasons(drop_set, 35, batch) == expected
        originals = [drop_set.of(row) for row in range(35)]
        assert [one.reason if one else None for one in originals] == expected


def reason_of(at: Place, exact: Drops, near: Drops) -> str | None:
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
    drop_set = DropSet(tmp_path, 2)
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
    DropSet(tmp_path, 0).apply(0, verdicts)
    assert [verdicts.reason(k) for k in range(2)] == ["duplicate", "too_short"]


def test_drops_out_of_order_are_refused(tmp_path: Path) -> None:
    """Within a call and between calls; a document can be dropped once. What is given up leaves nothing."""
    for later in ([1, 0], [0, 0], [3, 3]):
        with pytest.raises(ValueError, match="in the order"), DropWriter(tmp_path / "d.bin") as writer:
            writer.add(np.array([1, 2]), np.array([0, 0]))
            writer.add(np.array(later), np.array([0, 0]))
    assert list(tmp_path.iterdir()) == []
