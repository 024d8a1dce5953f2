"""Exports of rows in folders (hf, parquet, mds), read back by the tools that they are for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
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


def test_mds_has_every_sample_and_its_hash(store: Store, tmp_path: Path) -> None:
    """By the layout that MosaicML documents; the page on exports reads one with its StreamingDataset."""
    for name, folder, split, options in export_cases(store, "mds", tmp_path / "out"):
        found, dtype = [], np.dtype(options.get("dtype", "int32"))
        for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
            data = (folder / shard["raw_data"]["basename"]).read_bytes()
            assert xxhash.xxh3_128_hexdigest(data) == shard["raw_data"]["hashes"]["xxh3_128"]
            offsets = np.frombuffer(data, "<u4", shard["samples"] + 1, 4).tolist()
            for begin, end in itertools.pairwise(offsets):
                header = 0 if options.get("seq_len") else 5 + (1 << (data[begin + 4] & 3))
                found.append(np.frombuffer(data[begin + header : end], dtype).tolist())
                assert not header or int.from_bytes(data[begin + 5 : begin + header], "little") == len(found[-1])
        assert found == expected_rows(store, split, options.get("seq_len")), name


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
