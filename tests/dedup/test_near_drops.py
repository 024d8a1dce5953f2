"""What to look at among near-duplicates: the least alike pairs, the largest clusters; and the sizes of all clusters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.dedup.minhash import SignatureFiles, signature_file_name
from milldam.dedup.near_drops import CLUSTERS, PAIRS, Cluster, NearDrops, NearSummary, Pair

Drop = tuple[int, int, int]
"""Position, position of what it is like, thousandths."""


def enter(folder: Path, drops: list[Drop], *, units: tuple[int, ...] = (0, 1), share: int = 7) -> NearDrops:
    """Drops among units of 500 documents each."""
    for unit in units:
        (folder / signature_file_name(unit)).write_bytes(bytes(500 * 4))
    found = NearDrops(folder, SignatureFiles(folder, 4), share, 2)
    at, of, similarity = np.array(drops, np.int64).reshape(-1, 3).T.copy()
    found.enter(at, of, similarity.astype(np.uint16))
    found.book(of)
    return found


def test_pairs_come_with_the_least_alike_first_and_clusters_with_the_largest(tmp_path: Path) -> None:
    """Equal ones in plan order; of a cluster the pair that is least alike."""
    drops = [(5, 1, 900), (7, 1, 810), (500, 1, 810), (504, 502, 805)]
    seen, found = enter(tmp_path, drops).write(tmp_path)
    first, second = Pair((1, 4), (1, 2), 0.805), Pair((0, 7), (0, 1), 0.81)
    assert found.pairs == (first, second, Pair((1, 0), (0, 1), 0.81), Pair((0, 5), (0, 1), 0.9))
    assert found.clusters == (Cluster((0, 1), 3, second), Cluster((1, 2), 1, first))
    assert seen == 0


def test_what_an_earlier_run_has_seen_is_counted_and_left_out(tmp_path: Path) -> None:
    """Its documents are not in this run's input."""
    seen, found = enter(tmp_path, [(501, 4, 800), (502, 500, 950)], units=(-1, 0)).write(tmp_path)
    assert [pair.dropped for pair in found.pairs] == [(0, 2)]
    assert [cluster.kept for cluster in found.clusters] == [(0, 0)]
    assert seen == 1


def test_nothing_dropped_is_nothing_to_show(tmp_path: Path) -> None:
    """Also where there is no document at all."""
    (tmp_path / "none").mkdir()
    for drops in (enter(tmp_path, []), enter(tmp_path / "none", [], units=())):
        assert drops.write(tmp_path) == (0, NearSummary())
        assert drops.sizes() == {}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(800, 1000)), min_size=1, max_size=300))
def test_pairs_and_clusters_are_those_of_a_plain_count(
    tmp_path_factory: pytest.TempPathFactory, likes: list[tuple[int, int]]
) -> None:
    """Whatever the order of the drops, and however small the ranges."""
    drops = [(100 + row, of, similarity) for row, (of, similarity) in enumerate(likes)]
    folder = tmp_path_factory.mktemp("drops")
    entered = enter(folder, drops)
    _, found = entered.write(folder)
    ordered = sorted(drops, key=lambda one: (one[2], one[0]))
    assert found.pairs == tuple(pair_of(one) for one in ordered[:PAIRS])
    counts = sorted(Counter(of for _, of, _ in drops).items(), key=lambda one: (-one[1], one[0]))
    worst = {of: next(one for one in ordered if one[1] == of) for of, _ in counts}
    assert found.clusters == tuple(Cluster((0, of), count, pair_of(worst[of])) for of, count in counts[:CLUSTERS])
    sizes = Counter(count + 1 if count < 63 else 1 << ((count + 1).bit_length() - 1) for _, count in counts)
    assert entered.sizes() == dict(sorted(sizes.items()))


def pair_of(drop: Drop) -> Pair:
    at, of, similarity = drop
    return Pair(divmod(at, 500), divmod(of, 500), similarity / 1000)
