"""Exports of one file or pair: read back by those who are meant to read them, killed and resumed, never mixed up."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.quick import first_quick
from tests.kit.token_stores import EOS, flat_tokens, shard_file, write_store

import milldam
from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.formats import export, flat
from milldam.loader.stores import Store
from milldam.stores.tokens import format as store_format

SHARDS = [[5, 1, 300], [40], [2, 2, 2, 700]]
SINGLE = {"npy": "out.npy", "nanogpt": "out.bin", "megatron": "out"}
"""Formats of one file or pair, and a name for each."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three shards of documents of very different lengths."""
    return write_store(tmp_path / "store", SHARDS)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and checkpoints of a few tokens, so that small stores take many of each."""
    monkeypatch.setattr(flat, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(store_format, "BLOCK_DOCUMENTS", 2)


@pytest.fixture(scope="module")
def indexed_dataset() -> Any:
    """Megatron-LM's own reader. Its package warns of everything that is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    return module.IndexedDataset


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for what lies in work folders."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "milldam-export" not in str(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# ---- what the consumers see ----


def test_npy_is_one_array_that_numpy_maps(store: Store, tmp_path: Path, small_steps: None) -> None:
    """numpy maps the file, and it holds every token of every shard in order."""
    summary = export(store, "npy", tmp_path / "out.npy")
    array = np.load(tmp_path / "out.npy", mmap_mode="r")
    assert array.dtype == np.uint16
    assert array.shape == (store.tokens,)
    np.testing.assert_array_equal(array, flat_tokens(store))
    assert summary.counts == {"documents": 8, "tokens": 1052, "files": 1}
    assert summary.output_bytes == (tmp_path / "out.npy").stat().st_size


def test_nanogpt_makes_a_file_of_every_split(tmp_path: Path) -> None:
    """A store of several splits becomes train.bin and val.bin in a folder; one split that is named is a file."""
    store = write_store(tmp_path / "store", SHARDS, splits=["train", "train", "validation"])
    summary = export(store, "nanogpt", tmp_path / "data")
    assert summary.counts["files"] == 2
    visible = sorted(path.name for path in (tmp_path / "data").iterdir() if not path.name.startswith("."))
    assert visible == ["train.bin", "val.bin"]
    export(store, "nanogpt", tmp_path / "one.bin", split="validation")
    for path, split in (("data/train.bin", "train"), ("data/val.bin", "validation"), ("one.bin", "validation")):
        data = np.memmap(tmp_path / path, dtype=np.uint16, mode="r")
        np.testing.assert_array_equal(data, flat_tokens(store.named_part(split)))
    assert export(store, "nanogpt", tmp_path / "data").up_to_date


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=12), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint16", "int32"]),
)
def test_megatron_reads_all_documents_of_all_shards(
    indexed_dataset: Any, tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], dtype: str
) -> None:
    """IndexedDataset finds every document, equal and in order, in one merged pair."""
    folder = tmp_path_factory.mktemp("pair")
    store = write_store(folder / "store", shards, dtype=dtype)
    export(store, "megatron", folder / "merged", dtype=dtype)
    dataset = indexed_dataset(str(folder / "merged"), mmap=True)
    assert len(dataset) == len(store)
    np.testing.assert_array_equal(dataset.document_indices, np.arange(len(store) + 1))
    np.testing.assert_array_equal(dataset.sequence_lengths, [len(document) for document in store])
    for mine, theirs in zip(store, dataset[: len(dataset)], strict=True):
        assert theirs.dtype == dtype
        np.testing.assert_array_equal(theirs, mine)
    shard = indexed_dataset(str(folder / "store" / store.shards[0].name))  # as it lies
    assert [one.tolist() for one in shard[: len(shard)]] == [store[k].tolist() for k in range(len(shard))]
    # Ends of documents are where the store has them: what a trainer resets attention at.
    assert all(document[-1] == EOS for document in dataset[: len(dataset)])


# ---- refusals ----


@pytest.mark.parametrize(
    ("to", "name", "options", "message"),
    [
        ("npy", "out.bin", {}, "ends in .npy"),
        ("nanogpt", "train", {}, "ends in .bin"),
        ("megatron", "out.bin", {}, "without its endings"),
        ("npy", "out.npy", {"dtype": "float32"}, "uint16, int32, uint32 or int64"),
        ("megatron", "out", {"dtype": "uint32"}, "uint16 or int32"),
        ("npy", "out.npy", {"seq_len": 4}, "seq_len does not apply"),
        ("npz", "out", {}, 'Did you mean "npy"'),
        ("npy", "out.npy", {"split": "val"}, 'no split "val"'),
        ("npy", "out.npy", {"shard_size": "0MB"}, "shard_size"),
        ("hf", "out", {"seq_len": 0}, "must be at least 1"),
        ("hf", "store", {}, "is the store itself"),
        ("hf", "..", {"seq_len": 4}, "name what is to be made"),
    ],
)
def test_what_can_not_be_written_is_refused_before_anything_is_made(
    store: Store, tmp_path: Path, to: str, name: str, options: dict[str, Any], message: str
) -> None:
    """An error in the options leaves no trace."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        export(store, to, tmp_path / name, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_an_id_that_does_not_fit_is_an_error_and_never_another_id(tmp_path: Path) -> None:
    """A damaged store whose ids exceed its vocabulary is not exported as other tokens."""
    store = write_store(tmp_path / "store", [[10]], dtype="int32")
    path = shard_file(store.path, 0, "bin")
    tokens = np.fromfile(path, np.int32)
    tokens[3] = 70_000
    tokens.tofile(path)
    with pytest.raises(StoreError, match="to 70,000 do not fit uint16"):
        export(store, "nanogpt", tmp_path / "train.bin")
    assert not (tmp_path / "train.bin").exists()


@pytest.mark.parametrize("to", ["npy", "megatron"])
def test_of_several_splits_one_must_be_named_where_a_format_holds_one(tmp_path: Path, to: str) -> None:
    """Training and validation are never put into one file."""
    store = write_store(tmp_path / "store", SHARDS, splits=["train", "val", "val"])
    with pytest.raises(ConfigError, match="say which one is meant"):
        export(store, to, tmp_path / SINGLE[to])
    assert export(store, to, tmp_path / SINGLE[to], split="val").counts["tokens"] == 746


# ---- again, and instead of another ----


@pytest.mark.parametrize("to", SINGLE)
def test_an_export_is_up_to_date_or_replaced_only_when_asked(store: Store, tmp_path: Path, to: str) -> None:
    """Nothing is written again; what was made from something else is neither reused nor lost in silence."""
    out = tmp_path / "made" / SINGLE[to]
    first = export(store, to, out)
    times = {path: path.stat().st_mtime_ns for path in out.parent.iterdir()}
    second = export(store, to, out)
    assert (first.up_to_date, second.up_to_date) == (False, True)
    assert (first.counts, first.output_bytes) == (second.counts, second.output_bytes)
    assert {path: path.stat().st_mtime_ns for path in out.parent.iterdir()} == times
    other = write_store(tmp_path / "other", [[7, 8]])
    before = contents(out.parent)
    with pytest.raises(MismatchError, match="overwrite"):
        export(other, to, out)
    assert contents(out.parent) == before
    assert export(other, to, out, overwrite=True).counts["tokens"] == 15
    assert milldam.open(out).tokens == 15
    assert export(other, to, out).up_to_date
    changed = next(path for path in out.parent.iterdir() if path.suffix in (".npy", ".bin"))
    changed.write_bytes(b"mine")
    with pytest.raises(MismatchError, match="changed since it was exported"):
        export(other, to, out)


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    """Not even with overwrite: a folder may hold anything."""
    store = write_store(tmp_path / "store", SHARDS, splits=["train", "val", "val"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="left alone"):
        export(store, "nanogpt", tmp_path / "data", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "store"]
    (tmp_path / "data" / "thesis.tex").unlink()
    export(store, "nanogpt", tmp_path / "data")
    other = write_store(tmp_path / "other", [[7], [8]], splits=["train", "test"])
    export(other, "nanogpt", tmp_path / "data", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "data").glob("*.bin")) == ["test.bin", "train.bin"]


# ---- killed ----


def replaced_and_killed(store: Store, to: str, out: Path, dtype: str, at: int) -> bool:
    """An export in a process of its own, killed at its call of the system of this number; whether it was."""
    child = os.fork()
    if child == 0:
        step = itertools.count(1)

        def dying(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                if next(step) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for name in ("rename", "unlink", "rmdir", "mkdir", "fsync"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            export(store, to, out, dtype=dtype, overwrite=True)
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("to", first_quick(["megatron", "parquet", "npy", "nanogpt", "mds"]))
def test_killed_at_any_step_of_replacing_a_second_call_makes_the_new_export(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """At every rename, removal and sync: what is there is old, new or nothing, and the same call makes it all new."""
    # A kill loses nothing that is in the page cache: a sync is a step, and costs nothing.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    name, dtype = SINGLE.get(to, "out"), "int32" if to in SINGLE else "uint16"
    export(store, to, tmp_path / "before" / name)
    export(store, to, tmp_path / "whole" / name, dtype=dtype)
    old, new = contents(tmp_path / "before"), contents(tmp_path / "whole")
    for step in itertools.count(1):
        place = tmp_path / f"killed-{step}"
        shutil.copytree(tmp_path / "before", place)
        if not replaced_and_killed(store, to, place / name, dtype, step):
            break
        assert all(data in (old.get(name), new.get(name)) for name, data in contents(place).items()), place
        export(store, to, place / name, dtype=dtype, overwrite=True)
        assert contents(place) == new, place
        assert export(store, to, place / name, dtype=dtype).up_to_date, place
    assert step > 20


# ---- memory ----


@pytest.mark.parametrize("to", SINGLE)
def test_memory_does_not_grow_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Ten times the tokens and documents, the same peak."""
    monkeypatch.setattr(flat, "BLOCK_TOKENS", 1 << 14)
    monkeypatch.setattr(store_format, "BLOCK_DOCUMENTS", 1 << 8)
    monkeypatch.setattr(store_format, "_CHUNK", 1 << 8)
    peaks = []
    for shards in (3, 30):
        store = write_store(tmp_path / f"store-{shards}", [[50] * 2000] * shards)
        tracemalloc.start()
        export(store, to, tmp_path / f"{shards}-{SINGLE[to]}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 50_000, peaks
