"""Exports of rows in folders (hf, parquet, mds), read back by the tools that they are for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.token_stores import random_documents, store_of

from milldam.errors import ConfigError
from milldam.formats import export, rows
from milldam.loader.stores import Store

SEQ_LEN = 500
# Lengths on both sides of what one, two and four bytes say; one longer than a small file.
LENGTHS = [5, 0, 1, 255, 256, 300, 17, 65_535, 65_536, 3, 1_000, 40]
CASES: dict[str, dict[str, Any]] = {
    "documents": {"shard_size": 3_000},
    "rows": {"seq_len": SEQ_LEN, "shard_size": 40_000},
    "uint16": {"dtype": "uint16"},
    "one split": {"split": "val", "seq_len": 70},
}

MDS_READER = """
import importlib.machinery, json, sys, types
# Its image datasets, which nobody here needs, want torchvision.
names = {"torchvision": [], "torchvision.transforms": []}
names |= {"torchvision.datasets": ["VisionDataset"], "torchvision.transforms.functional": ["to_tensor"]}
try:
    import torchvision
except ImportError:
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        for inner in names[name]:
            setattr(module, inner, type(inner, (), {}))
        sys.modules[name] = module
from streaming import MDSWriter, StreamingDataset
found = {}
for case, folder in json.loads(sys.argv[1]):
    data = StreamingDataset(local=folder, shuffle=False, batch_size=1, validate_hash="xxh3_128")
    found[case] = [[str(one["tokens"].dtype), one["tokens"].tolist()] for one in (data[k] for k in range(len(data)))]
import numpy as np
rows = [np.array(row, np.uint16) for _, row in found["uint16 train"] if row]
with MDSWriter(columns={"tokens": "ndarray:uint16"}, out="plain", size_limit=None, hashes=["xxh3_128"]) as writer:
    for row in rows:
        writer.write({"tokens": row})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    documents = {"train": random_documents(LENGTHS), "val": random_documents([3_000, 8, 4], seed=1)}
    return store_of(tmp_path_factory.mktemp("exported") / "store", documents)


def expected_rows(store: Store, split: str, seq_len: int | None) -> list[list[int]]:
    documents = [document.tolist() for document in Store(store.path, split=split)]
    if seq_len is None:
        return documents
    flat = [token for document in documents for token in document]
    return [flat[at : at + seq_len] for at in range(0, len(flat) // seq_len * seq_len, seq_len)]


def export_cases(store: Store, to: str, folder: Path) -> list[tuple[str, Path, str, dict[str, Any]]]:
    """(name, folder, split, options) of every part of every case, exported."""
    made = []
    for case, options in CASES.items():
        export(store, to, folder / case, **options)
        if "split" in options:
            made.append((f"{case} {options['split']}", folder / case, options["split"], options))
        else:
            made += [(f"{case} {split}", folder / case / split, split, options) for split in store.splits]
    return made


def test_hf_rows_are_mapped_by_datasets(store: Store, tmp_path: Path) -> None:
    """`load_from_disk` gives every token back, as documents and as rows, and a DatasetDict of several splits."""
    datasets = pytest.importorskip("datasets")
    for name, folder, split, options in export_cases(store, "hf", tmp_path):
        data = datasets.load_from_disk(str(folder))
        assert data["input_ids"][:] == expected_rows(store, split, options.get("seq_len")), name
        assert str(data.features["input_ids"].feature.dtype) == options.get("dtype", "int32")
        assert [Path(one["filename"]).parent for one in data.cache_files] == [folder] * len(data.cache_files)
        assert str(data.split) == split
    both = datasets.load_from_disk(str(tmp_path / "rows"))
    assert {split: len(rows) for split, rows in both.items()} == {"train": 265, "val": 6}
    files = list((tmp_path / "rows" / "train").glob("data-*-of-*.arrow"))
    assert len(both["train"].cache_files) == len(files) > 3
    assert all(path.stat().st_size < 60_000 for path in files)


def test_parquet_is_read_by_pyarrow_and_datasets(store: Store, tmp_path: Path) -> None:
    """Both read the folder, with its splits, and give every token back."""
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet as pq

    for name, folder, split, options in export_cases(store, "parquet", tmp_path / "out"):
        table = pq.read_table(folder)
        assert table["input_ids"].to_pylist() == expected_rows(store, split, options.get("seq_len")), name
        assert str(table["input_ids"].type.value_type) == options.get("dtype", "int32")
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "out" / "one split"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert loaded["input_ids"][:] == expected_rows(store, "val", 70)


@pytest.mark.slow  # the page on exports reads one with it, too
def test_mds_is_read_by_streaming(store: Store, tmp_path: Path) -> None:
    """MosaicML's StreamingDataset gives every token back, and its hash of each shard agrees; it writes the same."""
    for name in ("streaming", "torch"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    parts = export_cases(store, "mds", tmp_path / "out")
    jobs = json.dumps([(name, str(folder)) for name, folder, _, _ in parts])
    home = os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", MDS_READER, jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, _, split, options in parts:
        assert [row for _, row in found[name]] == expected_rows(store, split, options.get("seq_len")), name
        assert {dtype for dtype, _ in found[name]} == {options.get("dtype", "int32")}
    store_of(tmp_path / "store", {"train": [row for row in expected_rows(store, "train", None) if row]})
    export(tmp_path / "store", "mds", tmp_path / "ours", dtype="uint16")
    ours, theirs = ((tmp_path / name / "shard.00000.mds").read_bytes() for name in ("ours", "plain"))
    assert ours == theirs


def test_tokens_that_fill_no_row_are_counted(store: Store, tmp_path: Path) -> None:
    """With a sequence length the tail of each split is left out, and said."""
    summary = export(store, "parquet", tmp_path / "out", seq_len=1_000)
    train, val = (Store(store.path, split=split).tokens for split in ("train", "val"))
    assert summary.counts["tokens_left_out"] == train % 1_000 + val % 1_000 > 0
    assert summary.counts["rows"] == train // 1_000 + val // 1_000


def test_a_document_too_long_for_a_row_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of Arrow and MDS have 32 bits: the way out is said."""
    monkeypatch.setattr(rows, "MOST_BYTES", 4 * 65_536)
    for to in ("hf", "mds"):
        with pytest.raises(ConfigError, match=r"A document of 65,536 tokens .* Cut the tokens into rows with seq_len"):
            export(store, to, tmp_path / to)
