"""Dedup by a Bloom filter: nothing is missed, little is lost, memory is fixed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dedup.test_exact import (
    INDEXED,
    UNITS,
    drop_bytes,
    expected_drops,
    read_drops,
    set_small_groups,
    write_hashes,
    write_index_file,
    write_units,
)

from milldam.dedup import bloom
from milldam.dedup.bloom import BloomFilter, filter_bytes, resolve_bloom
from milldam.dedup.drops import UNKNOWN
from milldam.dedup.exact import Resolved
from milldam.dedup.fingerprints import Hashes, hash_file_name
from milldam.errors import ResourceError

MEMORY = 100 << 20


def resolve(folder: Path, rate: float = 1e-9, exempt_below: int = 0, index_files: tuple[Path, ...] = ()) -> Resolved:
    return resolve_bloom(
        folder, rate=rate, exempt_below=exempt_below, memory_bytes=MEMORY, index_files=list(index_files)
    )


def random_hashes(number: int, seed: int = 0) -> Hashes:
    return np.random.default_rng(seed).integers(0, 2**64, (number, 2), dtype=np.uint64)


@settings(max_examples=25)
@given(units=UNITS, exempt_below=st.integers(0, 2), indexed=INDEXED)
def test_drops_are_those_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[int]], exempt_below: int, indexed: list[set[int]]
) -> None:
    """With a filter that is large enough: the same documents as by exact dedup, the first in plan order kept."""
    folder = tmp_path_factory.mktemp("bloom")
    with pytest.MonkeyPatch.context() as patch:
        set_small_groups(patch)
        write_units(folder, units)
        index_files = tuple(write_index_file(folder / f"index-{k}.hashes", keys) for k, keys in enumerate(indexed))
        found = resolve(folder, exempt_below=exempt_below, index_files=index_files)
    expected = expected_drops(units, exempt_below, indexed)
    assert read_drops(folder) == dict.fromkeys(expected, (UNKNOWN, 0))
    assert (found.documents, found.dropped) == (sum(map(len, units)), len(expected))
    fresh = {key for keys in units for key in keys} - {key for keys in indexed for key in keys}
    assert found.distinct == len(fresh)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_fewer_than_the_stated_rate_are_lost(tmp_path: Path, rate: float) -> None:
    """Of new documents; and they are lost only by the filter's chance, not all at once."""
    documents = 100_000
    write_hashes(tmp_path / hash_file_name(0), random_hashes(documents))
    lost = resolve(tmp_path, rate).dropped
    assert rate * documents / 100 < lost < rate * documents


def test_a_full_filter_has_the_stated_rate() -> None:
    """When all documents are in, what was never added is known with that chance, give or take a fifth."""
    seen = BloomFilter(100_000, 0.01, MEMORY)
    hashes = random_hashes(100_000)
    for start in range(0, 100_000, 10_000):
        seen.add(hashes[start : start + 10_000])
    others = random_hashes(100_000, seed=1)
    known = sum(int(seen._look_up(others[start : start + 1000]).sum()) for start in range(0, 100_000, 1000))
    assert 800 < known < 1200
    assert seen._look_up(hashes).all()


@pytest.mark.parametrize("rate", [0.5, 1e-3])
def test_no_duplicate_is_missed_at_any_rate(tmp_path: Path, rate: float) -> None:
    """However small the filter, what was there before is dropped."""
    hashes = random_hashes(30_000)
    write_hashes(tmp_path / hash_file_name(0), np.concatenate([hashes, hashes[::-1]]))
    write_hashes(tmp_path / hash_file_name(1), hashes[::7])
    resolve(tmp_path, rate)
    found = read_drops(tmp_path)
    assert all((0, row) in found for row in range(30_000, 60_000))
    assert all((1, row) in found for row in range(len(hashes[::7])))


def test_hashes_with_a_half_in_common_are_different(tmp_path: Path) -> None:
    """Among documents that are looked up together both halves count."""
    hashes = np.array([[1, 2], [1, 4], [1, 2], [3, 2], [1, 4]], dtype=np.uint64)
    write_hashes(tmp_path / hash_file_name(0), hashes)
    resolve(tmp_path)
    assert sorted(read_drops(tmp_path)) == [(0, 2), (0, 4)]


def test_memory_does_not_change_the_result(tmp_path: Path) -> None:
    """More than enough is not used."""
    write_hashes(tmp_path / hash_file_name(0), random_hashes(50_000))
    found = []
    for memory_bytes in (MEMORY, 10 * MEMORY):
        resolve_bloom(tmp_path, rate=0.1, exempt_below=0, memory_bytes=memory_bytes)
        found.append(drop_bytes(tmp_path))
    assert found[0] == found[1]


@pytest.mark.parametrize("memory_bytes", range(1_000_000, 3_500_000, 100_000))
def test_a_filter_that_does_not_fit_says_which_rate_would(memory_bytes: int) -> None:
    """And that rate does fit, and is not much worse than it must be."""
    with pytest.raises(ResourceError, match=r"takes 3.6 MB; there are") as caught:
        BloomFilter(10**6, 1e-6, memory_bytes)
    (rate,) = re.findall(r"false_positive_rate: (\S+),", str(caught.value))
    assert 0.97 * memory_bytes < filter_bytes(10**6, float(rate)) <= memory_bytes


def test_where_no_sensible_rate_fits_none_is_named(tmp_path: Path) -> None:
    """A filter that drops one new document in two is no advice."""
    write_hashes(tmp_path / hash_file_name(0), random_hashes(1000))
    with pytest.raises(ResourceError) as caught:
        resolve_bloom(tmp_path, rate=1e-6, exempt_below=0, memory_bytes=bloom._FIXED_BYTES)
    assert "false_positive_rate" not in str(caught.value)
    assert "dedup.method: exact" in str(caught.value)


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    """No units, or a unit without documents, is no error."""
    assert resolve(tmp_path) == Resolved()
    assert resolve(write_units(tmp_path, [[]])) == Resolved()
