"""The hashes of finished runs: each run has its own, none by halves, whoever else is at work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests.dedup.test_exact import (
    UNITS,
    drop_bytes,
    expected_drops,
    hashes_of,
    read_drops,
    resolve,
    set_small_groups,
    write_units,
)

from milldam.dedup.index import DedupIndex, IndexedRun
from milldam.errors import ConfigError, StoreError
from milldam.files import record_of

SORTING: dict[str, Any] = {"exempt_below": 0, "index_files": [], "memory_bytes": 10**8, "threads": 1}


def do_run(
    index: DedupIndex, name: str, units: list[list[int]], *, out: str | None = None, exempt_below: int = 0
) -> Path:
    """A run from hashes to commit, as the pipeline does it; the folder of its hash and drop files."""
    folder = write_units(index.folder.parent / f"run-{name}", units)
    out = out or f"/stores/{name}"
    files = [path for _, path in index.pin(folder, run_id=name, out=out)]
    resolve(folder, exempt_below=exempt_below, index_files=files)
    index.commit(name, out, folder, **SORTING | {"index_files": files, "exempt_below": exempt_below})
    return folder


def hashes_in(path: Path) -> list[tuple[int, int]]:
    return list(zip(*np.fromfile(path, np.uint64).reshape(2, -1).tolist(), strict=True))


def keys_in(path: Path) -> set[int]:
    """Which keys are in a hash file; it must be sorted, each once."""
    found = hashes_in(path)
    assert found == sorted(set(found))
    known = {tuple(one): key for key, one in enumerate(hashes_of(list(range(100))).tolist())}
    return {known[one] for one in found}


@pytest.fixture
def index(tmp_path: Path) -> DedupIndex:
    return DedupIndex(tmp_path / "index")


def contents(index: DedupIndex) -> dict[str, set[int]]:
    return {name: keys_in(path) for name, path in index.files("", "")}


@settings(max_examples=8)
@given(first=UNITS, second=UNITS)
def test_a_run_enters_with_what_no_earlier_one_had(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[int]], second: list[list[int]]
) -> None:
    """Each hash has one owner, the earliest run; the next run drops exactly what was seen."""
    index = DedupIndex(tmp_path_factory.mktemp("runs") / "index")
    with pytest.MonkeyPatch.context() as patch:
        set_small_groups(patch)
        do_run(index, "a", first)
        folder = do_run(index, "b", second)
        files = [path for _, path in index.pin(folder, run_id="b", out="/stores/b")]
        index.commit("b", "/stores/b", folder, **SORTING | {"index_files": files})
    seen = {key for keys in first for key in keys}
    assert read_drops(folder) == expected_drops(second, indexed=[seen])
    assert contents(index) == {"a": seen, "b": {key for keys in second for key in keys} - seen}
    runs = index.runs()
    assert [(run.id, run.documents) for run in runs] == [("a", sum(map(len, first))), ("b", sum(map(len, second)))]
    assert [run.hashes for run in runs] == [len(keys) for keys in contents(index).values()]


def test_an_index_that_is_not_there_yet_is_empty(index: DedupIndex) -> None:
    """The first run finds nothing."""
    assert index.runs() == []
    assert index.files("a", "/stores/a") == []


def test_repeating_a_run_drops_none_of_its_documents(index: DedupIndex, tmp_path: Path) -> None:
    """Neither under the same id nor with the same output folder."""
    first = drop_bytes(do_run(index, "a", [[1, 2, 2, 3]]))
    for path in (tmp_path / "run-a").iterdir():
        path.unlink()
    assert drop_bytes(do_run(index, "a", [[1, 2, 2, 3]])) == first
    assert drop_bytes(do_run(index, "again", [[1, 2, 2, 3]], out="/stores/a")) == first
    assert contents(index) == {"again": {1, 2, 3}}


def test_a_commit_replaces_the_run_whose_store_is_gone(index: DedupIndex) -> None:
    """The same id or the same output folder; other runs stay."""
    do_run(index, "other", [[7]])
    do_run(index, "a", [[1, 2]], out="/stores/x")
    do_run(index, "b", [[2, 3]], out="/stores/x")
    assert contents(index) == {"other": {7}, "b": {2, 3}}
    assert sorted(path.name for path in index.folder.iterdir() if path.name != "lock") == [
        "b.hashes", "b.json", "other.hashes", "other.json"
    ]  # fmt: skip


def test_what_a_removed_run_had_is_new_again(index: DedupIndex) -> None:
    """Its hashes go, and with them the drops that they caused."""
    do_run(index, "a", [[1, 2]])
    assert read_drops(do_run(index, "b", [[2, 3]])) == {(0, 0): (-1, 0)}
    index.remove("a")
    assert contents(index) == {"b": {3}}
    assert read_drops(do_run(index, "c", [[1, 2, 3]])) == {(0, 2): (-1, 0)}


def test_removing_an_unknown_run_names_those_there_are(index: DedupIndex) -> None:
    """So that a slip of the pen is seen."""
    do_run(index, "a", [[1]])
    with pytest.raises(ConfigError, match=r'no run "b" in this index. It has: a\.'):
        index.remove("b")


def test_validation_documents_enter_though_they_were_seen(index: DedupIndex) -> None:
    """They are in the store, whoever had them before."""
    do_run(index, "a", [[1, 2]])
    folder = do_run(index, "b", [[1], [2, 3]], exempt_below=1)
    assert read_drops(folder) == {(1, 0): (-1, 0)}
    assert contents(index) == {"a": {1, 2}, "b": {1, 3}}


def test_a_pinned_index_does_not_change(index: DedupIndex, tmp_path: Path) -> None:
    """A run sees the index as it was when it began, however often it is resumed."""
    do_run(index, "a", [[1, 2]])
    (tmp_path / "mine").mkdir()
    pinned = index.pin(tmp_path / "mine", run_id="me", out="/stores/me")
    do_run(index, "b", [[5]])
    do_run(index, "a", [[9]])
    index.remove("a")
    assert index.pin(tmp_path / "mine", run_id="me", out="/stores/me") == pinned
    assert [(name, keys_in(path)) for name, path in pinned] == [("a", {1, 2})]


def test_a_commit_by_halves_is_not_read(index: DedupIndex) -> None:
    """Hashes without a record belong to a run that was killed: not listed, and cleared by the next commit."""
    do_run(index, "a", [[1]])
    (index.folder / "b.hashes").write_bytes((index.folder / "a.hashes").read_bytes()[:10])
    (index.folder / ".c.hashes.123.tmp").write_bytes(b"begun")
    assert contents(index) == {"a": {1}}
    do_run(index, "d", [[2]])
    assert contents(index) == {"a": {1}, "d": {2}}
    assert sorted(index.folder.glob("b.*")) == sorted(index.folder.glob(".*")) == []


def test_damage_is_named(index: DedupIndex) -> None:
    """A file that is cut off or missing is not taken for a small one; a foreign file is no record."""
    do_run(index, "a", [[1]])
    (index.folder / "a.hashes").write_bytes(b"")
    with pytest.raises(StoreError, match=r"a\.hashes: missing or damaged"):
        index.files("", "")
    (index.folder / "notes.json").write_text("{}")
    with pytest.raises(StoreError, match=r"notes\.json: not the record of a run"):
        index.runs()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a.json"])
def test_ids_that_are_no_file_names_are_refused(index: DedupIndex, tmp_path: Path, name: str) -> None:
    """An id must not lead out of the folder."""
    with pytest.raises(ConfigError, match="can't be the id of a run"):
        index.commit(name, "/stores/a", tmp_path, **SORTING)
    with pytest.raises(ConfigError, match="can't be the id of a run"):
        index.remove(name)


# ---- real processes ----

COMMIT = """
import sys
from pathlib import Path
from milldam.dedup.index import DedupIndex
index, folder, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
how = dict(exempt_below=0, index_files=[], memory_bytes=100 << 20, threads=1)
for name in names:
    DedupIndex(index).commit(name, "/stores/" + name, folder, **how)
"""


def start_commits(index: DedupIndex, folder: Path, *names: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COMMIT, str(index.folder), str(folder), *names])


@pytest.mark.slow
def test_processes_that_commit_at_the_same_time_do_not_disturb_each_other(index: DedupIndex, tmp_path: Path) -> None:
    """Three of them, the same id among theirs: every run is there whole."""
    folders = [write_units(tmp_path / f"f{k}", [list(range(k * 10, k * 10 + 20))]) for k in range(3)]
    processes = [start_commits(index, folder, f"own{k}", "same", f"last{k}") for k, folder in enumerate(folders)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = contents(index)
    wanted = [set(range(k * 10, k * 10 + 20)) for k in range(3)]
    assert found.pop("same") in wanted
    assert found == {f"{name}{k}": wanted[k] for k in range(3) for name in ("own", "last")}
    assert list(index.folder.glob(".*")) == []


def test_a_killed_commit_leaves_the_index_as_it_was(index: DedupIndex, tmp_path: Path) -> None:
    """SIGKILL when the hashes are written: the next commit makes up for it."""
    do_run(index, "a", [[1]])
    folder = write_units(tmp_path / "many", [list(range(20_000))])
    killed = "import os\nos.fsync = lambda _: os.kill(os.getpid(), 9)\n" + COMMIT
    done = subprocess.run([sys.executable, "-c", killed, str(index.folder), str(folder), "b"])
    assert done.returncode == -signal.SIGKILL and list(index.folder.glob(".*"))
    assert [run.id for run in index.runs()] == ["a"]
    run = index.commit("b", "/stores/b", folder, **SORTING)
    assert (run.documents, run.hashes) == (20_000, 20_000)
    assert [one.id for one in index.runs()] == ["a", "b"]
    assert list(index.folder.glob(".*")) == []


def test_a_run_says_what_it_is(index: DedupIndex) -> None:
    """For the list that a user sees."""
    do_run(index, "a", [[1, 1, 2]])
    (run,) = index.runs()
    file = record_of(index.folder / "a.hashes")
    assert run == IndexedRun("a", "/stores/a", 3, 2, file["bytes"], file["xxh3"], run.created)
    assert run.created > 1.7e9
