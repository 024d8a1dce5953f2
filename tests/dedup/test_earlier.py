"""Unit by unit, in order: the drops that all units together have."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dedup.test_exact import UNITS, expected_drops, set_small_groups, write_units

from milldam.dedup import earlier
from milldam.dedup.earlier import EarlierHashes
from milldam.dedup.exact import ROW_BITS
from milldam.dedup.fingerprints import hash_file_name

Drops = dict[tuple[int, int], tuple[int, int]]


def place_of(position: int) -> tuple[int, int]:
    return position >> ROW_BITS, position & ((1 << ROW_BITS) - 1)


def decided(folder: Path, units: int) -> Drops:
    (folder / "runs").mkdir()
    hashes, found = EarlierHashes(folder / "runs"), Drops()
    for unit in range(units):
        position, first = hashes.decide(unit, folder / hash_file_name(unit))
        assert position.tolist() == sorted(position.tolist())
        found |= {place_of(one): place_of(other) for one, other in zip(position.tolist(), first.tolist(), strict=True)}
    return found


@settings(max_examples=30)
@given(units=UNITS, block=st.sampled_from([1, 3, 1 << 16]))
def test_drops_are_those_of_all_units_together(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[int]], block: int
) -> None:
    """For any size of blocks, over stretches of a file that are sorted on their own."""
    folder = tmp_path_factory.mktemp("units") / "run"
    with pytest.MonkeyPatch.context() as patch:
        set_small_groups(patch)
        patch.setattr(earlier, "_BLOCK_HASHES", block)
        write_units(folder, units)
        assert decided(folder, len(units)) == expected_drops(units)


def test_runs_stay_few(tmp_path: Path) -> None:
    """They are merged as they double, and what was merged is removed."""
    units = [list(range(10 * unit, 10 * unit + 12)) for unit in range(100)]
    write_units(tmp_path / "run", units)
    assert decided(tmp_path / "run", 100) == expected_drops(units)
    assert len(list((tmp_path / "run/runs").iterdir())) <= 8
