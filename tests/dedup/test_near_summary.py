"""What to look at among near-duplicates: the least alike pairs, the largest clusters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.dedup import near_summary
from milldam.dedup.drops import NEAR, DropWriter, drop_file_name
from milldam.dedup.near_summary import Cluster, Pair, summarize

Drop = tuple[int, int, int, int, int]
"""unit, row, of_unit, of_row, thousandths."""


def write_drops(folder: Path, drops: list[Drop]) -> list[Path]:
    path = folder / drop_file_name(NEAR, 0)
    with DropWriter(path) as writer:
        writer.add(*np.array(sorted(drops), np.int64).reshape(-1, 5).T)
        writer.commit()
    return [path]


def test_pairs_come_with_the_least_alike_first_and_clusters_with_the_largest(tmp_path: Path) -> None:
    """Equal ones in plan order; of a cluster the pair that is least alike."""
    files = write_drops(tmp_path, [(0, 5, 0, 1, 900), (0, 7, 0, 1, 810), (1, 0, 0, 1, 810), (1, 4, 1, 2, 805)])
    found = summarize(files, pairs=3, clusters=2)
    first, second = Pair((1, 4), (1, 2), 0.805), Pair((0, 7), (0, 1), 0.81)
    assert found.pairs == (first, second, Pair((1, 0), (0, 1), 0.81))
    assert found.clusters == (Cluster((0, 1), 3, second), Cluster((1, 2), 1, first))


def test_what_an_earlier_run_has_seen_is_left_out(tmp_path: Path) -> None:
    """Its documents are not in this run's input."""
    found = summarize(write_drops(tmp_path, [(0, 1, -1, 4, 800), (0, 2, 0, 0, 950)]))
    assert [pair.dropped for pair in found.pairs] == [(0, 2)]
    assert [cluster.kept for cluster in found.clusters] == [(0, 0)]


def test_nothing_dropped_is_nothing_to_show(tmp_path: Path) -> None:
    """No files, and a file without drops."""
    for files in ([], write_drops(tmp_path, [])):
        assert (summarize(files).pairs, summarize(files).clusters) == ((), ())


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(800, 1000)), min_size=1, max_size=300), st.integers(2, 20))
def test_clusters_above_a_share_are_counted_exactly_with_few_counters(
    tmp_path_factory: pytest.TempPathFactory, likes: list[tuple[int, int]], counters: int
) -> None:
    """Whatever the order of the drops, and however small the batches."""
    drops = [(1, row, 0, of, similarity) for row, (of, similarity) in enumerate(likes)]
    files = write_drops(tmp_path_factory.mktemp("drops"), drops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_summary, "_COUNTERS", counters)
        patch.setattr(near_summary, "_BATCH_ROWS", 7)
        found = {one.kept[1]: one for one in summarize(files, clusters=13).clusters}
    true = Counter(of for of, _ in likes)
    assert all(found[of].dropped == true[of] for of in found)
    assert found.keys() >= {of for of, count in true.items() if count > len(likes) / counters}
    for of, one in found.items():
        assert one.worst.similarity == min(similarity for other, similarity in likes if other == of) / 1000
