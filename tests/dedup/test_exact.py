"""Hashes of documents, and the exact duplicates that they give: the same as a Python dict's, in any memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dedup.test_drops import read_drops as read_drop_file
from tests.kit.jobs import wait_until

from milldam.dedup import drops, exact, fingerprints
from milldam.dedup.bloom import resolve_bloom
from milldam.dedup.exact import Resolved, resolve_exact
from milldam.dedup.fingerprints import (
    FingerprintWriter,
    Hashes,
    fingerprint,
    hash_file_name,
    partition_count,
    stretches,
)

Drops = dict[tuple[int, int], tuple[int, int]]
"""(unit, row) -> (of_unit, of_row)."""


# ---- hashes ----


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def as_words(text: str) -> str:
    """What `normalize` leaves of a text, said in Python."""
    lower = "".join(one.lower() if len(one.lower()) == 1 else one for one in text)
    return "".join(one for one in lower if unicodedata.category(one)[0] in "LNM")


SOME_TEXT = st.text(st.sampled_from("aB1 .,!éÉ“—\n日ßÄќक्षि🙂"), max_size=12)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6), st.integers(0, 6))
def test_a_hash_is_the_xxh3_of_the_text(texts: list[str], start: int) -> None:
    """High and low half of the 128 bits, for slices of an array too."""
    hashes = fingerprint(array(texts)[start:], normalize=False)
    expected = [xxhash.xxh3_128_intdigest(text.encode()) for text in texts[start:]]
    assert [(hi << 64) | lo for hi, lo in hashes.tolist()] == expected


@given(st.lists(SOME_TEXT, min_size=2, max_size=8))
def test_normalized_hashes_compare_letters_digits_and_marks(texts: list[str]) -> None:
    """Equal where the words are; texts without any are equal only where they are the same."""
    hashes = [tuple(one) for one in fingerprint(array(texts), normalize=True).tolist()]
    for one, one_hash in zip(texts, hashes, strict=True):
        for other, other_hash in zip(texts, hashes, strict=True):
            same = as_words(one) == as_words(other) if as_words(one) or as_words(other) else one == other
            assert (one_hash == other_hash) == same


def test_normalized_hashes_keep_vowel_signs() -> None:
    """In many scripts a vowel is a mark: without it other words would be equal."""
    hashes = fingerprint(array(["कम", "काम", "Straße, 1", "straße 1"]), normalize=True)
    assert (hashes[0] != hashes[1]).any()
    assert (hashes[2] == hashes[3]).all()


# ---- hash files ----


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few documents have as many parts as large ones."""
    set_small_groups(monkeypatch)


def set_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "FLUSH_ROWS", 8)
    monkeypatch.setattr("milldam.dedup.bloom._STRETCH", 3)
    monkeypatch.setattr(exact, "_AT_ONCE", 5)
    monkeypatch.setattr(exact, "_READ_AT_ONCE", 3)
    monkeypatch.setattr(exact, "FEW_HASHES", 20)


def hashes_of(keys: list[int]) -> Hashes:
    """A hash for each key; the same one for the same key."""
    return fingerprint(array([str(key) for key in keys]), normalize=False)


def write_hashes(path: Path, hashes: Hashes, batch: int = 1000) -> None:
    with FingerprintWriter(path) as writer:
        for start in range(0, len(hashes), batch):
            writer.add(hashes[start : start + batch], start)
        writer.commit()


def write_units(folder: Path, units: list[list[int]]) -> Path:
    """Hash files of units, each a list of keys."""
    folder.mkdir(parents=True, exist_ok=True)
    for unit, keys in enumerate(units):
        write_hashes(folder / hash_file_name(unit), hashes_of(keys))
    return folder


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("documents", [0, 1, 8, 9, 50])
def test_a_hash_file_has_every_document_once(tmp_path: Path, documents: int) -> None:
    """All rows with their hashes, whatever the number."""
    hashes = hashes_of(list(range(documents)))
    write_hashes(tmp_path / "h.bin", hashes)
    table = np.concatenate([np.empty((3, 0), np.uint64), *stretches(tmp_path / "h.bin")], axis=1)
    assert all((np.diff(stretch[0].astype(float)) >= 0).all() for stretch in stretches(tmp_path / "h.bin"))
    hi, lo, row = table[:, np.argsort(table[2])]
    assert row.tolist() == list(range(documents)) and np.stack([hi, lo], axis=1).tolist() == hashes.tolist()


@pytest.mark.usefixtures("small_groups")
def test_the_bytes_of_a_hash_file_do_not_depend_on_batches(tmp_path: Path) -> None:
    """One document at a time or all at once."""
    for batch in (1, 7, 100):
        write_hashes(tmp_path / f"{batch}.bin", hashes_of(list(range(30))), batch)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_hash_file_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """An error in between must not look like a unit that is done."""
    with pytest.raises(KeyError), FingerprintWriter(tmp_path / "h.bin") as writer:
        writer.add(hashes_of([1, 2]), 0)
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_partitions_grow_with_the_input() -> None:
    """16 GB of text a partition, at least one and at most 256."""
    sizes = [0, 16 * 10**9, 16 * 10**9 + 1, 10**12, 10**15]
    assert [partition_count(size) for size in sizes] == [1, 1, 2, 63, 256]


# ---- exact duplicates ----


def resolve(
    folder: Path, partitions: int = 1, *, exempt_below: int = 0, index_files: list[Path] | None = None
) -> Resolved:
    """All partitions of a folder."""
    options = {"exempt_below": exempt_below, "index_files": index_files or [], "memory_bytes": 10**8, "threads": 2}
    each = [asdict(resolve_exact(folder, partition, partitions, **options)) for partition in range(partitions)]
    sizes = sorted({size for found in each for size in found["clusters"]})
    clusters = {size: sum(found["clusters"].get(size, 0) for found in each) for size in sizes}
    numbers = {name: sum(found[name] for found in each) for name in each[0] if name != "clusters"}
    return Resolved(**numbers, clusters=clusters)


def read_drops(folder: Path) -> Drops:
    """Everything that the drop files of a folder say."""
    found: Drops = {}
    for path in sorted(folder.glob("drops-*.bin")):
        drops_of = read_drop_file(path)
        assert all(similarity == 1000 for _, similarity in drops_of.values())
        found |= {at: of for at, (of, _) in drops_of.items()}
    return found


def drop_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("drops-*.bin")}


def expected_drops(units: list[list[int]], exempt_below: int = 0, indexed: list[set[int]] | None = None) -> Drops:
    """The same by a dict."""
    first: dict[int, tuple[int, int]] = {}
    for k, keys in reversed(list(enumerate(indexed or []))):
        first |= dict.fromkeys(keys, (-1 - k, 0))
    found: Drops = {}
    for unit, keys in enumerate(units):
        for row, key in enumerate(keys):
            if key in first and unit >= exempt_below:
                found[unit, row] = first[key]
            first.setdefault(key, (unit, row))
    return found


def write_index_file(path: Path, keys: set[int]) -> Path:
    hashes = sorted(map(tuple, hashes_of(sorted(keys)).tolist()))
    columns = np.array(hashes, dtype=np.uint64).reshape(-1, 2).T
    columns.tofile(path)
    return path


UNITS = st.lists(st.lists(st.integers(0, 30), max_size=25), min_size=1, max_size=4)
INDEXED = st.lists(st.sets(st.integers(0, 40), max_size=10), max_size=2)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    units=UNITS,
    partitions=st.integers(1, 4),
    exempt_below=st.integers(0, 2),
    indexed=INDEXED,
    held=st.sampled_from([10, 10**6]),
)
def test_drops_are_those_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    units: list[list[int]],
    partitions: int,
    exempt_below: int,
    indexed: list[set[int]],
    held: int,
) -> None:
    """For any units, partitions, passes, validation units and earlier runs; and the counts fit."""
    folder = tmp_path_factory.mktemp("exact")
    with pytest.MonkeyPatch.context() as patch:
        set_small_groups(patch)
        # The fewer hashes are held at once, the more ranges there are, and the more often each is sorted.
        patch.setattr(exact, "_LEAST_HASHES", held)
        patch.setattr(exact, "_HASH_BYTES", 10**9)
        write_units(folder, units)
        index_files = [write_index_file(folder / f"index-{k}.hashes", keys) for k, keys in enumerate(indexed)]
        found = resolve(folder, partitions, exempt_below=exempt_below, index_files=index_files)
    expected = expected_drops(units, exempt_below, indexed)
    assert read_drops(folder) == expected
    documents = [key for keys in units for key in keys]
    assert (found.documents, found.distinct, found.dropped) == (len(documents), len(set(documents)), len(expected))
    assert found.seen_before == sum(of_unit < 0 for of_unit, _ in expected.values())
    sizes = [1 << (documents.count(key).bit_length() - 1) for key in set(documents)]
    assert found.clusters == {size: sizes.count(size) for size in sorted(set(sizes))}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_memory_and_threads_do_not_change_the_drop_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte the same in one range or 64, by one thread or two; also where most documents are the same one."""
    rng = np.random.default_rng(0)
    keys = [np.where(rng.random(20_000) < 0.3, 7, rng.integers(0, 30_000, 20_000)).tolist() for _ in range(2)]
    folder = write_units(tmp_path, keys)
    monkeypatch.setattr(exact, "FEW_HASHES", 100)
    found = []
    for least, memory_bytes, threads in ((1 << 17, 1 << 30, 1), (600, 0, 2)):
        monkeypatch.setattr(exact, "_LEAST_HASHES", least)
        options = {"exempt_below": 0, "index_files": [], "memory_bytes": memory_bytes, "threads": threads}
        found.append((resolve_exact(folder, 0, 1, **options), drop_bytes(folder)))
    assert found[0] == found[1]
    assert found[0][0].dropped > 10_000


def test_hashes_with_a_half_in_common_are_different(tmp_path: Path) -> None:
    """Both halves count, and the edges of the range too."""
    high = 2**64 - 1
    pairs = [[1, 2], [1, 3], [2, 2], [1, 2], [0, 0], [high, high], [high, high], [1, 3], [1, 2]]
    write_hashes(tmp_path / hash_file_name(0), np.array(pairs, dtype=np.uint64))
    found = resolve(tmp_path, 3)
    assert read_drops(tmp_path) == {(0, 3): (0, 0), (0, 6): (0, 5), (0, 7): (0, 1), (0, 8): (0, 0)}
    assert found.clusters == {1: 2, 2: 3}


@pytest.mark.usefixtures("small_groups")
def test_a_unit_need_not_begin_at_its_first_document(tmp_path: Path) -> None:
    """Where only a part of a unit is wanted, rows keep their numbers, over gaps too."""
    with FingerprintWriter(tmp_path / hash_file_name(3)) as writer:
        writer.add(hashes_of(list(range(20))), 100)
        writer.add(hashes_of([5, 6]), 10**9)
        writer.commit()
    resolve(tmp_path)
    expected = {(3, 10**9): (3, 105), (3, 10**9 + 1): (3, 106)}
    assert read_drops(tmp_path) == expected
    (tmp_path / drops.drop_file_name(drops.EXACT, 0)).unlink()
    resolve_bloom(tmp_path, rate=1e-9, exempt_below=0, memory_bytes=100 << 20)
    assert read_drops(tmp_path) == dict.fromkeys(expected, (drops.UNKNOWN, 0))


def test_folders_with_odd_names_work(tmp_path: Path) -> None:
    """Brackets, stars and quotes in a path are no patterns."""
    folder = write_units(tmp_path / "it's [a]*?b", [[1, 1]])
    index_file = write_index_file(folder / "i[0].hashes", {1})
    resolve(folder, index_files=[index_file])
    assert read_drops(folder) == {(0, 0): (-1, 0), (0, 1): (-1, 0)}


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    """No units, or a unit without documents, is no error."""
    assert resolve(tmp_path) == Resolved()
    assert resolve(write_units(tmp_path, [[]])) == Resolved()
    assert read_drops(tmp_path) == {}


# ---- kills ----

RESOLVE = """
import sys
from pathlib import Path
from milldam.dedup.exact import resolve_exact
resolve_exact(Path(sys.argv[1]), 0, 1, exempt_below=0, index_files=[], memory_bytes=100 << 20, threads=1)
"""


def killed_when(code: str, folder: Path, condition: Callable[[], object]) -> bool:
    """Start a process and kill it at some point; whether it had come so far."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    try:
        reached = wait_until(condition, process)  # type: ignore[arg-type]
    finally:
        process.send_signal(signal.SIGKILL)
    return reached and process.wait() == -signal.SIGKILL


def points(folder: Path) -> Iterator[Callable[[], object]]:
    """Where to kill: while it begins, while it sorts, while it writes."""
    yield lambda: list(folder.glob(".exact-*"))
    yield lambda: any(path.stat().st_size > 10_000 for path in folder.glob(".exact-*/*.run"))
    yield lambda: list(folder.glob(".drops-*"))


@pytest.mark.slow
def test_killed_and_run_again_the_drop_file_is_the_same(tmp_path: Path) -> None:
    """SIGKILL at three points: no drop file appears by halves, and the next run makes it whole."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, (400_000, 2), dtype=np.uint64)[rng.integers(0, 400_000, 800_000)]
    write_hashes(tmp_path / hash_file_name(0), hashes)
    resolve(tmp_path)
    expected = drop_bytes(tmp_path)
    kills = 0
    for point in points(tmp_path):
        (tmp_path / drops.drop_file_name(drops.EXACT, 0)).unlink()
        if killed_when(RESOLVE, tmp_path, point):
            kills += 1
            assert drop_bytes(tmp_path) in ({}, expected)
        resolve(tmp_path)
        assert drop_bytes(tmp_path) == expected
        for leftover in tmp_path.glob(".*.tmp"):
            leftover.unlink()
    assert kills >= 2
