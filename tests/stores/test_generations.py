"""A store that is replaced while it is read: readers keep what they opened, and a kill leaves one of the two whole."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.kit.quick import first_quick
from tests.kit.token_stores import flat_tokens, write_store

import milldam
from milldam.errors import MismatchError, StoreError
from milldam.loader.stores import Store
from milldam.run.records import sweep
from milldam.stores.kinds import TOKENS, live_files
from milldam.stores.place import KEPT
from milldam.stores.verify import verify

OLD, NEW = [[300], [20, 40], [500]], [[20, 7], [300], [100], [9]]


def update(folder: Path, shards: list[list[int]] = NEW) -> Store:
    """What a job does at its end: new shards, the manifest, then what nobody needs any more goes."""
    store = write_store(folder, shards)
    clear(folder)
    return store


def clear(folder: Path) -> None:
    sweep(folder, ("*.bin", "*.idx"), live_files(folder, TOKENS))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("train-*")}


def named(store: Store) -> set[str]:
    return {name for name, _ in store.manifest.files()}


def run(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


READER = """
import sys, milldam
from tests.kit.token_stores import flat_tokens
store = milldam.open(sys.argv[1])
{open_some}
print("open", flush=True)
sys.stdin.readline()
print(int(flat_tokens(store).sum()), len(store.windows(8)), flush=True)
sys.stdin.readline()
"""


def reader(folder: Path, open_some: str = "") -> subprocess.Popen[str]:
    process = run(READER.format(open_some=open_some), folder)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("open_some", ["", "store[0]", "store = store.split('train')"])
def test_a_reader_keeps_what_it_opened_while_the_store_is_updated(tmp_path: Path, open_some: str) -> None:
    """Shards that it opens after the update, too; when it ends, the next run removes what it had kept."""
    folder = tmp_path / "s"
    old = write_store(folder, OLD)
    tokens, kept = flat_tokens(old), named(old)
    told = f"{tokens.sum()} {len(old.windows(8))}\n"
    del old
    process = reader(folder, open_some)
    new = update(folder)
    assert files(folder) == kept | named(new) and list(verify(folder)) == []
    assert ask(process) == told
    ask(process)
    process.wait()
    clear(folder)
    assert files(folder) == named(new) and not (folder / KEPT).exists()
    assert list(verify(folder)) == []


def test_a_forked_worker_holds_what_its_parent_opened(tmp_path: Path) -> None:
    """The parent drops the store; the child, as a worker of torch's DataLoader, still reads it."""
    folder = tmp_path / "s"
    store: Store | None = write_store(folder, OLD)
    assert store is not None
    expected = int(flat_tokens(store).sum())
    go, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        os.write(done[1], str(int(flat_tokens(store).sum())).encode())
        os._exit(0)
    store = None
    update(folder)
    os.write(go[1], b"x")
    assert int(os.read(done[0], 99)) == expected
    os.waitpid(child, 0)
    clear(folder)
    assert not (folder / KEPT).exists()


def test_a_pickled_store_is_the_generation_that_was_opened(tmp_path: Path) -> None:
    """A worker that is spawned after the update opens the kept one; without a reader, it says that it is gone."""
    folder = tmp_path / "s"
    store = write_store(folder, OLD)
    expected, pickled = flat_tokens(store), pickle.dumps(store)
    update(folder)
    again = pickle.loads(pickled)
    assert np.array_equal(flat_tokens(again), expected)
    assert np.array_equal(flat_tokens(pickle.loads(pickle.dumps(again))), expected)
    del store, again
    clear(folder)
    with pytest.raises(MismatchError, match="is not the store that was opened"):
        pickle.loads(pickled)


def killed_update(folder: Path, at: int) -> int:
    """An update in a process of its own, which is killed at its system call of this number; its exit status."""
    child = os.fork()
    if child == 0:
        step = itertools.count(1)

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                if next(step) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for name in ("rename", "link", "unlink", "fsync", "mkdir", "rmdir", "open"):
            setattr(os, name, counted(getattr(os, name)))
        update(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("held", first_quick([True, False]))
def test_killed_at_any_step_the_old_store_is_whole_or_the_new_one(tmp_path: Path, held: bool) -> None:
    """At every system call of the switch; then the same update finishes, and nothing is left behind."""
    whole = write_store(tmp_path / "old", OLD).fingerprint, write_store(tmp_path / "new", NEW).fingerprint
    expected = int(flat_tokens(write_store(tmp_path / "old", OLD)).sum())
    seen, step = set(), 0
    while True:
        step += 1
        folder = tmp_path / f"s{step}"
        write_store(folder, OLD)
        reading = milldam.open(folder) if held else None
        code = killed_update(folder, step)
        assert list(verify(folder)) == []
        seen.add(milldam.open(folder).fingerprint)
        if reading is not None:
            assert int(flat_tokens(reading).sum()) == expected
        del reading
        store = update(folder)
        assert store.fingerprint == whole[1] and list(verify(folder)) == []
        assert {path.name for path in folder.iterdir()} - {"run"} == named(store) | {"milldam.json"} | {
            path.name for path in folder.glob(".*.tmp")
        }
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == set(whole) and step > 10


def test_without_locks_nothing_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no flock: stores open and are updated; a reader that misses a shard says so."""

    def refuse(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("milldam.stores.place.fcntl.flock", refuse)
    folder = tmp_path / "s"
    old = write_store(folder, OLD)
    old[0]
    update(folder)
    assert len(old[0]) == 300
    with pytest.raises(StoreError, match="can't be"):
        old[3]
    assert list(verify(folder)) == []
