"""Stores at addresses: equal to those on this machine in all they give, within the bound of their cache."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import TOKENIZER, invoke, write_lines
from tests.kit.token_stores import flat_tokens, shard_file, write_store

import milldam
from milldam.errors import ConfigError, InputError, MismatchError, ResourceError, StoreError
from milldam.loader.stores import Store
from milldam.remote import place
from milldam.remote.place import RemoteFolder

SHARD = 2000
"""Bytes of the token file of a shard below: 1,000 tokens."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(place, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "default-cache"))


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one example: hypothesis runs many in one test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write_even(path: Path, shards: int, *, tokens: int = 1000, documents: int = 10) -> Store:
    return write_store(path, [[tokens // documents] * documents] * shards)


def remote(path: Path, cache: int | str = "1GB", cache_dir: Path | None = None, **options: Any) -> Store:
    """A store of this machine as one at an address."""
    opened = milldam.open(f"file://{path}", cache=cache, cache_dir=cache_dir or path.parent / "cache", **options)
    assert isinstance(opened, Store)
    return opened


class Traffic:
    """What is fetched: how often each file, and the most that lay in the cache while it came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.files: Counter[str] = Counter()
        self.most_bytes = 0
        self._cache = cache / "shards"
        real = RemoteFolder.blocks

        def blocks(folder: RemoteFolder, file: str, size: int | None = None) -> Iterator[bytes]:
            self.files[file] += 1
            for block in real(folder, file, size):
                self.look()
                yield block
                self.look()

        monkeypatch.setattr(RemoteFolder, "blocks", blocks)

    def look(self) -> None:
        sizes = 0
        for one in self._cache.glob("*"):
            try:
                sizes += one.stat().st_size
            except FileNotFoundError:
                continue
        self.most_bytes = max(self.most_bytes, sizes)

    @property
    def shards(self) -> int:
        """Token files that were fetched, each time counted."""
        return sum(count for name, count in self.files.items() if name.endswith(".bin"))


def assert_equal(one: Any, other: Any) -> None:
    """Batches or samples with the same arrays of the same dtypes."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, tuple):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


shard_lists = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=7)
views = st.sampled_from(["windows", "strided", "hf", "wrapped", "best_fit"])


def samples_of(data: Any, view: str) -> Any:
    if view == "windows":
        return data.windows(7)
    if view == "strided":
        return data.windows(9, stride=4, tail=True)
    if view == "hf":
        return data.windows(5, form="hf")
    return data.packed(8, strategy=view)


@settings(max_examples=16)
@given(shards=shard_lists, view=views, order=st.sampled_from([False, "shard", True, "block"]), data=st.data())
def test_a_store_at_an_address_gives_what_the_same_store_here_gives(
    shards: list[list[int]], view: str, order: Any, data: st.DataObject
) -> None:
    """Documents, samples, batches, parts and states are equal, whatever the cache holds."""
    with folder() as base:
        here = write_store(base / "s", [[20], *shards])
        sizes = [shard.bin["bytes"] + shard.idx["bytes"] for shard in here.shards]
        limit = sum(sizes) if order in (True, "block") else data.draw(st.integers(4 * max(sizes), 5 * sum(sizes)))
        if view in ("wrapped", "best_fit"):
            limit += sum(shard.idx["bytes"] for shard in here.shards)
        there = remote(base / "s", limit)
        assert (len(there), there.tokens, there.fingerprint) == (len(here), here.tokens, here.fingerprint)
        for one, other in zip(here, there, strict=True):
            assert_equal(np.asarray(one), np.asarray(other))
        number = data.draw(st.integers(0, len(here) - 1))
        assert_equal(here[number], there[number])
        np.testing.assert_array_equal(flat_tokens(here), flat_tokens(there))
        first, second = (samples_of(one, view) for one in (here, there))
        assert first.identity == second.identity
        assert_equal(first[len(first) - 1], second[len(second) - 1])
        pairs = zip(*(one.batches(3, shuffle=order, seed=5, epochs=2) for one in (first, second)), strict=True)
        for left, right in pairs:
            assert_equal(left, right)


@pytest.mark.parametrize("order", [False, "shard"])
def test_an_epoch_fetches_each_shard_about_once_and_stays_in_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    """A cache of 5 shards, data of 40: sequential reading fetches 40, by windows of 4 at most a quarter more."""
    here = write_even(tmp_path / "s", 40)
    traffic = Traffic(monkeypatch, tmp_path / "cache")
    store = remote(tmp_path / "s", 5 * SHARD)
    expected = list(here.windows(16).batches(8, shuffle=order))
    for left, right in zip(store.windows(16).batches(8, shuffle=order), expected, strict=True):
        assert_equal(left, right)
        traffic.look()
    # By windows it depends on what was fetched ahead whether a sample over the end of a shard finds the other one here.
    assert traffic.shards == 40 if order is False else 40 <= traffic.shards <= 52
    assert traffic.most_bytes <= 5 * SHARD


def test_a_full_shuffle_beyond_the_cache_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    """It would fetch a shard a sample; so would lanes of streams that lie in more shards than fit."""
    write_even(tmp_path / "s", 20)
    store = remote(tmp_path / "s", 8 * SHARD)
    for order in (True, "block"):
        with pytest.raises(ResourceError, match=r'(?s)from 20 shards.*larger cache.*shuffle="shard".*milldam pull'):
            store.windows(16).batches(4, shuffle=order)
    with pytest.raises(ResourceError, match="4 shards at a time"):
        remote(tmp_path / "s", 3 * SHARD).windows(16).batches(4, shuffle="shard")
    with pytest.raises(ResourceError, match="10 shards at a time"):
        list(store.streams(10, 16))


def test_a_state_goes_on_at_the_address_and_here(tmp_path: Path) -> None:
    """A loader that was stopped there goes on here, in the same order, and the other way."""
    here = write_even(tmp_path / "s", 9)
    there = remote(tmp_path / "s", 6 * SHARD)
    loaders = [store.windows(16).batches(4, shuffle="shard", seed=3) for store in (here, there)]
    expected = list(here.windows(16).batches(4, shuffle="shard", seed=3))
    for _ in range(20):
        next(loaders[0]), next(loaders[1])
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert states[0] == states[1]
    loaders[0].load_state_dict(states[1])
    loaders[1].load_state_dict(states[0])
    for loader in loaders:
        for one, other in zip(loader, expected[20:], strict=True):
            assert_equal(one, other)


def test_it_pickles_as_its_address_and_settings(tmp_path: Path) -> None:
    """Neither data nor secrets beyond what was given; a store that was replaced meanwhile is refused."""
    write_even(tmp_path / "s", 3)
    store = remote(tmp_path / "s", 4 * SHARD, storage_options={"auto_mkdir": False})
    data = pickle.dumps(store.windows(16))
    assert len(data) < 1500
    assert "auto_mkdir" not in repr(store) + repr(store.place)
    assert_equal(pickle.loads(data).read(np.arange(3)), store.windows(16).read(np.arange(3)))
    write_even(tmp_path / "other", 2)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "other").rename(tmp_path / "s")
    with pytest.raises(MismatchError, match="is not the store that was opened"):
        pickle.loads(data)


# ---- the commands ----


def test_commands_take_addresses(tmp_path: Path) -> None:
    """verify, stats, inspect and feed say of an address what they say of the folder."""
    corpus = tmp_path / "s"
    milldam.tokenize(write_lines(tmp_path / "c.jsonl", ["one two three", "four"]), corpus, tokenizer=TOKENIZER)
    address = f"file://{corpus}"
    done = invoke("verify", address, "--json")
    assert json.loads(done.stdout) == json.loads(invoke("verify", corpus, "--json").stdout)
    figures = json.loads(invoke("stats", address, "--json").stdout)
    assert figures == json.loads(invoke("stats", corpus, "--json").stdout) | {"store": address}
    assert invoke("inspect", address).stdout == invoke("inspect", corpus).stdout
    how = ("--seq-len", 2, "--batch-size", 1, "--epochs", 1, "--cache", "1MB", "--shuffle", "shard")
    fed = invoke("feed", address, *how, "--json")
    assert json.loads(fed.stdout)["data"] == address


# ---- errors ----


def test_what_is_wrong_with_an_address_is_said_in_a_few_lines(tmp_path: Path) -> None:
    """No store, no such file system, options where none belong."""
    with pytest.raises(StoreError, match=r"no store there \(no milldam\.json\)"):
        milldam.open(f"file://{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="nosuch"):
        milldam.open("nosuch://bucket/x")
    write_even(tmp_path / "s", 1)
    with pytest.raises(ConfigError, match="is on this machine; leave it out"):
        milldam.open(tmp_path / "s", cache="1GB")
    with pytest.raises(ConfigError, match="knows its dtype"):
        milldam.open(f"file://{tmp_path}/s", dtype="uint16")
    with pytest.raises(ConfigError, match="is at an address"):
        _ = remote(tmp_path / "s").path
    remote(tmp_path / "s", cache_dir=tmp_path / "warm")[0]
    for folder in ("cold", "warm"):
        with pytest.raises(ResourceError, match="A shard of 2 KB and a cache of 500 B"):
            remote(tmp_path / "s", 500, cache_dir=tmp_path / folder)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an extra of milldam."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r'pip install "milldam\[gcs\]"'):
        milldam.open("gs://bucket/x")


def test_a_failing_network_is_tried_again_and_then_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some failures are passed over; a lasting one is an error that names the file; a refusal is said at once."""
    from fsspec.implementations.local import LocalFileSystem

    write_even(tmp_path / "s", 1)
    errors: list[Exception] = []
    real = LocalFileSystem.open

    def open_file(filesystem: Any, path: str, *rest: Any, **options: Any) -> Any:
        if path.endswith(".bin") and errors:
            raise errors.pop()
        return real(filesystem, path, *rest, **options)

    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    errors += [ConnectionError("reset by peer")] * 3
    assert len(remote(tmp_path / "s")[0]) == 100 and not errors
    errors += [ConnectionError("reset by peer")] * 5
    with pytest.raises(InputError, match=r"train-\w+\.bin: can't be read: reset by peer \(tried 5 times\)"):
        remote(tmp_path / "s", cache_dir=tmp_path / "other")[0]
    errors += [PermissionError("403")]
    with pytest.raises(InputError, match=r"(?s)no permission: 403.*storage_options"):
        remote(tmp_path / "s", cache_dir=tmp_path / "third")[0]


def test_a_shard_that_changed_at_the_address_is_refused(tmp_path: Path) -> None:
    """Its hash is checked before anybody sees it."""
    write_even(tmp_path / "s", 1)
    path = shard_file(tmp_path / "s", 0, "bin")
    path.write_bytes(b"\x01" * len(path.read_bytes()))
    with pytest.raises(StoreError, match=r"train-\w+\.bin: its bytes are not those"):
        remote(tmp_path / "s")[0]


LOOPING = """
import sys
import milldam
store = milldam.open(sys.argv[1], cache=int(sys.argv[2]), cache_dir=sys.argv[3])
print("reading", flush=True)
for _ in store.windows(16).batches(4, shuffle="shard", epochs=None):
    pass
"""


def test_killed_readers_leave_a_cache_that_is_right(tmp_path: Path) -> None:
    """SIGKILL at any moment, two readers at once: whoever comes next reads the right tokens within the bound."""
    here = write_even(tmp_path / "s", 30)
    limit = 6 * SHARD
    command = [sys.executable, "-c", LOOPING, f"file://{tmp_path / 's'}", str(limit), str(tmp_path / "cache")]
    for _ in range(2):
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for process in processes:
            assert isinstance(process.stdout, io.BufferedReader)
            process.stdout.readline()
        time.sleep(0.2)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    store = remote(tmp_path / "s", limit)
    np.testing.assert_array_equal(flat_tokens(store), flat_tokens(here))
    left = [one for one in (tmp_path / "cache" / "shards").iterdir() if one.suffix == ".part"]
    assert not left
    assert sum(one.stat().st_size for one in (tmp_path / "cache" / "shards").iterdir()) <= limit
