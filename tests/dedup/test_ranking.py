"""Ranks are the order of (preference, place in the plan), of any numbers, in any memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.dedup import candidates
from milldam.dedup.candidates import NearWork
from milldam.dedup.drops import EXACT, UNKNOWN, DropWriter, drop_file_name, place_of
from milldam.dedup.minhash import signature_file_name
from milldam.dedup.ranking import preference_file_name, rank
from milldam.rules import NearRules, PreferredField

RULES = NearRules(bands=1, rows=1, prefer=PreferredField(field="score"))
NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1), st.just(2**64 - 1))


def work_in(folder: Path, units: list[list[int]], exempt_below: int) -> NearWork:
    for unit, preferences in enumerate(units):
        (folder / signature_file_name(unit)).write_bytes(bytes(len(preferences)))
        np.array(preferences, np.uint64).tofile(folder / preference_file_name(unit))
    return NearWork(folder=folder, rules=RULES, exempt_below=exempt_below, memory_bytes=1000)


def ranked(folder: Path) -> tuple[list[int], list[int]]:
    names = candidates.POSITIONS, candidates.RANKS
    positions, ranks = (
        np.fromfile(folder / name, np.int64).tolist() if (folder / name).exists() else [] for name in names
    )
    return positions, ranks


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(NUMBERS, max_size=40), min_size=1, max_size=4), st.integers(0, 2), st.integers(1, 50))
def test_ranks_are_the_sorted_order(
    tmp_path_factory: Any, units: list[list[int]], exempt_below: int, block: int
) -> None:
    """All 64 bits count; what is never dropped comes first, as in the plan."""
    folder = tmp_path_factory.mktemp("ranks")
    exempt = sum(map(len, units[:exempt_below]))
    numbers = [number for unit in units for number in unit]
    with_blocks = NearWork.share
    try:
        NearWork.share = lambda work, _: block  # type: ignore[method-assign]
        rank(work_in(folder, units, exempt_below))
    finally:
        NearWork.share = with_blocks  # type: ignore[method-assign]
    later = sorted(range(exempt, len(numbers)), key=lambda position: (numbers[position], position))
    positions, ranks = ranked(folder)
    assert positions == [*range(exempt), *later]
    assert [positions[rank] for rank in ranks] == list(range(len(numbers)))


def test_a_text_counts_with_the_best_of_its_copies(tmp_path: Path) -> None:
    """What was dropped as equal to one that stays lends it its number; what another run has seen lends nothing."""
    work = work_in(tmp_path, [[5, 4], [9, 6, 1, 0]], exempt_below=0)
    with DropWriter(tmp_path / drop_file_name(EXACT, 0)) as writer:
        places = place_of(np.array([0, 1, 1]), np.array([1, 2, 3]))
        writer.add(places, np.array([-1, int(place_of(1, 0)), UNKNOWN]))
        writer.commit()
    rank(work)
    # Documents: 5 and 4, then 9 with a copy of 1, then 6, then the copy, then one whose original is not known.
    assert ranked(tmp_path)[0] == [5, 2, 4, 1, 0, 3]
